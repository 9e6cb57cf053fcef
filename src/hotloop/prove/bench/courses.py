"""The total time of each way to run as a line over the steps, and where one way overtakes another."""

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
        cold_seconds: seconds that getting the way ready takes beyond its own steps.
        step_seconds: seconds of a steady step.
    """

    way: str
    cold_seconds: float
    step_seconds: float

    def seconds(self, steps: int) -> float:
        """Return the total seconds of a run of so many steps."""
        return self.cold_seconds + steps * self.step_seconds

    def overtakes(self, other: Course) -> int | None:
        """Return the fewest steps in which this way takes less time than another; None if its step is no faster.

        ``cold + n * step < other.cold + n * other.step`` solved for n, which is 0 if it is ahead from the start.
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
    """Return which way takes the least time by the length of the run: the lower envelope of the courses.

    Args:
        courses: the first is the way that runs anyhow (eager); it stays unless another is known to be better.
        faster: returns whether a step of the first way is faster than of the second by more than noise; otherwise the
            first never overtakes.

    Returns:
        The stretches in order, at least one, the first from 0 on; `Stretch.first` grows strictly.
    """
    found = [Stretch(0, courses[0].way)]
    here = courses[0]
    while True:
        rivals = [
            (steps, course.seconds(steps), index, course)
            for index, course in enumerate(courses)
            if course is not here and faster(course.way, here.way) and (steps := course.overtakes(here)) is not None
        ]
        if not rivals:
            return found
        steps, _, _, here = min(rivals)  # of ways that overtake in the same step, the fastest in total
        if steps <= found[-1].first:
            steps = found.pop().first
        found.append(Stretch(steps, here.way))
