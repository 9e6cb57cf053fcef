"""The account of a loop: what each step took in which tier, what it saved, what was decided; kept in the run record."""

from __future__ import annotations

import collections
import dataclasses
import statistics
import traceback
from typing import TYPE_CHECKING, Any

from hotloop import events as ev
from hotloop.measure import typical
from hotloop.measure.machine import record_folder
from hotloop.record import RunRecord
from hotloop.step.loop.status import LoopStatus, StaleSteps, TierStatus
from hotloop.step.tiers import GRAPH, Tier

if TYPE_CHECKING:
    import os
    from collections.abc import Hashable, Mapping

    from hotloop.measure import Timing
    from hotloop.step.context import Context, Progress
    from hotloop.step.policy.policy import Policy
    from hotloop.step.prove.check import SentinelStatus

SAMPLES = 200
"""Times kept of each tier: enough for a median, few enough to follow a run that changes."""
_MANY = 64
"""After so many steps without a step of an optimizer, the status says so; accumulation takes fewer for an update."""
_KINDS = 256
"""Kinds of calls whose times are kept apart, the latest ones."""
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
        """A typical step's time; looked at again when an eighth more steps have been timed, since it is asked often.

        Of a tier that only ran beside another it is the least: these few are among a run's first steps, which are slow.
        """
        if self.samples and (self._known is None or self.timed >= self._known_at):
            self._known = typical(list(self.samples)) if self.steps else min(self.samples)
            self._known_at = self.timed + 1 + min(self.timed, SAMPLES) // 8
        return self._known

    def time(self, seconds: float) -> None:
        """Add a step's time."""
        self.samples.append(seconds)
        self.timed += 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoopView:
    """What a loop is at, for its status and record.

    Args:
        unproven: what the tier in force lacks before steps run in it; empty where it lacks nothing.
        shapes: by step, the shapes that it has seen.
        bypassed: steps run as the models were given, and nothing is done beside them.
    """

    context: Context
    policy: Policy
    unproven: str
    shapes: dict[str, Any]
    sentinels: tuple[SentinelStatus, ...]
    bypassed: bool
    closed: bool


class Account:
    """The sums of what a loop does.

    Args:
        base: the name of the tier that the models were given in.
        record: a run record that somebody else owns, a folder for a new one, or None for one in memory.
    """

    def __init__(self, progress: Progress, base: str, record: str | os.PathLike[str] | RunRecord | None) -> None:
        self.progress, self._base = progress, base
        self._owned = not isinstance(record, RunRecord)
        self.record = record if isinstance(record, RunRecord) else RunRecord(record_folder(record))
        self.tiers: dict[str, TierAccount] = collections.defaultdict(TierAccount)
        self.saved = self.proof_seconds = self.prepare_seconds = 0.0
        self.undone = 0
        self.dropped: list[str] = []
        self.stale: list[StaleSteps] = []
        self.decisions: list[str] = []
        self.running = ""
        self._base_times: dict[Hashable, TierAccount] = {}
        """Times of the models as given, by kind of call: short batches say nothing of what long ones save."""
        self._steps = 0
        self._closed = False
        self._copied = 0
        self.failure: BaseException | None = None
        """The exception that the run ends with."""
        self._unproven: str | None = None
        """What the tier in force lacked as the loop was closed; asked of the loop before."""
        self._raised: tuple[int, str, str] | None = None
        """The steps that were done when a step raised, a run's status then, and the error: no object, which would keep
        the loop."""

    def beside(self, tier: str, timing: Timing, call: Hashable = None) -> None:
        """Add the time of a step that ran in a tier beside another one; ``call`` is its kind."""
        self.tiers[tier].time(timing.seconds)
        if tier == self._base:
            self._base_of(call).time(timing.seconds)

    def _base_of(self, call: Hashable) -> TierAccount:
        """Return the times of a kind of call in the base tier; a new kind takes the place of the oldest one."""
        if call not in self._base_times:
            if len(self._base_times) >= _KINDS:
                del self._base_times[next(iter(self._base_times))]
            self._base_times[call] = TierAccount()
        return self._base_times[call]

    def step(self, tier: str, doing: str, timing: Timing, *, chosen: bool, call: Hashable = None) -> None:
        """Count a step in a tier; ``doing`` and ``call`` as in `DecoratedStep`.

        It saves what calls of its kind take in the base tier: of a kind that never ran there, nothing is known. Where
        the tier was ``chosen`` by the policy, the policy counts by itself what that saves.
        """
        self._steps += 1
        account = self.tiers[tier]
        account.steps += 1
        changed, self.running = tier != self.running, tier
        known = self._base_times.get(call)
        eager = known.seconds if known is not None else None
        if doing == "run":
            account.time(timing.seconds)
            if tier == self._base:
                known = self._base_of(call)
                known.steps += 1
                known.time(timing.seconds)
            elif eager is not None and not chosen:
                self.saved += eager - timing.seconds
        elif doing != "sentinel" and (usual := self._usual(eager)) is not None:
            self.prepare_seconds += max(0.0, timing.seconds - usual)
        if not self._owned:
            return
        if changed or doing != "run" or self._steps < _EVERY_STEP or self._steps % _THINNED == 0:
            entry = {"step": self._steps, "seconds": timing.seconds, "running": tier}
            self.record.append("steps", entry if doing == "run" else {**entry, "doing": doing})

    def _usual(self, of_kind: float | None) -> float | None:
        """Return a base step's seconds, of the kind of call if known, else of any."""
        base = self.tiers.get(self._base)
        return of_kind if of_kind is not None or base is None else base.seconds

    def untimed(self, tier: str) -> None:
        """Count a step that was not timed."""
        self._steps += 1
        self.tiers[tier].steps += 1

    def event(self, event: ev.Event) -> None:
        """Write an event down, and note what it says of a tier."""
        self.record.append("events", {**event.to_dict(), "step": getattr(event, "step", self.progress.steps)})
        verdict = ""
        if isinstance(event, ev.StepUndone):
            self.undone += 1
        elif isinstance(event, ev.CaptureDropped):
            self.dropped.append(event.reason)
        elif isinstance(event, ev.StepsStale):
            self.stale.append(StaleSteps(event.first_step, event.last_step, event.operation, event.file, event.line))
        elif isinstance(event, ev.TierProven):
            self.tiers[event.tier].proven = True
            verdict = "proven"
        elif isinstance(event, ev.SentinelDisagreed):
            verdict = "disagreed"
        elif isinstance(event, ev.TierDeclined):
            at = f" at {event.location}: {event.source}" if event.file else ""
            self.tiers[event.tier].declined = f"{event.reason}{at}. {event.hint}"
            verdict = "declined"
        if verdict:
            self.record.append("verdicts", {**event.to_dict(), "verdict": verdict})

    def decided(self, line: str, numbers: Mapping[str, Any]) -> None:
        """Write a decision down."""
        self.decisions.append(line)
        self.record.append("decisions", {"step": self.progress.steps, "reason": line, **numbers})

    def proof(self, seconds: float, copied_bytes: int) -> None:
        """Add to what proofs have cost."""
        self.proof_seconds += seconds
        self._copied = max(self._copied, copied_bytes)

    # -- the status ------------------------------------------------------------------------------------------------

    def status(self, loop: LoopView) -> LoopStatus:
        """Sum up what runs, what that saves, and why."""
        if loop.bypassed and (more := self.progress.steps - self._steps) > 0:  # none of these steps was counted
            self.tiers[self._base].steps += more
            self._steps, self.running = self.progress.steps, self._base
        policy, goal = loop.policy, self.progress.tier.name
        unproven = loop.unproven if self._unproven is None else self._unproven
        running, known = self.running or goal, self.tiers.get(goal)
        if known is not None and known.proven and not known.declined:
            running = goal  # though the last step ran in another tier, as a short last batch does
        tiers = dict(self.tiers)
        if unproven or policy.chooses:
            tiers.setdefault(goal, TierAccount())
        lately = list(self.tiers[running].samples)[-50:] if running in self.tiers else []
        eager_seconds = policy.eager_seconds
        if eager_seconds is None and self._base in self.tiers:
            eager_seconds = self.tiers[self._base].seconds
        done = sum(tier.steps for tier in self.tiers.values())
        forgotten = done >= _MANY and loop.context.holdings.optimizers and not loop.context.writes.ever
        return LoopStatus(
            asked=policy.asked,
            tier=goal if loop.bypassed and not loop.closed else running,
            step=self.progress.steps,
            step_seconds=statistics.median(lately) if lately else None,
            eager_seconds=eager_seconds,
            seconds_saved=self.saved + policy.saved_seconds,
            prepare_seconds=self.prepare_seconds,
            tiers=tuple(self._tier(name, account, running, unproven, loop) for name, account in tiers.items()),
            decisions=tuple(self.decisions),
            undone=self.undone,
            dropped=tuple(self.dropped),
            stale=tuple(self.stale),
            compiled=tuple(loop.context.compiled.status().compile_lines()),
            sentinels=loop.sentinels,
            closed=loop.closed,
            without_update=done if forgotten and not loop.closed else 0,
            memory=loop.context.room.use if loop.context.room.use.eager is not None else None,
        )

    def _tier(self, name: str, account: TierAccount, running: str, unproven: str, loop: LoopView) -> TierStatus:
        state = "timed" if account.samples else "trying"
        state = "in force" if name == running else "proven" if account.proven else state
        base = self.tiers.get(name.removesuffix(GRAPH)) if name.endswith(GRAPH) else None
        declined = account.declined
        if base is not None and not account.proven and name != running:  # there is no code to capture
            declined = declined or base.declined
        if declined and name != running:
            state = "declined"
        lacks = unproven if name == self.progress.tier.name else ""
        if lacks and not account.proven and not declined:  # though its last step was a proof step, say
            state = "trying"
        compiled = loop.context.compiled
        given = compiled.why_given if name.startswith("as-given") else ""
        instead = compiled.instead(name.removesuffix(GRAPH))
        undecided = loop.policy.undecided if name == self._base else ""
        timed = account.timed
        beside = f"ran {timed} times beside another, to compare the two" if timed and not account.steps else ""
        asked = loop.policy.start.name
        if account.steps and name == self._base != asked == running and not loop.policy.chooses:
            beside = f"beside {asked}: first calls of their kind, and those that have no code or recording of their own"
        why = declined or "; ".join(filter(None, (lacks, instead, given, undecided))) or beside
        return TierStatus(name=name, state=state, steps=account.steps, step_seconds=account.seconds, why=why)

    # -- the record ------------------------------------------------------------------------------------------------

    def settle(self, loop: LoopView) -> None:
        """Bring the record's mappings up to date."""
        if not self._owned or self._closed:
            return
        status = self.status(loop)
        self.record.update("components", **self._components(status.tier, loop))
        measured = {
            "steady_step_ms": status.step_seconds and 1e3 * status.step_seconds,
            "eager_step_ms": status.eager_seconds and 1e3 * status.eager_seconds,
            "steps_done": self.progress.steps,
            "seconds_saved": status.seconds_saved,
            "prepare_seconds": self.prepare_seconds,
            "proof_seconds": self.proof_seconds,
            "proof_copied_bytes": self._copied,
            **loop.context.room.use.figures(),
        }
        self.record.update("measurements", **{key: value for key, value in measured.items() if value is not None})
        self.record.update("measurements", shapes=loop.shapes)
        if status.sentinels:
            self.record.update(
                "measurements",
                sentinel_checks=sum(sentinel.checks for sentinel in status.sentinels),
                sentinel_seconds=sum(sentinel.seconds for sentinel in status.sentinels),
                sentinel_every=max(sentinel.every for sentinel in status.sentinels),
            )
        self.record.update("settings", run=status.asked, total_steps=loop.context.total_steps)

    def _components(self, tier: str, loop: LoopView) -> dict[str, Any]:
        """Return what ran of each model; of a model that is not compiled, the tier.

        With `auto` no preset was asked for, so that what it decided is as asked.
        """
        compiled, policy = loop.context.compiled, loop.policy
        found: dict[str, Any] = compiled.status().to_dict()["components"]
        start = policy.start
        if compiled.given or (not policy.chooses and (start.compiles or not (start.graph or start.channels_last))):
            return found
        asked = {"requested": policy.asked, "running": tier}
        if not Tier(tier.removesuffix(GRAPH)).compiles:
            asked["state"] = "captured" if tier.endswith(GRAPH) else "eager"
        return {name: {**component, **asked} for name, component in found.items()}

    def state_dict(self, policy: Policy) -> dict[str, Any]:
        """Return what a checkpoint keeps."""
        saved = self.saved + policy.saved_seconds
        return {"saved": saved, "prepare_seconds": self.prepare_seconds, "undone": self.undone}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a checkpoint."""
        self.saved = float(state.get("saved", 0.0))
        self.prepare_seconds = float(state.get("prepare_seconds", 0.0))
        self.undone = int(state.get("undone", 0))
        self._steps = self.progress.steps

    def close(self, loop: LoopView) -> None:
        """Settle the record, where it is the loop's own."""
        try:
            self.settle(loop)
        finally:
            self._closed, self._unproven = True, loop.unproven
            if self._owned:
                self.record.__exit__(type(self.failure) if self.failure else None, self.failure, None)

    def raised(self, error: BaseException) -> None:
        """Note that a step raised: a run that takes no further step ended there."""
        status = "interrupted" if isinstance(error, KeyboardInterrupt) else "failed"
        self._raised = self.progress.steps, status, _text(error)

    def raised_last(self, error: BaseException) -> bool:
        """Return whether an exception is what the last step raised, and no further step came."""
        return self._raised is not None and (self._raised[0], self._raised[2]) == (self.progress.steps, _text(error))

    def begin(self, asked: str, total_steps: int | None) -> None:
        """Write down what was asked for: a record that nobody settles says how many steps were to come as well."""
        if self._owned:
            self.record.update("settings", run=asked, total_steps=total_steps)

    def end(self, error: BaseException | None = None) -> None:
        """Finish the record of a loop that was never closed: it is gone, or could not be made for an error."""
        if self._closed or not self._owned:
            return
        self._closed, steps = True, self.progress.steps
        self.record.update("measurements", steps_done=steps)
        error = error or self.failure
        if error is None and self._raised is not None and self._raised[0] == steps:
            self.record.finish(*self._raised[1:])
        else:
            self.record.__exit__(type(error) if error else None, error, None)


def _text(error: BaseException) -> str:
    return "".join(traceback.format_exception_only(error)).strip()
