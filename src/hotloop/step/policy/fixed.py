"""The policy of a loop whose tier was asked for by name."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import TYPE_CHECKING, Any

from hotloop.step.policy.policy import SetTier

if TYPE_CHECKING:
    from hotloop.step.context import Context
    from hotloop.step.obstacle import Obstacle
    from hotloop.step.policy.policy import Action
    from hotloop.step.tiers import Tier


class Fixed:
    """The policy that runs steps in the tier that was asked for, and in the tier below once that tier fails."""

    chooses = preparing = quiet = idle_start = False
    eager_seconds: float | None = None
    undecided = ""
    saved_seconds = 0.0

    def __init__(self, context: Context, tier: Tier) -> None:
        self._context = context
        self.asked, self.start, self.in_force = tier.name, tier, tier

    def failed(self, tier: Tier, obstacle: Obstacle) -> list[Action]:
        """Step down: from other kernels to the models as given, from a graph to the same code without one."""
        if tier.other_kernels:
            self.in_force = dataclasses.replace(self._context.base_tier, graph=self._context.progress.tier.graph)
        else:
            self.in_force = tier.without_graph()
        return [SetTier(self.in_force, str(obstacle))]

    def watch_step(self) -> contextlib.AbstractContextManager[None]:
        """Watch nothing of the step that runs in the block."""
        return contextlib.nullcontext()

    def _change_nothing(self, *_: Any, **__: Any) -> list[Action]:
        return []

    def survey_too_dear(self, set_up_seconds: float) -> bool:  # noqa: ARG002 - as auto's
        """Return that a survey goes on to its end: the tier was asked for by name."""
        return False

    before_step = timed = proven = declined = _change_nothing

    def _ignore(self, *_: Any, **__: Any) -> None:
        """Return None: there are no trials, nothing is kept for other runs, and no child process compiles."""

    turn = spread_before = after_step = replay_saves = close = stop = _ignore
