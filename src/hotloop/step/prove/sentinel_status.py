"""What the sentinel of one decorated step has done, for the loop's status and record."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class SentinelStatus:
    """The checks of one decorated step so far.

    Args:
        function: the name of the step.
        every: steps between two checks, as it is now.
        checks: steps that were run both ways.
        suspicions: checks past a limit, after which the next steps were checked too.
        seconds: time that checks have cost beyond the time of their steps.
        disagreed: what disagrees, and where; empty if nothing does.
        off: why no more checks are made; empty while they are made.
        waits: why a check that is due is not made yet; empty where none is.
    """

    function: str
    every: int
    checks: int
    suspicions: int
    seconds: float
    disagreed: str = ""
    off: str = ""
    waits: str = ""

    def __str__(self) -> str:
        if self.disagreed:
            return f"sentinel: {self.function} did not agree with eager: {self.disagreed}"
        suspected = f" ({self.suspicions:,} were suspected, and not confirmed)" if self.suspicions else ""
        line = f"sentinel: {self.function}: {self.checks:,} steps were also run eagerly and agreed{suspected}, "
        line += f"then no more: {self.off}" if self.off else f"one in {self.every:,}; {self.seconds:.1f} s"
        return line + (f"; the next waits: {self.waits}" if self.waits else "")
