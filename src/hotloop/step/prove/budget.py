"""What checks of the sentinel may cost, a share of the time trained with suspicions included, and what they came to.

The share is earned step by step, and a check begins only where what it is expected to cost is there. In a run of known
length all that the run will earn may be spent at any step, so that its first check comes early; in an open run nothing
is spent before it is earned.

From the second check on, one closer check is kept back, which is what a suspicion of right code costs. Where that is
more than three quarters of all that may be spent, an open run keeps these back. A run of known length then keeps back
nothing, since that would not do.
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Mapping

Work = Literal["recording", "code", "more bits", "roundings", "noise"]
"""What a check does: compares a recording, or code with eager alone, in more bits, by roundings; or measures noise."""
_TIMES: Mapping[Work, float] = {"recording": 1.0, "code": 1.0, "more bits": 8.0, "roundings": 12.0, "noise": 4.0}
"""Seconds beside those of a plain comparison. A BERT of 12 narrow layers, on a CPU: 0.25 s, and 2.0 s in more bits."""
_KEPT_BACK = 0.75
"""The most that is kept back for a suspicion, of all that may be spent."""


class Budget:
    """The budget of one decorated step.

    Args:
        share: the share of time that checks may cost.
        total_steps: the length of the run; None where it is not known.

    Attributes:
        steps: steps in the tier in force, counted by the sentinel.
        spent: seconds that checks have cost so far.
    """

    def __init__(self, share: float, total_steps: int | None) -> None:
        self._share, self._total = share, total_steps
        self.steps, self.spent = 0, 0.0
        self._since = 0
        """Steps of the run before those in the tier in force."""
        self._allowed = self._before = 0.0
        """Seconds that a step in force earns; and that steps in earlier tiers have earned."""
        self._known: dict[Work, float] = {}

    def enter(self, done: int) -> None:
        """Begin to count steps in another tier; what was earned and spent stays."""
        self._before += self._allowed * self.steps
        self.steps, self._since, self._allowed = 0, done, 0.0

    def take_pace(self, step_seconds: float) -> None:
        """Note what a step in the tier in force takes."""
        self._allowed = self._share * step_seconds

    def note(self, work: Work, seconds: float) -> None:
        """Note what a check has cost."""
        self._known[work] = seconds
        self.spent += seconds

    def guess(self, work: Work, seconds: float) -> None:
        """Take a proof step's seconds for those of such a check, until one is made."""
        self._known.setdefault(work, seconds)

    def expected(self, work: Work) -> float:
        """Return what a check is expected to cost; 0 where nothing is known."""
        if work in self._known:
            return self._known[work]
        return _TIMES[work] * max((seconds / _TIMES[one] for one, seconds in self._known.items()), default=0.0)

    def lacks(self, work: Work, done: int, *, first: bool, repeats: bool) -> float:
        """Return the seconds that are missing before a check may begin; 0 or less where none are.

        Args:
            work: what the check does.
            done: steps of the run so far.
            first: it is the first check, before which nothing is reserved.
            repeats: it is one of the checks of a suspicion, which was reserved for.
        """
        reserved = 0.0 if first or repeats else self._kept_back(work, done)
        return self.spent + self.expected(work) + reserved - self._whole(done)

    def _whole(self, done: int) -> float:
        """Return the seconds that may be spent, those spent included."""
        return self._before + self._allowed * (self.steps + self._left(done))

    def _kept_back(self, work: Work, done: int) -> float:
        """Return the seconds that are kept back for a suspicion after such a check."""
        closer: Work = work if work in {"recording", "roundings"} else "more bits"
        seconds, most = self.expected(closer), _KEPT_BACK * self._whole(done)
        return seconds if seconds <= most else most if self._total is None else 0.0

    def _left(self, done: int) -> float:
        """Return how many steps of this kind are still to come, as far as that is known."""
        if self._total is None:
            return 0.0
        return max(0, self._total - done) * self.steps / max(self.steps, done - self._since, 1)

    def steps_for(self, seconds: float) -> int:
        """Return the number of steps that earn some seconds."""
        return math.ceil(seconds / self._allowed) if self._allowed else 0

    def steps_to_next(self, seconds: float, work: Work, done: int) -> int:
        """Return after how many further steps checks have cost their share of the time, with one of some seconds.

        In a run of known length the others are spread over all of it, without what is kept back.
        """
        whole, rate = self._whole(done), self._allowed
        if self._total is not None and whole > 0:
            rate *= 1.0 - self._kept_back(work, done) / whole
        return math.ceil((self.spent + seconds - self._before) / rate) - self.steps if rate else 0


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
