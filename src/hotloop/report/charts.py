"""The charts of a report as plain data, ready for any renderer to draw."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from hotloop.report import occurrences
from hotloop.report.occurrences import Mark
from hotloop.report.series import Band, Line, Steps, aligned
from hotloop.report.text import figure, flat, number, seconds, text, words

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

LINES_PER_CHART = 8
SMOOTHED_FROM = 50
"""Steps from which a loss gets a smoothed line as well."""
_MOST = 6
"""Charts at most of metrics that are no shares of 1, and of columns of the steps that this version does not know."""
_KNOWN_COLUMNS = {"step", "epoch", "time", "seconds", "loss", "learning_rate", "running"}


@dataclasses.dataclass(frozen=True)
class Chart:
    """One chart: a common axis of steps, a column of values for each line, and the marks on it.

    ``styles`` says how each line is drawn: ``line``, ``faint`` (raw values behind a smoothed line) or ``dots``
    (joined).
    ``log``: a logarithmic axis makes sense, and ``log_first``: it is the better one to start with. ``apart``: its steps
    are not those of the run that the other charts show. ``axis``: what the common axis counts.
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

    @classmethod
    def of(cls, key: str, title: str, lines: Sequence[Line], styles: Sequence[str], **fields: Any) -> Chart:
        """Return the chart of some lines; its summary says the range of each line."""
        steps, columns = aligned([line.thinned() for line in lines])
        shown = seconds if fields.setdefault("unit", "") == "s" else figure
        names = [line.name for line in lines]
        fields.setdefault("summary", "; ".join(_range(line, shown) for line in lines))
        return cls(key=key, title=title, steps=steps, names=names, columns=columns, styles=list(styles), **fields)

    def to_json(self) -> dict[str, Any]:
        """Return the chart as JSON data, its numbers with the digits that a screen can show."""
        data = dict(vars(self))  # its columns are long: they are copied once, below
        data |= {name: [dataclasses.asdict(one) for one in data[name]] for name in ("marks", "bands")}
        data["columns"] = [[None if value is None else float(f"{value:.6g}") for value in c] for c in self.columns]
        data["steps"] = [int(step) if step.is_integer() else step for step in self.steps]
        return data


def _range(line: Line, shown: Any) -> str:
    low, high = shown(min(line.values)), shown(max(line.values))
    return f"{line.name}: from {shown(line.values[0])} to {shown(line.values[-1])}, between {low} and {high}"


@dataclasses.dataclass(frozen=True)
class MetricRow:
    """One metric of one split: its first, best and last values and the step of the best."""

    split: str
    name: str
    first: float
    best: float
    best_step: float
    last: float

    @classmethod
    def of(cls, line: Line) -> MetricRow:
        """Sum a metric up; its best value is the smallest of a loss or an error, else the largest."""
        small_is_good = ("loss", "error", "perplexity", "seconds", "brier")
        choose = min if any(word in line.name.lower() for word in small_is_good) else max
        best = choose(range(len(line.values)), key=line.values.__getitem__)
        split, _, name = line.name.rpartition(" ")
        return cls(split, name, line.values[0], line.values[best], line.steps[best], line.values[-1])


def metric_lines(entries: Sequence[Mapping[str, Any]]) -> list[Line]:
    """Return each metric of each split as a line named ``split metric``, in the order in which they first came."""
    pairs: dict[str, list[tuple[float, float | None]]] = {}
    apart = {"step", "epoch", "split", "time"}
    for place, entry in enumerate(entries):
        step = number(entry.get("step"))
        split = f"{text(entry['split'])} " if entry.get("split") else ""
        for key, value in flat({key: value for key, value in entry.items() if key not in apart}):
            if number(value) is not None:
                pairs.setdefault(split + text(key), []).append((float(place) if step is None else step, number(value)))
    return [Line.of(name, points) for name, points in pairs.items()]


def of_run(steps: Steps, metrics: Sequence[Line], events: Sequence[Mapping[str, Any]]) -> list[Chart]:
    """Return every chart that a record has numbers for."""
    losses = [line for line in metrics if "loss" in line.name.lower()]
    others = [line for line in metrics if line not in losses]
    rate = steps.line("learning_rate", "learning rate")
    rates = [Chart.of("learning-rate", "Learning rate", [rate], ["line"])] if rate else []
    return [*_loss(steps, losses), *_step_time(steps, events), *_metrics(others), *rates, *_other_columns(steps)]


def _loss(steps: Steps, losses: list[Line]) -> Iterator[Chart]:
    """Yield the chart of the training loss and of each metric that is a loss."""
    raw = steps.line("loss", "training loss")
    lines, styles = ([raw], ["line"]) if raw else ([], [])
    if len(raw.values) >= SMOOTHED_FROM:
        lines, styles = [raw, raw.smoothed("training loss, smoothed")], ["faint", "line"]
    losses = losses[: LINES_PER_CHART - len(lines)]
    lines, styles = [*lines, *losses], [*styles, *["dots"] * len(losses)]
    positive = all(value > 0 for line in lines for value in line.values)
    not_finite = steps.not_finite("loss")[: occurrences.MARKS]
    marks = [Mark(step, "not_finite", "Not finite", 1, ()) for step in not_finite]
    if lines:
        yield Chart.of("loss", "Loss", lines, styles, marks=marks, log=positive, wide=True)


def _step_time(steps: Steps, events: Sequence[Mapping[str, Any]]) -> Iterator[Chart]:
    """Yield the chart of the steps' seconds, with the events marked and what ran as bands."""
    line = steps.line("seconds", "step time")
    if not line:
        return
    low, high = line.steady or min(line.values), max(line.values)
    yield Chart.of(
        "step-time",
        "Step time",
        [line],
        ["line"],
        unit="s",
        marks=occurrences.marks(events),
        bands=steps.bands(),
        log=min(line.values) > 0,
        log_first=0 < 10 * low < high,
        wide=True,
    )


def _metrics(lines: list[Line]) -> Iterator[Chart]:
    """Yield one chart of all metrics between 0 and 1, and a chart of each other metric."""
    shares = [line for line in lines if min(line.values) >= 0 and max(line.values) <= 1][:LINES_PER_CHART]
    others = [line for line in lines if line not in shares][:_MOST]
    if shares:
        yield Chart.of("metrics", "Metrics", shares, ["dots"] * len(shares))
    for n, line in enumerate(others):
        yield Chart.of(f"metric-{n}", words(line.name), [line], ["dots"])


def _other_columns(steps: Steps) -> list[Chart]:
    """Return charts of columns of the steps that are not drawn elsewhere, such as a norm of the gradients."""
    some = [*steps.entries[:100], *steps.entries[-100:]]
    columns = sorted({column for entry in some for column in entry} - _KNOWN_COLUMNS)
    lines = [line for column in columns if (line := steps.line(column, text(column).replace("_", " ")))]
    return [Chart.of(f"column-{n}", words(line.name), [line], ["line"]) for n, line in enumerate(lines[:_MOST])]
