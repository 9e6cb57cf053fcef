"""A study as one JSON document: what its report and its readers need, without Optuna and without its storage."""

from __future__ import annotations

import math
import os
import time
from typing import TYPE_CHECKING, Any

from hotloop.errors import ConfigError, RecordError, SearchStoppedError
from hotloop.files import whole
from hotloop.record import SUBMITTED
from hotloop.report import study as report
from hotloop.train import conf_files, configure
from hotloop.train.optional import require
from hotloop.train.search import space
from hotloop.train.search.study import CAUSE, FILE, WORKER, Study, history, masked
from hotloop.train.search.trial import best_settings, study_name

if TYPE_CHECKING:
    from pathlib import Path

    import optuna

    from hotloop.train.settings import Settings

BEST, SETTINGS = "best.yaml", "study.yaml"
STORED = (report.DOCUMENT, BEST)
"""What goes to ``run.storage``: the settings may have a password."""
_ENOUGH = 4
"""Complete trials from which importances are estimated."""


def build(study: Study, *, importances: bool = True) -> dict[str, Any]:
    """Return the document of a study as its storage has it now."""
    settings, every, best = study.settings, study.trials(), study.best()
    standing = {one.number for one in study.standing(every)}
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
        "left": study.left(),
        "space": {
            one.name: {"kind": one.kind, "values": list(one.values), "step": one.step, "when": one.when}
            for one in study.space.searched
        },
        "trial_settings": space.trial_changes(settings),
        "best": None if best is None else best.number,
        "importances": _importances(study, every) if importances else {},
        "trials": [_trial(one, stands=one.number in standing) for one in every if one.state.name != "WAITING"],
    }


def write(study: Study, *, importances: bool = True) -> dict[str, Any]:
    """Write the document and, where there is a best trial, its settings into the study's folder.

    Importances take seconds where there are many trials, so that they are left out while the search goes on.
    """
    found = build(study, importances=importances)
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
        raise ConfigError(f"hpo.folder={folder} holds the study {found['name']}: name another hpo.folder")
    if settings.hpo.storage is None and found["trials"] and not (folder / FILE).is_file():
        raise SearchStoppedError(
            f"{folder / FILE} is not there any more, and has the trials that {report.DOCUMENT} lists: put it back, or "
            "search anew in another folder, hpo.folder=..."
        )


def write_settings(settings: Settings, folder: Path) -> None:
    """Write the settings that a study is opened with; for its owner alone where a password is among them.

    Raises:
        OSError: the folder cannot be written.
    """
    url = settings.hpo.storage
    secret = url is not None and masked(url) != url
    _write(folder / SETTINGS, settings, mode=0o600 if secret else 0o666)


def refresh(folder: Path) -> tuple[dict[str, Any], str]:
    """Bring a study's document up to date with its storage, and give it with a note where that was not possible.

    Raises:
        ConfigError: the folder holds no study.
        RecordError: its storage is gone, and its document cannot be read.
    """
    if not (folder / SETTINGS).is_file():
        raise ConfigError(f"{folder} holds no study: expected the folder of a search, with {SETTINGS} in it")
    settings = configure.from_dict(conf_files.read(folder / SETTINGS))
    try:
        check_folder(settings, folder)
        return write(Study(settings, folder)), ""
    except (SearchStoppedError, ConfigError) as error:
        found = report.SCHEMA.load(folder)
        return found, f"As of {time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(found['written']))}: {error}"


def best_values(found: dict[str, Any]) -> dict[str, Any]:
    """Return the values of the best trial.

    Raises:
        SearchStoppedError: no trial is complete.
    """
    if found["best"] is None:
        raise SearchStoppedError(f"study {found['name']} has no complete trial yet; see hotloop report")
    values: dict[str, Any] = next(one for one in found["trials"] if one["number"] == found["best"])["values"]
    return values


def _trial(one: optuna.trial.FrozenTrial, *, stands: bool) -> dict[str, Any]:
    worker, states = one.user_attrs.get(WORKER) or {}, {"FAIL": "failed" if stands else "interrupted"}
    return {
        "number": one.number,
        "attempt": 1 + len(history(one)),
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
    if len({one.value for one in every if one.state.name == "COMPLETE"}) < _ENOUGH:
        return {}
    try:
        found = importance.get_param_importances(
            study.study, evaluator=importance.FanovaImportanceEvaluator(seed=0, n_trees=32)
        )
    except (RuntimeError, ValueError):  # a space in which no two trials share a setting has none
        return {}
    return {key: float(value) for key, value in found.items() if math.isfinite(value)}


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _write(path: Path, settings: Settings, mode: int = 0o666) -> None:
    with whole(path, shared=True, mode=mode) as file:
        file.write(configure.to_yaml(settings).encode())
