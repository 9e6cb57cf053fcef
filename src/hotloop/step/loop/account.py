"""The account of a loop: what each step took in which tier, what it saved, what was decided; kept in the run record."""

from __future__ import annotations

import collections
import dataclasses
import os
import statistics
import sys
import weakref
from typing import TYPE_CHECKING, Any

from hotloop import events as ev
from hotloop.measure import typical
from hotloop.measure.machine import record_folder
from hotloop.record import RunRecord
from hotloop.report import write_html
from hotloop.step.loop.status import LoopStatus, TierStatus
from hotloop.step.tiers import GRAPH, Tier

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hotloop.measure import Timing
    from hotloop.step.loop.loop import Loop
    from hotloop.step.loop.status import SentinelStatus
    from hotloop.step.prove.outcomes import Outcome

SAMPLES = 200
"""Times kept of each tier: enough for a median, few enough to follow a run that changes."""
_EVERY_STEP = 2_000
_THINNED = 20
"""From step `_EVERY_STEP` on, one in so many steps is written down, unless something happens in it."""


@dataclasses.dataclass
class TierAccount:
    """What is known of one tier in this run."""

    steps: int = 0
    timed: int = 0
    samples: collections.deque[float] = dataclasses.field(default_factory=lambda: collections.deque(maxlen=SAMPLES))
    proven: bool = False
    declined: str = ""

    _known: float | None = None
    _known_at: int = 0

    @property
    def seconds(self) -> float | None:
        """A typical step's time; looked at again when an eighth more steps have been timed, since it is asked often."""
        if self.samples and (self._known is None or self.timed >= self._known_at):
            self._known = typical(list(self.samples))
            self._known_at = self.timed + 1 + min(self.timed, SAMPLES) // 8
        return self._known

    def time(self, seconds: float) -> None:
        """Add a step's time."""
        self.samples.append(seconds)
        self.timed += 1


class Account:
    """Adds up what a loop does.

    Args:
        loop: whose account it is.
        record: a run record that somebody else owns, a folder for a new one, or None for one in memory.
    """

    def __init__(self, loop: Loop, record: str | os.PathLike[str] | RunRecord | None) -> None:
        self._loop = loop
        self._owned = not isinstance(record, RunRecord)
        self.record = record if isinstance(record, RunRecord) else RunRecord(record_folder(record))
        self.tiers: dict[str, TierAccount] = collections.defaultdict(TierAccount)
        self.saved = self.proof_seconds = self.prepare_seconds = 0.0
        self.undone = 0
        self.dropped: list[str] = []
        self.decisions: list[str] = []
        self.running = ""
        self._steps = 0
        self._closed = False
        self._copied = 0
        self._failure: BaseException | None = None
        self._unproven: str | None = None
        """What the tier aimed at lacked as the loop was closed; asked of the loop before."""
        if self._owned:  # a program that never closes its loop has a settled record as well
            weakref.finalize(self, _end, self.record, os.getpid())

    def step(self, tier: str, kind: str, timing: Timing) -> None:
        """Take note of a step in a tier; ``kind`` tells a plain run from one that looked, proved or captured."""
        self._steps += 1
        account = self.tiers[tier]
        account.steps += 1
        changed, self.running = tier != self.running, tier
        eager = known.seconds if (known := self.tiers.get(self._loop.given)) is not None else None
        if kind == "run":
            account.time(timing.seconds)
            if tier != self._loop.given and eager is not None and self._loop.auto is None:
                self.saved += eager - timing.seconds
        elif eager is not None and kind != "sentinel":
            self.prepare_seconds += max(0.0, timing.seconds - eager)
        if not self._owned:
            return
        if changed or kind != "run" or self._steps < _EVERY_STEP or self._steps % _THINNED == 0:
            entry = {"step": self._steps, "seconds": timing.seconds, "running": tier}
            self.record.append("steps", entry if kind == "run" else {**entry, "doing": kind})

    def untimed(self, tier: str) -> None:
        """Count a step that was not timed."""
        self._steps += 1
        self.tiers[tier].steps += 1

    def beside(self, tier: str, timing: Timing) -> None:
        """Take note of what a step took in another tier, beside the one that was proven."""
        self.tiers[tier].time(timing.seconds)

    def event(self, event: ev.Event) -> None:
        """Take note of an event."""
        self.record.append("events", {**event.to_dict(), "step": getattr(event, "step", self._loop.steps)})
        if isinstance(event, ev.StepUndone):
            self.undone += 1
        elif isinstance(event, ev.CaptureDropped):
            self.dropped.append(event.reason)
        elif isinstance(event, ev.TierProven):
            self.tiers[event.tier].proven = True
            self.record.append("verdicts", {**event.to_dict(), "verdict": "proven"})
        elif isinstance(event, ev.SentinelDisagreed):
            self.record.append("verdicts", {**event.to_dict(), "verdict": "disagreed"})
        elif isinstance(event, ev.TierDeclined):
            at = f" at {event.location}: {event.source}" if event.file else ""
            self.tiers[event.tier].declined = f"{event.reason}{at}. {event.hint}"
            self.record.append("verdicts", {**event.to_dict(), "verdict": "declined"})

    def gave_up(self, tier: str, why: str) -> None:
        """Take note that a tier was given up before it was proven."""
        self.tiers[tier].declined = why

    def decided(self, line: str, numbers: Mapping[str, Any]) -> None:
        """Take note of a decision."""
        self.decisions.append(line)
        self.record.append("decisions", {"step": self._loop.steps, "reason": line, **numbers})

    def proof(self, seconds: float, outcome: Outcome | None) -> None:
        """Add to what proofs have cost."""
        self.proof_seconds += seconds
        if outcome is not None:
            self._copied = max(self._copied, outcome.nbytes)

    def status(self) -> LoopStatus:
        """Sum up."""
        loop = self._loop
        if loop.plain:
            self._count_plain()
        running, unproven = self._in_force(), self._lacks()
        begun = {loop.goal.name: TierAccount()} if unproven or loop.auto is not None else {}
        tiers = {**self.tiers, **{name: self.tiers.get(name, one) for name, one in begun.items()}}
        return LoopStatus(
            asked="auto" if loop.auto is not None else loop.asked.name,
            tier=loop.goal.name if loop.plain and not loop.closed else running,
            step=loop.steps,
            step_seconds=self._lately(running),
            eager_seconds=self._eager(),
            seconds_saved=self._saved(),
            prepare_seconds=self.prepare_seconds,
            tiers=tuple(self._tier(name, one, running, unproven) for name, one in tiers.items()),
            decisions=tuple(self.decisions),
            undone=self.undone,
            dropped=tuple(self.dropped),
            compiled=tuple(loop.compiled.status().compile_lines()),
            sentinels=tuple(loop.sentinels()),
            closed=loop.closed,
        )

    def _count_plain(self) -> None:
        """Count the steps that ran as the model was given since the last look: none of them tells anybody."""
        if (more := self._loop.steps - self._steps) > 0:
            self.tiers[self._loop.given].steps += more
            self._steps, self.running = self._loop.steps, self._loop.given

    def _in_force(self) -> str:
        """Name the tier that steps run in: the last one's, unless that was of a kind which a proven tier leaves out."""
        goal = self._loop.goal.name
        known = self.tiers.get(goal)
        if known is not None and known.proven and not known.declined:  # a short last batch ran eager, say
            return goal
        return self.running or goal

    def _eager(self) -> float | None:
        known = self._loop.auto.eager_seconds if self._loop.auto is not None else None
        return self.tiers[self._loop.given].seconds if known is None and self._loop.given in self.tiers else known

    def _saved(self) -> float:
        return self.saved if self._loop.auto is None else self.saved + self._loop.auto.saved_seconds

    def _lately(self, tier: str) -> float | None:
        samples = list(self.tiers[tier].samples)[-50:] if tier in self.tiers else []
        return statistics.median(samples) if samples else None

    def _lacks(self) -> str:
        """Say what the tier that is aimed at lacks, in the run or as it ended."""
        return self._loop.unproven() if self._unproven is None else self._unproven

    def _tier(self, name: str, one: TierAccount, running: str, unproven: str) -> TierStatus:
        state = "in force" if name == running else "proven" if one.proven else "timed" if one.samples else "trying"
        base = self.tiers.get(name.removesuffix(GRAPH)) if name.endswith(GRAPH) else None
        declined = one.declined
        if base is not None and not one.proven and name != running:  # there is no code to capture
            declined = declined or base.declined
        if declined and name != running:
            state = "declined"
        lacks = unproven if name == self._loop.goal.name else ""
        if lacks and not one.proven and not declined:  # though its last step was one of a proof, say
            state = "trying"
        given = self._loop.compiled.why_given if name.startswith("as-given") else ""
        instead = self._loop.compiled.instead(name.removesuffix(GRAPH))
        undecided = self._loop.auto.undecided if self._loop.auto is not None and name == self._loop.given else ""
        beside = f"ran {one.timed} times beside another, to compare the two" if one.timed and not one.steps else ""
        why = declined or "; ".join(filter(None, (lacks, instead, given, undecided))) or beside
        return TierStatus(name=name, state=state, steps=one.steps, step_seconds=one.seconds, why=why)

    def settle(self) -> None:
        """Bring the record's mappings up to date."""
        if not self._owned or self._closed:
            return
        status = self.status()
        self.record.update("components", **self._components(status.tier))
        measured = {
            "steady_step_ms": status.step_seconds and 1e3 * status.step_seconds,
            "eager_step_ms": status.eager_seconds and 1e3 * status.eager_seconds,
            "steps_done": self._loop.steps,
            "seconds_saved": status.seconds_saved,
            "prepare_seconds": self.prepare_seconds,
            "proof_seconds": self.proof_seconds,
            "proof_copied_bytes": self._copied,
        }
        self.record.update("measurements", **{key: value for key, value in measured.items() if value is not None})
        self.record.update("measurements", shapes=self._loop.shapes())
        if status.sentinels:
            self.record.update("measurements", **_figures(status.sentinels))
        self.record.update("settings", run=status.asked, total_steps=self._loop.total_steps)

    def _components(self, tier: str) -> dict[str, Any]:
        """Give what ran of each model; of one that is not compiled, the tier.

        With `auto` no preset was asked for, so that what it decided is as asked.
        """
        found: dict[str, Any] = self._loop.compiled.status().to_dict()["components"]
        forced = self._loop.auto is None
        if self._loop.compiled.given or (forced and (not self._loop.asked.graph or self._loop.asked.compiles)):
            return found
        asked = {"requested": self._loop.asked.name if forced else "auto", "running": tier}
        if not Tier(tier.removesuffix(GRAPH)).compiles:
            asked["state"] = "captured" if tier.endswith(GRAPH) else "eager"
        return {name: {**one, **asked} for name, one in found.items()}

    def report(self, path: str | os.PathLike[str]) -> None:
        """Write the record as a page."""
        self.settle()
        write_html(self.record.document, path)

    def state_dict(self) -> dict[str, Any]:
        """Give what a checkpoint keeps."""
        return {"saved": self._saved(), "prepare_seconds": self.prepare_seconds, "undone": self.undone}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a checkpoint."""
        self.saved = float(state.get("saved", 0.0))
        self.prepare_seconds = float(state.get("prepare_seconds", 0.0))
        self.undone = int(state.get("undone", 0))
        self._steps = self._loop.steps

    def failed(self, error: BaseException) -> None:
        """The run ends with an exception."""
        self._failure = error

    def close(self) -> None:
        """Settle the record, where it is the loop's own."""
        self.settle()
        self._closed, self._unproven = True, self._lacks()
        if self._owned:
            self.record.__exit__(type(self._failure) if self._failure else None, self._failure, None)


def _figures(sentinels: tuple[SentinelStatus, ...]) -> dict[str, Any]:
    return {
        "sentinel_checks": sum(one.checks for one in sentinels),
        "sentinel_seconds": sum(one.seconds for one in sentinels),
        "sentinel_every": max(one.every for one in sentinels),
    }


def _end(record: RunRecord, owner: int) -> None:
    """Settle a record at the end of its loop or of the program, which may have ended with an exception."""
    if os.getpid() != owner:  # a fork, a data loader's worker say, ends while the run goes on
        return
    error: BaseException | None = getattr(sys, "last_value", None)
    record.__exit__(type(error) if error is not None else None, error, None)
