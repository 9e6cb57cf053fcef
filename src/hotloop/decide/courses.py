"""Total time over a run as a line, one a way to run: where each way overtakes the one before it."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


@dataclasses.dataclass(frozen=True)
class Course:
    """The total time of one way over a run: ``cold_seconds + steps * step_seconds``.

    Args:
        way: its name.
        cold_seconds: what getting the way ready takes beyond its own steps.
        step_seconds: of a steady step.
    """

    way: str
    cold_seconds: float
    step_seconds: float

    @classmethod
    def of_start(cls, way: str, steps: int, seconds: float, step_seconds: float) -> Course:
        """Make the course of a way whose first ``steps``, getting ready included, took ``seconds``."""
        return cls(way, seconds - steps * step_seconds, step_seconds)

    def seconds(self, steps: int) -> float:
        """Give the total seconds of a run of so many steps."""
        return self.cold_seconds + steps * self.step_seconds

    def overtakes(self, other: Course) -> int | None:
        """Give the fewest steps of a run in which this way takes less time than another; None if a step is no faster.

        ``cold + n * step < other.cold + n * other.step`` solved for n, which is 0 where it is ahead from the start.
        """
        gain = other.step_seconds - self.step_seconds
        if gain <= 0:
            return None
        return max(0, math.floor((self.cold_seconds - other.cold_seconds) / gain) + 1)


@dataclasses.dataclass(frozen=True)
class Stretch:
    """From runs of ``first`` steps on, up to the next stretch, ``way`` takes the least time."""

    first: int
    way: str


def envelope(courses: Sequence[Course], faster: Callable[[str, str], bool]) -> list[Stretch]:
    """Give which way takes the least time by the length of the run: the lower envelope of the courses.

    Args:
        courses: the first is what runs anyhow, and stays where nothing is known to be better: eager.
        faster: tells of two ways whether a step of the first is faster by more than noise; what is not never overtakes.

    Returns:
        the stretches in order, at least one, the first from 0 on; `Stretch.first` grows strictly.
    """
    found = [Stretch(0, courses[0].way)]
    here = courses[0]
    while True:
        rivals = [
            (steps, one.seconds(steps), index, one)
            for index, one in enumerate(courses)
            if one is not here and faster(one.way, here.way) and (steps := one.overtakes(here)) is not None
        ]
        if not rivals:
            return found
        steps, _, _, here = min(rivals)  # of those that overtake in the same step the best one there
        if steps <= found[-1].first:
            steps = found.pop().first
        found.append(Stretch(steps, here.way))
