"""One kind of call of a step, and its way to a proven recording: New, Audited, Warmed, Captured, Proven, or Declined.

Each state holds what is true in it, and runs a call: as a real step, whatever else it finds out on the way.
"""

from __future__ import annotations

import collections
import dataclasses
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from hotloop.step.prove.graph_proofs import CapturePath, Noise, Recorded
from hotloop.step.prove.outcomes import STEPS

if TYPE_CHECKING:
    import functools
    from collections.abc import Callable, Hashable

    from hotloop.measure import Signature
    from hotloop.step.audit.auditor import StepAuditor
    from hotloop.step.audit.findings import AuditFindings
    from hotloop.step.capture.invariants import Change, Invariants
    from hotloop.step.capture.recording import CapturedStep
    from hotloop.step.obstacle import Obstacle
    from hotloop.step.prove.outcomes import Outcome
    from hotloop.step.tiers import Tier

DROPS, WITHIN = 3, 24
"""A recording that is dropped so often within so many steps is not made again."""
REPLACES = 16
"""Calls of a further kind without one of a recorded kind, after which it takes that one's place: kinds that come by
turns, as uneven batches do, would otherwise be recorded anew all the time."""


class StepCall(NamedTuple):
    """One call of a step: its positional and named arguments, the leaves among them in order, and what runs it."""

    arguments: tuple[tuple[Any, ...], dict[str, Any]]
    leaves: list[Any]
    run: functools.partial[Any]


class Capturing(Protocol):
    """What the states ask of the step that they belong to; `loop.capturing` implements it.

    Attributes:
        auditor: observes eager runs of the step.
        uncaptured: runs a call in a tier without its graph.
    """

    auditor: StepAuditor
    uncaptured: Callable[[CallKind, StepCall, Tier], Any]

    def may_begin(self, kind: CallKind) -> bool:
        """Return whether to take a kind of call to a recording now."""

    def must_wait(self) -> bool:
        """Return whether nothing may be proven at present, since another thread trains as well."""

    def common_obstacle(self) -> Obstacle | None:
        """Return the line that keeps every kind of call of this step from being captured, once that is known."""

    def argument_in_state(self, kind: CallKind, recording: CapturedStep, call: StepCall) -> bool:
        """Return whether an argument is part of what the step changes, and was not when the step was recorded."""

    def look(self, kind: CallKind, audit: AuditFindings, call: StepCall, tier: Tier) -> Any:
        """Run the call eagerly, and compare its operations with those of its audit."""

    def look_due(self) -> bool:
        """Count a replay; return whether to look at the step's operations in place of it."""

    def check_due(self) -> bool:
        """Count a step; return whether the sentinel is to check it."""

    def audit(self, kind: CallKind, call: StepCall) -> Any:
        """Run the call eagerly and observe it."""

    def warm_up(self, kind: CallKind, state: Audited | Captured, call: StepCall, tier: Tier) -> Any:
        """Run the call twice, to see how far it is from itself."""

    def prove(self, kind: CallKind, state: Warmed | Captured, call: StepCall, tier: Tier) -> Any:
        """Run the call both ways and compare; capture it first where it is not captured."""

    def replay(self, recorded: Recorded, call: StepCall, tier: Tier) -> Any:
        """Run the call by replaying its recording."""

    def check(self, kind: CallKind, recorded: Recorded, call: StepCall, tier: Tier) -> Any:
        """Run the call both ways and compare, for the sentinel."""

    def decline(self, kind: CallKind, obstacle: Obstacle) -> None:
        """Never capture this kind of call."""

    def drop(self, kind: CallKind, change: Change) -> None:
        """Forget a recording that no longer fits the program."""


@dataclasses.dataclass
class New:
    """Nothing is known of this kind of call."""

    def run(self, kind: CallKind, call: StepCall, tier: Tier, capturing: Capturing) -> Any:
        """Audit the call, once it is worth a recording."""
        if (obstacle := capturing.common_obstacle()) is not None:
            kind.state = Declined(obstacle)  # it was reported of the kinds before
            return capturing.uncaptured(kind, call, tier)
        if not capturing.may_begin(kind):
            return capturing.uncaptured(kind, call, tier)
        return capturing.audit(kind, call)


@dataclasses.dataclass
class Audited:
    """An eager run was observed."""

    audit: AuditFindings

    def run(self, kind: CallKind, call: StepCall, tier: Tier, capturing: Capturing) -> Any:
        """Decline the kind for what the audit found, or warm the step up."""
        if not capturing.may_begin(kind):
            return capturing.uncaptured(kind, call, tier)
        obstacles = self.audit.obstacles
        if obstacles and kind.takes_other_path():
            return capturing.audit(kind, call)
        if obstacles:
            capturing.decline(kind, obstacles[0])
            return capturing.uncaptured(kind, call, tier)
        if self.audit.changed():
            return capturing.look(kind, self.audit, call, tier)
        return capturing.warm_up(kind, self, call, tier)


@dataclasses.dataclass
class Warmed:
    """The step was run twice: how far it is from itself is known, and what a recording will rest on."""

    recorded: Recorded
    invariants: Invariants

    def run(self, kind: CallKind, call: StepCall, tier: Tier, capturing: Capturing) -> Any:
        """Capture the step, and prove it a first time."""
        if not self.invariants.holds():
            kind.forget()
            return kind.state.run(kind, call, tier, capturing)
        if capturing.must_wait():
            return capturing.uncaptured(kind, call, tier)
        if self.recorded.audit.changed():
            return capturing.look(kind, self.recorded.audit, call, tier)
        return capturing.prove(kind, self, call, tier)


@dataclasses.dataclass
class Captured:
    """The step is recorded, and agreed with its reference in every proof step so far."""

    recorded: Recorded
    recording: CapturedStep
    outcomes: list[Outcome] = dataclasses.field(default_factory=list)
    """Of the proof steps, without what the steps returned."""
    measures: bool = False
    """Whether to run the step twice once more, before more proof steps: its noise may explain a difference."""

    def run(self, kind: CallKind, call: StepCall, tier: Tier, capturing: Capturing) -> Any:
        """Prove the recording in one more step."""
        if (change := self.recording.changed()) is not None:
            capturing.drop(kind, change)
            return kind.state.run(kind, call, tier, capturing)
        if capturing.must_wait() or capturing.argument_in_state(kind, self.recording, call):
            return capturing.uncaptured(kind, call, tier)
        if self.recorded.audit.changed():
            return capturing.look(kind, self.recorded.audit, call, tier)
        if self.measures:
            return capturing.warm_up(kind, self, call, tier)
        return capturing.prove(kind, self, call, tier)


@dataclasses.dataclass
class Proven:
    """The recording agreed in enough steps: it runs in place of the step."""

    recorded: Recorded
    recording: CapturedStep
    right_at: int = 0
    """The step of the run after which the recording was last known to be right."""
    replayed: bool = False
    """Whether it was replayed since."""

    def again(self) -> Captured:
        """Return the state in which the noise is measured anew, and the recording proven."""
        self.recorded.noise = Noise()
        return Captured(self.recorded, self.recording, measures=True)

    def run(self, kind: CallKind, call: StepCall, tier: Tier, capturing: Capturing) -> Any:
        """Replay the recording, unless what it rests on has changed; let the sentinel check it now and then."""
        if (change := self.recording.changed()) is not None:
            capturing.drop(kind, change)
            return kind.state.run(kind, call, tier, capturing)
        if capturing.argument_in_state(kind, self.recording, call):
            return capturing.uncaptured(kind, call, tier)
        if capturing.values_due():
            return capturing.check(kind, self.recorded, call, tier)
        if self.recorded.audit.changed() or capturing.look_due():
            return capturing.look(kind, self.recorded.audit, call, tier)
        self.replayed = True
        return capturing.replay(self.recorded, call, tier)


@dataclasses.dataclass
class Declined:
    """This kind of call is never captured."""

    obstacle: Obstacle
    audit: AuditFindings | None = None

    def run(self, kind: CallKind, call: StepCall, tier: Tier, capturing: Capturing) -> Any:
        """Run the call without a graph."""
        return capturing.uncaptured(kind, call, tier)


State = New | Audited | Warmed | Captured | Proven | Declined


class CallKind:
    """Calls with one key: argument shapes and values, gradients that exist, modes.

    Args:
        signature: the arguments' part of the key.
        reports_capturing: the answer for code of the step that asks whether a capture is going on.

    Attributes:
        calls: how often the step was called so.
        latest: the numbers of the last such calls, among all calls of the step.
        state: how far this kind is on its way to a recording.
    """

    def __init__(self, key: Hashable, signature: Signature, *, reports_capturing: bool) -> None:
        self.key, self.signature = key, signature
        self.calls = 0
        self.latest: collections.deque[int] = collections.deque(maxlen=REPLACES)
        self.path = CapturePath(reports_capturing)
        self.state: State = New()
        self._drops: collections.deque[tuple[int, str]] = collections.deque(maxlen=DROPS)

    @property
    def called(self) -> int:
        """The number of the last such call, among all calls of the step."""
        return self.latest[-1] if self.latest else 0

    def outlives(self, other: CallKind) -> bool:
        """Return whether this kind has come so often since the other one last came that it may take its place."""
        return len(self.latest) == REPLACES and self.latest[0] > other.called

    @property
    def audit(self) -> AuditFindings | None:
        """What an eager run of this kind of call has shown; None where it was not observed."""
        state = self.state
        if isinstance(state, Audited | Declined):
            return state.audit
        return state.recorded.audit if isinstance(state, Warmed | Captured | Proven) else None

    @property
    def recording(self) -> CapturedStep | None:
        """The captured step, proven or not."""
        return self.state.recording if isinstance(self.state, Captured | Proven) else None

    @property
    def declined(self) -> Obstacle | None:
        """Why calls of this kind are never captured."""
        return self.state.obstacle if isinstance(self.state, Declined) else None

    @property
    def proven(self) -> bool:
        """Whether a recording runs in place of the step."""
        return isinstance(self.state, Proven)

    @property
    def begun(self) -> bool:
        """Whether the kind is on its way to a recording, or has one."""
        return isinstance(self.state, Warmed | Captured | Proven)

    @property
    def steps_left(self) -> int:
        """The calls that it takes until the kind is proven, as far as none differs: audit, warm-up, proof steps."""
        if isinstance(self.state, Captured):
            return max(1, self.state.measures + STEPS - len(self.state.outcomes))
        before = 2 if isinstance(self.state, New) else 1 if isinstance(self.state, Audited) else 0
        return before + STEPS

    def forget(self) -> None:
        """Begin anew, with an audit."""
        self.state = New()

    def takes_other_path(self) -> bool:
        """Begin anew on the path of code that is told that it is captured; False where there is no other path.

        transformers reads a padding mask on the host to leave it out, unless it is captured.
        """
        if self.path.reports_capturing or self.audit is None or not self.audit.asked:
            return False
        self.path.reports_capturing = True
        self.forget()
        return True

    def drop(self, step: int, reason: str) -> list[str]:
        """Forget the recording; where that happened too often lately, return the reasons, each once."""
        self.forget()
        self._drops.append((step, reason))
        if len(self._drops) < DROPS or step - self._drops[0][0] > WITHIN:
            return []
        reasons = list(dict.fromkeys(reason for _, reason in self._drops))
        self._drops.clear()
        return reasons
