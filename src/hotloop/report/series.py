"""Numbers over steps as plain columns: read from a record, smoothed, and thinned so that spikes survive."""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics
from collections import Counter
from typing import TYPE_CHECKING, Any

from hotloop.report.text import number, text

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

BANDS = 200
"""Stretches of "what ran" that a chart gets at most."""
ENOUGH = 8
"""Steps that have to be timed for an estimate."""


@dataclasses.dataclass(frozen=True)
class Line:
    """One named series: ascending steps and their finite values."""

    name: str
    steps: tuple[float, ...]
    values: tuple[float, ...]

    @classmethod
    def of(cls, name: str, pairs: Iterable[tuple[float, float | None]]) -> Line:
        """Return the line of (step, value) pairs without missing values; the last of equal steps counts."""
        known = {step: value for step, value in pairs if value is not None}
        steps = sorted(known)
        return cls(name, tuple(steps), tuple(known[step] for step in steps))

    def __bool__(self) -> bool:
        return bool(self.steps)

    @property
    def steady(self) -> float | None:
        """The median of the later half of the values; None where they are fewer than ``ENOUGH``."""
        if len(self.values) < ENOUGH:
            return None
        return statistics.median(self.values[len(self.values) // 2 :])

    def smoothed(self, name: str) -> Line:
        """Return the exponential mean over about a fiftieth of the steps, corrected for its start (as in Adam)."""
        keep = 1 - 1 / max(5, len(self.values) / 50)
        mean, weight, smoothed = 0.0, 0.0, []
        for value in self.values:
            mean = keep * mean + (1 - keep) * value
            weight = keep * weight + (1 - keep)
            smoothed.append(mean / weight)
        return Line(name, self.steps, tuple(smoothed))

    def thinned(self, points: int = 2000) -> Line:
        """Return the smallest and the largest of each of ``points / 2`` buckets, and both ends: no spike is lost."""
        many = len(self.values)
        if many <= points:
            return self
        width = many / (points // 2 - 1)
        kept = {0, many - 1}
        start = 0.0
        while start < many:
            bucket = range(int(start), min(many, max(int(start) + 1, int(start + width))))
            kept.add(min(bucket, key=self.values.__getitem__))
            kept.add(max(bucket, key=self.values.__getitem__))
            start += width
        order = sorted(kept)
        return Line(self.name, tuple(self.steps[i] for i in order), tuple(self.values[i] for i in order))


def median_interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the two values between which the true median lies, in 19 of 20 cases, whatever the distribution.

    By the sign test: a median has as many values above as below, as a coin has heads and tails. Of five values or
    fewer, the ends are returned, which hold it less often.
    """
    ordered, many = sorted(values), len(values)
    outside, left_out = 0.0, 0
    while left_out < (many - 1) // 2:
        outside += math.comb(many, left_out) / 2**many
        if outside > 0.025:  # noqa: PLR2004 - on each side
            break
        left_out += 1
    at = max(0, left_out - 1)
    return ordered[at], ordered[-1 - at]


@dataclasses.dataclass(frozen=True)
class Band:
    """A stretch of steps, both ends included, that ran the same way."""

    start: float
    end: float
    label: str


@dataclasses.dataclass(frozen=True)
class Steps:
    """The steps of a run in ascending order. If a resumed run repeats a step, its last entry counts."""

    entries: tuple[Mapping[str, Any], ...]
    numbers: tuple[float, ...]

    @classmethod
    def read(cls, entries: Sequence[Mapping[str, Any]]) -> Steps:
        """Put the steps of a record in order; an entry without a number of its own counts by its place."""
        by_number = {}
        for place, entry in enumerate(entries):
            known = number(entry.get("step"))
            by_number[float(place) if known is None else known] = entry
        numbers = sorted(by_number)
        return cls(tuple(by_number[step] for step in numbers), tuple(numbers))

    def line(self, key: str, name: str) -> Line:
        """Return one column as a line, without values that are not finite numbers."""
        values = (number(entry.get(key)) for entry in self.entries)
        return Line.of(name, zip(self.numbers, values, strict=True))

    def eager_seconds(self) -> list[float]:
        """Return the seconds of the steps that ran eager and were timed."""
        eager = (entry for entry in self.entries if entry.get("running") in ("none", "eager"))
        return [took for entry in eager if (took := number(entry.get("seconds"))) is not None]

    def not_finite(self, key: str) -> list[float]:
        """Return the steps whose value was NaN or infinite."""
        values = ((step, entry.get(key)) for step, entry in zip(self.numbers, self.entries, strict=True))
        return [step for step, value in values if _is_not_finite(value)]

    def bands(self, key: str = "running") -> list[Band]:
        """Group successive steps that ran the same way.

        A run that alternates all the time would fill the page: then each stretch of a fixed width gets the label that
        most of its steps have.
        """
        known: dict[Any, str] = {None: ""}  # a long run has few labels
        labels = [_label(entry.get(key), known) for entry in self.entries]
        if sum(a != b for a, b in itertools.pairwise(labels)) >= BANDS:
            width = -(-len(labels) // BANDS)
            parts = [labels[start : start + width] for start in range(0, len(labels), width)]
            labels = [label for part in parts for label in [Counter(part).most_common(1)[0][0]] * len(part)]
        bands, at = [], 0
        for label, group in itertools.groupby(labels):
            length = sum(1 for _ in group)
            if label:
                bands.append(Band(self.numbers[at], self.numbers[at + length - 1], label))
            at += length
        return bands


def aligned(lines: Sequence[Line]) -> tuple[list[float], list[list[float | None]]]:
    """Return one ascending axis of all steps and a column for each line, None where a line has no value."""
    axis = sorted({step for line in lines for step in line.steps})
    columns = []
    for line in lines:
        known = dict(zip(line.steps, line.values, strict=True))
        columns.append([known.get(step) for step in axis])
    return axis, columns


def _label(value: Any, known: dict[Any, str]) -> str:
    """Return a label as text, made once for each."""
    if value is not None and type(value) is not str:
        return text(value)
    if value not in known:
        known[value] = text(value)
    return known[value]


def _is_not_finite(value: Any) -> bool:
    """Return whether a value is NaN or infinite, as a number or in the record's words for it."""
    if type(value) is float:  # a record has hundreds of thousands of them
        return not math.isfinite(value)
    return isinstance(value, str) and value in ("nan", "inf", "-inf")
