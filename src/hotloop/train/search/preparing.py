"""A search before it begins: what a program says of its own settings, values to try first, and how many a grid has."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from hotloop.errors import ConfigError
from hotloop.train.nested import merge, nested
from hotloop.train.schema import members, nearest
from hotloop.train.search import space
from hotloop.train.search.given import grid
from hotloop.train.search.trial import changed
from hotloop.train.settings import GROUP

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hotloop.train.program import Program
    from hotloop.train.search.space import Searched
    from hotloop.train.settings import Settings


def prepared(settings: Settings) -> Settings:
    """Return the settings of a search as its study keeps them; those that are prepared already as they are.

    A metric that nobody names is that of ``recipe.goal``, and a direction that nobody names is the goal's. A program
    without a goal has the metric of the search for its goal, in trials and in the final run.
    A program's own settings are filled in, and so is the space that its annotations declare (``hotloop.Search``), where
    ``hpo.space`` does not name the setting. A grid has no more trials than combinations. With several
    metrics nothing is pruned.

    Raises:
        ConfigError: listing what cannot be used in ``hpo.space``, ``hpo.trial`` or ``hpo.enqueue``, or that nothing
            names a metric.
    """
    settings = _with_objective(settings)
    if ":" in settings.recipe.name:
        from hotloop.train import program  # noqa: PLC0415 - a program brings torch, and a recipe of ours does not

        settings = _with_program(settings, program.known(settings.recipe.name))
    if settings.hpo.also:  # no trial is cut short for one metric that may be the best by another
        settings = space.with_hpo(settings, pruner="none")
    searched = space.parse(settings)
    if wrong := list(_enqueued(settings, searched.searched)):
        raise ConfigError("\n".join(wrong))
    if settings.hpo.sampler != "grid":
        return settings
    first, most = len(settings.hpo.enqueue), settings.hpo.n_trials
    trials = first + sum(1 for _ in itertools.islice(grid(searched, settings), max(0, most - first)))
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
