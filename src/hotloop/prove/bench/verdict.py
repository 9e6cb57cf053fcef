"""Judges the times of a bench: which way is faster by more than noise, from how many steps on it pays, the verdict."""

from __future__ import annotations

import dataclasses
import math
import statistics
from typing import TYPE_CHECKING, Literal

from hotloop.measure import interval, ratio_interval
from hotloop.prove.bench.courses import Course, Stretch, envelope

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

Difference = Literal["faster", "slower", "none"]
LEAST_PAIRS = 6
"""With fewer pairs of blocks there is no interval (`hotloop.measure.interval`)."""
BASELINE = "eager"
_TIMES = "\N{MULTIPLICATION SIGN}"


@dataclasses.dataclass(frozen=True)
class Sample:
    """Seconds of a step in a block of a way, and in the block of eager beside it."""

    seconds: float
    eager_seconds: float

    @property
    def relative(self) -> float:
        """The step's time in eager steps of the same moment: a machine that slows down for both cancels out."""
        return self.seconds / self.eager_seconds


@dataclasses.dataclass(frozen=True)
class Ratio:
    """How many times as long a step of one way takes as of another: median over pairs, with its 95% interval."""

    median: float
    low: float
    high: float

    @classmethod
    def between(cls, one: Sequence[Sample | None], other: Sequence[Sample | None]) -> Ratio:
        """Compare two ways over the rounds in which both were timed; with too few rounds the interval is unbounded."""
        pairs = [(a.relative, b.relative) for a, b in zip(one, other, strict=False) if a is not None and b is not None]
        if not pairs:
            return cls(math.nan, -math.inf, math.inf)
        low, high = ratio_interval([a for a, _ in pairs], [b for _, b in pairs])
        return cls(statistics.median(a / b for a, b in pairs), low, high)

    def difference(self, noise: float) -> Difference:
        """Return how the other way compares with this one: ``none`` if the interval holds 1 or noise explains it.

        Args:
            noise: how far eager is from itself, as a share of its step.
        """
        if self.low > 1 and self.median > 1 + noise:
            return "faster"
        if self.high < 1 and 1 / self.median > 1 + noise:
            return "slower"
        return "none"


def noise_of(again: Sequence[Sample | None]) -> float:
    """Return how far eager is from itself, from its second block of each round: the farther end of the interval.

    Infinite if there are too few blocks: then no difference counts.
    """
    timed = [sample for sample in again if sample is not None]
    if len(timed) < LEAST_PAIRS:
        return math.inf
    low, high = interval([sample.relative for sample in timed])
    return max(high, 1 / low) - 1


@dataclasses.dataclass(frozen=True)
class Steady:
    """A way's steady step: its median in ms with the 95% interval, and its speed in times eager's."""

    ms: float
    low: float
    high: float
    speed: Ratio
    difference: Difference

    @classmethod
    def of(cls, times: Mapping[str, Sequence[Sample | None]], way: str, noise: float) -> Steady:
        """Sum up the blocks of a way, which has at least one."""
        timed = [1e3 * sample.seconds for sample in times[way] if sample is not None]
        speed = Ratio.between(times[BASELINE], times[way])
        difference: Difference = "none" if way == BASELINE else speed.difference(noise)
        return cls(statistics.median(timed), *interval(timed), speed, difference)


@dataclasses.dataclass(frozen=True)
class Verdict:
    """Which way takes the least time, by the length of the run, and that as a sentence."""

    stretches: tuple[Stretch, ...]
    sentence: str

    def best(self, steps: int) -> str:
        """Name the way that takes the least time in a run of so many steps."""
        return [stretch.way for stretch in self.stretches if stretch.first <= steps][-1]


def conclude(
    courses: Sequence[Course],
    times: Mapping[str, Sequence[Sample | None]],
    noise: float,
    total_steps: int | None,
) -> Verdict:
    """Return the verdict over the ways that were timed.

    Args:
        courses: of each way, eager first.
        times: the samples of each way.
        noise: see `noise_of`.
        total_steps: the length of the run; None if it is not known.
    """

    def faster(one: str, other: str) -> bool:
        return Ratio.between(times[other], times[one]).difference(noise) == "faster"

    stretches = tuple(envelope(courses, faster))
    writer = _Writer(stretches, {course.way: course for course in courses})
    sentence = writer.any_length() if total_steps is None else writer.at(total_steps)
    if len(stretches) == 1 and stretches[0].way == BASELINE:
        sentence += writer.why_eager(times, noise)
    return Verdict(stretches, sentence + ".")


class _Writer:
    """Writes the verdict as a sentence."""

    def __init__(self, stretches: Sequence[Stretch], courses: Mapping[str, Course]) -> None:
        self._stretches, self._courses = stretches, courses

    def at(self, steps: int) -> str:
        """Name the best way for a run of so many steps, and the others with the lengths that they are best for."""
        best = [stretch for stretch in self._stretches if stretch.first <= steps][-1]
        sentence = f"At {steps:,} steps: {best.way}"
        if best.way != BASELINE:
            ratio = self._courses[BASELINE].seconds(steps) / self._courses[best.way].seconds(steps)
            sentence += f", {ratio:.3g}{_TIMES} in all"
        others = [stretch for stretch in self._stretches if stretch is not best]
        return sentence + "".join(f"; {self._range(stretch)}: {stretch.way}" for stretch in others)

    def any_length(self) -> str:
        """Name each way with the lengths of a run that it is best for, the longest runs first."""
        if len(self._stretches) == 1:
            return f"At any length of the run: {self._with_speed(self._stretches[0].way)}"
        ranges = [f"{self._range(stretch)}: {self._with_speed(stretch.way)}" for stretch in reversed(self._stretches)]
        sentence = "; ".join(ranges)
        return sentence[:1].upper() + sentence[1:]

    def _range(self, stretch: Stretch) -> str:
        place = self._stretches.index(stretch)
        if place == len(self._stretches) - 1:
            return f"from {stretch.first:,} steps on"
        end = self._stretches[place + 1].first
        return f"below {end:,} steps" if place == 0 else f"from {stretch.first:,} to {end - 1:,} steps"

    def _with_speed(self, way: str) -> str:
        if way == BASELINE:
            return way
        return f"{way} ({self._courses[BASELINE].step_seconds / self._courses[way].step_seconds:.3g}{_TIMES} a step)"

    def why_eager(self, times: Mapping[str, Sequence[Sample | None]], noise: float) -> str:
        """Say with figures why no other way is better: "stay eager" is a verdict as well."""
        others = [(Ratio.between(times[BASELINE], times[way]), way) for way in self._courses if way != BASELINE]
        if not others:
            return ", since no other way ran here"
        speed, way = max(others, key=lambda pair: pair[0].median)
        if speed.difference(noise) == "slower":
            return f"; {way} comes nearest, and its step takes {1 / speed.median:.2f} times eager's"
        share = f"{100 * noise:.2g}%" if math.isfinite(noise) else "unknown"
        return f"; {way} comes nearest, and {speed.median:.2f}{_TIMES} a step is no difference (noise: {share})"
