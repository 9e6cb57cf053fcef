"""From the times of a bench to what they say: which way is faster by more than noise, when it pays, and the verdict."""

from __future__ import annotations

import dataclasses
import math
import statistics
from typing import TYPE_CHECKING, Literal

from hotloop.decide import Course, Stretch, envelope
from hotloop.measure import interval, ratio_interval

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

Difference = Literal["faster", "slower", "none"]
LEAST_PAIRS = 6
"""Pairs of blocks under which no interval exists (`hotloop.measure.interval`)."""
BASELINE = "eager"


@dataclasses.dataclass(frozen=True)
class Sample:
    """Seconds of a step in one block of a way, and in the block of eager beside it."""

    seconds: float
    eager_seconds: float

    @property
    def relative(self) -> float:
        """The step in eager's steps of the same moment: a machine that slows down for both cancels."""
        return self.seconds / self.eager_seconds


@dataclasses.dataclass(frozen=True)
class Ratio:
    """How many times as long a step of one way takes as one of another: median over pairs, with its 95% interval."""

    median: float
    low: float
    high: float

    def difference(self, noise: float) -> Difference:
        """Say what the other way is, against this one: ``none`` where the interval holds 1 or noise explains it.

        Args:
            noise: how far eager is from itself, as a share of its step.
        """
        if self.low > 1 and self.median > 1 + noise:
            return "faster"
        if self.high < 1 and 1 / self.median > 1 + noise:
            return "slower"
        return "none"


def ratio(one: Sequence[Sample | None], other: Sequence[Sample | None]) -> Ratio:
    """Compare two ways over the rounds in which both were timed; with too few, the interval is all numbers."""
    pairs = [(a.relative, b.relative) for a, b in zip(one, other, strict=False) if a is not None and b is not None]
    if not pairs:
        return Ratio(math.nan, -math.inf, math.inf)
    low, high = ratio_interval([a for a, _ in pairs], [b for _, b in pairs])
    return Ratio(statistics.median(a / b for a, b in pairs), low, high)


def noise_of(again: Sequence[Sample | None]) -> float:
    """Give how far eager is from itself, from its second blocks of each round: the farther end of the ratio's interval.

    Infinite where there are too few blocks: then no difference counts.
    """
    known = [one for one in again if one is not None]
    if len(known) < LEAST_PAIRS:
        return math.inf
    low, high = interval([one.relative for one in known])
    return max(high, 1 / low) - 1


@dataclasses.dataclass(frozen=True)
class Steady:
    """A way's steady step: its median in ms with the 95% interval, and how often as fast as eager it is."""

    ms: float
    low: float
    high: float
    speed: Ratio
    difference: Difference


def steady(times: Mapping[str, Sequence[Sample | None]], way: str, noise: float) -> Steady:
    """Sum a way's blocks up; it has at least one."""
    known = [1e3 * one.seconds for one in times[way] if one is not None]
    speed = ratio(times[BASELINE], times[way])
    found: Difference = "none" if way == BASELINE else speed.difference(noise)
    return Steady(statistics.median(known), *interval(known), speed, found)


@dataclasses.dataclass(frozen=True)
class Verdict:
    """Which way takes the least time, by the length of the run; ``sentence`` says it."""

    stretches: tuple[Stretch, ...]
    sentence: str

    def best(self, steps: int) -> str:
        """Name the way for a run of so many steps."""
        return [one.way for one in self.stretches if one.first <= steps][-1]


def conclude(
    courses: Sequence[Course],
    times: Mapping[str, Sequence[Sample | None]],
    noise: float,
    total_steps: int | None,
) -> Verdict:
    """Give the verdict over the ways that were timed.

    Args:
        courses: of each, eager first.
        times: the samples of each.
        noise: see `noise_of`.
        total_steps: how long the run is to be; None where nobody said.
    """

    def faster(one: str, other: str) -> bool:
        return ratio(times[other], times[one]).difference(noise) == "faster"

    stretches = tuple(envelope(courses, faster))
    known = {one.way: one for one in courses}
    said = _in_all(stretches, known) if total_steps is None else _at(stretches, known, total_steps)
    if len(stretches) == 1 and stretches[0].way == BASELINE:
        said += _why_eager(courses, times, noise)
    return Verdict(stretches, said + ".")


def _at(stretches: Sequence[Stretch], courses: Mapping[str, Course], steps: int) -> str:
    here = [one for one in stretches if one.first <= steps][-1]
    eager = courses[BASELINE].seconds(steps)
    said = f"At {steps:,} steps: {here.way}"
    if here.way != BASELINE:
        said += f", {eager / courses[here.way].seconds(steps):.3g}\N{MULTIPLICATION SIGN} in all"
    return said + "".join(f"; {_where(stretches, one)}: {one.way}" for one in stretches if one is not here)


def _in_all(stretches: Sequence[Stretch], courses: Mapping[str, Course]) -> str:
    if len(stretches) == 1:
        return f"At any length of the run: {stretches[0].way}{_speed(courses, stretches[0].way)}"
    said = [f"{_where(stretches, one)}: {one.way}{_speed(courses, one.way)}" for one in reversed(stretches)]
    text = "; ".join(said)
    return text[:1].upper() + text[1:]


def _where(stretches: Sequence[Stretch], one: Stretch) -> str:
    place = stretches.index(one)
    if place == len(stretches) - 1:
        return f"from {one.first:,} steps on"
    below = stretches[place + 1].first
    return f"below {below:,} steps" if place == 0 else f"from {one.first:,} to {below - 1:,} steps"


def _speed(courses: Mapping[str, Course], way: str) -> str:
    if way == BASELINE:
        return ""
    return f" ({courses[BASELINE].step_seconds / courses[way].step_seconds:.3g}\N{MULTIPLICATION SIGN} a step)"


def _why_eager(courses: Sequence[Course], times: Mapping[str, Sequence[Sample | None]], noise: float) -> str:
    """Say with figures why nothing else is better: "stay eager" is a verdict like any other."""
    others = [(ratio(times[BASELINE], times[one.way]), one.way) for one in courses[1:]]
    if not others:
        return ", since no other way ran here"
    speed, way = max(others, key=lambda pair: pair[0].median)
    share = f"{100 * noise:.2g}%" if math.isfinite(noise) else "unknown"
    if speed.difference(noise) == "slower":
        return f"; {way} comes nearest, and its step takes {1 / speed.median:.2f} times eager's"
    return (
        f"; {way} comes nearest, and {speed.median:.2f}\N{MULTIPLICATION SIGN} a step is no difference (noise: {share})"
    )
