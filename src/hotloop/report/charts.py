"""The charts of a report as plain data, ready for any renderer to draw."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, ClassVar

from hotloop.report import occurrences
from hotloop.report.occurrences import Mark
from hotloop.report.series import Band, Line, Steps, aligned
from hotloop.report.text import figure, flat, number, seconds, text, words

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

LINES_PER_CHART = 8


@dataclasses.dataclass(frozen=True)
class Chart:
    """One chart: a common axis of steps, a column of values for each line, and the marks on it.

    ``styles`` says how each line is drawn: ``line``, ``faint`` (raw values behind a smoothed line), ``dots`` (joined)
    or ``points`` (not joined).
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

    @classmethod
    def of(cls, key: str, title: str, lines: Sequence[Line], styles: Sequence[str], **fields: Any) -> Chart:
        """Return the chart of some lines; without a ``summary`` it gets each line's range, apart from faint lines."""
        steps, columns = aligned([line.thinned() for line in lines])
        shown = seconds if fields.setdefault("unit", "") == "s" else figure
        ranges = []
        for line, style in zip(lines, styles, strict=True):
            if style != "faint":
                first, last, low, high = map(
                    shown, (line.values[0], line.values[-1], min(line.values), max(line.values))
                )
                many = f"over {len(line.values):,} points" if len(line.values) > 1 else "at one point"
                ranges.append(f"{line.name}: from {first} to {last} {many}, between {low} and {high}")
        fields.setdefault("summary", "; ".join(ranges))
        names = [line.name for line in lines]
        return cls(key=key, title=title, steps=steps, names=names, columns=columns, styles=list(styles), **fields)

    def to_json(self) -> dict[str, Any]:
        """Return the chart as JSON data, its numbers with the digits that a screen can show."""
        data = dict(vars(self))  # its columns are long: they are copied once, below
        data |= {name: [dataclasses.asdict(one) for one in data[name]] for name in ("marks", "bands")}
        data["columns"] = [[None if value is None else float(f"{value:.6g}") for value in c] for c in self.columns]
        data["steps"] = [int(step) if step.is_integer() else step for step in self.steps]
        return data


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

    @classmethod
    def of(cls, line: Line) -> MetricRow:
        """Sum a metric up; its best value is the smallest of a loss or an error, else the largest."""
        values, small_is_good = line.values, ("loss", "error", "perplexity", "seconds", "brier")
        choose = min if any(word in line.name.lower() for word in small_is_good) else max
        best = choose(range(len(values)), key=values.__getitem__)
        split, _, name = line.name.rpartition(" ")
        return cls(split, name, values[0], values[best], line.steps[best], values[-1], len(values))


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


@dataclasses.dataclass(frozen=True)
class RunCharts:
    """The charts of a run's steps, metrics and events."""

    steps: Steps
    metrics: Sequence[Line]
    events: Sequence[Mapping[str, Any]]

    smoothed_from: ClassVar[int] = 50  # steps from which a loss gets a smoothed line as well
    most_metrics: ClassVar[int] = 6  # charts of metrics that are no shares of 1
    most_columns: ClassVar[int] = 4  # charts of columns of the steps that this version does not know

    def all(self) -> list[Chart]:
        """Return every chart that the record has numbers for."""
        rate = self.column("learning_rate", "learning-rate")
        return [*self.loss(), *self.step_time(), *self.metric_charts(), *rate, *self.other_columns()]

    def loss(self) -> Iterator[Chart]:
        """Yield the chart of the training loss and of each metric that is a loss."""
        raw = self.steps.line("loss", "training loss")
        lines, styles = ([raw], ["line"]) if raw else ([], [])
        if len(raw.values) >= self.smoothed_from:
            lines, styles = [raw, raw.smoothed("training loss, smoothed")], ["faint", "line"]
        losses = [line for line in self.metrics if "loss" in line.name.lower()][: LINES_PER_CHART - len(lines)]
        lines, styles = [*lines, *losses], [*styles, *["dots"] * len(losses)]
        if not lines:
            return
        positive = all(value > 0 for line in lines for value in line.values)
        not_finite = self.steps.not_finite("loss")[: occurrences.MARKS]
        marks = [Mark(step, "not_finite", "Not finite", 1, ()) for step in not_finite]
        yield Chart.of("loss", "Loss", lines, styles, marks=marks, log=positive, wide=True)

    def step_time(self) -> Iterator[Chart]:
        """Yield the chart of the steps' seconds, with the events marked and what ran as bands."""
        line = self.steps.line("seconds", "step time")
        if not line:
            return
        usual = line.steady or min(line.values)
        bands = [
            dataclasses.replace(band, label="eager" if band.label.lower() == "none" else band.label)
            for band in self.steps.bands()
        ]
        yield Chart.of(
            "step-time",
            "Step time",
            [line],
            ["line"],
            unit="s",
            marks=occurrences.marks(self.events),
            bands=bands,
            log=all(value > 0 for value in line.values),
            log_first=usual > 0 and max(line.values) > 10 * usual,
            wide=True,
        )

    def metric_charts(self) -> Iterator[Chart]:
        """Yield one chart of all metrics between 0 and 1, and a chart of each other metric."""
        rest = [line for line in self.metrics if "loss" not in line.name.lower()]
        shares = [line for line in rest if min(line.values) >= 0 and max(line.values) <= 1][:LINES_PER_CHART]
        others = [line for line in rest if line not in shares][: self.most_metrics]
        if shares:
            yield Chart.of("metrics", "Metrics", shares, ["dots"] * len(shares))
        for n, line in enumerate(others):
            yield Chart.of(f"metric-{n}", words(line.name), [line], ["dots"])

    def column(self, column: str, key: str) -> list[Chart]:
        """Return the chart of one column of the steps; none if it holds no number."""
        line = self.steps.line(column, text(column).replace("_", " "))
        return [Chart.of(key, words(line.name), [line], ["line"])] if line else []

    def other_columns(self) -> list[Chart]:
        """Return charts of columns of the steps that are not drawn elsewhere, such as a norm of the gradients."""
        known = {"step", "epoch", "time", "seconds", "loss", "learning_rate", "running"}
        some = [*self.steps.entries[:100], *self.steps.entries[-100:]]
        columns = sorted({column for entry in some for column in entry} - known)
        charts = [chart for column in columns for chart in self.column(column, "")]
        return [dataclasses.replace(chart, key=f"column-{n}") for n, chart in enumerate(charts[: self.most_columns])]
