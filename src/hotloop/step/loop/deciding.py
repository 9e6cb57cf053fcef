"""Decides what to do with a call of a step; nothing runs and no state of a kind changes, so that processes can vote."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hotloop._torch.wrappers import why_not_recorded
from hotloop.step.audit.values import gradients_of
from hotloop.step.loop.kinds import Audited, Captured, Decision, Declined, Doing, New, Proven, Warmed
from hotloop.step.obstacle import Obstacle
from hotloop.step.ranks.threads import WAITS, another_trains

if TYPE_CHECKING:
    from hotloop.step.calls.shapes import Shapes
    from hotloop.step.context import DecoratedStep
    from hotloop.step.loop.capturing import Capturing
    from hotloop.step.loop.kinds import CallKind, StepCall
    from hotloop.step.prove.check import Check
    from hotloop.step.prove.code_proofs import CodeProofs
    from hotloop.step.tiers import Tier

AUDITS = 2
"""Audits of a step before it is taken for one whose Python must run exactly once."""
VALUES_EVERY = 4
"""Of so many looks at a step's operations one is followed by a comparison of values."""
_OUTSIDE = "an optimizer steps outside of its recording, which processes that capture together do not do"
_TAKE = "take an optimizer of torch.optim that steps on the device, and change its settings less often"


class Deciding:
    """What is decided of the calls of one decorated step.

    Args:
        check: checks proven code and recordings; None where nothing is checked.

    Attributes:
        audits: how often the step was audited on the way to compiled code.
    """

    def __init__(
        self,
        step: DecoratedStep,
        capturing: Capturing,
        code: CodeProofs,
        shapes: Shapes,
        *,
        check: Check | None,
    ) -> None:
        self._step, self._context, self._peers = step, step.context, step.context.peers
        self._capturing, self._code, self._shapes = capturing, code, shapes
        self._check, self.audits = check, 0
        self._looks, self._owes_values = 0, False

    def next_doing(self, kind: CallKind | None, call: StepCall, tier: Tier) -> Decision:
        """Decide what to do with a call in a tier.

        Args:
            kind: of the call; None for compiled code that was proven and is not captured.
            call: the call.
            tier: the tier in force.
        """
        if (left := self._why_left(call, tier)) is not None:
            return left
        if (why := self._code.distrusted.get(tier.base)) is not None:
            return Decision(Doing.AGAIN, why)
        if tier.other_kernels and not self._code.proven(tier.base):
            return self._towards_code(call, tier)
        if kind is None:
            return self.plain(call, tier, checks=True)
        return self._captured(kind, call, tier)

    def _why_left(self, call: StepCall, tier: Tier) -> Decision | None:
        """Return that the tier is left for good, and why; None while it stays."""
        code, vetoes, parts = tier.without_graph(), self._context.reports.vetoes, self._context.parts
        why = vetoes.get(code.name) or (parts.kept() if tier.compiles else None)
        if why is None and tier.other_kernels and call.inputs.require_gradients():
            why = gradients_of(call.leaves)
        if why is not None:
            return Decision(Doing.LEAVE, why, code)
        why = vetoes.get(tier.name)
        if tier.graph and not self._peers.alone and why is None:
            wrapped = next(filter(None, map(why_not_recorded, parts.wrappers())), "")
            why = Obstacle(wrapped, "take that out, or train without a graph") if wrapped else None
        return None if why is None else Decision(Doing.LEAVE, why, tier)

    def _towards_code(self, call: StepCall, tier: Tier) -> Decision:
        """Decide on a call on the way to compiled code that is proven: audited first, then run both ways."""
        parts = self._context.parts
        if another_trains(self._context):
            return Decision(Doing.PLAIN, WAITS)
        if self._peers.rebuilds(parts.wrappers(), reduces=not self._peers.alone and parts.reduces()):
            return Decision(Doing.PLAIN)  # nor is it observed: the wrapper changes itself
        if self.to_be_audited(tier):
            return Decision(Doing.AUDIT)
        if self._step.not_repeatable is not None:
            return Decision(Doing.LEAVE, self._step.not_repeatable, tier.without_graph())
        return Decision(Doing.PROVE_CODE if self._shapes.wanted(tier.base, call.inputs) else Doing.PLAIN)

    def to_be_audited(self, tier: Tier) -> bool:
        """Return whether the step is audited before anything else.

        What the first call of all sets up (transformers notes the kind of task in its config, an average begins with a
        copy) is found only once, so that a step with an obstacle is audited a second time.
        """
        hindered = self._step.not_repeatable is not None or (tier.graph and self._capturing.hindered)
        return not self.audits or (self.audits < AUDITS and hindered)

    def plain(self, call: StepCall, tier: Tier, because: str | None = None, *, checks: bool = False) -> Decision:
        """Decide on a call without a graph: compiled code is proven anew for shapes that it has not seen.

        Where every step brings other shapes, torch has made one code of them by now.
        """
        shapes, inputs = self._shapes, call.inputs
        known = not tier.other_kernels or shapes.compiled(tier.base, inputs) or shapes.many
        if known:
            checks = checks and self._peers.alone  # several processes check recordings alone
            return Decision(Doing.CHECK if checks and self._check_due() else Doing.PLAIN, because)
        if not shapes.wanted(tier.base, inputs) or another_trains(self._context):
            return Decision(Doing.PLAIN, because)
        return Decision(Doing.PROVE_CODE)

    def _check_due(self, *, recorded: bool = False) -> bool:
        """Count a step; return whether to check it, with the random streams to itself."""
        due = self._check is not None and self._check.due(recorded=recorded)
        return due and not another_trains(self._context)

    # -- on the way to a recording ---------------------------------------------------------------------------------

    def _captured(self, kind: CallKind, call: StepCall, tier: Tier) -> Decision:  # noqa: PLR0911 - a state each
        """Decide on a call in a captured tier, or on the way to it."""
        state = kind.state
        if isinstance(state, Declined):
            return self.plain(call, tier)
        if (obstacle := self._capturing.why_not_captured(kind)) is not None:
            return Decision(Doing.DECLINED, obstacle)
        if isinstance(state, Captured | Proven):
            return self._recorded(kind, state, call, tier)
        if isinstance(state, Warmed):
            if another_trains(self._context):
                return self.plain(call, tier, WAITS)
            return Decision(Doing.LOOK if state.recorded.audit.changed() else Doing.CAPTURE)
        why = self._capturing.why_not_begin(kind)
        if why is None and another_trains(self._context):
            why = WAITS
        if why is not None:
            return self.plain(call, tier, why)
        return Decision(Doing.AUDIT) if isinstance(state, New) else self._audited(kind, state)

    def _audited(self, kind: CallKind, state: Audited) -> Decision:
        if state.audit.obstacles:
            obstacle = state.audit.obstacles[0]
            return Decision(Doing.AUDIT) if kind.has_other_path else Decision(Doing.DECLINED, obstacle)
        outside = "" if self._peers.alone else self._capturing.optimizers.why_outside(state.audit.stepped)
        if outside:
            return Decision(Doing.DECLINED, Obstacle(f"{_OUTSIDE}: {outside}", _TAKE))
        return Decision(Doing.LOOK if state.audit.changed() else Doing.WARM_UP)

    def _recorded(self, kind: CallKind, state: Captured | Proven, call: StepCall, tier: Tier) -> Decision:
        if (change := state.recording.changed()) is not None:
            return Decision(Doing.AUDIT, change)
        if why := self._capturing.argument_in_state(kind, state.recording, call):
            return self.plain(call, tier, why)
        if isinstance(state, Proven):
            return Decision(self._look_due(state, tier))
        if another_trains(self._context):
            return self.plain(call, tier, WAITS)
        if state.recorded.audit.changed():
            return Decision(Doing.LOOK)
        return Decision(Doing.WARM_UP if state.measures else Doing.PROVE)

    def _look_due(self, state: Proven, tier: Tier) -> Doing:
        """Count a replay; return whether to look at the step's operations, or to compare values after that.

        Operations say nothing of a kernel that is wrong.
        """
        owes, self._owes_values = self._owes_values, False
        if owes:
            return Doing.CHECK
        if state.recorded.audit.changed():
            return Doing.LOOK
        if not self._check_due(recorded=True):
            return Doing.REPLAY
        self._looks += 1
        fits = self._check is not None and not self._check.schedule.off
        self._owes_values = fits and (tier.other_kernels or self._looks % VALUES_EVERY == 0)
        return Doing.LOOK
