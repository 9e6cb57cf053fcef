"""A search before it begins: its space, its metric and its data, checked before a study is written."""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hotloop.errors import ConfigError
from hotloop.train import idle
from hotloop.train.nested import merge, nested
from hotloop.train.schema import members, nearest
from hotloop.train.search import space
from hotloop.train.search.trial import changed, folds_of, settings_of
from hotloop.train.settings import GROUP

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hotloop.train.program import Program
    from hotloop.train.search.space import Searched
    from hotloop.train.settings import Settings


METRICS: Mapping[str, tuple[str, ...]] = {
    "criteria": ("loss", "accuracy", "f1", "precision", "recall", "auc"),
    "digits": ("loss", "accuracy"),
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
    hpo, recipe, wanted = settings.hpo, settings.recipe.name, settings.recipe.wanted
    searched = space.parse(settings).searched
    for name, usual in (("workers", 1), ("engine", "local")):
        if (value := getattr(settings.kfold, name)) != usual:
            raise ConfigError(f"kfold.{name}={value}: a trial runs its folds one after another; set hpo.{name} instead")
    if hpo.metric not in METRICS.get(recipe, (hpo.metric,)):
        raise ConfigError(
            f"hpo.metric={hpo.metric}: a validation of recipe {recipe} gives {', '.join(METRICS[recipe])}"
        )
    if wanted and wanted[0] == hpo.metric and wanted[1] != hpo.towards:
        raise ConfigError(
            f"recipe.goal={settings.recipe.goal}, and this search would {hpo.towards} {hpo.metric}: set "
            f"hpo.direction={wanted[1]}, or leave it out"
        )
    space.check_trial(settings)
    trial = settings_of(settings, {}, Path(hpo.folder, "trials", "0000"))
    idle.refuse_idle(settings, space.varied(settings))
    names = [one.name for one in searched]
    if wrong := [one for one in names if idle.is_idle(trial, one, names)]:
        raise ConfigError(
            f"recipe={recipe}, as it is set up here, does nothing with {', '.join(wrong)}, so that no search can vary "
            f"it: take it out, {' '.join(f'hpo.space.{one}=null' for one in wrong)}"
        )
    if recipe == "criteria" and trial.data.source == "csv":
        for fold in folds_of(trial) or [{}]:
            importlib.import_module("hotloop.recipes").load("criteria").sides(changed(trial, fold))


def inner(settings: Settings) -> Settings:
    """Return the settings of a search within a fold, whose ``hpo.trial`` leaves the fold's rows alone.

    Raises:
        ConfigError: the space or ``hpo.trial`` names the data, the folds or the run itself, or ``hpo`` asks for what a
            search within a fold has not.
    """
    hpo = settings.hpo
    without = {"workers": 1, "engine": "local", "timeout_seconds": None, "storage": None}
    for name, only in without.items():
        if getattr(hpo, name) != only:
            raise ConfigError(
                f"hpo.{name} has no effect on a search within a fold, which runs kfold.inner_trials trials in this "
                f"process and keeps them in the fold's folder: set {space.override(f'hpo.{name}', only)}"
            )
    space.parse(settings)
    space.check_trial(settings)
    changes = [f"hpo.space.{name}=null" for name, value in hpo.space.items() if value is not None and _is_kept(name)]
    for name, value in space.flat(hpo.trial):
        own = space.value_of(name, {}, settings)
        if _is_kept(name) and value != own and not (name == "kfold.fold" and value is None):
            changes.append(space.override(f"hpo.trial.{name}", own))
    if changes:
        raise ConfigError(
            f"{changes[0].split('=')[0]}: a search within a fold has no say in {', '.join(space.KEPT)}: the folds "
            f"would then hold other rows. Leave it out, or set {' '.join(changes)}"
        )
    trial = {name: value for name, value in hpo.trial.items() if not _is_kept(name)}
    return space.with_hpo(settings, trial=trial)


def _is_kept(name: str) -> bool:
    return name.split(".", 1)[0] in space.KEPT


def prepared(settings: Settings) -> Settings:
    """Return the settings of a search as its study keeps them; those that are prepared already as they are.

    A metric that nobody names is that of ``recipe.goal``, and a direction that nobody names is the goal's. A program
    without a goal has the metric of the search for its goal, in trials and in the final run.
    A program's own settings are filled in, and so is the space that its annotations declare (``hotloop.Search``), where
    ``hpo.space`` does not name the setting. A grid has no more trials than combinations.

    Raises:
        ConfigError: listing what cannot be used in ``hpo.space``, ``hpo.trial`` or ``hpo.enqueue``, or that nothing
            names a metric.
    """
    settings = _with_objective(settings)
    if ":" in settings.recipe.name:
        from hotloop.train import program  # noqa: PLC0415 - a program brings torch, and a recipe of ours does not

        settings = _with_program(settings, program.known(settings.recipe.name))
    searched = space.parse(settings)
    if wrong := list(_enqueued(settings, searched.searched)):
        raise ConfigError("\n".join(wrong))
    if settings.hpo.sampler != "grid":
        return settings
    first, most = len(settings.hpo.enqueue), settings.hpo.n_trials
    trials = first + sum(1 for _ in itertools.islice(space.grid(searched, settings), max(0, most - first)))
    return space.with_hpo(settings, n_trials=min(most, trials))


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
    declared = [(f"{GROUP}.{one.name}", one.search.to_dict()) for one in own.parameters if one.search]
    named = dict(_named(settings.hpo.space))
    out = [name for name, given in named.items() if given is None]  # a setting, or a whole group of them
    missing = nested({name: given for name, given in declared if name not in named and not space.is_within(name, out)})
    settings = space.with_hpo(settings, space=_with_decimals(merge(dict(settings.hpo.space), missing), own))
    searched = [one for one in space.parse(settings).searched if one.name.startswith(f"{GROUP}.")]
    wrong = [text for one in searched for text in _wrong(one, own)]
    trial = nested(dict(space.flat(settings.hpo.trial)))
    wrong += [f"hpo.trial: {text}" for text in own.problems(trial.get(GROUP, {}))]
    if wrong:
        raise ConfigError("\n".join(wrong))
    # A setting without a default need not be set where each trial has a value of it.
    needed = {f"{GROUP}.{one.name}" for one in own.parameters if one.required}
    drawn = nested({one.name: one.values[0] for one in searched if one.name in needed})
    return settings.model_copy(update={GROUP: own.filled(merge(drawn.get(GROUP, {}), settings.program))})


def _with_decimals(given: Mapping[str, Any], own: Program, prefix: str = "") -> dict[str, Any]:
    """Return a space in which ends of ``log`` that a program takes as numbers are no integers: they would be drawn."""
    found = dict(given)
    for key, value in given.items():
        name = f"{prefix}{key}"
        if not isinstance(value, Mapping):
            continue
        parameter = own.of(name.removeprefix(f"{GROUP}.")) if name.startswith(f"{GROUP}.") else None
        ends = value.get("log")
        if parameter is None:
            found[key] = _with_decimals(value, own, f"{name}.")
        elif isinstance(ends, list | tuple) and float in members(parameter.kind) and {*map(type, ends)} == {int}:
            found[key] = {**value, "log": [float(end) for end in ends]}
    return found


def _wrong(one: Searched, own: Program) -> Iterator[str]:
    """Say why a program's setting cannot vary as the space says."""
    bare, label = one.name.removeprefix(f"{GROUP}."), f"hpo.space.{one.name}"
    parameter = own.of(bare)
    if parameter is None:
        yield f"{label}: unknown setting; {own.nearest(bare)}"
        return
    kinds = members(parameter.kind)
    if int in kinds and float not in kinds and (one.kind == "float" or (one.kind == "log" and not one.whole)):
        ends = "expected two integers" if one.kind == "log" else "use int, log or choices"
        yield f"{label}.{one.kind}: {one.name} takes an integer: {ends}"
        return
    for value in one.values:
        yield from (f"{label}.{one.kind}: {text}" for text in own.problems(nested({bare: value})))
    for name, allowed in one.when.items():
        for value in allowed if name.startswith(f"{GROUP}.") else ():
            under = nested({name.removeprefix(f"{GROUP}."): value})
            yield from (f"{label}.when: {text}" for text in own.problems(under))


def _enqueued(settings: Settings, searched: tuple[Searched, ...]) -> Iterator[str]:
    """Say what cannot be used of the values to try first."""
    by_name = {one.name: one for one in searched}
    for place, given in enumerate(settings.hpo.enqueue):
        for name, value in space.flat(given):
            if name not in by_name:
                yield f"hpo.enqueue[{place}].{name}: it is not searched; {nearest(name, by_name)}"
            elif not by_name[name].holds(value):
                expected = f"{by_name[name].kind} {list(by_name[name].values)}"
                yield f"hpo.enqueue[{place}].{name}={value!r}: expected a value of its space, {expected}"


def _named(given: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Walk what a space says of a program's settings, those included that it takes out, by name."""
    for key, value in given.items():
        yield f"{prefix}{key}", value
        if isinstance(value, Mapping):
            yield from _named(value, f"{prefix}{key}.")
