"""One kind of call of a step, its way to a proven recording, and what may be done with such a call."""

from __future__ import annotations

import collections
import dataclasses
import enum
from typing import TYPE_CHECKING, Any, NamedTuple

from hotloop.step.prove.graph_proofs import CapturePath, Noise, Recorded
from hotloop.step.prove.outcomes import STEPS

if TYPE_CHECKING:
    import functools
    from collections.abc import Hashable

    from hotloop.measure import Signature
    from hotloop.step.audit.findings import AuditFindings
    from hotloop.step.capture.invariants import Change
    from hotloop.step.capture.recording import CapturedStep
    from hotloop.step.obstacle import Obstacle
    from hotloop.step.prove.outcomes import Outcome
    from hotloop.step.tiers import Tier

DROPS, WITHIN = 3, 24
"""A recording that is dropped so often within so many steps is not made again."""
REPLACES = 16
"""Calls of a further kind without one of a recorded kind, after which it takes that one's place: kinds that come by
turns, as uneven batches do, would otherwise be recorded anew all the time."""


class Doing(enum.IntEnum):
    """What to do with a call. Of several processes all do the lowest."""

    LEAVE = 0
    """Leave the tier for good."""
    AGAIN = 1
    """Prove the compiled code again, from this call on."""
    DECLINED = 2
    """Never capture this kind of call."""
    PLAIN = 3
    """Run it without a graph: by compiled code that was proven with its shapes, else as given."""
    LOOK = 4
    """Run it eagerly, and compare its operations with those of its audit."""
    AUDIT = 5
    PROVE_CODE = 6
    WARM_UP = 7
    CAPTURE = 8
    PROVE = 9
    CHECK = 10
    REPLAY = 11


class StepCall(NamedTuple):
    """One call of a step: its arguments, their leaves and shapes, and a function that runs it."""

    arguments: tuple[tuple[Any, ...], dict[str, Any]]
    leaves: list[Any]
    inputs: Signature
    run: functools.partial[Any]


class Decision(NamedTuple):
    """What to do with a call, and why; a line is for the log."""

    doing: Doing
    because: Obstacle | Change | str | None = None
    left: Tier | None = None
    """The tier to leave."""


@dataclasses.dataclass
class New:
    """Nothing is known of this kind of call."""


@dataclasses.dataclass
class Audited:
    """An eager run was observed."""

    audit: AuditFindings


@dataclasses.dataclass
class Warmed:
    """The step was run twice: how far it is from itself is known."""

    recorded: Recorded


@dataclasses.dataclass
class Captured:
    """The step is recorded, and agreed with its reference in every proof step so far."""

    recorded: Recorded
    recording: CapturedStep
    outcomes: list[Outcome] = dataclasses.field(default_factory=list)
    """Of the proof steps, without what the steps returned."""
    measures: bool = False
    """Whether to run the step twice once more, before more proof steps: its noise may explain a difference."""


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


@dataclasses.dataclass
class Declined:
    """This kind of call is never captured."""

    obstacle: Obstacle
    audit: AuditFindings | None = None


State = New | Audited | Warmed | Captured | Proven | Declined
STATES = (Declined, New, Audited, Warmed, Captured, Proven)
"""The states of a kind of call, by how far it is."""


class CallKind:
    """Calls with one key: argument shapes and values, gradients that exist, modes.

    Args:
        signature: the arguments' part of the key.
        reports_capturing: the answer for code of the step that asks whether a capture is going on.
        number: the same number in all processes whose call is of such a kind; 0 in a single process.

    Attributes:
        calls: how often the step was called so.
        latest: the numbers of the last such calls, among all calls of the step.
        state: how far this kind is on its way to a recording.
        unstable: why its arguments keep it from being captured.
        collectives: how many a run of it makes.
        checked: several processes check its recording, by proving it again.
        anew: the calls at which several processes began anew with it.
    """

    def __init__(self, key: Hashable, signature: Signature, *, reports_capturing: bool, number: int = 0) -> None:
        self.key, self.signature, self.number = key, signature, number
        self.calls = 0
        self.latest: collections.deque[int] = collections.deque(maxlen=REPLACES)
        self.path = CapturePath(reports_capturing)
        self.state: State = New()
        self.unstable: Obstacle | None = None
        self.collectives: int | None = None
        self.checked = False
        self.anew: collections.deque[int] = collections.deque(maxlen=DROPS)
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
        return None if isinstance(state, New) else state.recorded.audit

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
        """Whether a recording runs in place of the step, or is checked."""
        return isinstance(self.state, Proven) or (isinstance(self.state, Captured) and self.checked)

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

    @property
    def place(self) -> int:
        """How far the kind is, for a vote: the place of its state in `STATES`."""
        return STATES.index(type(self.state))

    def forget(self) -> None:
        """Begin anew, with an audit."""
        self.state = New()

    @property
    def has_other_path(self) -> bool:
        """Whether code of the step asked whether it is captured, and was told that it is not.

        transformers reads a padding mask on the host to leave it out, unless it is captured.
        """
        return not self.path.reports_capturing and self.audit is not None and self.audit.asked

    def take_other_path(self) -> bool:
        """Begin anew on the path of code that is told that it is captured; False where there is no other path."""
        if not self.has_other_path:
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
