"""What one of several processes would do with a call, before they vote on it: nothing of the step runs."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Any

from hotloop.step.loop.kind_states import Audited, Captured, Warmed
from hotloop.step.obstacle import Obstacle

if TYPE_CHECKING:
    from hotloop.step.audit.findings import AuditFindings
    from hotloop.step.loop.kind_states import CallKind, StepCall
    from hotloop.step.prove.graph_proofs import Recorded
    from hotloop.step.tiers import Tier

_OUTSIDE = "an optimizer steps outside of its recording, which processes that capture together do not do"
_TAKE = "take an optimizer of torch.optim that steps on the device, and change its settings less often"


class Doing(enum.IntEnum):
    """What one process would do with a call; the lowest of all is done by all."""

    LEAVE = 0
    """The tier failed here, or something of the program cannot be captured."""
    DECLINED = 1
    ONCE = 2
    """Run it without a graph: there is a reason to wait."""
    CODE = 3
    """Go on with the proof of compiled code."""
    LOOK = 4
    """Run it eagerly, and compare its operations with those that were recorded."""
    AUDIT = 5
    WARM_UP = 6
    CAPTURE = 7
    PROVE = 8
    REPLAY = 9


class Plan:
    """Answers a state of a kind of call as `Capturing` does, and names what it wants to do in place of doing it."""

    def __init__(self, capturing: Any) -> None:
        self._capturing = capturing

    def __getattr__(self, name: str) -> Any:
        return getattr(self._capturing, name)

    def uncaptured(self, kind: CallKind, _call: StepCall, _tier: Tier) -> Doing:
        """Say that the call runs without a graph."""
        return Doing.ONCE if kind.declined is None else Doing.DECLINED

    def look_due(self) -> bool:
        """Return False: all processes count to a check together."""
        return False

    values_due = look_due

    def check_due(self) -> bool:
        """Return False: all processes count to a check together."""
        return False

    def look(self, _kind: CallKind, _audit: AuditFindings, _call: StepCall, _tier: Tier) -> Doing:
        """Say that the call's operations are compared."""
        return Doing.LOOK

    def audit(self, _kind: CallKind, _call: StepCall) -> Doing:
        """Say that the call is observed."""
        return Doing.AUDIT

    def warm_up(self, kind: CallKind, state: Audited | Captured, _call: StepCall, _tier: Tier) -> Doing:
        """Say that the call runs twice, unless an optimizer would step outside of its recording."""
        audit = state.audit if isinstance(state, Audited) else state.recorded.audit
        if why := self._capturing.why_outside(audit):
            self._capturing.decline(kind, Obstacle(f"{_OUTSIDE}: {why}", _TAKE))
            return Doing.DECLINED
        return Doing.WARM_UP

    def prove(self, _kind: CallKind, state: Warmed | Captured, _call: StepCall, _tier: Tier) -> Doing:
        """Say that the call is captured, or its recording proven."""
        return Doing.CAPTURE if isinstance(state, Warmed) else Doing.PROVE

    def replay(self, _recorded: Recorded, _call: StepCall, _tier: Tier) -> Doing:
        """Say that the call is replayed."""
        return Doing.REPLAY
