"""A search's document as what a reader sees: the history, what mattered, slices, and every trial with its cause."""

from __future__ import annotations

import dataclasses
import json
import statistics
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from hotloop.errors import RecordError
from hotloop.report.charts import Chart
from hotloop.report.series import Line, aligned, line_of, thin
from hotloop.report.text import count, figure, line, moment, number, seconds, text

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from hotloop.report.occurrences import Tone

DOCUMENT = "study.json"
SCHEMA_VERSION = 1
ROWS = 2000
"""Trials that the page lists at most: the best and the last ones."""
SLICES = 24
_NONE = "\N{EN DASH}"
_TONES: dict[str, Tone] = {
    "complete": "good",
    "running": "note",
    "pruned": "note",
    "interrupted": "warn",
    "waiting": "note",
}


@dataclasses.dataclass(frozen=True)
class TrialRow:
    """One attempt of a trial."""

    number: int
    attempt: int
    state: str
    tone: Tone
    value: float | None
    cells: tuple[str, ...]
    reports: int
    seconds: str
    worker: str
    cause: str
    best: bool


@dataclasses.dataclass(frozen=True)
class ChoiceRow:
    """One choice of a setting: how many complete trials had it, and what they came to."""

    choice: str
    trials: int
    best: float
    median: float


@dataclasses.dataclass(frozen=True)
class Choices:
    """A setting with a few choices, as a table."""

    name: str
    rows: tuple[ChoiceRow, ...]


@dataclasses.dataclass(frozen=True)
class StudyView:
    """Everything that is shown of a search."""

    title: str
    status: str
    tone: Tone
    sentence: str
    facts: tuple[str, ...]
    metric: str
    maximize: bool
    best: tuple[tuple[str, str], ...]
    best_value: float | None
    importances: tuple[tuple[str, float], ...]
    names: tuple[str, ...]
    charts: tuple[Chart, ...]
    choices: tuple[Choices, ...]
    trials: tuple[TrialRow, ...]
    trials_left_out: int

    def to_dict(self) -> dict[str, Any]:
        """Give what is in words and numbers as plain data; charts are the page's."""
        plain = dataclasses.asdict(dataclasses.replace(self, charts=()))
        del plain["charts"]
        return plain


def is_study(path: Path) -> bool:
    """Say whether a path is a search's folder, or its document."""
    return path.name == DOCUMENT or (path / DOCUMENT).is_file()


def load(path: Path) -> dict[str, Any]:
    """Read a search's document.

    Raises:
        RecordError: it cannot be read, or is none of this version.
    """
    path = path if path.name == DOCUMENT else path / DOCUMENT
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise RecordError(f"{path} cannot be read as the document of a search: {error}") from error
    if (
        not isinstance(found, dict)
        or found.get("schema") != SCHEMA_VERSION
        or not isinstance(found.get("trials"), list)
    ):
        raise RecordError(f"{path} is no document of a search that this version of hotloop reads")
    document: dict[str, Any] = found
    return document


def build(document: Mapping[str, Any]) -> StudyView:
    """Make what is shown of a document; whatever in it is of another type than it should be is left out."""
    attempts = [one for one in document["trials"] if isinstance(one, Mapping)]
    space = document.get("space") if isinstance(document.get("space"), Mapping) else {}
    assert isinstance(space, Mapping)
    names = tuple(line(name, 80) for name in space)
    maximize = document.get("direction") != "minimize"
    complete = [one for one in attempts if one.get("state") == "complete" and number(one.get("value")) is not None]
    ordered = sorted(complete, key=lambda one: float(one["value"]), reverse=maximize)
    best = next((one for one in ordered if one.get("number") == document.get("best")), None)
    shown = _listed(attempts, ordered)
    left = number(document.get("left")) or 0
    metric = line(document.get("metric"), 60)
    return StudyView(
        title=f"Search {line(document.get('name'), 80)}",
        status="open" if left else "finished",
        tone="note" if left else "good",
        sentence=_sentence(document, attempts, left),
        facts=tuple(_facts(document)),
        metric=metric,
        maximize=maximize,
        best=tuple((line(key, 80), line(value, 80)) for key, value in _values(best).items()) if best else (),
        best_value=number(best["value"]) if best else None,
        importances=_importances(document),
        names=names,
        charts=tuple(_charts(complete, space, metric, maximize=maximize)),
        choices=tuple(_choices(complete, space, maximize=maximize)),
        trials=tuple(_row(one, tuple(space), best) for one in shown),
        trials_left_out=len(attempts) - len(shown),
    )


def _listed(attempts: list[Mapping[str, Any]], ordered: list[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Choose the attempts to list: all of them, or the best and the last where they are too many for a page."""
    if len(attempts) <= ROWS:
        return attempts
    kept = {id(one) for one in [*ordered[: ROWS // 2], *attempts[-ROWS // 2 :]]}
    return [one for one in attempts if id(one) in kept]


def _sentence(document: Mapping[str, Any], attempts: list[Mapping[str, Any]], left: float) -> str:
    states = [line(one.get("state"), 40) for one in attempts]
    found = ", ".join(f"{states.count(state):,} {state}" for state in dict.fromkeys(states)) or "none was begun"
    wanted = number(document.get("n_trials")) or 0
    rest = f"; {count(int(left), 'trial')} left" if left else ""
    return f"{count(int(wanted), 'trial')}: {found}{rest}."


def _facts(document: Mapping[str, Any]) -> Iterable[str]:
    yield f"{line(document.get('direction'), 20)} {line(document.get('metric'), 60)}"
    yield f"sampler {line(document.get('sampler'), 40)}, pruner {line(document.get('pruner'), 40)}"
    yield f"kept in {line(document.get('storage'), 200)}"
    changed = document.get("trial_settings")
    if isinstance(changed, Mapping) and changed:
        yield "in trials alone: " + ", ".join(f"{line(key, 80)}={_given(value)}" for key, value in changed.items())
    if written := moment(document.get("written")):
        yield f"as of {written}"


def _given(value: Any) -> str:
    return "null" if value is None else line(value, 80)


def _importances(document: Mapping[str, Any]) -> tuple[tuple[str, float], ...]:
    given = document.get("importances")
    known = [(line(key, 80), number(value)) for key, value in given.items()] if isinstance(given, Mapping) else []
    return tuple(sorted(((key, value) for key, value in known if value is not None), key=lambda one: -one[1]))


def _values(one: Mapping[str, Any]) -> Mapping[str, Any]:
    values = one.get("values")
    return values if isinstance(values, Mapping) else {}


def _row(one: Mapping[str, Any], names: tuple[str, ...], best: Mapping[str, Any] | None) -> TrialRow:
    state, took = line(one.get("state"), 40), number(one.get("seconds"))
    reports = one.get("reports")
    return TrialRow(
        number=int(number(one.get("number")) or 0),
        attempt=int(number(one.get("attempt")) or 1),
        state=state,
        tone=_TONES.get(state, "bad"),
        value=number(one.get("value")),
        cells=tuple(_cell(_values(one), name) for name in names),
        reports=len(reports) if isinstance(reports, list) else 0,
        seconds="" if took is None else seconds(took),
        worker=line(one.get("worker") or "", 80),
        cause=line(one.get("cause") or "", 1000),
        best=one is best,
    )


def _cell(values: Mapping[str, Any], name: str) -> str:
    if name not in values:
        return _NONE
    known = number(values[name])
    return line(values[name], 60) if known is None else figure(known)


def _charts(
    complete: list[Mapping[str, Any]], space: Mapping[str, Any], metric: str, *, maximize: bool
) -> Iterable[Chart]:
    """Draw the history, and a slice for each setting that is a number of a range."""
    if not complete:
        return
    history = [(float(number(one.get("number")) or 0), float(one["value"])) for one in complete]
    values = line_of(metric, history)
    so_far: list[float] = []
    for value in values.values:
        so_far.append(value if not so_far else (max if maximize else min)(so_far[-1], value))
    yield _chart("history", "History", [values, Line("best so far", values.steps, tuple(so_far))], "trial", wide=True)
    for place, (name, about) in enumerate(list(space.items())[:SLICES]):
        if not isinstance(about, Mapping) or about.get("kind") == "choices":
            continue
        points = ((number(_values(one).get(name)), float(one["value"])) for one in complete)
        slice_ = line_of(metric, [(at, value) for at, value in points if at is not None])
        if slice_:
            logarithmic = about.get("kind") == "log" and slice_.steps[0] > 0
            yield _chart(f"slice-{place}", line(name, 80), [slice_], line(name, 80), axis_log=logarithmic)


def _chart(key: str, title: str, lines: list[Line], axis: str, **others: Any) -> Chart:
    steps, columns = aligned([thin(one) for one in lines])
    first = lines[0]
    low, high = figure(min(first.values)), figure(max(first.values))
    summary = f"{first.name} of {count(len(first.values), 'trial')}, from {low} to {high}"
    styles = ["dots", "line"][: len(lines)]
    names = [one.name for one in lines]
    return Chart(key, title, "", summary, steps, names, columns, styles, apart=True, axis=axis, **others)


def _choices(complete: list[Mapping[str, Any]], space: Mapping[str, Any], *, maximize: bool) -> Iterable[Choices]:
    for name, about in space.items():
        if not isinstance(about, Mapping) or about.get("kind") != "choices":
            continue
        found: dict[str, list[float]] = {}
        for one in complete:
            if name in _values(one):
                found.setdefault(text(_values(one)[name]), []).append(float(one["value"]))
        rows = [
            ChoiceRow(line(choice, 80), len(values), (max if maximize else min)(values), statistics.median(values))
            for choice, values in found.items()
        ]
        if rows:
            yield Choices(line(name, 80), tuple(sorted(rows, key=lambda row: row.median, reverse=maximize)))
