"""A cross-validation's document, ``kfold.json``: reading it, and what a report shows of it; pure, and without torch."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from hotloop import record
from hotloop.errors import RecordError
from hotloop.report.text import count, figure, flat, line, moment, number, seconds

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator, Sequence

    from hotloop.report.occurrences import Tone

DOCUMENT = "kfold.json"
SCHEMA_VERSION = 1
NAMED = 4
"""Up to how many labels have their shares shown one by one."""
_TONES: dict[str, Tone] = {"finished": "good", "running": "note", "pending": "note", "interrupted": "warn"}
_STYLES: dict[Tone, str] = {"good": "green", "note": "cyan", "warn": "yellow", "bad": "bold red"}
_NONE = "\N{EN DASH}"
_WIDE = 1000


@dataclasses.dataclass(frozen=True)
class FoldRow:
    """One fold: how it ended, its metrics in the table's order, and what was compiled in it."""

    fold: str
    folder: str
    status: str
    tone: Tone
    metrics: tuple[str, ...]
    step: str
    trained: str
    running: str
    compiles: str
    captured: str
    prepared: str
    error: str
    chosen: str


@dataclasses.dataclass(frozen=True)
class ContentRow:
    """What one fold trains on and holds out."""

    fold: str
    rows: str
    groups: str
    labels: str
    held_rows: str
    held_groups: str
    held_labels: str


@dataclasses.dataclass(frozen=True)
class FoldsView:
    """Everything that the report of a cross-validation shows.

    ``mean`` and ``spread`` are of the folds that finished, metric by metric, the spread as a standard deviation.
    """

    title: str
    status: str
    tone: Tone
    when: str
    sentence: str
    compiled: str
    names: tuple[str, ...]
    folds: tuple[FoldRow, ...]
    mean: tuple[str, ...]
    spread: tuple[str, ...]
    last: tuple[tuple[str, str], ...]
    contents: tuple[ContentRow, ...]
    settings: tuple[tuple[str, str], ...]

    def to_dict(self) -> dict[str, Any]:
        """Give the view as plain JSON data."""
        return dataclasses.asdict(self)


def is_cross_validation(path: Path) -> bool:
    """Say whether a path is a cross-validation's folder, or its document."""
    return (path / DOCUMENT).is_file() or (path.name == DOCUMENT and path.is_file())


def load(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read a cross-validation's document from its folder, or by its own name.

    Raises:
        RecordError: it cannot be read, is of another kind, or of a newer schema.
    """
    path = Path(path)
    path = path / DOCUMENT if path.is_dir() else path
    try:
        document = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise RecordError(f"{path} is no readable document of a cross-validation: {error}") from error
    if not isinstance(document, dict) or not _is_whole(document):
        raise RecordError(f"{path} is no document of a cross-validation: expected the one that hotloop kfold wrote")
    if document["schema"] > SCHEMA_VERSION:
        raise RecordError(
            f"{path} has schema {document['schema']}; this version of hotloop reads up to {SCHEMA_VERSION}"
        )
    return document


def _is_whole(document: Mapping[str, Any]) -> bool:
    folds, contents = document.get("folds"), document.get("contents")
    return (
        type(document.get("schema")) is int
        and isinstance(folds, list)
        and all(isinstance(one, dict) and type(one.get("fold")) is int for one in folds)
        and isinstance(contents, list)
        and all(isinstance(one, dict) for one in contents)
        and all(isinstance(document.get(name), dict) for name in ("settings", "metrics"))
    )


def build(document: Mapping[str, Any]) -> FoldsView:
    """Turn a cross-validation's document into what its report shows."""
    killed = record.was_killed(document)
    status = line(document.get("status"), 40)
    names = _names(document["folds"])
    best, last = (_mapping(document["metrics"].get(key)) for key in ("best", "last"))
    return FoldsView(
        title=f"{line(document.get('recipe'), 80)}, {count(len(document['folds']), 'fold')}",
        status="interrupted (killed)" if killed else status,
        tone="warn" if killed else _TONES.get(status, "bad"),
        when=moment(document.get("created")),
        sentence=_sentence(document),
        compiled=_compiled(document["folds"]),
        names=names,
        folds=tuple(_row(one, names, killed=killed) for one in document["folds"]),
        mean=tuple(_metric(_mapping(best.get(name)).get("mean")) for name in names),
        spread=tuple(_metric(_mapping(best.get(name)).get("std")) for name in names),
        last=tuple((name, _both(_mapping(last.get(name)))) for name in names),
        contents=tuple(_contents(fold, one) for fold, one in enumerate(document["contents"])),
        settings=tuple((line(key, 200), line(value, 1000)) for key, value in flat(document["settings"])),
    )


def _names(folds: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """Give the metrics that any fold has, in their first order."""
    return tuple(dict.fromkeys(line(name, 40) for one in folds for name in _mapping(one.get("best"))))


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _figure(value: Any) -> str:
    known = number(value)
    return figure(known) if known is not None else _NONE if value is None else line(value, 20)


def _metric(value: Any) -> str:
    """Give a metric with as many places as its neighbours, so that a column can be read down."""
    known = number(value)
    return f"{known:.4f}" if known is not None and abs(known) < _WIDE else _figure(value)


def _both(entry: Mapping[str, Any]) -> str:
    mean, std = _metric(entry.get("mean")), entry.get("std")
    return mean if std is None else f"{mean} ± {_metric(std)}"


def _sentence(document: Mapping[str, Any]) -> str:
    """Say how many folds ended how."""
    states = [line(one.get("status"), 40) for one in document["folds"]]
    done = states.count("finished")
    others = [f"{states.count(state)} {state}" for state in dict.fromkeys(states) if state != "finished"]
    said = f"{done} of {count(len(states), 'fold')} finished" + (f", {', '.join(others)}" if others else "") + "."
    if 1 < done < len(states):
        said += f" Mean and standard deviation are of the {done} that finished."
    error = document.get("error")
    return f"{said} {line(error, 600)}" if error else said


def _compiled(folds: Sequence[Mapping[str, Any]]) -> str:
    """Say in which folds something was compiled or captured, and that the others took it over."""
    ran = [one for one in folds if _mapping(one.get("compiled"))]
    made = {one["fold"]: [number(one["compiled"].get(key)) or 0 for key in ("compiles", "captured")] for one in ran}
    fresh = {fold: counts for fold, counts in made.items() if any(counts)}
    if not ran:
        return ""
    if not fresh:
        return "Nothing was compiled or captured."
    said = [f"fold {fold}: {_counts(*counts)}" for fold, counts in fresh.items()]
    rest = [str(fold) for fold in made if fold not in fresh]
    what = f"Compiled or captured in {'; '.join(said)}."
    if not rest:
        return what
    return f"{what} Nothing in fold{'' if len(rest) == 1 else 's'} {', '.join(rest)}."


def _counts(compiles: float, captured: float) -> str:
    said = [count(int(compiles), "compile")] if compiles else []
    return ", ".join([*said, *([count(int(captured), "captured step")] if captured else [])])


def _row(one: Mapping[str, Any], names: Sequence[str], *, killed: bool) -> FoldRow:
    status, compiled = line(one.get("status"), 40), _mapping(one.get("compiled"))
    status = "interrupted" if killed and status == "running" else status
    trained, prepared = number(one.get("seconds")), number(compiled.get("seconds"))
    chosen = one.get("chosen")
    return FoldRow(
        fold=str(one["fold"]),
        folder=line(one.get("folder") or "", 200),
        status=status,
        tone=_TONES.get(status, "bad"),
        metrics=tuple(_metric(_mapping(one.get("best")).get(name)) for name in names),
        step=_figure(one.get("best_step")),
        trained=seconds(trained) if trained is not None else _NONE,
        running=line(compiled.get("running") or _NONE, 60),
        compiles=_figure(compiled.get("compiles")),
        captured=_figure(compiled.get("captured")),
        prepared=seconds(prepared) if prepared else _figure(prepared),
        error=line(one.get("error") or "", 600),
        chosen=", ".join(line(each, 120) for each in chosen) if isinstance(chosen, list) else "",
    )


def _contents(fold: int, one: Mapping[str, Any]) -> ContentRow:
    cells = [_side(_mapping(one.get(name))) for name in ("train", "validation")]
    return ContentRow(str(fold), *cells[0], *cells[1])


def _side(side: Mapping[str, Any]) -> tuple[str, str, str]:
    return _figure(side.get("rows")), _figure(side.get("groups")), shares(_mapping(side.get("shares")))


def shares(known: Mapping[str, Any]) -> str:
    """Say how frequent each label is; of many labels, the rarest and the commonest."""
    read = {line(label, 40): number(share) or 0.0 for label, share in known.items()}
    if len(read) <= NAMED:
        return ", ".join(f"{label}: {share:.1%}" for label, share in read.items())
    low, high = min(read, key=lambda one: read[one]), max(read, key=lambda one: read[one])
    return f"{len(read)} labels, {low}: {read[low]:.1%} to {high}: {read[high]:.1%}"


def draw(view: FoldsView) -> RenderableType:
    """Draw a cross-validation for a terminal. Everything goes in as plain text, never as markup."""
    top = Text.assemble((view.title, "bold"), "  ", (view.status, _STYLES[view.tone]))
    if view.when:
        top.append(f"  {view.when}", style="dim")
    return Group(top, Text(view.sentence), Text(""), *_tables(view), *_after(view))


def _tables(view: FoldsView) -> Iterator[RenderableType]:
    metrics = _empty("fold", "", *view.names, "at step", "trained for")
    for row in view.folds:
        status = Text(row.status, style=_STYLES[row.tone])
        metrics.add_row(Text(row.fold), status, *(Text(cell) for cell in (*row.metrics, row.step, row.trained)))
    if view.names:
        metrics.add_row(Text("mean"), Text(""), *(Text(cell, style="bold") for cell in view.mean))
        metrics.add_row(Text("± std"), Text(""), *(Text(cell) for cell in view.spread))
    yield metrics
    compiled = _empty("fold", "ran", "compiles", "captured steps", "prepared in")
    for row in view.folds:
        compiled.add_row(*map(Text, (row.fold, row.running, row.compiles, row.captured, row.prepared)))
    yield Text("\nWhat was compiled", style="bold")
    yield compiled
    if view.compiled:
        yield Text(view.compiled)


def _empty(*names: str) -> Table:
    table = Table(box=None, header_style="dim", padding=(0, 2, 0, 0), pad_edge=False)
    for name in names:
        table.add_column(name, justify="left" if name in ("fold", "", "ran") else "right", overflow="fold")
    return table


def _after(view: FoldsView) -> Iterator[RenderableType]:
    for row in view.folds:
        if row.chosen:
            yield Text(f"fold {row.fold}: its inner search chose {row.chosen}")
        if row.error:
            yield Text(f"fold {row.fold} {row.status}: {row.error}", style=_STYLES[row.tone])
