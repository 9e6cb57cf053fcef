"""Numbers over steps as plain columns: read from a record, smoothed, and thinned so that spikes survive."""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics
from typing import TYPE_CHECKING, Any

from hotloop.report.text import number, text

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

BANDS = 200
"""Stretches of "what ran" that a chart gets at most; of more, none is drawn."""
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
        later = self.values[len(self.values) // 2 :]
        return statistics.median(later) if len(self.values) >= ENOUGH else None

    def smoothed(self, name: str) -> Line:
        """Return the exponential mean over about a fiftieth of the steps."""
        keep = 1 - 1 / max(5, len(self.values) / 50)
        smoothed = itertools.accumulate(self.values, lambda mean, value: keep * mean + (1 - keep) * value)
        return Line(name, self.steps, tuple(smoothed))

    def thinned(self, points: int = 2000) -> Line:
        """Return the smallest and the largest of each bucket of steps, and both ends: no spike is lost."""
        many = len(self.values)
        if many <= points:
            return self
        width = -(-many // (points // 2 - 1))
        kept = {0, many - 1}
        for start in range(0, many, width):
            bucket = range(start, min(many, start + width))
            kept |= {min(bucket, key=self.values.__getitem__), max(bucket, key=self.values.__getitem__)}
        order = sorted(kept)
        return Line(self.name, tuple(self.steps[i] for i in order), tuple(self.values[i] for i in order))


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

    def not_finite(self, key: str) -> list[float]:
        """Return the steps whose value was NaN or infinite."""
        values = (entry.get(key) for entry in self.entries)
        return [step for step, value in zip(self.numbers, values, strict=True) if _is_not_finite(value)]

    def bands(self) -> list[Band]:
        """Group successive steps that ran the same way."""
        ran = (text(entry.get("running") or "") for entry in self.entries)
        pairs = zip(self.numbers, ran, strict=True)
        bands = []
        for label, group in itertools.groupby(pairs, key=lambda pair: pair[1]):
            steps = [step for step, _ in group]
            if label:
                bands.append(Band(steps[0], steps[-1], "eager" if label.lower() == "none" else label))
        return bands if len(bands) <= BANDS else []


def aligned(lines: Sequence[Line]) -> tuple[list[float], list[list[float | None]]]:
    """Return one ascending axis of all steps and a column for each line, None where a line has no value."""
    axis = sorted({step for line in lines for step in line.steps})
    known = [dict(zip(line.steps, line.values, strict=True)) for line in lines]
    return axis, [[values.get(step) for step in axis] for values in known]


def _is_not_finite(value: Any) -> bool:
    if type(value) is float:
        return not math.isfinite(value)
    return value in ("nan", "inf", "-inf") if isinstance(value, str) else False
