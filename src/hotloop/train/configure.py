"""Settings from the command line: the groups in ``conf/``, a file of the user's own, and overrides."""

from __future__ import annotations

import contextvars
import copy
import functools
import importlib.metadata
import os
import re
import shlex
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Any, get_args

from hotloop.errors import ConfigError
from hotloop.record import SUBMITTED
from hotloop.train import conf_files, grammar, nested, schema, storage
from hotloop.train.conf_files import groups
from hotloop.train.scope import ALONE, RECIPES, has
from hotloop.train.settings import GROUP, HpoSettings, Settings

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from hotloop.train.program import Program

ENTRY_POINTS = "hotloop.recipes"
"""The group of entry points, ``name = "module:function"``, by which a package ships a program as a recipe."""
runs_programs = contextvars.ContextVar("runs_programs", default=True)
"""Whether a program's file may run in this process, to judge its settings; in a server it may not."""


def load(overrides: Sequence[str] = (), config: str | Path | None = None) -> Settings:
    """Compose the settings of a run.

    Args:
        overrides: ``a.b=c`` and group choices (``data=csv``); later ones win.
        config: a YAML file whose settings lie between the defaults and the overrides, or a folder of groups
            (``data/mine.yaml``) that adds choices.

    Raises:
        ConfigError: an override, a key, a group choice or a value that cannot be used, with what was expected.
    """
    return build(compose(overrides, config))


def build(values: Mapping[str, Any]) -> Settings:
    """Make the settings of plain values, those of their recipe.

    Raises:
        ConfigError: listing every setting that is unknown, missing, of a wrong type or out of its range; those of a
            program are looked at only where others are wrong, so that all are said at once.
    """
    try:
        return schema.build(model(_recipe(values)), values)
    except ConfigError as error:
        own = _program(str(values["recipe"]["name"]))
        if own is None:
            raise
        wrong = schema.problems(error.__cause__, model(_recipe(values)), values, also=_names(own))
        raise ConfigError("\n".join([one.text for one in wrong] + own.problems(values.get(GROUP, {})))) from error


def _program(name: str) -> Program | None:
    """Return a program of the user's own; None for a recipe, and where no program may run."""
    if ":" not in name or not runs_programs.get():
        return None
    from hotloop.train import program  # noqa: PLC0415 - loads torch

    return program.known(name)


def _names(program: Program) -> list[str]:
    return [f"{GROUP}.{one.name}" for one in program.parameters]


@functools.cache
def model(recipe: str) -> type[Settings]:
    """Return the model of a recipe's settings, with its defaults, and with what each is for."""
    usual = schema.build(Settings, _resolved(conf_files.composed({"recipe": recipe})))
    name = f"recipe={recipe}" if recipe != "workload" else "a program of your own"
    return schema.of_recipe(Settings, name, functools.partial(has, recipe), usual, conf_files.comments())


def _recipe(values: Mapping[str, Any]) -> str:
    """Return the choice of the group ``recipe`` that settings are of; a name that there is none of is refused later."""
    own = values.get("recipe")
    name = recipe_choice(str(own.get("name"))) if isinstance(own, dict) else ""
    return name if name in RECIPES else "criteria"


def load_search(overrides: Sequence[str] = (), config: str | Path | None = None) -> Settings:
    """Compose the settings of a search, in which those that the user names are as named: by overrides or in a file.

    What ``hpo.trial`` would set otherwise for trials is left out of it, and the setting is out of the space, unless the
    user says it of ``hpo.trial`` and ``hpo.space`` themselves.

    Raises:
        ConfigError: as `load`.
    """
    composed = compose(overrides, config)
    named_keys = (text.partition("=")[0].strip().lstrip("+~") for text in overrides)
    keys = [*_written(config), *(one for one in named_keys if "." in one)]  # the others are choices
    for text in overrides:  # what a program declares is not there yet to be taken out
        if text.startswith(f"~hpo.space.{GROUP}"):
            nested.put(composed["hpo"]["space"], text.removeprefix("~hpo.space."), None)
    for key in keys:
        for part, at in (("trial", composed["hpo"]["trial"]), ("space", composed["hpo"]["space"])):
            named = f"hpo.{part}.{key}"
            if any(f"{one}.".startswith(f"{named}.") or named.startswith(f"{one}.") for one in keys):
                continue
            if part == "trial":
                nested.drop(at, key)
            # What a program says of its space is put into it later.
            elif key.startswith(f"{GROUP}.") or any(f"{one}.".startswith(f"{key}.") for one, _ in nested.leaves(at)):
                nested.put(at, key, None)
    return build(composed)


def _written(config: str | Path | None) -> list[str]:
    """Name the settings in a file of the user's; none in one that hotloop wrote, which has all there are."""
    path = Path(config) if config else None
    written = conf_files.read(path, named=True) if path and _is_one_file(path) else {}
    search = written.get("hpo")
    all_named = isinstance(search, dict) and set(search) >= set(HpoSettings.model_fields)
    return [] if all_named else [name for name, _ in nested.leaves(written) if "." in name]


def compose(overrides: Sequence[str] = (), config: str | Path | None = None) -> dict[str, Any]:
    """Compose the settings as plain data, before their types are checked: those that the recipe has."""
    path = Path(config) if config else None
    if path and not path.exists():
        raise ConfigError(f"--config {path}: no such file or folder")
    folder = path if path and path.is_dir() else None
    for file in folder.glob("*/*.yaml") if folder else ():
        conf_files.read(file, named=True)
    written = conf_files.read(path, named=True) if path and not folder else {}
    available = groups(folder)
    given = [*(f"{key}={name}" for key, name in written.items() if isinstance(name, str)), *overrides]
    named = next((name for one in reversed(given) if (name := program_name(one))), "")
    lines = [_choice(text, available) for one in given for text in own_program(_as_written(one, named))]
    chosen = [line.partition("=")[::2] for line in lines if line.partition("=")[0] in available]
    choices = {group: _chosen(group, name.strip(), available) for group, name in chosen}
    own = {name: value for name, value in written.items() if not isinstance(value, str)}
    if "recipe" in own and "recipe" not in choices:
        choices["recipe"] = _recipe(own)
    whole = conf_files.composed(choices, folder)
    recipe = model(_recipe(whole))
    usual = conf_files.composed({"recipe": choices["recipe"]} if "recipe" in choices else {})
    for group, name in choices.items():
        if group not in recipe.model_fields:
            raise ConfigError(_unknown(recipe, group))
        # Defaults, and what a search sets for trials, are for any recipe.
        sets = conf_files.own(group, name, folder) if group not in ("recipe", "hpo") and name != "default" else {}
        kept = dict(nested.leaves(schema.trimmed(sets, recipe)))
        if lacks := next(
            (one for one, _ in nested.leaves(schema.trimmed(sets, recipe, usual)) if one not in kept), None
        ):
            raise ConfigError(f"{group}={name} sets {lacks}: {_unknown(recipe, lacks)}")
    values: dict[str, Any] = schema.trimmed(whole, recipe)
    nested.merge(values, schema.trimmed(own, recipe, same=whole))
    return _put(values, (text for text in lines if text.partition("=")[0] not in available), recipe, available)


def resumed(overrides: Sequence[str], config: str | Path | None = None) -> Path | None:
    """Return the folder that ``run.resume`` names; what else is said is then of the settings in it.

    Of a copy of a run at a URL, the folder here that has what is there.
    """
    path = Path(config) if config else None
    written = conf_files.read(path, named=True).get("run") if path and _is_one_file(path) else None
    found = written.get("resume") if isinstance(written, dict) else None
    for text in overrides:
        if text.lstrip("+").startswith("run.resume="):
            _, found = _read(text, Settings, ())
    if found is None:
        return None
    folder = Path(str(found))
    return storage.fetched(str(found)) if "://" in str(found) else folder


def _is_one_file(path: Path) -> bool:
    return path.exists() and not path.is_dir()  # it may be a pipe


def _choice(text: str, available: Mapping[str, Sequence[str]]) -> str:
    """Return the choice of a recipe for ``recipe.name=RECIPE``, as resumed runs name it; any other text as it is."""
    key, _, name = text.partition("=")
    return f"recipe={name}" if key == "recipe.name" and name in available["recipe"] else text


def _unknown(recipe: type[Settings], key: str, also: Iterable[str] = ()) -> str:
    """Say that a recipe has no such setting, why where that is known, and which recipe has it."""
    said = schema.unknown(recipe, key, also=also)
    said += next((f" ({why})" for one, (name, why) in ALONE.items() if key == name and recipe is model(one)), "")
    own = recipe is model("workload")  # what a program decides itself is no matter of another recipe
    others = [f"recipe={one}" for one in RECIPES if one != "workload" and not own and schema.at(model(one), key)]
    return f"{said}; {' and '.join(others)} {'has' if len(others) == 1 else 'have'} it" if others else said


def _chosen(group: str, asked: str, available: Mapping[str, Sequence[str]]) -> str:
    """Check a choice; where there is none of this name, say what may be chosen: not what others stand on."""
    if asked in available[group]:
        return asked
    known = set(available[group]) - {"default"} or {"default"}
    if group != "recipe":
        raise ConfigError(f"{group}={asked}: no such choice; {schema.nearest(asked, known)}")
    near = schema.nearest(asked, {*known, *installed()} - {"workload"})
    raise ConfigError(f"recipe={asked}: no such choice; {near} (a program of your own: recipe=FILE.py:function)")


def _put(
    values: dict[str, Any], overrides: Iterable[str], recipe: type[Settings], available: Iterable[str] = ()
) -> dict[str, Any]:
    """Put overrides on top of values; ``available`` names the groups that could be chosen of instead."""
    values = copy.deepcopy(values)
    wrong = []
    for text in overrides:
        try:
            key, value = _read(text, recipe, available, str(values["recipe"]["name"]))
        except ConfigError as error:
            wrong.append(str(error))
            continue
        if text.startswith("~"):
            nested.drop(values, key)
        else:
            nested.merge(values, nested.nested({key: value}))
    values = _resolved(values)
    if wrong:
        name = str(values["recipe"]["name"])
        try:
            build(values)
            wrong += own.problems(values.get(GROUP, {})) if (own := _program(name)) else []
        except ConfigError as error:
            wrong.append(str(error))
        raise ConfigError("\n".join(wrong))
    return values


def _resolved(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: conf_files.resolved(value, values) for name, value in values.items()}


def _read(text: str, recipe: type[Settings], available: Iterable[str], program: str = "") -> tuple[str, Any]:
    """Read an override, whose key is checked against the recipe's settings; a ``+`` before it says nothing."""
    key, equals, value = text.partition("=")
    key = key.strip().lstrip("+~")
    if not equals and not text.startswith("~"):
        function = f"; a program is named with its function, {text}:make" if text.endswith(".py") else ""
        raise ConfigError(f"override {text!r}: expected <setting>=<value>, such as training.num_epochs=3{function}")
    if schema.at(recipe, key) is None:
        own = _program(program)
        raise ConfigError(_unknown(recipe, key, also={*available, *(_names(own) if own else ())}))
    within = schema.at(recipe, key.rpartition(".")[0])
    if text.startswith("~") and (equals or within is None or schema.is_model(within.kind)):
        raise ConfigError(
            f"override {text!r}: ~ takes an entry out of a mapping, such as ~hpo.space.model; a setting or a group "
            f"always has a value, so give it another one, {key}=VALUE"
        )
    return key, grammar.parse(value)


def resume(folder: str | Path) -> str:
    """Return the override that goes on with what is in a folder, whatever signs its name has."""
    text = str(folder)
    if re.fullmatch(r"[\w./+@-]+", text, re.ASCII):
        return f"run.resume={text}"
    return f"run.resume={grammar.written(text)}"


def again(folder: str | Path, verb: str = "train", changed: str = "") -> str:
    """Return the command, as it is typed into a shell, that goes on with a run, perhaps with changed settings.

    A cluster goes on with a run as it is: one whose settings are to be others is fetched first.
    """
    name = os.environ.get(SUBMITTED)
    if not name:
        return f"hotloop {verb} {shlex.quote(resume(folder))} {changed}".rstrip()
    if not changed:
        return f"hotloop submit resume {name}"
    return f"hotloop submit fetch --checkpoints last {name}, then hotloop {verb} run.resume=FOLDER {changed}"


def recipe_choice(name: str) -> str:
    """Return the choice of the group ``recipe`` that a recipe's name belongs to: a program of one's own has none."""
    return "workload" if ":" in name else name


def installed() -> dict[str, str]:
    """Return the programs that installed packages ship as recipes, by name: their entry points `ENTRY_POINTS`.

    Raises:
        ConfigError: an entry point names no function.
    """
    found = {one.name: one.value for one in importlib.metadata.entry_points(group=ENTRY_POINTS)}
    for name, value in found.items():
        if not re.fullmatch(r"[\w.]+:\w+", value):
            raise ConfigError(f"entry point {name} of {ENTRY_POINTS} is {value!r}: expected module:function")
    return found


def _as_written(text: str, named: str) -> str:
    """Quote the value of a program's text setting where it reads as a number, a list or null: text is as written."""
    key, _, value = text.partition("=")
    own = _program(named) if key.strip().lstrip("+").startswith(f"{GROUP}.") else None
    if own is None:
        return text
    setting = own.of(key.strip().lstrip("+").removeprefix(f"{GROUP}."))
    kinds = schema.members(setting.kind) if setting else (None,)
    texts = all(one in (str, NoneType) or {*map(type, get_args(one))} == {str} for one in kinds)  # str, or a Literal
    if not texts or (NoneType in kinds and value.strip() == "null"):
        return text
    return text if isinstance(grammar.parse(value), str) else f"{key}={grammar.written(value.strip())}"


def program_name(text: str) -> str | None:
    """Return the program that an override names: ``recipe=FILE.py:function``, or that alone, or a package's recipe."""
    key, equals, value = text.partition("=")
    value = (value if equals else text).strip().strip("'\"")
    if equals and key.strip() != "recipe":
        return None
    if equals and ":" not in value and value not in groups()["recipe"]:
        value = installed().get(value, "")
    if not re.fullmatch(r".+:\w+", value):
        return None
    return _found_anywhere(value)


def _found_anywhere(name: str) -> str:
    """Return the name of a function with its file's whole path: a resumed run finds the file from any folder."""
    place, _, function = name.rpartition(":")
    return f"{Path(place).resolve() if place.endswith('.py') else place}:{function}"


def own_program(text: str) -> list[str]:
    """Return the override that names a program as a choice and the name; any other override as it is."""
    name = program_name(text)
    if name is None:
        return [text]
    return [f"recipe={recipe_choice(name)}", f"recipe.name={grammar.written(name)}"]


def to_dict(settings: Settings) -> dict[str, Any]:
    """Return settings as plain data: what the record, the checkpoints and ``settings.yaml`` hold."""
    return settings.model_dump(mode="json")


def to_yaml(settings: Settings) -> str:
    """Return settings as a YAML file that ``--config`` takes."""
    return conf_files.to_yaml(to_dict(settings))


def from_dict(values: Mapping[str, Any], overrides: Sequence[str] = ()) -> Settings:
    """Rebuild settings from `to_dict`'s data, with overrides on top.

    Raises:
        ConfigError: as `load`.
    """
    recipe = model(_recipe(values))
    kept = schema.trimmed(values, recipe)
    if overrides:
        kept = _put(kept, [_as_written(text, values["recipe"]["name"]) for text in overrides], recipe)
    return build(schema.trimmed(kept, model(_recipe(kept))))
