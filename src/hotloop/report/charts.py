"""The charts of a report as plain data, ready for any renderer to draw."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from hotloop.report import occurrences
from hotloop.report.occurrences import Mark
from hotloop.report.series import Band, Line, Steps, aligned, line_of, smooth, steady, thin
from hotloop.report.text import figure, flat, number, seconds, text, words

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence


SMOOTHED_FROM = 50
"""Steps from which a loss gets a smoothed line as well."""
METRIC_CHARTS = 6
LINES_PER_CHART = 8
OTHER_COLUMNS = 4
"""Charts of columns of the steps that this version does not know."""
_KNOWN_COLUMNS = {"step", "epoch", "time", "seconds", "loss", "learning_rate", "running"}
_NO_METRIC = {"step", "epoch", "split", "time"}


@dataclasses.dataclass(frozen=True)
class Chart:
    """One chart: a common axis of steps, a column of values for each line, and what is marked on it.

    ``styles`` has for each line how it is drawn: ``line``, ``faint`` (raw values behind a smoothed line) or ``dots``.
    ``log``: a logarithmic axis makes sense, and ``log_first``: it is the better one to start with. ``apart``: its steps
    are not those of the run that the other charts show. ``axis``: what the common axis counts, and ``axis_log``: it is
    a logarithmic one.
    """

    key: str
    title: str
    unit: str
    summary: str
    steps: list[float]
    names: list[str]
    columns: list[list[float | None]]
    styles: list[str]
    marks: list[Mark] = dataclasses.field(default_factory=list)
    bands: list[Band] = dataclasses.field(default_factory=list)
    log: bool = False
    log_first: bool = False
    wide: bool = False
    apart: bool = False
    axis: str = "step"
    axis_log: bool = False


@dataclasses.dataclass(frozen=True)
class MetricRow:
    """One metric of one split: its first, best and last values and the step of the best."""

    split: str
    name: str
    first: float
    best: float
    best_step: float
    last: float
    many: int


def charts(steps: Steps, metrics: Sequence[Line], events: Sequence[Mapping[str, Any]]) -> list[Chart]:
    """Make every chart that the record has numbers for."""
    found = [_loss(steps, metrics), _step_time(steps, events), *_metric_charts(metrics), _rate(steps), *_others(steps)]
    return [chart for chart in found if chart is not None]


def metric_lines(entries: Sequence[Mapping[str, Any]]) -> list[Line]:
    """Read each metric of each split as a line named ``split metric``, in the order in which they first came."""
    pairs: dict[str, list[tuple[float, float | None]]] = {}
    for place, entry in enumerate(entries):
        step = number(entry.get("step"))
        split = f"{text(entry['split'])} " if entry.get("split") else ""
        for key, value in flat({key: value for key, value in entry.items() if key not in _NO_METRIC}):
            if number(value) is not None:
                pairs.setdefault(split + text(key), []).append((float(place) if step is None else step, number(value)))
    return [line_of(name, points) for name, points in pairs.items()]


def metric_rows(lines: Sequence[Line]) -> list[MetricRow]:
    """Sum each metric up; the best is the smallest of what is a loss or an error, and else the largest."""
    found = []
    for line in lines:
        choose: Callable[..., int] = min if _smaller_is_better(line.name) else max
        best = choose(range(len(line.values)), key=line.values.__getitem__)
        split, _, name = line.name.rpartition(" ")
        values = line.values
        found.append(MetricRow(split, name, values[0], values[best], line.steps[best], values[-1], len(values)))
    return found


def _smaller_is_better(name: str) -> bool:
    return any(word in name.lower() for word in ("loss", "error", "perplexity", "seconds", "brier"))


def _chart(key: str, title: str, lines: Sequence[Line], styles: Sequence[str], **others: Any) -> Chart:
    steps, columns = aligned([thin(line) for line in lines])
    unit = others.pop("unit", "")
    summary = "; ".join(_says(line, unit) for line, style in zip(lines, styles, strict=True) if style != "faint")
    return Chart(key, title, unit, summary, steps, [line.name for line in lines], columns, list(styles), **others)


def _says(line: Line, unit: str) -> str:
    shown = seconds if unit == "s" else figure
    low, high = shown(min(line.values)), shown(max(line.values))
    first, last = shown(line.values[0]), shown(line.values[-1])
    many = f"over {len(line.values):,} points" if len(line.values) > 1 else "at one point"
    return f"{line.name}: from {first} to {last} {many}, between {low} and {high}"


def _loss(steps: Steps, metrics: Sequence[Line]) -> Chart | None:
    raw = steps.line("loss", "training loss")
    lines, styles = [], []
    if len(raw.values) >= SMOOTHED_FROM:
        lines, styles = [raw, smooth(raw, "training loss, smoothed")], ["faint", "line"]
    elif raw:
        lines, styles = [raw], ["line"]
    others = [line for line in metrics if "loss" in line.name.lower()][: LINES_PER_CHART - len(lines)]
    lines, styles = [*lines, *others], [*styles, *["dots"] * len(others)]
    if not lines:
        return None
    positive = all(value > 0 for line in lines for value in line.values)
    wrong = [Mark(step, "not_finite", "Not finite", 1, ()) for step in steps.not_finite("loss")[: occurrences.MARKS]]
    return _chart("loss", "Loss", lines, styles, marks=wrong, log=positive, wide=True)


def _step_time(steps: Steps, events: Sequence[Mapping[str, Any]]) -> Chart | None:
    line = steps.line("seconds", "step time")
    if not line:
        return None
    usual = steady(line) or min(line.values)
    return _chart(
        "step-time",
        "Step time",
        [line],
        ["line"],
        unit="s",
        marks=occurrences.marks(events),
        bands=[dataclasses.replace(band, label=_ran(band.label)) for band in steps.bands()],
        log=all(value > 0 for value in line.values),
        log_first=usual > 0 and max(line.values) > 10 * usual,
        wide=True,
    )


def _ran(label: str) -> str:
    return "eager" if label.lower() == "none" else label


def _metric_charts(metrics: Sequence[Line]) -> list[Chart]:
    """Draw what lies between 0 and 1 in one chart, and everything else each in its own."""
    rest = [line for line in metrics if "loss" not in line.name.lower()]
    shares = [line for line in rest if min(line.values) >= 0 and max(line.values) <= 1][:LINES_PER_CHART]
    others = [line for line in rest if line not in shares][:METRIC_CHARTS]
    found = [_chart("metrics", "Metrics", shares, ["dots"] * len(shares))] if shares else []
    return found + [_chart(f"metric-{n}", words(line.name), [line], ["dots"]) for n, line in enumerate(others)]


def _rate(steps: Steps) -> Chart | None:
    line = steps.line("learning_rate", "learning rate")
    return _chart("learning-rate", "Learning rate", [line], ["line"]) if line else None


def _others(steps: Steps) -> list[Chart]:
    """Draw the columns of the steps that are not drawn elsewhere, such as a norm of the gradients."""
    some = [*steps.entries[:100], *steps.entries[-100:]]
    keys = sorted({key for entry in some for key in entry} - _KNOWN_COLUMNS)
    lines = [line for key in keys if (line := steps.line(key, text(key).replace("_", " ")))][:OTHER_COLUMNS]
    return [_chart(f"column-{n}", words(line.name), [line], ["line"]) for n, line in enumerate(lines)]
