"""A trial: an ordinary run of the recipe, or one for each fold, that tells the study of its validations."""

from __future__ import annotations

import dataclasses
import importlib
import io
import math
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hotloop.errors import SearchStoppedError
from hotloop.files import open_append
from hotloop.train import checkpoint, configure
from hotloop.train.nested import put
from hotloop.train.schema import meant
from hotloop.train.search import space
from hotloop.train.within import Within

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from hotloop.train.settings import Settings
LOG = "log.txt"


@dataclasses.dataclass(frozen=True)
class Asked:
    """What a trial is asked to do.

    Args:
        number: the trial's.
        settings: of its run, the chosen values among them.
        values: the chosen values by their dotted names.
        folder: where it leaves what it makes.
        report: takes an intermediate value with its count from 1, and raises `RunPrunedError` where that is not worth
            going on.
        runs: how many trials, this one included, are expected to share what is compiled in this process.
        stop: notes that somebody wished to stop when the trial was too far for it: the worker takes no other one.
    """

    number: int
    settings: Settings
    values: Mapping[str, Any]
    folder: Path
    report: Callable[[int, float], None]
    runs: float = 1.0
    stop: Callable[[], None] = lambda: None


def study_name(settings: Settings) -> str:
    """Return the name of a study in its storage."""
    return f"{settings.recipe.name}/{settings.hpo.name}"


def settings_of(settings: Settings, values: Mapping[str, Any], folder: Path) -> Settings:
    """Return the settings of a trial: the search's, with ``hpo.trial`` and the chosen values on top.

    Raises:
        ConfigError: values that do not fit together.
    """
    own = dict(space.flat(settings.hpo.trial))
    return changed(settings, {"hpo.storage": None, **own, **values, "run.folder": str(folder), "run.resume": None})


def best_settings(settings: Settings, values: Mapping[str, Any]) -> Settings:
    """Return the settings of the final run: the search's with the best values, without what made trials cheaper.

    Neither has the storage, which may have a password: a run writes its settings into files and loggers.
    """
    return changed(settings, {"hpo.storage": None, **values, "run.folder": None, "run.resume": None})


def changed(settings: Settings, values: Mapping[str, Any]) -> Settings:
    """Return settings with other values by dotted names, checked as a whole.

    Raises:
        ConfigError: a value that cannot be used, alone or with the others.
    """
    plain = configure.to_dict(settings)
    for name, value in values.items():
        put(plain, name, value)
    return configure.build(plain)


def train(asked: Asked) -> float:
    """Run a trial and return its objective: that of the best validation, or the mean of the folds' best ones.

    Raises:
        RunPrunedError: the trial is not worth going on with.
        KeyboardInterrupt: somebody interrupted the run.
        SearchStoppedError: the recipe's validations have no such metric.
    """
    folds = folds_of(asked.settings)
    if not folds:
        return _run(asked, asked.settings, asked.folder)
    values: list[float] = []
    for number, fold in enumerate(folds):
        folder = asked.folder / f"fold-{number}"
        settings = changed(asked.settings, {**fold, "run.folder": str(folder)})
        values.append(_run(asked, settings, folder, fold=number, folds=len(folds)))
        asked.report(number + 1, sum(values) / len(values))
    return sum(values) / len(values)


def folds_of(settings: Settings) -> list[dict[str, Any]]:
    """Return what each run of a trial has in place of the search's settings: its fold; empty where a trial is one run.

    Within an outer fold of a nested cross-validation they are the inner folds.
    """
    kfold = settings.kfold
    if kfold.n_splits and kfold.fold is None:
        return [{"kfold.fold": fold} for fold in range(kfold.n_splits)]
    if kfold.inner_trials and kfold.inner_fold is None:
        return [{"kfold.inner_fold": fold, "kfold.inner_trials": None} for fold in range(kfold.inner_splits)]
    return []


def _run(asked: Asked, settings: Settings, folder: Path, *, fold: int | None = None, folds: int = 1) -> float:
    """Train once, as the trial's run or as that of one of its folds, and return the metric of its best validation."""
    from rich.console import Console  # noqa: PLC0415 - only a process that runs trials loads torch

    from hotloop.train.start import Start  # noqa: PLC0415

    hpo, metric = settings.hpo, str(settings.hpo.metric)
    found: list[float] = []

    def validated(step: int, epoch: int, metrics: Mapping[str, float]) -> None:  # noqa: ARG001 - as Within calls it
        if metric not in metrics:
            given = f"{', '.join(metrics) or 'no metrics'}{meant(metric, metrics)}"
            raise SearchStoppedError(
                f"hpo.metric={metric}: a validation of recipe {settings.recipe.name} gives {given}"
            )
        found.append(float(metrics[metric]))
        if fold is None:
            asked.report(len(found), found[-1])

    within = Within(
        validated=validated,
        metric=f"hpo.metric={metric}",
        runs=asked.runs * folds - (fold or 0),
        study=study_name(settings),
        trial=asked.number,
        fold=fold,
        folder=Path(hpo.folder),
        keeps=lambda _: hpo.keep_checkpoints != "none",
        resume="the same hotloop hpo command, which begins this trial again",
    )
    start = Start(settings, folder, within=within)
    folder.mkdir(parents=True, exist_ok=True)
    with io.TextIOWrapper(open_append(folder / LOG), encoding="utf-8", write_through=True) as log:
        recipe = importlib.import_module("hotloop.recipes").load(settings.recipe.name)
        outcome = recipe.train(start, Console(file=log, width=120, highlight=False))
    if outcome.status == "interrupted" or (outcome.stop and fold is not None and fold + 1 < folds):
        raise KeyboardInterrupt
    if outcome.stop:
        asked.stop()
    known = [one for one in found if not math.isnan(one)]  # NaN is never the best, as for a run's best.pt
    return (max if hpo.towards == "maximize" else min)(known or found)


def drop_checkpoints(folder: Path) -> None:
    """Delete the checkpoints of a trial, those of its folds included."""
    for path in (folder, *folder.glob("fold-*")):
        shutil.rmtree(path / checkpoint.FOLDER, ignore_errors=True)
