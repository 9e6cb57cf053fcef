"""Numbers over steps as plain columns: read from a record, smoothed, and thinned so that spikes survive."""

from __future__ import annotations

import dataclasses
import itertools
import statistics
from collections import Counter
from typing import TYPE_CHECKING, Any

from hotloop.report.text import number, text

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

POINTS = 2000
"""Points of a series that a chart gets at most."""
STEADY_FROM = 8
"""Values from which a steady one is estimated."""
BANDS = 200
"""Stretches of "what ran" that a chart gets at most."""


@dataclasses.dataclass(frozen=True)
class Line:
    """One named series: ascending steps and their finite values."""

    name: str
    steps: tuple[float, ...]
    values: tuple[float, ...]

    def __bool__(self) -> bool:
        return bool(self.steps)


@dataclasses.dataclass(frozen=True)
class Band:
    """A stretch of steps, both ends included, that ran the same way."""

    start: float
    end: float
    label: str


@dataclasses.dataclass(frozen=True)
class Steps:
    """The steps of a run, ascending, each once: after a resume the later account of a step is the one that counts."""

    entries: tuple[Mapping[str, Any], ...]
    numbers: tuple[float, ...]

    def line(self, key: str, name: str) -> Line:
        """Read one column, leaving out what is no finite number."""
        pairs = ((step, number(entry.get(key))) for step, entry in zip(self.numbers, self.entries, strict=True))
        return line_of(name, pairs)

    def not_finite(self, key: str) -> list[float]:
        """Find the steps whose value was NaN or infinite."""
        words = {"nan", "inf", "-inf"}
        return [step for step, entry in zip(self.numbers, self.entries, strict=True) if str(entry.get(key)) in words]

    def bands(self, key: str = "running") -> list[Band]:
        """Group successive steps that ran the same way."""
        labels = [text(entry[key]) if entry.get(key) is not None else "" for entry in self.entries]
        if sum(a != b for a, b in itertools.pairwise(labels)) >= BANDS:
            labels = _majority(labels, -(-len(labels) // BANDS))
        found, at = [], 0
        for label, group in itertools.groupby(labels):
            length = sum(1 for _ in group)
            if label:
                found.append(Band(self.numbers[at], self.numbers[at + length - 1], label))
            at += length
        return found


def read_steps(entries: Sequence[Mapping[str, Any]]) -> Steps:
    """Put the steps of a record in order; an entry without a number of its own counts by its place."""
    by_number = {}
    for place, entry in enumerate(entries):
        known = number(entry.get("step"))
        by_number[float(place) if known is None else known] = entry
    numbers = sorted(by_number)
    return Steps(tuple(by_number[each] for each in numbers), tuple(numbers))


def line_of(name: str, pairs: Iterable[tuple[float, float | None]]) -> Line:
    """Make a line of pairs, leaving out the missing values and keeping the last of equal steps."""
    known = {step: value for step, value in pairs if value is not None}
    steps = sorted(known)
    return Line(name, tuple(steps), tuple(known[step] for step in steps))


def smooth(line: Line, name: str) -> Line:
    """Smooth by an exponential mean over about a fiftieth of the steps, corrected for its start (as in Adam)."""
    keep = 1 - 1 / max(5, len(line.values) / 50)
    mean, weight, smoothed = 0.0, 0.0, []
    for value in line.values:
        mean = keep * mean + (1 - keep) * value
        weight = keep * weight + (1 - keep)
        smoothed.append(mean / weight)
    return Line(name, line.steps, tuple(smoothed))


def thin(line: Line, points: int = POINTS) -> Line:
    """Keep the smallest and the largest of each of ``points / 2`` buckets, and both ends: no spike is lost."""
    many = len(line.values)
    if many <= points:
        return line
    width = many / (points // 2 - 1)
    kept = {0, many - 1}
    start = 0.0
    while start < many:
        bucket = range(int(start), min(many, max(int(start) + 1, int(start + width))))
        kept.add(min(bucket, key=line.values.__getitem__))
        kept.add(max(bucket, key=line.values.__getitem__))
        start += width
    order = sorted(kept)
    return Line(line.name, tuple(line.steps[i] for i in order), tuple(line.values[i] for i in order))


def steady(line: Line) -> float | None:
    """Estimate the steady value: the median of the later half; None where there are too few to tell."""
    return statistics.median(line.values[len(line.values) // 2 :]) if len(line.values) >= STEADY_FROM else None


def aligned(lines: Sequence[Line]) -> tuple[list[float], list[list[float | None]]]:
    """Put lines on one common ascending axis, None where a line has no value, as chart libraries want it."""
    axis = sorted({step for line in lines for step in line.steps})
    columns = []
    for line in lines:
        known = dict(zip(line.steps, line.values, strict=True))
        columns.append([known.get(step) for step in axis])
    return axis, columns


def _majority(labels: list[str], width: int) -> list[str]:
    """Give each stretch of ``width`` steps the label that most of it has: a run that flaps would fill the page."""
    smoothed: list[str] = []
    for start in range(0, len(labels), width):
        part = labels[start : start + width]
        smoothed += [Counter(part).most_common(1)[0][0]] * len(part)
    return smoothed
