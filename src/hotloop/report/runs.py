"""Runs, cross-validations and searches as rows of a list: what ran, how it ended, what came of it; without torch."""

from __future__ import annotations

import dataclasses
import json
import os
from typing import TYPE_CHECKING, Any

from hotloop import files, record
from hotloop.errors import ConfigError, RecordError
from hotloop.report import folds, study
from hotloop.report.charts import MetricRow, metric_lines
from hotloop.report.headline import late
from hotloop.report.text import count, flat, line, moment, number

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

RUN, FOLDS, SEARCH, UNKNOWN = "run", "cross-validation", "search", "unknown"
SETTINGS, STUDY_SETTINGS = "settings.yaml", "study.yaml"
ON_CLUSTER = "on cluster"
FETCHED = "submit-run.json"
"""The file of a fetched folder that says where its run is, and how it was doing when it was fetched or resumed last."""
_ENDED = ("finished", "failed", "stopped", "lost")
"""How a run is doing by its cluster's word once its process is gone."""
_FIGURES = ("steady_step_ms", "samples_per_second", "cold_seconds", "compile_seconds", "peak_memory_bytes")
_DEEPEST = 6
"""Levels of folders below the one that is listed in which runs are looked for."""


@dataclasses.dataclass(frozen=True)
class Row:
    """One folder of a list. What is not known is None, or empty.

    Args:
        folder: of the run.
        kind: ``run``, ``cross-validation``, ``search``, or ``unknown`` for a folder that is none of these.
        status: ``finished``, ``running``, ``on cluster`` (where it ran when it was fetched), ``interrupted``,
            ``failed``, ``pruned`` or ``killed`` (it says that it runs, and its process is gone); of a search with
            trials left ``open``; ``unreadable`` where ``problem`` says why.
        recipe: the recipe or the program.
        created: seconds since the epoch.
        steps: optimizer steps that were done.
        loss: of the training, the mean of its last twentieth.
        metric: the metric that says which validation is the best.
        best: its best value; of a cross-validation the mean over its folds.
        tier: what ran: ``eager``, a preset or a tier.
        problem: what is wrong with the folder or its record, or the error that ended the run.
        place: where a run is that was running on a cluster when it was fetched, and what knows more.
        members: the number of folds, or of trials that are over or run; one that was interrupted is open again.
        settings: the settings that it read, by their dotted names.
        figures: its metrics and measurements, by name.
        writer: where its record says ``running``, what `record.was_killed` asks: its process may end at any time.
    """

    folder: Path
    kind: str = RUN
    status: str = "unreadable"
    recipe: str = ""
    created: float | None = None
    steps: int | None = None
    loss: float | None = None
    metric: str = ""
    best: float | None = None
    tier: str = ""
    problem: str = ""
    place: str = ""
    members: int | None = None
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    figures: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    writer: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def to_dict(self, *, whole: bool = True) -> dict[str, Any]:
        """Return the row as plain data; without ``whole``, its settings and figures are left out."""
        left_out = ("writer",) if whole else ("writer", "settings", "figures")
        return {key: value for key, value in {**vars(self), "folder": str(self.folder)}.items() if key not in left_out}


def kind_of(folder: Path) -> str:
    """Return what a folder holds, by the names of its files."""
    if folds.SCHEMA.is_at(folder):
        return FOLDS
    if any((folder / name).is_file() for name in (study.DOCUMENT, STUDY_SETTINGS)):
        return SEARCH
    return RUN if any((folder / name).is_file() for name in (record.LINES, record.DOCUMENT, SETTINGS)) else UNKNOWN


def find(folder: Path) -> list[Row]:
    """Return a row of each run below a folder, the newest first; of a cross-validation or a search, of its members.

    Links to folders are not followed, and folders without any run are left out.
    """
    kind = kind_of(folder)
    if kind == RUN:
        return [read(folder)]
    found = members(folder) if kind in (FOLDS, SEARCH) else [read(path) for path in _below(folder, _DEEPEST)]
    return sorted(found, key=lambda one: one.created or 0.0, reverse=True)


def members(folder: Path) -> list[Row]:
    """Return a row of each fold of a cross-validation, or of each trial of a search, in their order."""
    return [read(path) for path in member_folders(folder)]


def member_folders(folder: Path) -> list[Path]:
    """Return the folders of a cross-validation's folds, or of a search's trials, in their order."""
    places = {FOLDS: (folder, "fold-"), SEARCH: (folder / "trials", "")}.get(kind_of(folder))
    if places is None:
        return []
    inside = [path for path in _folders(places[0]) if path.name.startswith(places[1])]
    return sorted(inside, key=lambda path: (len(path.name), path.name))


def read(folder: Path) -> Row:
    """Return the row of one folder; what cannot be read of it is said in the row."""
    kind = kind_of(folder)
    try:
        if kind == FOLDS:
            return _folds(folder, folds.load(folder))
        if kind == SEARCH:
            return _search(folder, study.SCHEMA.load(folder))
        if kind == RUN:
            return row(folder, record.load(folder))
    except RecordError as error:
        begun = (folder / SETTINGS).is_file() and not any(
            (folder / n).exists() for n in (record.LINES, record.DOCUMENT)
        )
        told = "it was stopped before its first record was written" if begun else line(str(error), 300)
        return Row(folder, kind, problem=told)
    return Row(folder, kind, problem="no run, cross-validation or search: no record of any in it")


def known(folder: Path) -> Row:
    """Return the row of a folder that holds a run.

    Raises:
        ConfigError: there is no such folder, or it is no run.
    """
    if not folder.is_dir():
        raise ConfigError(f"run {folder}: no such folder; `hotloop runs list` names those below runs/")
    found = read(folder)
    if found.kind == UNKNOWN:
        raise ConfigError(f"{folder} is {found.problem}; `hotloop runs list` names those below runs/")
    return found


def _best_trial(document: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the attempt of a search's best trial that is complete; empty where there is none."""
    attempts = (one for one in document["trials"] if isinstance(one, dict))
    whole = (one for one in attempts if one.get("number") == document.get("best") and one.get("state") == "complete")
    return next(whole, {})


def _folders(folder: Path) -> list[Path]:
    """List the folders in a folder, without links and hidden ones; none where it cannot be read."""
    try:
        with os.scandir(folder) as entries:
            inside = [one.name for one in entries if one.is_dir(follow_symlinks=False) and not one.name.startswith(".")]
    except OSError:
        return []
    return [folder / name for name in sorted(inside)]


def _below(folder: Path, deepest: int) -> Iterator[Path]:
    """Yield the runs below a folder."""
    for path in _folders(folder):
        if kind_of(path) != UNKNOWN:
            yield path
        elif deepest:
            yield from _below(path, deepest - 1)


def row(folder: Path, document: Mapping[str, Any]) -> Row:
    """Return the row of a run by its record's document."""
    settings, measured = dict(flat(document["settings"])), document["measurements"]
    metrics = [MetricRow.of(one) for one in metric_lines(document["metrics"])]
    validation = [one for one in metrics if one.split == "validation"] or metrics
    metric, best, at = _best(document, settings.get("recipe.goal") or measured.get("goal"), validation)
    last = document["steps"][-1] if document["steps"] else {}
    done = number(measured.get("steps_done")) or number(last.get("step")) or len(document["steps"])
    tiers = [last.get("running"), *(one.get("running") for one in document["components"].values())]
    tier = next(filter(None, tiers), "")
    losses = [loss for one in document["steps"] if (loss := number(one.get("loss"))) is not None]
    tail = late(losses)
    unread = number(document.get("unread_lines"))
    problems = [f"{count(int(unread), 'line')} of its record cannot be read"] if unread else []
    problems += [line(document["error"], 300)] if document.get("error") else []
    status, place = _standing(folder, document)
    return Row(
        folder=folder,
        status=status,
        recipe=line(settings.get("recipe.name") or "", 200),
        created=number(document.get("created")),
        steps=int(done),
        loss=sum(tail) / len(tail) if tail else None,
        metric=line(metric, 60),
        best=best,
        tier="eager" if tier == "none" else line(tier, 60),
        problem="; ".join(problems),
        place=place,
        settings=settings,
        figures={**{one.name: _at(document["metrics"], one, at) for one in validation}, **_figures(document)},
        writer=_writer(document),
    )


def _best(document: Mapping[str, Any], goal: Any, validation: list[MetricRow]) -> tuple[str, float | None, Any]:
    """Return the metric that judges a run, its best value, and the step of that: by its goal, else the first metric."""
    direction, _, wanted = goal.partition(":") if isinstance(goal, str) else ("", "", "")
    entries = [one for one in document["metrics"] if wanted and number(one.get(wanted)) is not None]
    if entries:
        choose = min if direction == "min" else max
        chosen = choose(entries, key=lambda one: number(one[wanted]) or 0.0)
        return wanted, number(chosen[wanted]), number(chosen.get("step"))
    return (validation[0].name, validation[0].best, validation[0].best_step) if validation else ("", None, None)


def _at(entries: list[Mapping[str, Any]], metric: MetricRow, step: float | None) -> float:
    """Return a metric of the validation at a step; else its last value."""
    values = (number(one.get(metric.name)) for one in entries if step is not None and number(one.get("step")) == step)
    return next((value for value in values if value is not None), metric.last)


def _figures(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return how long a run took, and its measurements."""
    begun, ended = number(document.get("created")), number(document.get("finished") or document.get("updated"))
    idle, measured = number(document.get("idle_seconds")) or 0.0, document["measurements"]
    took = {"seconds": ended - begun - idle} if begun is not None and ended is not None else {}
    return {**took, **{name: measured[name] for name in _FIGURES if number(measured.get(name)) is not None}}


def _standing(folder: Path, document: Mapping[str, Any]) -> tuple[str, str]:
    """Return the status of a run or a cross-validation; if its process is not of this machine, also where it is."""
    status = "killed" if record.was_killed(document) else line(document.get("status"), 40)
    name = record.on_cluster(document)
    if status != "running" or not name:
        return status, ""
    known = next(filter(None, map(_fetched, fetched_files(folder))), {})
    if known.get("run") != name:
        return ON_CLUSTER, f"on a cluster: where it was submitted, `hotloop submit status {name}` says how it is doing"
    then, when = line(known.get("status"), 40), moment(known.get("fetched"))
    where = f"on {line(known.get('address'), 200)}, {then} at {when}"
    if then in _ENDED:
        return "killed", f"{where}. `hotloop submit resume {name}` goes on with it"
    return ON_CLUSTER, f"{where}. `hotloop submit fetch {name}` brings what is new"


def fetched_files(folder: Path) -> list[Path]:
    """Return where a fetch may have said how a run was doing: in its folder, or in that of its folds or search."""
    return [one / FETCHED for one in (folder, *folder.absolute().parents[:3])]


def _fetched(path: Path) -> dict[str, Any]:
    """Return what the last fetch knew of its run; empty where nothing was fetched."""
    try:
        found = json.loads(files.read(path))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _writer(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return what `record.was_killed` asks of a record; nothing where the record says that it ended."""
    names = ("status", "pid", "host", "submitted", "process_started") if document.get("status") == "running" else ()
    return {name: document.get(name) for name in names}


def _folds(folder: Path, document: Mapping[str, Any]) -> Row:
    inside = members(folder)
    settings = next((one.settings for one in inside if one.settings), dict(flat(document["settings"])))
    over = document["metrics"].get("best") or document["metrics"].get("last")
    known = over.items() if isinstance(over, dict) else ()
    means = {line(name, 60): number(one.get("mean")) for name, one in known if isinstance(one, dict)}
    # A recipe may judge its runs by a goal of its own, which stands in the folds' records.
    metric = next((one.metric for one in inside if one.metric in means), next(iter(means), ""))
    ran = [one["compiled"].get("running") for one in document["folds"] if isinstance(one.get("compiled"), dict)]
    status, place = _standing(folder, document)
    return Row(
        folder=folder,
        kind=FOLDS,
        status=status,
        recipe=line(document.get("recipe") or "", 200),
        created=number(document.get("created")),
        steps=int(sum(number(one.get("step")) or 0.0 for one in document["folds"])),
        metric=metric,
        best=means.get(metric),
        tier=", ".join(dict.fromkeys(line(one, 60) for one in ran if one)),
        problem=line(document["error"], 300) if document.get("error") else "",
        place=place,
        members=len(document["folds"]),
        settings={name: value for name, value in settings.items() if name != "kfold.fold"},
        figures=means,
        writer=_writer(document),
    )


def _search(folder: Path, document: Mapping[str, Any]) -> Row:
    attempts = [one for one in document["trials"] if isinstance(one, dict)]
    best, metric = _best_trial(document), line(document.get("metric") or "", 60)
    began = [at for one in attempts if (at := number(one.get("began"))) is not None]
    inside = members(folder) if any(one.get("state") == "running" for one in attempts) else []
    works = next((one for one in inside if one.status in ("running", ON_CLUSTER)), None)
    status, place = (works.status, works.place) if works else ("finished", "")
    if works is None and number(document.get("left")):
        status, place = _standing(folder, {"status": "running", "submitted": document.get("submitted")})
        status = status if status == ON_CLUSTER else "open"
    value, chosen = number(best.get("value")), best.get("values")
    return Row(
        folder=folder,
        kind=SEARCH,
        status=status,
        recipe=line(str(document.get("name") or "").rpartition("/")[0], 200),  # behind it is hpo.name
        created=min(began, default=number(document.get("written"))),
        metric=metric,
        best=value,
        place=place,
        members=len({number(one.get("number")) for one in attempts if one.get("state") not in ("interrupted", "died")}),
        settings=dict(flat(chosen)) if isinstance(chosen, dict) else {},
        figures={} if value is None else {metric: value},
    )


def beside(columns: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Return what each of several mappings has for a name, for all names in their first order."""
    names = dict.fromkeys(name for one in columns for name in one)
    return {name: [one.get(name) for one in columns] for name in names}
