"""Parallel coordinates of a search: an axis for each setting, a line for each complete trial, as plain numbers."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any

from hotloop.report.text import figure, line, number, text

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

AXES = 10
"""Settings that are drawn at most, the most important first."""
LINES = 200
"""Trials that are drawn at most: the best."""
SHADES = 5
"""Shades of the lines: the best fifth of the trials is the darkest."""
WIDTH, HEIGHT, TOP, SIDE = 1000, 250, 34, 70


@dataclasses.dataclass(frozen=True)
class Axis:
    """One axis: its name, where it stands, and the labels along it with their heights."""

    name: str
    at: float
    labels: tuple[tuple[str, float], ...]


@dataclasses.dataclass(frozen=True)
class Parallel:
    """The picture: its axes, and its lines as SVG's points with their shade, the best last."""

    axes: tuple[Axis, ...]
    lines: tuple[tuple[str, int], ...]
    width: int = WIDTH
    height: int = TOP + HEIGHT + 16
    top: int = TOP
    bottom: int = TOP + HEIGHT


def build(
    ordered: Sequence[Mapping[str, Any]], space: Mapping[str, Any], names: Sequence[str], metric: str
) -> Parallel | None:
    """Return the picture of complete trials; None where there are too few trials or settings to compare.

    Args:
        ordered: the trials, the best first.
        space: of the search, by setting.
        names: the settings, the most important first.
        metric: what the trials are judged by.
    """
    trials = ordered[:LINES]
    columns = {name: [_value(one, name) for one in trials] for name in names[:AXES]}
    known = {name: column for name, column in columns.items() if len({*map(text, column)}) > 1}
    if len(trials) < 2 or not known:  # noqa: PLR2004 - one line compares nothing
        return None
    kinds = {name: about.get("kind") if isinstance(about := space.get(name), dict) else "" for name in known}
    scales = [_scale(name, column, log=kinds[name] == "log") for name, column in known.items()]
    scales.append(_scale(metric, [number(one.get("value")) for one in trials], log=False))
    apart = (WIDTH - 2 * SIDE) / (len(scales) - 1)
    axes = tuple(Axis(line(name, 40), SIDE + place * apart, labels) for place, (name, labels, _) in enumerate(scales))
    lines = []
    for place in range(len(trials)):
        heights = [(axis.at, scale[2][place]) for axis, scale in zip(axes, scales, strict=True)]
        points = " ".join(f"{at:.1f},{height:.1f}" for at, height in heights if height is not None)
        lines.append((points, place * SHADES // len(trials)))
    return Parallel(axes, tuple(reversed(lines)))


def _value(attempt: Mapping[str, Any], name: str) -> Any:
    values = attempt.get("values")
    return values.get(name) if isinstance(values, dict) else None


def _scale(
    name: str, column: Sequence[Any], *, log: bool
) -> tuple[str, tuple[tuple[str, float], ...], list[float | None]]:
    """Return an axis: its name, its labels with their heights, and the height of each value; None where it has none."""
    numbers = [number(one) for one in column]
    if all(one is not None for one, given in zip(numbers, column, strict=True) if given is not None):
        ends = [one for one in numbers if one is not None]
        low, high = min(ends), max(ends)
        shown = math.log if log and low > 0 else float
        span = shown(high) - shown(low) or 1.0
        heights = [None if one is None else _height((shown(one) - shown(low)) / span) for one in numbers]
        return name, ((figure(low), _height(0)), (figure(high), _height(1))), heights
    words = [line(one, 24) for one in column]
    places = {word: _height(at / max(1, len(set(words)) - 1)) for at, word in enumerate(sorted(set(words)))}
    return name, tuple(places.items()), [places[word] for word in words]


def _height(share: float) -> float:
    return TOP + HEIGHT * (1 - share)
