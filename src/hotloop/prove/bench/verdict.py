"""Judges the times of a bench: which way is faster by more than noise, from how many steps on it pays, the verdict."""

from __future__ import annotations

import dataclasses
import math
import statistics
from typing import TYPE_CHECKING, Literal

from hotloop.measure import interval, ratio_interval

if TYPE_CHECKING:
    from collections.abc import Sequence

Difference = Literal["faster", "slower", "none"]
LEAST_PAIRS = 6
"""With fewer pairs of blocks there is no interval (`hotloop.measure.interval`)."""
BASELINE = "eager"
_TIMES = "\N{MULTIPLICATION SIGN}"


@dataclasses.dataclass(frozen=True)
class Speed:
    """How many times as fast as eager a way is: median over pairs of blocks, with its 95% interval."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, pairs: Sequence[tuple[float, float]]) -> Speed:
        """Compare the seconds of a way's blocks with those of eager beside them: a slow moment of both cancels out."""
        ours, eager = zip(*pairs, strict=True)
        return cls(statistics.median(theirs / own for own, theirs in pairs), *ratio_interval(eager, ours))

    def difference(self, noise: float) -> Difference:
        """Return how the way compares with eager: ``none`` if the interval holds 1 or noise explains it.

        Args:
            noise: how far eager is from itself, as a share of its step.
        """
        if self.low > 1 and self.median > 1 + noise:
            return "faster"
        if self.high < 1 and 1 / self.median > 1 + noise:
            return "slower"
        return "none"


def noise_of(pairs: Sequence[tuple[float, float]]) -> float:
    """Return how far eager is from itself, from its two blocks of each round: the farther end of the interval.

    Infinite if there are too few blocks: then no difference counts.
    """
    if len(pairs) < LEAST_PAIRS:
        return math.inf
    low, high = interval([again / first for again, first in pairs])
    return max(high, 1 / low) - 1


@dataclasses.dataclass(frozen=True)
class Course:
    """The total time of one way over a run: ``cold_seconds + steps * step_seconds``."""

    way: str
    cold_seconds: float
    step_seconds: float

    def seconds(self, steps: int) -> float:
        """Return the total seconds of a run of so many steps."""
        return self.cold_seconds + steps * self.step_seconds

    def overtakes(self, other: Course) -> int | None:
        """Return the fewest steps in which this way takes less time than another; None if its step is no faster."""
        gain = other.step_seconds - self.step_seconds
        if gain <= 0:
            return None
        return max(0, math.floor((self.cold_seconds - other.cold_seconds) / gain) + 1)


def sentence(best: Course, longest: Course, eager: Course, total_steps: int | None) -> str:
    """Say which way takes the least time in a run of so many steps, and which in the longest runs.

    Args:
        best: the way that takes the least time in a run of ``total_steps``.
        longest: the way with the fastest step.
        eager: the way that runs anyhow.
        total_steps: None if they are not known.
    """
    faster = longest.way
    if longest is not eager:
        faster += f" ({eager.step_seconds / longest.step_seconds:.3g}{_TIMES} a step)"
    if total_steps is None:
        pays = longest.overtakes(eager)
        return f"From {pays:,} steps on: {faster}" if pays else f"At any length of the run: {faster}"
    gain = "" if best is eager else f", {eager.seconds(total_steps) / best.seconds(total_steps):.3g}{_TIMES} in all"
    other = "" if longest is best else f"; from {longest.overtakes(best):,} steps on: {faster}"
    return f"At {total_steps:,} steps: {best.way}{gain}{other}"


def why_eager(speeds: dict[str, Speed], noise: float) -> str:
    """Say with figures why no other way is better: "stay eager" is a verdict as well."""
    if not speeds:
        return ", since no other way ran here"
    way, speed = max(speeds.items(), key=lambda item: item[1].median)
    if speed.difference(noise) == "slower":
        return f"; {way} comes nearest, and its step takes {1 / speed.median:.2f} times eager's"
    share = f"{100 * noise:.2g}%" if math.isfinite(noise) else "unknown"
    return f"; {way} comes nearest, and {speed.median:.2f}{_TIMES} a step is no difference (noise: {share})"
