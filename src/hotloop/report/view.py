"""A run record as view data: plain and complete, so that the terminal and the page only have to draw it."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, ClassVar

from hotloop.report import advice, charts, components, headline, occurrences
from hotloop.report.occurrences import LENGTH, EventRow
from hotloop.report.series import Line, Steps
from hotloop.report.text import count, figure, flat, line, nth, number, quantity, words

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from hotloop.report.advice import AdviceRow, WayRow
    from hotloop.report.charts import Chart, MetricRow
    from hotloop.report.components import Component
    from hotloop.report.headline import Card, Headline


@dataclasses.dataclass(frozen=True)
class View:
    """Everything that a report shows."""

    template: ClassVar[str] = "page.html.j2"

    headline: Headline
    cards: list[Card]
    charts: list[Chart]
    components: list[Component]
    events: list[EventRow]
    events_total: int
    events_left: int
    metrics: list[MetricRow]
    measurements: list[tuple[str, str]]
    processes: list[tuple[str, str]]
    told: list[tuple[str, str]]
    settings: list[tuple[str, str]]
    environment: list[tuple[str, str]]
    decisions: list[EventRow]
    verdicts: list[EventRow]
    diagnosis: str
    ways: list[WayRow]
    advice: list[AdviceRow]
    advice_left: int

    def to_dict(self) -> dict[str, Any]:
        """Return the view as plain JSON data without the charts' columns, which the record itself has."""
        shown = [{"key": chart.key, "title": chart.title, "summary": chart.summary} for chart in self.charts]
        return {**dataclasses.asdict(dataclasses.replace(self, charts=[])), "charts": shown}


def build(document: Mapping[str, Any], ranks: Mapping[int, Mapping[str, Any]] | None = None) -> View:
    """Return what a report shows of a run.

    Args:
        document: its run record's document (`hotloop.record.load`); of several processes the first one's.
        ranks: the documents of the other processes (`hotloop.record.load_ranks`).
    """
    measured, given = document["measurements"], document.get("advice", ())
    steps = Steps.read(document["steps"])
    times = steps.line("seconds", "step time")
    lines = charts.metric_lines(document["metrics"])
    metrics = [charts.MetricRow.of(line) for line in lines]
    parts = components.components(document["components"])
    rows, left = occurrences.rows(document["events"])
    head = headline.Headline.of(document, steps, parts)
    goes_on = head.status in ("running", headline.THERE)
    why = headline.no_speed_up(measured, steps) if "speed_up" in measured else ""
    return View(
        headline=head,
        cards=headline.cards(measured, steps, times, metrics, goes_on=goes_on),
        charts=charts.of_run(steps, lines, document["events"]),
        components=parts,
        events=rows,
        events_total=len(document["events"]),
        events_left=left,
        metrics=metrics,
        measurements=list(_measurements({**measured, "speed_up": why} if why else measured, times)),
        processes=[(f"rank {rank}", _process(each)) for rank, each in {0: document, **ranks}.items()] if ranks else [],
        told=_cut([_told(subject, value) for subject, value in document.get("told", {}).items()]),
        settings=_settings(document["settings"]),
        environment=_settings(document["environment"]),
        decisions=[EventRow.decided(entry) for entry in document["decisions"][: occurrences.ROWS]],
        verdicts=[EventRow.decided(entry) for entry in document["verdicts"][: occurrences.ROWS]],
        diagnosis=advice.verdict(document),
        ways=advice.ways(measured),
        advice=[advice.AdviceRow.read(entry) for entry in given[: advice.ROWS]],
        advice_left=max(0, len(given) - advice.ROWS),
    )


def _measurements(known: Mapping[str, Any], times: Line) -> Iterator[tuple[str, str]]:
    """Yield every measurement, unknown ones too, and after them the figures of the steps themselves."""
    apart = {"ways", "bench"} if advice.ways(known) else set()  # they have a table of their own
    for key, value in flat({key: value for key, value in known.items() if key not in apart}):
        if value is not None:
            yield words(key), line(quantity(key, value), LENGTH)
    if times.steady is not None and "steady_step_ms" not in known:
        yield "Steady step (median of the later half)", quantity("_seconds", times.steady)
    if times:
        yield f"First step ({nth(times.steps[0])})", quantity("_seconds", times.values[0])
        together = f"{quantity('_seconds', sum(times.values))} in {count(len(times.values), 'step')}"
        yield "All steps together", together


def _process(document: Mapping[str, Any]) -> str:
    """Return a line on one of several processes: what ran, how fast, how far it came, and what was declined."""
    measured, events = document["measurements"], document["events"]
    ran = ", ".join(line(part.get("running"), 60) for part in document["components"].values())
    step, done = number(measured.get("steady_step_ms")), number(measured.get("steps_done"))
    steps = count(int(done), "step") if done else ""
    figures = (f"{figure(step)} ms a step" if step else "", steps, headline.standing(document))
    declined = [event for event in events if event.get("kind") == "tier_declined"]
    whys = [f"{line(event.get('tier'), 60)} declined: {line(event.get('reason'), LENGTH)}" for event in declined]
    return "; ".join(filter(None, (ran, *figures, *dict.fromkeys(whys))))


def _told(subject: str, value: Any, most: int = 200) -> tuple[str, str]:
    """Return what the run printed about a subject before its first step; of a long list the first lines."""
    lines = value if isinstance(value, list) else [value]
    shown = [line(each, LENGTH) for each in lines[:most]]
    if len(lines) > most:
        shown.append(f"and {len(lines) - most:,} more lines in the record")
    return line(words(subject), 200), "\n".join(shown)


def _settings(values: Mapping[str, Any]) -> list[tuple[str, str]]:
    return _cut([(line(key, 200), line(value, LENGTH)) for key, value in flat(values)])


def _cut(rows: list[tuple[str, str]], most: int = 2000) -> list[tuple[str, str]]:
    left = len(rows) - most
    return [*rows[:most], ("…", f"{left:,} more in the record")] if left > 0 else rows
