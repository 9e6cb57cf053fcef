"""The terminal summary: view data as a Rich renderable, readable without colour and in a narrow window."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from hotloop.report.text import figure, nth, seconds, short_place
from hotloop.report.view import Entry, View, build

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from hotloop.report.advice import AdviceRow
    from hotloop.report.charts import Chart
    from hotloop.report.components import Component
    from hotloop.report.occurrences import EventRow, Tone

EVENTS = 12
"""Rows of events that a terminal gets; the page has the others."""
FIGURES = 3
"""Figures of a decision that a terminal gets beside its reason; the page has the others."""
_STYLES: dict[Tone, str] = {"good": "green", "note": "cyan", "warn": "yellow", "bad": "bold red"}
_BARS = "▁▂▃▄▅▆▇█"
_SPARK = 48


def summary(document: Mapping[str, Any]) -> RenderableType:
    """Sum a run record up for a terminal.

    Args:
        document: a run record's document (`hotloop.record.load`).
    """
    return draw(build(document))


def draw(view: View) -> RenderableType:
    """Draw view data for a terminal. Everything from the record goes in as plain text, never as markup."""
    sections = [
        ("", _headline(view)),
        *_diagnosis(view),
        ("Data and model", _pairs(view.told)),
        ("What ran", _components(view.components)),
        ("Measurements", _pairs(view.measurements)),
        ("Metrics", _metrics(view)),
        ("Over the steps", _sparks(view.charts)),
        ("Decisions", _entries(view.decisions)),
        ("Verdicts", _entries(view.verdicts)),
        ("Events, the costliest first", _events(view)),
    ]
    return Group(*_titled(sections))


def draw_diagnosis(view: View) -> RenderableType:
    """Draw what a diagnosis is about: its sentence, the ways that were measured, and the advice."""
    said = view.diagnosis or "Nothing to mend was found: the record holds no event or figure that a rule knows."
    return Group(Text(said, style="bold"), *_titled(_diagnosis(view)))


def _diagnosis(view: View) -> list[tuple[str, RenderableType | None]]:
    return [("Ways to run it", _ways(view)), ("Advice, the worst first", _advice(view))]


def _ways(view: View) -> RenderableType | None:
    if not view.ways:
        return None
    rows = [(row.name, row.step, row.against, row.cold, row.peak, row.note) for row in view.ways]
    names = ("", "a step", "against eager", "to get there", "peak memory", "")
    kept = [index for index in range(len(names)) if any(row[index] for row in rows)]
    table = Table(box=None, header_style="dim", padding=(0, 2, 0, 0), pad_edge=False)
    for index in kept:
        table.add_column(names[index], justify="right" if names[index] else "left", overflow="fold")
    for row in rows:
        table.add_row(*(Text(row[index]) for index in kept))
    return table


def _advice(view: View) -> RenderableType | None:
    if not view.advice:
        return None
    said = [each for number, row in enumerate(view.advice, start=1) for each in _piece(number, row)]
    left = [Text(f"and {view.advice_left:,} more in the record", style="dim")] if view.advice_left else []
    return Group(*said, *left)


def _piece(number: int, row: AdviceRow) -> Iterator[RenderableType]:
    cost = f"  {', '.join(row.costs)}" if row.costs else ""
    yield Text.assemble((f"{number}. {row.label}", "bold"), (cost, _STYLES[row.tone]), (f"  [{row.rule}]", "dim"))
    for label, value in (
        ("", row.what),
        ("at: ", f"{row.where}{': ' if row.source else ''}{row.source}" if row.where else row.source),
        ("why: ", row.cause),
        ("change: ", row.change),
        ("", row.remedy),
    ):
        if value:
            yield Padding(Text.assemble((label, "dim"), value), (0, 0, 0, 3))


def _titled(sections: Iterable[tuple[str, RenderableType | None]]) -> Iterator[RenderableType]:
    for title, content in sections:
        if content is None:
            continue
        if title:
            yield Text(f"\n{title}", style="bold")
        yield Padding(content, (0, 0, 0, 2)) if title else content


def _headline(view: View) -> RenderableType:
    head = view.headline
    top = Text.assemble((head.title, "bold"), "  ", (head.status, _STYLES[head.tone]))
    if head.when:
        top.append(f"  {head.when}", style="dim")
    said = [top, Text(head.sentence), Text(head.verdict)]
    return Group(*said, *(Text(f"! {note.text}", style=_STYLES[note.tone]) for note in head.notes))


def _components(parts: Sequence[Component]) -> RenderableType | None:
    if not parts:
        return None
    return Group(*(each for part in parts for each in _component(part)))


def _component(part: Component) -> Iterator[RenderableType]:
    yield Text.assemble((part.name, "bold"), "  ", (part.state, _STYLES[part.tone]), f"  {part.sentence}")
    if part.facts:
        yield Padding(Text(" · ".join(part.facts), style="dim"), (0, 0, 0, 2))
    for cause in part.causes:
        stage = f"[{cause.stage}] " if cause.stage else ""
        yield Padding(Text(f"because: {stage}{cause.reason}"), (0, 0, 0, 2))
        for label, value in (("at", cause.where), ("line", cause.source), ("try", cause.hint)):
            if value:
                yield Padding(Text.assemble((f"{label}: ", "dim"), value), (0, 0, 0, 4))
    if part.causes_left:
        yield Padding(Text(f"and {part.causes_left:,} more causes", style="dim"), (0, 0, 0, 2))


def _pairs(rows: Sequence[tuple[str, str]]) -> RenderableType | None:
    if not rows:
        return None
    table = _table()
    table.add_column(style="dim")
    table.add_column()
    for key, value in rows:
        table.add_row(Text(key), Text(value))
    return table


def _metrics(view: View) -> RenderableType | None:
    if not view.metrics:
        return None
    table = _table("", "first", "best", "at step", "last")
    for row in view.metrics:
        numbers = (figure(row.first), figure(row.best), nth(row.best_step), figure(row.last))
        table.add_row(Text(f"{row.split} {row.name}".strip()), *map(Text, numbers))
    return table


def _sparks(charts: Sequence[Chart]) -> RenderableType | None:
    """Draw the loss and the step time as one line of bars each; the peaks of a stretch stand for it."""
    table = _table()
    for chart in charts:
        if chart.key in {"loss", "step-time"}:
            values = [value for value in chart.columns[0] if value is not None]
            shown = seconds if chart.unit == "s" else figure
            bounds = f"{shown(min(values))} to {shown(max(values))}"
            table.add_row(Text(chart.title, style="dim"), Text(spark(values), style="cyan"), Text(bounds))
    return table if table.row_count else None


def spark(values: Sequence[float], width: int = _SPARK) -> str:
    """Draw values as one line of bars, the largest of each stretch."""
    many = len(values)
    cells = min(width, many)
    peaks = [max(values[i * many // cells : (i + 1) * many // cells]) for i in range(cells)]
    low, high = min(peaks), max(peaks)
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BARS[round((peak - low) * scale)] for peak in peaks)


def _entries(entries: Sequence[Entry]) -> RenderableType | None:
    if not entries:
        return None
    lines = []
    for entry in entries:
        rest = ", ".join(f"{key.lower()} {value}" for key, value in entry.rows[:FIGURES])
        rest += ", …" if len(entry.rows) > FIGURES else ""
        lines.append(
            Text.assemble((entry.title, "bold"), "  ", entry.text, (f"  {entry.where} {rest}".rstrip(), "dim"))
        )
    return Group(*lines)


def _events(view: View) -> RenderableType | None:
    if not view.events:
        return None
    table = _table("cost", "", "what", "step", "where and why")
    for row in view.events[:EVENTS]:
        table.add_row(*_event(row))
    left = len(view.events) - EVENTS + view.events_left
    return Group(table, Text(f"and {left:,} more", style="dim")) if left > 0 else table


def _event(row: EventRow) -> list[Text]:
    where = f"{short_place(row.where)}  " if row.where else ""
    return [
        Text(row.cost_text),
        Text(f"{row.count:,}\N{MULTIPLICATION SIGN}" if row.count > 1 else ""),
        Text(row.label, style=_STYLES[row.tone]),
        Text(row.steps),
        Text.assemble((where, "dim"), row.reason, (f"\ntry: {row.hint}" if row.hint else "", "dim")),
    ]


def _table(*headers: str) -> Table:
    table = Table(box=None, show_header=bool(headers), header_style="dim", padding=(0, 2, 0, 0), pad_edge=False)
    for name in headers:
        number = name in {"cost", "", "step", "first", "best", "at step", "last"} and name != headers[0]
        table.add_column(name, justify="right" if number else "left", overflow="fold")
    return table
