"""A policy says which tier comes next, and `loop.transitions` alone does it.

`Fixed` runs what the user asked for and steps down where that fails; `auto.Auto` chooses by measurement.
"""

from __future__ import annotations

import contextlib
import dataclasses
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

    from hotloop.decide import Trial, Turn
    from hotloop.measure import Timing
    from hotloop.step.context import Context
    from hotloop.step.obstacle import Obstacle
    from hotloop.step.tiers import Tier


@dataclasses.dataclass(frozen=True)
class SetTier:
    """From the next step on, run in a tier or on the way to it."""

    tier: Tier
    reason: str


@dataclasses.dataclass(frozen=True)
class TryTier:
    """Run the coming step in a tier, as one turn of a trial: no event, nothing else changes."""

    tier: Tier


@dataclasses.dataclass(frozen=True)
class Release:
    """Free the memory of a tier's recordings; they would be proven anew."""

    tier: Tier


Action = SetTier | TryTier | Release


@dataclasses.dataclass(frozen=True)
class Ran:
    """A step that ran: its tier, what it did (``run``, ``survey``, ``proof``), the trial it was a turn of, if any.

    Where it ran ``alone``, it began on an idle device. ``call`` is the shapes and dtypes of the call's tensors, None
    where nobody looked at it.
    """

    tier: str
    kind: str
    turn: tuple[Trial, Turn] | None = None
    alone: bool = False
    call: Hashable = None


class Policy:
    """The choice of the tier that a loop's steps run in. What its methods return is done before the next step.

    Attributes:
        asked: what the user asked for: ``auto`` or the name of a tier.
        start: the tier that the loop begins with.
        in_force: the tier that was decided; the coming step may run in another, as a turn of a trial.
        chooses: whether the tier is chosen by measurement, rather than asked for.
        saved_seconds: what the steps so far saved, as far as the policy knows it by trials.
    """

    chooses = False
    saved_seconds = 0.0

    def __init__(self, context: Context, asked: str, tier: Tier) -> None:
        self.context, self.asked = context, asked
        self.start = self.in_force = tier

    @property
    def preparing(self) -> bool:
        """Return whether a tier is on its way to its first proven step."""
        return False

    @property
    def quiet(self) -> bool:
        """Return whether nothing is under way, so that not every step needs to be timed."""
        return False

    @property
    def idle_start(self) -> bool:
        """Return whether the coming step must begin on an idle device, so that its launches can be timed."""
        return False

    @property
    def eager_seconds(self) -> float | None:
        """Return the seconds of a step of the models as given, at the speed that the machine has now."""
        return None

    @property
    def undecided(self) -> str:
        """Say why steps still run as the models were given; empty once something was decided."""
        return ""

    def before_step(self, step: Callable[..., Any], args: Any, kwargs: Any) -> list[Action]:  # noqa: ARG002
        """Decide what the coming step runs in; mostly that is no question."""
        return []

    def turn(self) -> tuple[Trial, Turn] | None:
        """Return the trial that the coming step is part of, and its turn in it."""
        return None

    def watch_step(self) -> contextlib.AbstractContextManager[Any]:
        """Watch the step that runs in the block; entered after the actions of `before_step` were done."""
        return contextlib.nullcontext()

    def after_step(self, doing: str) -> None:
        """Note that a step is over; ``doing`` as in `DecoratedStep`."""

    def timed(self, ran: Ran, timing: Timing) -> list[Action]:  # noqa: ARG002
        """Note what a step took; times come a few steps late."""
        return []

    def proven(self, tier: Tier) -> list[Action]:  # noqa: ARG002
        """React to a tier that was proven."""
        return []

    def declined(self, tier: Tier, obstacle: Obstacle) -> list[Action]:  # noqa: ARG002
        """React to a captured tier that no kind of call can run in."""
        return []

    def failed(self, tier: Tier, obstacle: Obstacle) -> list[Action]:
        """React to a tier whose code failed or was wrong."""
        return self.declined(tier, obstacle)

    def proof_saves(self, seconds: float, against: str) -> None:
        """Note what a tier that is being proven saves against another one, in seconds a step."""

    def stop(self) -> None:
        """Stop a child process at once, since deciding has failed."""

    def close(self) -> None:
        """Settle with the runs that come after this one, and stop a child process that nobody needs."""


class Fixed(Policy):
    """The policy that runs steps in the tier that was asked for, and in the tier below once that tier fails."""

    def __init__(self, context: Context, tier: Tier) -> None:
        super().__init__(context, tier.name, tier)

    def failed(self, tier: Tier, obstacle: Obstacle) -> list[Action]:
        """Step down: from other kernels to the models as given, from a graph to the same code without one."""
        if tier.other_kernels:
            self.in_force = dataclasses.replace(self.context.base_tier, graph=self.context.progress.tier.graph)
        else:
            self.in_force = self.in_force.without_graph()
        return [SetTier(self.in_force, str(obstacle))]
