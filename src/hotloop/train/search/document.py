"""A study as one JSON document: what its report and its readers need, without Optuna and without its storage."""

from __future__ import annotations

import contextlib
import math
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hotloop.errors import ConfigError, RecordError, SearchStoppedError
from hotloop.files import whole
from hotloop.record import SUBMITTED
from hotloop.report import study as report
from hotloop.train import conf_files, configure
from hotloop.train.optional import require
from hotloop.train.search import space
from hotloop.train.search.study import CAUSE, WORKER, Study, default_url, masked
from hotloop.train.search.trial import best_settings, study_name

if TYPE_CHECKING:
    import optuna

    from hotloop.train.settings import Settings

BEST, SETTINGS = "best.yaml", "study.yaml"
STORED = (report.DOCUMENT, BEST)
"""What goes to ``run.storage``: the settings may have a password."""
EVERY_SECONDS = 5.0
_ENOUGH = 4
"""Complete trials from which importances are estimated."""


def build(study: Study, *, importances: bool = True) -> dict[str, Any]:
    """Return the document of a study as its storage has it now."""
    settings, every = study.settings, study.trials()
    best, repeated = study.best(every), {one.number for one in study.standing(every)}
    return {
        "schema": report.SCHEMA.version,
        "kind": "study",
        "name": study_name(settings),
        "storage": masked(study.url),
        "written": time.time(),
        "submitted": os.environ.get(SUBMITTED),
        "metric": settings.hpo.metric,
        "direction": settings.hpo.towards,
        "sampler": settings.hpo.sampler,
        "pruner": settings.hpo.pruner,
        "n_trials": settings.hpo.n_trials,
        "left": study.left(every),
        "space": {
            one.name: {"kind": one.kind, "values": list(one.values), "step": one.step, "when": one.when}
            for one in study.space.searched
        },
        "trial_settings": space.trial_changes(settings),
        "best": None if best is None else best.number,
        "importances": _importances(study, every) if importances else {},
        "trials": [_trial(one, stands=one.number in repeated) for one in every if one.state.name != "WAITING"],
    }


def write(study: Study, *, importances: bool = True) -> dict[str, Any]:
    """Write the document and, where there is a best trial, its settings into the study's folder.

    Importances take seconds where there are many trials, so that they are left out while the search goes on.
    A full disk leaves those that are there.
    """
    found = build(study, importances=importances)
    with contextlib.suppress(OSError):
        report.SCHEMA.write(study.folder, found, shared=True)
        if found["best"] is not None:
            _write(study.folder / BEST, best_settings(study.settings, best_values(found)))
    return found


def check_folder(settings: Settings, folder: Path) -> None:
    """Refuse a folder whose trials are of another study, or of one that its storage has lost.

    Raises:
        ConfigError: another study is kept there.
        SearchStoppedError: its document has trials, and SQLite's file is gone; a new one would have them run again.
    """
    try:
        found = report.SCHEMA.load(folder)
    except RecordError:
        return  # nothing is there, or nothing that anybody can read
    if found["name"] != study_name(settings):
        raise ConfigError(
            f"hpo.folder={folder} holds the study {found['name']}, and this is {study_name(settings)}: their trials "
            "would be in the same folders. Name a folder of its own: hpo.folder=..."
        )
    file = Path(default_url(folder).removeprefix("sqlite:///"))
    if settings.hpo.storage is None and found["trials"] and not file.is_file():
        raise SearchStoppedError(
            f"{file} is not there any more, and has the {len(found['trials'])} trials that {folder / report.DOCUMENT} "
            "lists: put it back, and the same command goes on; or search anew in another folder, hpo.folder=..."
        )


def write_settings(settings: Settings, folder: Path) -> None:
    """Write the settings that a study is opened with; for its owner alone where a password is among them.

    Raises:
        OSError: the folder cannot be written.
    """
    url = settings.hpo.storage
    secret = url is not None and masked(url) != url
    _write(folder / SETTINGS, settings, mode=0o600 if secret else 0o666)


def read_settings(folder: Path) -> Settings:
    """Read the settings that a study was opened with, as they are: what the command took out of a group stays out.

    Raises:
        ConfigError: they cannot be read.
    """
    return configure.from_dict(conf_files.read(folder / SETTINGS))


def refresh(folder: Path) -> tuple[dict[str, Any], str]:
    """Bring a study's document up to date with its storage, and give it with a note where that was not possible.

    Raises:
        ConfigError: the folder holds no study.
        RecordError: its storage is gone, and its document cannot be read.
    """
    if not (folder / SETTINGS).is_file():
        raise ConfigError(
            f"{folder} holds no study: expected the folder of a search, with {SETTINGS} in it; `hotloop hpo` begins "
            "one, and `hotloop hpo best FOLDER` names another"
        )
    settings = read_settings(folder)
    try:
        check_folder(settings, folder)
        return write(Study(settings, folder)), ""
    except (SearchStoppedError, ConfigError) as error:
        found = report.SCHEMA.load(folder)
        return found, f"As of {time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(found['written']))}: {error}"


def best_values(found: dict[str, Any], number: int | None = None) -> dict[str, Any]:
    """Return the values of the best trial, or of the trial of a number.

    Raises:
        SearchStoppedError: no trial is complete.
        ConfigError: the trial is not complete, or there is none of this number.
    """
    if found["best"] is None:
        raise SearchStoppedError(
            f"study {found['name']} has no complete trial yet: {len(found['trials'])} were begun; see hotloop report"
        )
    complete = {one["number"]: one for one in found["trials"] if one["state"] == "complete"}
    best = complete.get(found["best"] if number is None else number)
    if best is None:
        raise ConfigError(f"--trial {number}: no complete trial of study {found['name']} has this number")
    values: dict[str, Any] = best["values"]
    return values


def write_best(folder: Path, found: dict[str, Any], number: int | None = None) -> tuple[Settings, Path]:
    """Write the settings that train as the best trial did, or the trial of a number, and return them with their file.

    Raises:
        SearchStoppedError: no trial is complete.
    """
    settings = best_settings(read_settings(folder), best_values(found, number))
    _write(folder / BEST, settings)
    return settings, folder / BEST


def _trial(one: optuna.trial.FrozenTrial, *, stands: bool) -> dict[str, Any]:
    worker, states = one.user_attrs.get(WORKER) or {}, {"FAIL": "failed" if stands else "interrupted"}
    return {
        "number": one.number,
        "attempt": 1 + len(one.system_attrs.get("retry_history", ())),
        "state": states.get(one.state.name, one.state.name.lower()),
        "value": _finite(one.value),
        "cause": one.user_attrs.get(CAUSE, "" if one.state.name != "FAIL" else "its worker died"),
        "values": dict(one.params),
        "reports": [[step, _finite(value)] for step, value in sorted(one.intermediate_values.items())],
        "began": one.datetime_start.timestamp() if one.datetime_start else None,
        "seconds": one.duration.total_seconds() if one.duration else None,
        "worker": f"{worker.get('host', '')} {worker.get('pid', '')}".strip(),
    }


def _importances(study: Study, every: list[optuna.trial.FrozenTrial]) -> dict[str, float]:
    """Estimate each setting's share of the variance of the objective; empty where there is too little to tell."""
    importance: Any = require("optuna", "hotloop hpo", "search").importance
    values = {one.value for one in every if one.state.name == "COMPLETE"}
    if len(values) < _ENOUGH:
        return {}
    try:
        evaluator = importance.FanovaImportanceEvaluator(seed=0, n_trees=32)
        found = importance.get_param_importances(study.study, evaluator=evaluator)
    except (RuntimeError, ValueError):  # a space in which no two trials share a setting has none
        return {}
    return {key: float(value) for key, value in found.items() if math.isfinite(value)}


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _write(path: Path, settings: Settings, mode: int = 0o666) -> None:
    with whole(path, shared=True, mode=mode) as file:
        file.write(configure.to_yaml(settings).encode())
