"""Plans when the steps of a proven tier are checked: often at first, then for a share of the time."""

from __future__ import annotations

import math
import random

SHARE = 0.01
"""The share of time that checks may cost, unless the user says otherwise."""
FIRST, LAST = 8, 4096
"""Steps after which a tier or a recording is checked first; twice as many each time, up to the last."""
EARLY, _CLOSE, _GRACE = 24, 7, 1.0
"""Early checks of code without a recording, their distance, and the seconds that they may cost in all. A recording
replays the same kernels each time, while code may go wrong at some calls only: at every 20th, say."""


class Schedule:
    """The checks of one decorated step.

    Args:
        share: the share of time that checks may cost.
        total_steps: the length of the run; None where it is not known.

    Attributes:
        every: steps to the next check, as it was planned; 0 where none is.
        spent: seconds that checks have cost.
        off: why values are compared no more; empty while they are. Operations, which need no copies, still are.
    """

    def __init__(self, share: float, total_steps: int | None = None) -> None:
        self._share, self._last_step = share, total_steps
        self.every, self.spent, self.off = FIRST, 0.0, ""
        self._earned, self._early = 0.0, EARLY
        self._steps = self._since = 0
        """Steps since a tier or recording began, and since the last check."""
        self._near = 0
        """How many of the next steps are checked in any case."""
        self._doubling = self._left = float(FIRST)

    def begin(self) -> None:
        """Count anew: a tier or a recording begins."""
        self._steps, self.every = 0, FIRST
        self._doubling = self._left = float(FIRST)

    def soon(self) -> None:
        """Check the next step, whatever it costs."""
        self._left = 1.0

    def closely(self) -> None:
        """Check each of the next steps, whatever that costs: something was far off that may come again."""
        self._near = EARLY

    def due(self, step: int) -> bool:
        """Count a step; return whether to check it.

        Args:
            step: the number of the step in the run, from 1 on.
        """
        self._steps += 1
        self._since += 1
        self._left -= 1
        return self._left <= 0 or self._steps >= self._doubling or self._near > 0 or step == self._last_step

    def checked(self, seconds: float, usual: float | None, *, recorded: bool) -> None:
        """Plan the next check.

        Args:
            seconds: what a check has cost beyond its step.
            usual: what a step takes in the tier in force; None where none was timed.
            recorded: a recording was checked.
        """
        self.spent += seconds
        self._earned += self._share * self._since * (usual or 0.0)
        self._since, self._near = 0, max(0, self._near - 1)
        while self._doubling <= self._steps:
            self._doubling = 2 * self._doubling if self._doubling < LAST else math.inf
        if self._left <= 0:
            self._left = self._distance(seconds, usual, recorded=recorded)
        following = min(self._left, self._doubling - self._steps)
        self.every = int(following) if math.isfinite(following) else 0

    def _distance(self, seconds: float, usual: float | None, *, recorded: bool) -> float:
        """Return the distance to the next check: a random one, else what a step does as often would never be met."""
        if not recorded and self._early and self.spent + seconds <= _GRACE:
            self._early -= 1
            return _CLOSE
        if not self._share:
            return math.inf
        lacks = self.spent + seconds - self._earned
        mean = max(FIRST, math.ceil(lacks / (self._share * usual))) if usual else FIRST
        draws = random.Random(self._steps)  # noqa: S311 - its own: no stream of the program moves
        return draws.randint(mean - mean // 2, mean + mean // 2)
