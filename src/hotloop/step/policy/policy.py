"""The interface of a policy: it says which tier comes next, and `loop.transitions` alone does it.

`Fixed` runs what the user asked for and steps down where that fails; `auto.Auto` chooses by measurement.
"""

from __future__ import annotations

import contextlib
import dataclasses
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence

    from hotloop.decide import Trial, Turn
    from hotloop.measure import Difference, Timing
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


class Policy(Protocol):
    """The choice of the tier that a loop's steps run in. What its methods return is done before the next step.

    Attributes:
        asked: what the user asked for: ``auto`` or the name of a tier.
        start: the tier that the loop begins with.
        in_force: the tier that was decided; the coming step may run in another, as a turn of a trial.
        chooses: whether the tier is chosen by measurement, rather than asked for.
        saved_seconds: what the steps so far saved, as far as the policy knows it by trials.
    """

    asked: str
    start: Tier
    in_force: Tier
    chooses: bool
    saved_seconds: float

    def before_step(self, step: Callable[..., Any], args: Any, kwargs: Any) -> Sequence[Action]:
        """Decide what the coming step runs in; mostly that is no question."""

    def turn(self) -> tuple[Trial, Turn] | None:
        """Return the trial that the coming step is part of, and its turn in it."""

    def after_step(self, doing: str) -> None:
        """Note that a step is over; ``doing`` as in `DecoratedStep`."""

    def timed(self, ran: Ran, timing: Timing) -> Sequence[Action]:
        """Note what a step took; times come a few steps late."""

    def proven(self, tier: Tier) -> Sequence[Action]:
        """React to a tier that was proven."""

    def declined(self, tier: Tier, obstacle: Obstacle) -> Sequence[Action]:
        """React to a captured tier that no kind of call can run in."""

    def failed(self, tier: Tier, obstacle: Obstacle) -> Sequence[Action]:
        """React to a tier whose code failed or was wrong."""

    def proof_saves(self, seconds: float, against: str) -> None:
        """Note what a tier that is being proven saves against another one, in seconds a step."""

    def proof_takes(self, seconds: float) -> None:
        """Note what the rest of the proof that is under way is expected to take."""

    @property
    def preparing(self) -> bool:
        """Return whether a tier is on its way to its first proven step."""

    @property
    def quiet(self) -> bool:
        """Return whether nothing is under way, so that not every step needs to be timed."""

    @property
    def idle_start(self) -> bool:
        """Return whether the coming step must begin on an idle device, so that its launches can be timed."""

    @property
    def eager_seconds(self) -> float | None:
        """Return the seconds of a step of the models as given, at the speed that the machine has now."""

    @property
    def undecided(self) -> str:
        """Say why steps still run as the models were given; empty once something was decided."""

    def watch_step(self) -> contextlib.AbstractContextManager[Any]:
        """Watch the step that runs in the block; entered after the actions of `before_step` were done."""

    def spread_before(self, step: str) -> dict[str, Difference] | None:
        """Return the noise of a step in earlier runs of this program, to be added to; None where that is not kept."""

    def stop(self) -> None:
        """Stop a child process at once, since deciding has failed."""

    def close(self) -> None:
        """Settle with the runs that come after this one, and stop a child process that nobody needs."""


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
            self.in_force = self.in_force.without_graph()
        return [SetTier(self.in_force, str(obstacle))]

    def watch_step(self) -> contextlib.AbstractContextManager[None]:
        """Watch nothing of the step that runs in the block."""
        return contextlib.nullcontext()

    def _change_nothing(self, *_: Any, **__: Any) -> list[Action]:
        return []

    before_step = timed = proven = declined = _change_nothing

    def _ignore(self, *_: Any, **__: Any) -> None:
        """Return None: there are no trials, nothing is kept for other runs, and no child process compiles."""

    turn = spread_before = after_step = proof_saves = proof_takes = close = stop = _ignore
