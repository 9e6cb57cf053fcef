"""A cross-validation's document, ``kfold.json``: reading it, and what its report shows; pure, and without torch."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, ClassVar

from hotloop import record
from hotloop.errors import RecordError
from hotloop.report.headline import KILLED, standing, tone_of
from hotloop.report.text import count, figure, flat, line, listing, mapping, moment, number, seconds

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping, Sequence

    from hotloop.report.charts import Chart
    from hotloop.report.occurrences import Tone

DOCUMENT = "kfold.json"
SCHEMA = record.Schema(
    "document of a cross-validation", DOCUMENT, 1, lists=("folds", "contents"), mappings=("settings", "metrics")
)


@dataclasses.dataclass(frozen=True)
class FoldRow:
    """One fold: how it ended, its metrics in the table's order, and what was compiled in it."""

    fold: str
    status: str
    tone: Tone
    metrics: tuple[str, ...]
    step: str
    trained: str
    running: str
    compiles: str
    captured: str
    error: str
    chosen: str

    @classmethod
    def read(cls, entry: Mapping[str, Any], names: Sequence[str], *, killed: bool) -> FoldRow:
        """Return the row of one fold; ``names`` are the metrics of all folds."""
        status, compiled = line(entry.get("status"), 40), mapping(entry.get("compiled"))
        status = "interrupted" if killed and status == "running" else status
        trained = number(entry.get("seconds"))
        return cls(
            fold=str(entry["fold"]),
            status=status,
            tone=tone_of(status),
            metrics=tuple(_metric(_best(entry).get(name)) for name in names),
            step=_figure(entry.get("best_step" if mapping(entry.get("best")) else "last_step")),
            trained=_figure(None) if trained is None else seconds(trained),
            running=line(compiled.get("running") or _figure(None), 60),
            compiles=_figure(compiled.get("compiles")),
            captured=_figure(compiled.get("captured")),
            error=line(entry.get("error") or "", 600),
            chosen=", ".join(line(setting, 120) for setting in listing(entry.get("chosen"))),
        )


@dataclasses.dataclass(frozen=True)
class FoldsView:
    """Everything that the report of a cross-validation shows.

    ``mean`` and ``spread`` are of the folds that finished, metric by metric, the spread as a standard deviation.
    """

    template: ClassVar[str] = "folds.html.j2"
    charts: ClassVar[tuple[Chart, ...]] = ()

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
    settings: tuple[tuple[str, str], ...]

    def to_dict(self) -> dict[str, Any]:
        """Return the view as plain JSON data."""
        return dataclasses.asdict(self)


def load(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read a cross-validation's document from its folder, or by its own name.

    Raises:
        RecordError: it cannot be read, is of another kind, or of a newer schema.
    """
    document = SCHEMA.load(path)
    if not all(type(fold.get("fold")) is int for fold in document["folds"]):
        raise RecordError(f"{path} is no {SCHEMA.name}: expected a number of each fold")
    return document


def build(document: Mapping[str, Any]) -> FoldsView:
    """Return what a report shows of a cross-validation's document."""
    folds, status = document["folds"], standing(document)
    names = tuple(dict.fromkeys(line(name, 40) for fold in folds for name in _best(fold)))
    best, last = (mapping(document["metrics"].get(key)) for key in ("best", "last"))
    over = [mapping((best or last).get(name)) for name in names]
    return FoldsView(
        title=f"{line(document.get('recipe'), 80)}, {count(len(folds), 'fold')}",
        status=status,
        tone=tone_of(status),
        when=moment(document.get("created")),
        sentence=_sentence(document),
        compiled=_compiled(folds),
        names=names,
        folds=tuple(FoldRow.read(fold, names, killed=status == KILLED) for fold in folds),
        mean=tuple(_metric(metric.get("mean")) for metric in over),
        spread=tuple(_metric(metric.get("std")) for metric in over),
        settings=tuple((line(key, 200), line(value, 1000)) for key, value in flat(document["settings"])),
    )


def shares(known: Mapping[str, Any]) -> str:
    """Say how frequent each label is; of more than four labels, the rarest and the most frequent."""
    read = {line(label, 40): number(share) or 0.0 for label, share in known.items()}
    if len(read) <= 4:  # noqa: PLR2004 - as many as fit in a cell
        return ", ".join(f"{label}: {share:.1%}" for label, share in read.items())
    low, high = min(read, key=read.__getitem__), max(read, key=read.__getitem__)
    return f"{len(read)} labels, {low}: {read[low]:.1%} to {high}: {read[high]:.1%}"


def _sentence(document: Mapping[str, Any]) -> str:
    """Say how many folds ended in which way."""
    states = [line(fold.get("status"), 40) for fold in document["folds"]]
    done = states.count("finished")
    others = "".join(f", {states.count(state)} {state}" for state in dict.fromkeys(states) if state != "finished")
    said = f"{done} of {count(len(states), 'fold')} finished{others}."
    if 1 < done < len(states):
        said += f" Mean and standard deviation are of the {done} that finished."
    error = document.get("error")
    return f"{said} {line(error, 600)}" if error else said


def _compiled(folds: Sequence[Mapping[str, Any]]) -> str:
    """Say in which folds something was compiled or captured, and that the other folds reused it."""
    made, reused = [], []
    for fold in folds:
        counts = mapping(fold.get("compiled"))
        compiles, captured = (int(number(counts.get(key)) or 0) for key in ("compiles", "captured"))
        said = [count(compiles, "compile")] if compiles else []
        said += [count(captured, "captured step")] if captured else []
        if said:
            made.append(f"fold {fold['fold']}: {', '.join(said)}")
        elif counts:
            reused.append(str(fold["fold"]))
    if not made:
        return "Nothing was compiled or captured." if reused else ""
    nothing = f" Nothing in fold{'' if len(reused) == 1 else 's'} {', '.join(reused)}." if reused else ""
    return f"Compiled or captured in {'; '.join(made)}.{nothing}"


def _best(fold: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the metrics of a fold's best validation; of its last one where nothing says which is the best."""
    return mapping(fold.get("best")) or mapping(fold.get("last"))


def _figure(value: Any) -> str:
    known = number(value)
    return figure(known) if known is not None else line(value, 20)


def _metric(value: Any) -> str:
    """Return a metric with as many places as its neighbours, so that a column is easy to compare."""
    known = number(value)
    return f"{known:.4f}" if known is not None and abs(known) < 1000 else _figure(value)  # noqa: PLR2004 - a cell's width
