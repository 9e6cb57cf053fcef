"""What the rooms below report: it goes to the record and as lines to the log, and verdicts on tiers to the policy."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from hotloop import events as ev
from hotloop.compiling.observe import collector
from hotloop.step.context import Verdict
from hotloop.step.policy.policy import Ran
from hotloop.step.prove.outcomes import STEPS as PROOF_STEPS

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Mapping

    from hotloop.step.context import DecoratedStep
    from hotloop.step.loop.account import Account
    from hotloop.step.loop.clock import Timed
    from hotloop.step.obstacle import Obstacle
    from hotloop.step.tiers import Tier

_log = logging.getLogger("hotloop")


class Reporter:
    """Writes down and logs what happened; verdicts on tiers wait until the loop tells its policy after the step.

    Args:
        account: keeps the figures and the run record.
        clock: times what a proof runs beside a step.
        asked: the tier was asked for by name.
        alone: there are no other processes, which leave a tier in a call that all of them vote on.

    Attributes:
        vetoes: by name, the tiers that this process wants all processes to leave, and why.
    """

    def __init__(self, account: Account, clock: Timed[Ran], *, asked: bool, alone: bool) -> None:
        self._account, self._clock, self._asked, self._alone = account, clock, asked, alone
        self.said: set[str] = set()
        """The lines that were logged, each of which is news only once."""
        self.vetoes: dict[str, Obstacle] = {}
        self._verdicts: list[Verdict] = []
        self._kinds: dict[str, None] = {}

    def emit(self, event: ev.Event) -> None:
        """Hand an event to the record, the watchers and the log."""
        self._account.event(event)
        collector.emit(event)
        level, line = line_of(event, asked=self._asked)
        if line:
            self.say_once(line, level)

    def decided(self, reason: str, numbers: Mapping[str, Any], level: int = logging.INFO) -> None:
        """Write a decision down, and log it."""
        self._account.decided(reason, numbers)
        _log.log(level, "step %d: %s", self._account.progress.steps, reason)

    def say_once(self, line: str, level: int = logging.INFO) -> None:
        """Log a line the first time that it is said."""
        if line not in self.said:
            self.said.add(line)
            _log.log(level, "%s", line)

    def proof_took(self, seconds: float, copied_bytes: int = 0) -> None:
        """Add to what proofs have cost."""
        self._account.proof(seconds, copied_bytes)

    def gave_up(self, tier: str, why: str) -> None:
        """Note that the policy gave a tier up before it was proven."""
        self._account.tiers[tier].declined = why

    def timed_beside(self, tier: Tier, run: Callable[[], Any], call: Hashable = None) -> Any:
        """Run the reference of a proof, and count its time as a step of the tier that it runs in."""
        return self._clock.run(run, lambda: Ran(tier.name, "run", call=call))

    def seconds_of(self, tier: str) -> float | None:
        """Return the typical seconds of a step in a tier; None where none was timed."""
        account = self._account.tiers.get(tier)
        return account.seconds if account is not None else None

    def declined_kinds(self) -> list[str]:
        """List why kinds of calls are not captured, each reason once."""
        return list(self._kinds)

    # -- verdicts on tiers -----------------------------------------------------------------------------------------

    def take(self) -> list[Verdict]:
        """Return the verdicts since the last time."""
        verdicts, self._verdicts = self._verdicts, []
        return verdicts

    def proof_saves(self, seconds: float, against: str) -> None:
        """Note what a tier that is being proven saves against another: seconds a step, over all calls of the loop."""
        self._verdicts.append(Verdict("proof_saves", (seconds, against)))

    def proven(self, step: DecoratedStep, tier: Tier, *, worst: str, copied_bytes: int, on_host: bool) -> None:
        """Report that a tier agreed with its reference in enough steps."""
        self.emit(
            ev.TierProven(
                step=step.context.progress.steps,
                function=step.name,
                tier=tier.name,
                steps=PROOF_STEPS,
                worst=worst,
                seconds=self._account.proof_seconds,
                copied_bytes=copied_bytes,
                on_host=on_host,
            )
        )
        self._verdicts.append(Verdict("proven", (tier,)))

    def kind_declined(self, step: DecoratedStep, tier: Tier, obstacle: Obstacle, *, every: bool) -> None:
        """Report a kind of call that cannot be captured; ``every`` kind that comes back cannot."""
        self._kinds[str(obstacle)] = None
        self._declined(step, tier, obstacle)
        if every and self._alone:
            self._verdicts.append(Verdict("declined", (tier, obstacle)))
        elif every and not self._asked:
            self.vetoes.setdefault(tier.name, obstacle)

    def failed(self, step: DecoratedStep, tier: Tier, obstacle: Obstacle) -> None:
        """Report that the code of a tier failed or was wrong: another tier runs once all processes leave this one."""
        if self._alone:
            self.left(step, tier, obstacle)
        else:
            self.vetoes.setdefault(tier.name, obstacle)

    def left(self, step: DecoratedStep, tier: Tier, obstacle: Obstacle) -> None:
        """Report a tier that is left for good: from the next step on another one runs."""
        self.vetoes.pop(tier.name, None)
        self._declined(step, tier, obstacle)
        self._verdicts.append(Verdict("failed", (tier, obstacle)))

    def _declined(self, step: DecoratedStep, tier: Tier, obstacle: Obstacle) -> None:
        self.emit(
            ev.TierDeclined(
                step=step.context.progress.steps,
                function=step.name,
                tier=tier.name,
                reason=obstacle.reason,
                hint=obstacle.hint,
                file=obstacle.file,
                line=obstacle.line,
                source=obstacle.source,
            )
        )


def line_of(event: ev.Event, *, asked: bool) -> tuple[int, str]:
    """Return level and line of an event; the line is empty where the event is no news.

    Where the user ``asked`` for the tier by name, anything else that runs is against their wish.
    """
    phrase = _PHRASES.get(type(event))
    against = isinstance(event, ev.StepUndone | ev.StepsStale)
    against |= asked and isinstance(event, ev.TierDeclined | ev.TierChanged)
    against |= isinstance(event, ev.SentinelDisagreed) and event.certain
    return (logging.WARNING if against else logging.INFO), phrase(event) if phrase is not None else ""


def _declined(event: ev.TierDeclined) -> str:
    at = f" at {event.location}: {event.source}" if event.file else ""
    return f"{event.function}: {event.tier} declined{at}: {event.reason}. {event.hint}"


def _proven(event: ev.TierProven) -> str:
    copied = f"{event.copied_bytes / 2**20:,.0f} MiB copied{' in host memory' if event.on_host else ''}"
    return f"{event.function}: {event.tier} agrees over {event.steps} steps ({event.worst}; {copied})"


def _captured(event: ev.Captured) -> str:
    outside = f"; {', '.join(event.outside)} outside" if event.outside else ""
    return f"{event.function}: {event.operations:,} operations captured in {event.seconds:.2f} s{outside}"


_PHRASES: dict[type[ev.Event], Callable[[Any], str]] = {
    ev.TierDeclined: _declined,
    ev.TierProven: _proven,
    ev.Captured: _captured,
    ev.StepUndone: lambda event: (
        f"{event.function}: step {event.step + 1} failed in {event.tier} and ran eager: {event.reason}"
    ),
    ev.SentinelDisagreed: lambda event: (
        f"{event.function}: step {event.step + 1} in {event.tier} does not agree with eager: {event.reason}"
    ),
    ev.CaptureDropped: lambda event: f"{event.function}: to be captured anew, since something changed: {event.reason}",
    ev.StepsStale: lambda event: (
        f"{event.function}: a change was noticed late: steps {event.first_step:,} to {event.last_step:,} may have used "
        f"an old value. What differs: {event.operation}{f' at {event.location}' if event.file else ''}"
    ),
    ev.TierChanged: lambda event: (
        f"from step {event.step + 1} on {event.to_tier}, before {event.from_tier}: {event.reason}"
    ),
}
