"""What the rooms below report: it goes to the record and as lines to the log, and verdicts on tiers to the policy."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from hotloop import events as ev
from hotloop.compiling.observe import collector
from hotloop.step.prove.outcomes import STEPS as PROOF_STEPS

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from hotloop.step.context import DecoratedStep
    from hotloop.step.loop.account import Account
    from hotloop.step.loop.runner import StepRunner
    from hotloop.step.loop.stepping import Stepping
    from hotloop.step.loop.transitions import Transitions
    from hotloop.step.obstacle import Obstacle
    from hotloop.step.state.holdings import Parts
    from hotloop.step.tiers import Tier

_log = logging.getLogger("hotloop")


class Reporter:
    """The loop's side of `hotloop.step.context.Reports`.

    Args:
        account: keeps the figures and the run record.
        parts: looked up anew after a recording was dropped.
        runners: of the steps that were decorated so far.

    Attributes:
        transitions: does what the policy says of a verdict; the loop sets it once it is made.
        stepping: times what runs beside a proof; the loop sets it once it is made.
    """

    transitions: Transitions
    stepping: Stepping

    def __init__(self, account: Account, parts: Parts, runners: list[StepRunner]) -> None:
        self._account, self._parts, self._runners = account, parts, runners
        self.said: set[str] = set()
        """The lines that were logged, each of which is news only once."""

    def emit(self, event: ev.Event) -> None:
        """Hand an event to the record, the watchers and the log."""
        if isinstance(event, ev.CaptureDropped):
            self._parts.look_again()
        self._account.event(event)
        collector.emit(event)
        level, line = line_of(event, asked=not self.transitions.policy.chooses)
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
        self.stepping.proved()

    def gave_up(self, tier: str, why: str) -> None:
        """Note that the policy gave a tier up before it was proven."""
        self._account.tiers[tier].declined = why

    def timed_beside(self, tier: Tier, run: Callable[[], Any]) -> Any:
        """Run the reference of a proof, and count its time as a step of the tier that it runs in."""
        return self.stepping.reference_times.run(run, lambda: self.stepping.beside(tier))

    def seconds_of(self, tier: str) -> float | None:
        """Return the typical seconds of a step in a tier; None where none was timed."""
        account = self._account.tiers.get(tier)
        return account.seconds if account is not None else None

    def proof_saves(self, seconds: float, against: str) -> None:
        """Note what a tier that is being proven saves against another: seconds a step, over all calls of the loop."""
        self.transitions.policy.proof_saves(seconds, against)

    def declined_kinds(self) -> list[str]:
        """List why kinds of calls are not captured, each reason once."""
        kinds = [kind for runner in self._runners for kind in runner.capturing.kinds.values()]
        return list(dict.fromkeys(str(kind.declined) for kind in kinds if kind.declined is not None))

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
        self.transitions.apply(self.transitions.policy.proven(tier))

    def kind_declined(self, step: DecoratedStep, tier: Tier, obstacle: Obstacle) -> None:
        """Report a kind of call that cannot be captured; the policy hears of it once no kind that comes back can."""
        self._declined(step, tier, obstacle)
        kinds = [kind for runner in self._runners if runner.step is step for kind in runner.capturing.kinds.values()]
        if not any(kind.declined is None for kind in kinds if kind.calls > 1):
            self.transitions.apply(self.transitions.policy.declined(tier, obstacle))

    def failed(self, step: DecoratedStep, tier: Tier, obstacle: Obstacle) -> None:
        """Report that the code of a tier failed or was wrong: from the next step on another tier runs."""
        self._declined(step, tier, obstacle)
        self.transitions.apply(self.transitions.policy.failed(tier, obstacle))

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
