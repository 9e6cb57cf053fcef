"""A search before it begins: its space, its metric and its data, checked before a study is written."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING

from hotloop.errors import ConfigError
from hotloop.train import idle
from hotloop.train.nested import leaves, merge, nested
from hotloop.train.schema import nearest
from hotloop.train.search import space
from hotloop.train.search.trial import changed, folds_of, settings_of
from hotloop.train.settings import GROUP

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hotloop.train.program import Program
    from hotloop.train.settings import Settings


METRICS: Mapping[str, tuple[str, ...]] = {
    "criteria": ("loss", "accuracy", "f1", "precision", "recall", "auc"),
    "diffusion": ("loss",),
    "focus": ("loss", "loss_recency", "loss_random"),
}
"""The metrics of a validation of each recipe; those of a program are known after its first."""


def check(settings: Settings) -> None:
    """Compose a trial, and check what can be checked without its recipe.

    Raises:
        ConfigError: a space or settings that cannot be used.
        DataError: a file of pairs that cannot be read, or split as the settings say.
    """
    hpo, recipe = settings.hpo, settings.recipe.name
    if (settings.kfold.workers, settings.kfold.engine) != (1, "local"):
        raise ConfigError("a trial runs its folds one after another: leave kfold.workers and kfold.engine out")
    known = METRICS.get(recipe)
    if known and hpo.metric not in known:
        raise ConfigError(f"hpo.metric={hpo.metric}: a validation of recipe {recipe} gives {', '.join(known)}")
    trial = settings_of(settings, {}, Path(hpo.folder, "trials", "0000"))
    idle.refuse_idle(settings, space.varied(settings))
    if recipe == "criteria" and trial.data.source == "csv":
        for fold in folds_of(trial) or [{}]:
            importlib.import_module("hotloop.recipes").load("criteria").sides(changed(trial, fold))


def inner(settings: Settings) -> Settings:
    """Return the settings of a search within a fold, whose trials leave the fold's rows alone.

    Raises:
        ConfigError: the space or ``hpo.trial`` names the data, the folds or the run itself.
    """
    trial = [name for name, value in space.trial_changes(settings).items() if value is not None]
    wrong = [
        name
        for name in (*trial, *(one.name for one in space.parse(settings).searched))
        if space.is_within(name, space.KEPT)
    ]
    if wrong:
        kept = ", ".join(space.KEPT)
        raise ConfigError(f"{', '.join(wrong)}: a search within a fold has no say in {kept}; take it out of hpo")
    left = {name: value for name, value in settings.hpo.trial.items() if not space.is_within(name, space.KEPT)}
    return space.with_hpo(settings, trial=left, workers=1, engine="local", timeout_seconds=None, storage=None)


def prepared(settings: Settings) -> Settings:
    """Return the settings of a search as its study keeps them; those that are prepared already as they are.

    A metric that nobody names is that of ``recipe.goal``, and a direction that nobody names is the goal's. A program
    without a goal has the metric of the search for its goal, in trials and in the final run.
    A program's own settings are filled in, and so is the space that its annotations declare (``hotloop.Search``), where
    ``hpo.space`` does not name the setting.

    Raises:
        ConfigError: something in ``hpo.space``, ``hpo.trial`` or ``hpo.enqueue`` cannot be used, or nothing names a
            metric.
    """
    settings = _with_objective(settings)
    if ":" in settings.recipe.name:
        from hotloop.train import program  # noqa: PLC0415 - a program brings torch, and a recipe of ours does not

        settings = _with_program(settings, program.known(settings.recipe.name))
    searched = space.parse(settings).searched
    names = [one.name for one in searched]
    endless = [one.name for one in searched if not one.whole and one.distinct() is None]
    if settings.hpo.sampler == "grid" and endless:
        raise ConfigError(f"hpo.sampler=grid: {', '.join(endless)} has no end of values: give it choices, or a step")
    for given in settings.hpo.enqueue:
        for name, _ in space.flat(given):
            if name not in names:
                raise ConfigError(f"hpo.enqueue: {name} is not searched; {nearest(name, names)}")
    return settings


def _with_objective(settings: Settings) -> Settings:
    hpo, wanted = settings.hpo, settings.recipe.wanted
    if hpo.metric is None and wanted is None:
        raise ConfigError(
            f"hpo.metric is not set, and recipe={settings.recipe.name} has no goal: name one of the metrics that its "
            "validations give, such as hpo.metric=accuracy, or a goal, such as recipe.goal=max:accuracy"
        )
    if wanted is None and ":" in settings.recipe.name:
        goal = f"{'max' if hpo.towards == 'maximize' else 'min'}:{hpo.metric}"
        return changed(settings, {"recipe.goal": goal, "hpo.direction": hpo.towards})
    if wanted is None or hpo.metric not in (None, wanted[0]):
        return settings
    return changed(settings, {"hpo.metric": wanted[0], "hpo.direction": hpo.direction or wanted[1]})


def _with_program(settings: Settings, own: Program) -> Settings:
    named = dict(leaves(settings.hpo.space))
    missing = {}
    for one in own.parameters:
        name = f"{GROUP}.{one.name}"
        said = any(f"{leaf}.".startswith(f"{name}.") for leaf in named)
        out = any(name.startswith(f"{leaf}.") for leaf, given in named.items() if given is None)
        if one.search and not said and not out:
            missing[name] = one.search.to_dict()
    settings = space.with_hpo(settings, space=merge(dict(settings.hpo.space), nested(missing)))
    searched = {
        one.name.removeprefix(f"{GROUP}."): one.values
        for one in space.parse(settings).searched
        if space.is_within(one.name, (GROUP,))
    }
    for name, values in searched.items():
        for value in values:
            _refuse(f"hpo.space.{GROUP}.{name}", own.problems(nested({name: value})))
    _refuse("hpo.trial", own.problems(nested(dict(space.flat(settings.hpo.trial))).get(GROUP, {})))
    # A setting without a default need not be set where each trial has a value of it.
    needed = {one.name for one in own.parameters if one.required}
    drawn = nested({name: values[0] for name, values in searched.items() if name in needed})
    return settings.model_copy(update={GROUP: own.filled(merge(drawn, settings.program))})


def _refuse(where: str, problems: list[str]) -> None:
    if problems:
        raise ConfigError(f"{where}: {'; '.join(problems)}")
