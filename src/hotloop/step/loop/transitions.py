"""The one place where the tier in force changes: what the policy decides is done here."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hotloop import events as ev
from hotloop.interrupts import uninterrupted
from hotloop.step.policy.policy import Action, Fixed, Policy, Release, SetTier, TryTier

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hotloop.step.capture.optimizers import RecordedOptimizers
    from hotloop.step.context import Context
    from hotloop.step.loop.runner import StepRunner
    from hotloop.step.tiers import Tier


class Transitions:
    """The setter of the tier that the steps of a loop run in.

    Args:
        policy: decides which tier comes next.
        optimizers: of the loop, whose step counts recordings move to the device.
        runners: of the steps that were decorated so far.
    """

    def __init__(
        self, context: Context, policy: Policy, optimizers: RecordedOptimizers, runners: list[StepRunner]
    ) -> None:
        self._context, self._optimizers, self._runners = context, optimizers, runners
        self.policy = policy
        progress = context.progress
        progress.tier = policy.start
        progress.may_capture = context.engine is not None and (policy.chooses or policy.start.graph)

    def apply(self, actions: Sequence[Action]) -> None:
        """Do what the policy has decided, in order."""
        if actions:
            self._do(actions)
        self._context.progress.in_trial = self.policy.turn() is not None
        self._context.progress.preparing = self.policy.preparing

    @uninterrupted  # half of it would leave another tier in force than the policy has decided
    def _do(self, actions: Sequence[Action]) -> None:
        for action in actions:
            if isinstance(action, SetTier):
                self.set_tier(action.tier, action.reason)
            elif isinstance(action, TryTier):
                self.try_tier(action.tier)
            elif isinstance(action, Release):
                for runner in self._runners:
                    runner.capturing.release(action.tier.base)
                if not self._context.progress.tier.graph:
                    self._optimizers.return_step_counts()

    def set_tier(self, tier: Tier, reason: str) -> None:
        """From the next step on, run in a tier, or on the way to it."""
        before = self._context.progress.tier
        self.try_tier(tier)
        if before.graph and not tier.graph:
            self._optimizers.return_step_counts()
        if before != tier:
            self._context.reports.emit(
                ev.TierChanged(
                    step=self._context.progress.steps, from_tier=before.name, to_tier=tier.name, reason=reason
                )
            )

    def try_tier(self, tier: Tier) -> None:
        """Run the next step in a tier, as part of a trial: nothing else changes."""
        progress = self._context.progress
        progress.tier = tier
        if progress.audits or not tier.other_kernels:  # an audit tells whether to compile at all
            self._context.compiled.install(tier)

    @uninterrupted
    def forget_recordings(self) -> None:
        """Let go of everything that was captured."""
        for runner in self._runners:
            runner.capturing.forget_recordings()
        self._optimizers.return_step_counts()

    @uninterrupted
    def stay_as_given(self) -> None:
        """Run the models as they were given from now on; nothing that was compiled or captured is kept."""
        base, progress = self._context.base_tier, self._context.progress
        self.policy = Fixed(self._context, base)
        progress.tier, progress.may_capture = base, False
        progress.in_trial = progress.preparing = False
        self._context.compiled.remove()
        for runner in self._runners:
            runner.capturing.forget_recordings()
