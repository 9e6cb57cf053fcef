"""A run record as view data: plain and complete, so that the terminal and the page only have to draw it."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from hotloop import record
from hotloop.report import advice, charts, components, headline, occurrences, ways
from hotloop.report.series import Line, read_steps, steady
from hotloop.report.text import count, flat, line, moment, nth, place, quantity, text, words

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from hotloop.report.advice import AdviceRow, WayRow
    from hotloop.report.charts import Chart, MetricRow
    from hotloop.report.components import Component
    from hotloop.report.headline import Card, Headline
    from hotloop.report.occurrences import EventRow

LINES = 200
"""Lines of what a run said of one subject that are shown: of files that were left out, for one."""
VALUE_LENGTH = 1000
"""Characters of a setting that are shown."""
_TITLES = ("title", "choice", "decision", "verdict", "action", "name", "kind")
"""Keys that can name a decision or a verdict, the first that is set."""
ENTRIES = 200
"""Decisions, verdicts and settings beyond this many (times ten for settings) are counted only."""


@dataclasses.dataclass(frozen=True)
class Entry:
    """A decision or a verdict: its title, what it says, and its other fields."""

    title: str
    text: str
    where: str
    rows: tuple[tuple[str, str], ...]


@dataclasses.dataclass(frozen=True)
class View:
    """Everything that a report shows."""

    headline: Headline
    cards: list[Card]
    charts: list[Chart]
    components: list[Component]
    events: list[EventRow]
    events_total: int
    events_left: int
    metrics: list[MetricRow]
    measurements: list[tuple[str, str]]
    told: list[tuple[str, str]]
    settings: list[tuple[str, str]]
    environment: list[tuple[str, str]]
    decisions: list[Entry]
    verdicts: list[Entry]
    diagnosis: str
    ways: list[WayRow]
    advice: list[AdviceRow]
    advice_left: int

    def to_dict(self) -> dict[str, Any]:
        """Give the view as plain JSON data without the charts' columns, which the record itself has."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self) if field.name != "charts"}
        plain = {name: _plain(value) for name, value in fields.items()}
        plain["charts"] = [{"key": chart.key, "title": chart.title, "summary": chart.summary} for chart in self.charts]
        return plain


def build(document: Mapping[str, Any]) -> View:
    """Turn a run record's document (`hotloop.record.load`) into what a report shows."""
    steps = read_steps(document["steps"])
    times = steps.line("seconds", "step time")
    lines = charts.metric_lines(document["metrics"])
    parts = components.components(document["components"])
    rows, left = occurrences.rows(document["events"], _extra(times))
    return View(
        headline=headline.headline(document, steps, parts, killed=record.was_killed(document)),
        cards=headline.cards(document["measurements"], steps, times, charts.metric_rows(lines)),
        charts=[*ways.charts(document), *charts.charts(steps, lines, document["events"])],
        components=parts,
        events=rows,
        events_total=len(document["events"]),
        events_left=left,
        metrics=charts.metric_rows(lines),
        measurements=_measurements(document["measurements"], times),
        told=_told(document.get("told", {})),
        settings=_rows(document["settings"]),
        environment=_rows(document["environment"]),
        decisions=_entries(document["decisions"]),
        verdicts=_entries(document["verdicts"]),
        diagnosis=ways.verdict(document) or advice.verdict(document),
        ways=advice.ways(document["measurements"]),
        advice=advice.advice(document.get("advice", ())),
        advice_left=max(0, len(document.get("advice", ())) - advice.ROWS),
    )


def _extra(times: Line) -> dict[float, float]:
    """Seconds of each slow step over the steady ones; not of the first, whose cost has many causes."""
    usual = steady(times)
    if usual is None:
        return {}
    pairs = zip(times.steps[1:], times.values[1:], strict=True)
    return {step: value - usual for step, value in pairs if value > 2 * usual}


def _measurements(known: Mapping[str, Any], times: Line) -> list[tuple[str, str]]:
    """List every measurement, the unknown ones too, and after them what the steps themselves say."""
    apart = {"ways", "bench"} if advice.ways(known) else set()  # they have a table and a chart of their own
    rest = {key: value for key, value in known.items() if key not in apart}
    rows = [(words(key), line(quantity(key, value), VALUE_LENGTH)) for key, value in flat(rest) if value is not None]
    usual = steady(times)
    if usual is not None and "steady_step_ms" not in known:
        rows.append(("Steady step (median of the later half)", quantity("_seconds", usual)))
    if times:
        rows.append((f"First step ({nth(times.steps[0])})", quantity("_seconds", times.values[0])))
        rows.append(
            ("All steps together", f"{quantity('_seconds', sum(times.values))} in {count(len(times.values), 'step')}")
        )
    return rows


def _told(values: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Give what the run said before its first step: a subject, and its lines."""
    rows = []
    for subject, value in values.items():
        lines = value if isinstance(value, list) else [value]
        said = [line(one, VALUE_LENGTH) for one in lines[:LINES]]
        said += [f"and {len(lines) - LINES:,} more lines in the record"] if len(lines) > LINES else []
        rows.append((line(words(subject), 200), "\n".join(said)))
    return rows


def _rows(values: Mapping[str, Any]) -> list[tuple[str, str]]:
    rows = [(line(key, 200), line(value, VALUE_LENGTH)) for key, value in flat(values)]
    if len(rows) > ENTRIES * 10:
        rows = [*rows[: ENTRIES * 10], ("…", f"{len(rows) - ENTRIES * 10:,} more in the record")]
    return rows


def _entries(entries: Sequence[Mapping[str, Any]]) -> list[Entry]:
    found = [_entry(entry) for entry in entries[:ENTRIES]]
    left = len(entries) - len(found)
    return [*found, Entry("…", f"{left:,} more in the record", "", ())] if left else found


def _entry(entry: Mapping[str, Any]) -> Entry:
    """Read a decision or a verdict of any shape: the first of a few usual keys names it, another says why."""
    title = next((key for key in _TITLES if entry.get(key)), None)
    said = next((key for key in ("reason", "text", "message", "summary") if entry.get(key)), None)
    # A verdict that is an event as well has the event's words.
    event = "verdict" in entry and text(entry.get("kind")) in occurrences.KINDS
    own = line(entry[said], VALUE_LENGTH) if said else ""
    apart = {title, said, "file", "line", "time"} | ({"kind", "tier", "worst", "component"} if event else set())
    values = ((key, value) for key, value in flat(entry) if key.split(".")[0] not in apart and value is not None)
    rows = [(words(key), line(quantity(key, value))) for key, value in values]
    at = moment(entry.get("time"))
    return Entry(
        title=line(entry[title], 120) if title else "",
        text=occurrences.reason(entry) if event else own,
        where=place(entry),
        rows=tuple([*rows, ("Time", at)] if at else rows),
    )


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value
