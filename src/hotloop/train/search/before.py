"""What no trial could run with, found before a study is written: names and data."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING

from hotloop.errors import ConfigError
from hotloop.train import idle
from hotloop.train.search import space
from hotloop.train.search.trial import changed, folds_of, settings_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hotloop.train.settings import Settings


METRICS: Mapping[str, tuple[str, ...]] = {
    "criteria": ("loss", "accuracy", "f1", "precision", "recall", "auc"),
    "digits": ("loss", "accuracy"),
    "language": ("loss", "perplexity", "bits_per_byte"),
    "diffusion": ("loss",),
    "focus": ("loss", "loss_recency", "loss_random"),
}
"""What a validation of each recipe gives; what one of a program gives is known after its first."""


def check(settings: Settings) -> None:
    """Compose a trial, and check what can be checked without its recipe.

    Raises:
        ConfigError: a space or settings that cannot be used.
        DataError: a file of pairs that cannot be read, or split as the settings say.
    """
    searched = space.parse(settings).searched
    for name, usual in (("workers", 1), ("engine", "local")):
        if (value := getattr(settings.kfold, name)) != usual:
            raise ConfigError(
                f"kfold.{name}={value}: a trial runs its folds one after another; set hpo.{name}, which is of "
                "trials, and leave it out"
            )
    _check_metric(settings)
    _check_direction(settings)
    space.check_trial(settings)
    trial = settings_of(settings, {}, Path(settings.hpo.folder, "trials", "0000"))
    idle.refuse_idle(settings, space.varied(settings))
    names = [one.name for one in searched]
    if wrong := [one for one in names if idle.is_idle(trial, one, names)]:
        raise ConfigError(
            f"recipe={settings.recipe.name}, as it is set up here, does nothing with {', '.join(wrong)}, so that no "
            f"search can vary it: take it out, {' '.join(f'hpo.space.{one}=null' for one in wrong)}"
        )
    if settings.recipe.name == "criteria" and trial.data.source == "csv":
        for fold in folds_of(trial) or [{}]:
            importlib.import_module("hotloop.recipes").load("criteria").sides(changed(trial, fold))


def _check_metric(settings: Settings) -> None:
    """Refuse a metric that the recipe does not have.

    Raises:
        ConfigError: naming those that it has.
    """
    metric, recipe = settings.hpo.metric, settings.recipe.name
    if metric not in METRICS.get(recipe, (metric,)):
        raise ConfigError(f"hpo.metric={metric}: a validation of recipe {recipe} gives {', '.join(METRICS[recipe])}")


def _check_direction(settings: Settings) -> None:
    """Refuse a search for the worst: a metric that ``recipe.goal`` wants otherwise than the search does.

    Raises:
        ConfigError: it is so.
    """
    wanted, hpo = settings.recipe.wanted, settings.hpo
    if wanted and wanted[0] == hpo.metric and wanted[1] != hpo.towards:
        raise ConfigError(
            f"recipe.goal={settings.recipe.goal}, and this search would {hpo.towards} {hpo.metric}: set "
            f"hpo.direction={wanted[1]}, or leave it out"
        )
