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
from hotloop.report.text import figure, nth, seconds, short_place

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from hotloop.report.occurrences import Tone
    from hotloop.report.view import Entry, View

EVENTS = 12
"""Rows of events that a terminal gets; the page has the others."""
_STYLES: dict[Tone, str] = {"good": "green", "note": "cyan", "warn": "yellow", "bad": "bold red"}


def draw(view: View | FoldsView | StudyView) -> RenderableType:
    """Draw the view of a run, a cross-validation or a search for a terminal."""
    if isinstance(view, FoldsView):
        return Group(*_folds(view))
    if isinstance(view, StudyView):
        return Group(*_study(view))
    run = _RunDrawing(view)
    sections = [
        ("", run.headline()),
        *run.diagnosis(),
        ("Data and model", run.pairs(view.told)),
        ("What ran", run.components()),
        ("Processes", run.pairs(view.processes)),
        ("Measurements", run.pairs(view.measurements)),
        ("Metrics", run.metrics()),
        ("Over the steps", run.sparks()),
        ("Decisions", run.entries(view.decisions)),
        ("Verdicts", run.entries(view.verdicts)),
        ("Events, the costliest first", run.events()),
    ]
    return Group(*_titled(sections))


def draw_diagnosis(view: View) -> RenderableType:
    """Draw a diagnosis alone: its sentence, the ways that were measured, and the advice."""
    said = view.diagnosis or "Nothing to fix was found: the record holds no event or figure that a rule knows."
    return Group(Text(said, style="bold"), *_titled(_RunDrawing(view).diagnosis()))


def spark(values: Sequence[float], width: int = 48) -> str:
    """Return values as one line of bars, each the largest of its stretch."""
    bars = "▁▂▃▄▅▆▇█"
    many = len(values)
    cells = min(width, many)
    peaks = [max(values[i * many // cells : (i + 1) * many // cells]) for i in range(cells)]
    low, high = min(peaks), max(peaks)
    scale = (len(bars) - 1) / (high - low) if high > low else 0.0
    return "".join(bars[round((peak - low) * scale)] for peak in peaks)


class _RunDrawing:
    """The sections of a run's summary; a section with nothing in it is None."""

    def __init__(self, view: View) -> None:
        self.view = view

    def headline(self) -> RenderableType:
        head = self.view.headline
        notes = (Text(f"! {note.text}", style=_STYLES[note.tone]) for note in head.notes)
        return Group(
            _top(head.title, head.status, head.tone, head.when), Text(head.sentence), Text(head.verdict), *notes
        )

    def diagnosis(self) -> list[tuple[str, RenderableType | None]]:
        return [("Ways to run it", self.ways()), ("Advice, the worst first", self.advice())]

    def ways(self) -> RenderableType | None:
        rows = [(row.name, row.step, row.against, row.cold, row.peak, row.note) for row in self.view.ways]
        names = ("", "a step", "against eager", "to get there", "peak memory", "")
        filled = [column for column in range(len(names)) if any(row[column] for row in rows)]
        table = _table(*(names[column] for column in filled), left=("",))
        for row in rows:
            table.add_row(*(Text(row[column]) for column in filled))
        return table if rows else None

    def advice(self) -> RenderableType | None:
        lines: list[RenderableType] = []
        for number, row in enumerate(self.view.advice, start=1):
            cost = f"  {', '.join(row.costs)}" if row.costs else ""
            label = (f"{number}. {row.label}", "bold")
            lines.append(Text.assemble(label, (cost, _STYLES[row.tone]), (f"  [{row.rule}]", "dim")))
            at = f"{row.where}{': ' if row.source else ''}{row.source}" if row.where else row.source
            labelled = (("", row.what), ("at: ", at), ("why: ", row.cause), ("change: ", row.change), ("", row.remedy))
            lines += [Padding(Text.assemble((label, "dim"), value), (0, 0, 0, 3)) for label, value in labelled if value]
        if self.view.advice_left:
            lines.append(Text(f"and {self.view.advice_left:,} more in the record", style="dim"))
        return Group(*lines) if lines else None

    def components(self) -> RenderableType | None:
        lines: list[RenderableType] = []
        for part in self.view.components:
            lines.append(
                Text.assemble((part.name, "bold"), "  ", (part.state, _STYLES[part.tone]), f"  {part.sentence}")
            )
            if part.facts:
                lines.append(Padding(Text(" · ".join(part.facts), style="dim"), (0, 0, 0, 2)))
            for cause in part.causes:
                stage = f"[{cause.stage}] " if cause.stage else ""
                lines.append(Padding(Text(f"because: {stage}{cause.reason}"), (0, 0, 0, 2)))
                for label, value in (("at", cause.where), ("line", cause.source), ("try", cause.hint)):
                    if value:
                        lines.append(Padding(Text.assemble((f"{label}: ", "dim"), value), (0, 0, 0, 4)))
            if part.causes_left:
                lines.append(Padding(Text(f"and {part.causes_left:,} more causes", style="dim"), (0, 0, 0, 2)))
        return Group(*lines) if lines else None

    def pairs(self, rows: Sequence[tuple[str, str]]) -> RenderableType | None:
        table = _table()
        table.add_column(style="dim")
        table.add_column()
        for key, value in rows:
            table.add_row(Text(key), Text(value))
        return table if rows else None

    def metrics(self) -> RenderableType | None:
        table = _table("", "first", "best", "at step", "last", left=("",))
        for row in self.view.metrics:
            numbers = (figure(row.first), figure(row.best), nth(row.best_step), figure(row.last))
            table.add_row(Text(f"{row.split} {row.name}".strip()), *map(Text, numbers))
        return table if self.view.metrics else None

    def sparks(self) -> RenderableType | None:
        """Draw the loss and the step time as one line of bars each."""
        table = _table()
        for chart in self.view.charts:
            if chart.key in {"loss", "step-time"}:
                values = [value for value in chart.columns[0] if value is not None]
                shown = seconds if chart.unit == "s" else figure
                bounds = f"{shown(min(values))} to {shown(max(values))}"
                table.add_row(Text(chart.title, style="dim"), Text(spark(values), style="cyan"), Text(bounds))
        return table if table.row_count else None

    def entries(self, entries: Sequence[Entry]) -> RenderableType | None:
        """Draw decisions or verdicts, each with its first three figures; the page has the others."""
        lines = []
        for entry in entries:
            figures = [f"{key.lower()} {value}" for key, value in entry.rows]
            rest = ", ".join(figures if len(figures) <= 3 else [*figures[:3], "…"])  # noqa: PLR2004 - see above
            where = (f"  {entry.where} {rest}".rstrip(), "dim")
            lines.append(Text.assemble((entry.title, "bold"), "  ", entry.text, where))
        return Group(*lines) if lines else None

    def events(self) -> RenderableType | None:
        view = self.view
        table = _table("cost", "", "what", "step", "where and why", left=("cost", "what", "where and why"))
        for row in view.events[:EVENTS]:
            where = f"{short_place(row.where)}  " if row.where else ""
            table.add_row(
                Text(row.cost_text),
                Text(f"{row.count:,}\N{MULTIPLICATION SIGN}" if row.count > 1 else ""),
                Text(row.label, style=_STYLES[row.tone]),
                Text(row.steps),
                Text.assemble((where, "dim"), row.reason, (f"\ntry: {row.hint}" if row.hint else "", "dim")),
            )
        left = len(view.events) - EVENTS + view.events_left
        if left > 0:
            return Group(table, Text(f"and {left:,} more", style="dim"))
        return table if view.events else None


def _folds(view: FoldsView) -> Iterator[RenderableType]:
    """Draw a cross-validation: its metrics, what was compiled in each fold, and what failed."""
    yield _top(view.title, view.status, view.tone, view.when)
    yield Text(f"{view.sentence}\n")
    metrics = _table("fold", "", *view.names, "at step", "trained for", left=("fold", ""))
    for row in view.folds:
        status = Text(row.status, style=_STYLES[row.tone])
        metrics.add_row(Text(row.fold), status, *map(Text, (*row.metrics, row.step, row.trained)))
    if view.names:
        metrics.add_row(Text("mean"), Text(""), *(Text(cell, style="bold") for cell in view.mean))
        metrics.add_row(Text("± std"), Text(""), *map(Text, view.spread))
    yield metrics
    compiled = _table("fold", "ran", "compiles", "captured steps", "prepared in", left=("fold", "ran"))
    for row in view.folds:
        compiled.add_row(*map(Text, (row.fold, row.running, row.compiles, row.captured, row.prepared)))
    yield Text("\nWhat was compiled", style="bold")
    yield compiled
    if view.compiled:
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
    top = Text.assemble((title, "bold"), "  ", (status, _STYLES[tone]))
    return top.append(f"  {when}", style="dim") if when else top


def _titled(sections: Iterable[tuple[str, RenderableType | None]]) -> Iterator[RenderableType]:
    for title, content in sections:
        if content is None:
            continue
        if title:
            yield Text(f"\n{title}", style="bold")
        yield Padding(content, (0, 0, 0, 2)) if title else content


def _table(*names: str, left: Sequence[str] = ()) -> Table:
    """Return an empty table without lines; columns are numbers, aligned right, unless they are in ``left``."""
    table = Table(box=None, show_header=bool(names), header_style="dim", padding=(0, 2, 0, 0), pad_edge=False)
    for name in names:
        table.add_column(name, justify="left" if name in left else "right", overflow="fold")
    return table
