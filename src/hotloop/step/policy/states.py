"""What is under way in `auto.Auto`: one class a state, with the data that are true in it.

In `Waiting` and `Settled` steps run in the tier in force. In `Preparing` and `Trying` another tier is worked on.
"""

from __future__ import annotations

import collections
import dataclasses
import statistics
import time
from typing import TYPE_CHECKING, ClassVar

from hotloop.decide import certain_saving_seconds
from hotloop.step.tiers import parse

if TYPE_CHECKING:
    from hotloop.decide import Trial, Turn
    from hotloop.step.tiers import Tier

_RECENT = 100
"""Times kept of steps in the tier in force."""
_FEWEST_RECENT = 20
"""Times before their median says that the tier in force became slower."""


@dataclasses.dataclass
class Idle:
    """Nothing is under way: steps run in the tier in force and are timed, until `decide` is asked again.

    Args:
        ask_at: steps done at which to ask.
        ask_after: seconds on the monotonic clock after which to ask, where they pass first; 0 for never.
        recent: seconds of the last plain steps in the tier in force.
        paired: the tier that a trial has just found faster than the tier in force.
        beside_thread: another thread trains, and nothing can be proven beside it: the question waits.
    """

    ask_at: int
    ask_after: float = 0.0
    recent: collections.deque[float] = dataclasses.field(default_factory=lambda: collections.deque(maxlen=_RECENT))
    paired: str | None = None
    beside_thread: bool = False

    spent: ClassVar[float] = 0.0

    def due(self, steps: int) -> bool:
        """Return whether `decide` is to be asked before the coming step."""
        return steps >= self.ask_at or time.monotonic() >= self.ask_after > 0

    @property
    def recent_seconds(self) -> float | None:
        """Return the median of the last steps; None while they are few."""
        return statistics.median(self.recent) if len(self.recent) >= _FEWEST_RECENT else None


class Waiting(Idle):
    """Nothing was decided yet: the first steps run as the models were given, and are timed."""

    def why(self, first_step: int, total_steps: int | None) -> str:
        """Say why steps run as the models were given, in a process whose run had done ``first_step`` steps before."""
        first = self.ask_at - first_step
        few = total_steps is not None and total_steps <= first
        so = f"and this run takes {total_steps}" if few else "and then it is decided what others run in"
        return f"the first {first} steps are timed as they are, {so}"


class Settled(Idle):
    """Something was decided, and nothing is under way."""


class Preparing:
    """A tier is on its way to its first proven step: what that has cost so far, and how much it may cost.

    Args:
        tier: the tier.
        plain_seconds: of a step in the tier in force. What a step takes beyond them is the preparation's cost.
        limit_seconds: the cost at which the preparation is given up between two steps; None for never.

    Attributes:
        steps: steps since the preparation began.
        savings: seconds a step that the tier saves, by what it was held against, once that is certain.
    """

    def __init__(self, tier: Tier, plain_seconds: float, limit_seconds: float | None = None) -> None:
        self.tier, self._plain, self._limit = tier, plain_seconds, limit_seconds
        self.steps = 0
        self.savings: dict[str, float] = {}
        self._extra = 0.0
        self._decided_at: float | None = time.perf_counter()
        self._step_began: float | None = None

    @property
    def spent(self) -> float:
        """Return the seconds that the preparation has cost, the step that is under way included."""
        return self._extra + self._beyond_plain()

    def _beyond_plain(self) -> float:
        if self._step_began is None:
            return 0.0
        return max(0.0, time.perf_counter() - self._step_began - self._plain)

    def begin_step(self) -> None:
        """Begin to time a step; what was imported for the tier since the decision is part of its cost."""
        now = time.perf_counter()
        if self._decided_at is not None:
            self._extra += now - self._decided_at
        self._decided_at, self._step_began = None, now

    def end_step(self, doing: str) -> None:
        """Add what a step cost. A plain run is no cost: its arguments may be new in length, and as slow in eager."""
        self.steps += 1
        if doing != "run":
            self._extra += self._beyond_plain()
        self._step_began = None

    def drop_step(self) -> None:
        """Add nothing for the step that began last: it raised, or it was a turn of a trial."""
        self._step_began = None

    def too_expensive(self, steps_left: int) -> bool:
        """Return whether the preparation has cost more than may be lost.

        Once the recording was replayed, its saving is known and raises the limit, as a timed tier's saving does.
        """
        saving = certain_saving_seconds(sum(self.savings.values()), 0.0, steps_left)
        return self._limit is not None and self.spent > self._limit + saving


@dataclasses.dataclass
class Trying:
    """Steps run by turns in a proven tier and in the tier in force, until it is clear which is faster.

    Args:
        trial: collects the times.
        preparation: of the tier, which is over.
        prepared_seconds: what the preparation cost up to the tier's first proven step; 0 where the tier was ready.
        turn: the coming step's; None before the first one.
    """

    trial: Trial
    preparation: Preparing
    prepared_seconds: float = 0.0
    turn: Turn | None = None

    @property
    def tier(self) -> Tier:
        """The tier on trial."""
        return self.preparation.tier

    @property
    def spent(self) -> float:
        """The seconds that the preparation cost, and those of a turn that is under way."""
        return self.preparation.spent

    def take_turn(self) -> Tier:
        """Draw the coming step's turn, and return the tier that the step runs in."""
        self.turn = self.trial.turn()
        return parse(self.turn.tier)


State = Waiting | Settled | Preparing | Trying
