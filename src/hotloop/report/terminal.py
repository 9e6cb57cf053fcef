"""The terminal summaries of a run, a cross-validation and a search; readable without colour and in a narrow window.

Everything from a record is drawn as plain text, never as markup.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from hotloop.report.folds import FoldsView
from hotloop.report.study import StudyView
from hotloop.report.text import figure, nth, short_place

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from hotloop.report.occurrences import EventRow, Tone
    from hotloop.report.view import View

EVENTS = 12
"""Rows of events that a terminal gets; the page has the others."""
_STYLES: dict[Tone, str] = {"good": "green", "note": "cyan", "warn": "yellow", "bad": "bold red"}


def draw(view: View | FoldsView | StudyView) -> RenderableType:
    """Draw the view of a run, a cross-validation or a search for a terminal."""
    if isinstance(view, FoldsView):
        return Group(*_folds(view))
    if isinstance(view, StudyView):
        return Group(*_study(view))
    return Group(
        *_headline(view),
        *_diagnosis(view),
        *_titled("Data and model", _pairs(view.told)),
        *_titled("What ran", _components(view)),
        *_titled("Processes", _pairs(view.processes)),
        *_titled("Measurements", _pairs(view.measurements)),
        *_titled("Metrics", _metrics(view)),
        *_titled("Decisions", _events(view.decisions, len(view.decisions))),
        *_titled("Verdicts", _events(view.verdicts, len(view.verdicts))),
        *_titled("Events, the most serious first", _events(view.events, view.events_total)),
    )


def draw_diagnosis(view: View) -> RenderableType:
    """Draw a diagnosis alone: its sentence, the ways that were measured, and the advice."""
    said = view.diagnosis or "Nothing to fix was found: the record holds no event or figure that a rule knows."
    return Group(Text(said, style="bold"), *_diagnosis(view))


def _headline(view: View) -> Iterator[RenderableType]:
    head = view.headline
    yield _top(head.title, head.status, head.tone, head.when)
    yield Text(f"{head.sentence}\n{head.verdict}")
    for note in head.notes:
        yield Text(f"! {note.text}", style=_STYLES[note.tone])


def _diagnosis(view: View) -> Iterator[RenderableType]:
    yield from _titled("Ways to run it", _ways(view))
    yield from _titled("Advice, the worst first", _advice(view))


def _ways(view: View) -> list[RenderableType]:
    rows = [(row.name, row.step, row.against, row.cold, row.peak, row.note) for row in view.ways]
    names = ("", "a step", "against eager", "to get there", "peak memory", "")
    filled = [column for column in range(len(names)) if any(row[column] for row in rows)]
    table = _table(*(names[column] for column in filled), left=("",))
    for row in rows:
        table.add_row(*(Text(row[column]) for column in filled))
    return [table] if rows else []


def _advice(view: View) -> list[RenderableType]:
    lines: list[RenderableType] = []
    for number, row in enumerate(view.advice, start=1):
        cost = (f"  {', '.join(row.costs)}" if row.costs else "", _STYLES[row.tone])
        lines.append(Text.assemble((f"{number}. {row.label}", "bold"), cost, (f"  [{row.rule}]", "dim")))
        at = ": ".join(filter(None, (row.where, row.source)))
        labelled = (("", row.what), ("at: ", at), ("why: ", row.cause), ("change: ", row.change), ("", row.remedy))
        lines += [_indented(label, value, 3) for label, value in labelled if value]
    return [*lines, *_more(view.advice_left, " in the record")]


def _components(view: View) -> list[RenderableType]:
    lines: list[RenderableType] = []
    for part in view.components:
        state = (part.state, _STYLES[part.tone])
        lines.append(Text.assemble((part.name, "bold"), "  ", state, f"  {part.sentence}"))
        if part.facts:
            lines.append(Padding(Text(" · ".join(part.facts), style="dim"), (0, 0, 0, 2)))
        for cause in part.causes:
            stage = f"[{cause.stage}] " if cause.stage else ""
            lines.append(_indented("because: ", f"{stage}{cause.reason}", 2))
            labelled = (("at: ", cause.where), ("line: ", cause.source), ("try: ", cause.hint))
            lines += [_indented(label, value, 4) for label, value in labelled if value]
        lines += _more(part.causes_left, " causes")
    return lines


def _pairs(rows: Sequence[tuple[str, str]]) -> list[RenderableType]:
    table = _table()
    table.add_column(style="dim")
    table.add_column()
    for row in rows:
        table.add_row(*map(Text, row))
    return [table] if rows else []


def _metrics(view: View) -> list[RenderableType]:
    table = _table("", "first", "best", "at step", "last", left=("",))
    for row in view.metrics:
        numbers = (figure(row.first), figure(row.best), nth(row.best_step), figure(row.last))
        table.add_row(Text(f"{row.split} {row.name}".strip()), *map(Text, numbers))
    return [table] if view.metrics else []


def _events(rows: Sequence[EventRow], total: int) -> list[RenderableType]:
    """Draw events, decisions or verdicts; the page has those that are left out, and their lines of code."""
    table = _table("cost", "what", "step", "where and why", left=("cost", "what", "where and why"))
    for row in rows[:EVENTS]:
        where = f"{short_place(row.where)}  " if row.where else ""
        why = Text.assemble((where, "dim"), row.reason, (f"\ntry: {row.hint}" if row.hint else "", "dim"))
        table.add_row(Text(row.cost), Text(row.label, style=_STYLES[row.tone]), Text(row.step), why)
    return [table, *_more(total - EVENTS)] if rows else []


def _folds(view: FoldsView) -> Iterator[RenderableType]:
    """Draw a cross-validation: its metrics, what was compiled in each fold, and what failed."""
    yield _top(view.title, view.status, view.tone, view.when)
    yield Text(f"{view.sentence}\n")
    metrics = _table("fold", "", *view.names, "at step", "trained for", "ran", left=("fold", "", "ran"))
    for row in view.folds:
        status = Text(row.status, style=_STYLES[row.tone])
        metrics.add_row(Text(row.fold), status, *map(Text, (*row.metrics, row.step, row.trained, row.running)))
    if view.names:
        metrics.add_row(Text("mean"), "", *(Text(cell, style="bold") for cell in view.mean))
        metrics.add_row(Text("± std"), "", *map(Text, view.spread))
    yield metrics
    yield Text(view.compiled)
    for row in view.folds:
        if row.chosen:
            yield Text(f"fold {row.fold}: its inner search chose {row.chosen}")
        if row.error:
            yield Text(f"fold {row.fold} {row.status}: {row.error}", style=_STYLES[row.tone])


def _study(view: StudyView) -> Iterator[RenderableType]:
    """Draw a search: its facts, the best trial, what mattered, and the ten best trials."""
    yield Text(f"{view.title}: {view.sentence}")
    yield from (Text(f"  {fact}") for fact in view.facts)
    if view.best_value is not None:
        best = "  ".join(f"{name}={value}" for name, value in view.best)
        yield Text(f"Best {view.metric} {figure(view.best_value)}: {best}")
    if view.importances:
        yield Text("What mattered: " + ", ".join(f"{name} {share:.0%}" for name, share in view.importances))
    table = Table()
    for name in ("trial", "state", view.metric, *(name.rsplit(".", 1)[-1] for name in view.names), "cause"):
        table.add_column(Text(name))
    sign = -1 if view.maximize else 1
    for row in sorted(view.trials, key=lambda row: (row.state != "complete", sign * (row.value or 0)))[:10]:
        value = "" if row.value is None else figure(row.value)
        table.add_row(*map(Text, (str(row.number), row.state, value, *row.cells, row.cause)))
    yield table


def _top(title: str, status: str, tone: Tone, when: str) -> Text:
    return Text.assemble((title, "bold"), "  ", (status, _STYLES[tone]), (f"  {when}".rstrip(), "dim"))


def _titled(title: str, content: Sequence[RenderableType]) -> Iterator[RenderableType]:
    if content:
        yield Text(f"\n{title}", style="bold")
        yield Padding(Group(*content), (0, 0, 0, 2))


def _indented(label: str, value: str, by: int) -> RenderableType:
    return Padding(Text.assemble((label, "dim"), value), (0, 0, 0, by))


def _more(left: int, of: str = "") -> list[RenderableType]:
    return [Text(f"and {left:,} more{of}", style="dim")] if left > 0 else []


def _table(*names: str, left: Sequence[str] = ()) -> Table:
    """Return an empty table without lines; columns are numbers, aligned right, unless they are in ``left``."""
    table = Table(box=None, show_header=bool(names), header_style="dim", padding=(0, 2, 0, 0), pad_edge=False)
    for name in names:
        table.add_column(name, justify="left" if name in left else "right", overflow="fold")
    return table
