"""Settings from the command line: the groups in ``conf/``, a file of the user's own, and overrides."""

from __future__ import annotations

import contextvars
import copy
import functools
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
from hotloop.train.scope import RECIPES, has
from hotloop.train.settings import GROUP, HpoSettings, Settings

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from hotloop.train.program import Program

runs_programs = contextvars.ContextVar("runs_programs", default=True)
"""Whether a program's file may run in this process, to judge its settings; in a server it may not."""


def load(overrides: Sequence[str] = (), config: str | Path | None = None) -> Settings:
    """Compose the settings of a run.

    Args:
        overrides: ``a.b=c`` and group choices (``data=csv``); later ones win.
        config: a YAML file whose settings lie between the defaults and the overrides.

    Raises:
        ConfigError: an override, a key, a group choice or a value that cannot be used, with what was expected.
    """
    return build(compose(overrides, config))


def build(values: Mapping[str, Any]) -> Settings:
    """Make the settings of plain values, those of their recipe.

    Raises:
        ConfigError: listing every setting that is unknown, missing, of a wrong type or out of its range.
    """
    return schema.build(model(_recipe(values)), values)


def _program(name: str) -> Program | None:
    """Return a program of the user's own; None for a recipe, and where no program may run."""
    if ":" not in name or not runs_programs.get():
        return None
    from hotloop.train import program  # noqa: PLC0415 - loads torch

    return program.known(name)


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
    named_keys = (text.partition("=")[0].strip().lstrip("+") for text in overrides)
    keys = [*_written(config), *(one for one in named_keys if "." in one)]  # the others are choices
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
    written = conf_files.read(Path(config), named=True) if config else {}
    search = written.get("hpo")
    all_named = isinstance(search, dict) and set(search) >= set(HpoSettings.model_fields)
    return [] if all_named else [name for name, _ in nested.leaves(written) if "." in name]


def compose(overrides: Sequence[str] = (), config: str | Path | None = None) -> dict[str, Any]:
    """Compose the settings as plain data, before their types are checked: those that the recipe has."""
    path = Path(config) if config else None
    if path and (not path.exists() or path.is_dir()):
        raise ConfigError(f"--config {path}: no such file")
    written, available = conf_files.read(path, named=True) if path else {}, groups()
    given = [*(f"{key}={name}" for key, name in written.items() if isinstance(name, str)), *overrides]
    named = next((name for one in reversed(given) if (name := program_name(one))), "")
    lines = [_choice(text, available) for one in given for text in own_program(_as_written(one, named))]
    chosen = [line.partition("=")[::2] for line in lines if line.partition("=")[0] in available]
    choices = {group: _chosen(group, name.strip(), available) for group, name in chosen}
    own = {name: value for name, value in written.items() if not isinstance(value, str)}
    if "recipe" in own and "recipe" not in choices:
        choices["recipe"] = _recipe(own)
    whole = conf_files.composed(choices)
    recipe = model(_recipe(whole))
    usual = conf_files.composed({"recipe": choices["recipe"]} if "recipe" in choices else {})
    for group, name in choices.items():
        if group not in recipe.model_fields:
            raise ConfigError(schema.unknown(recipe, group))
        sets = conf_files.own(group, name) if group not in ("recipe", "hpo") and name != "default" else {}
        kept = schema.trimmed(sets, recipe, usual)
        if kept != schema.trimmed(sets, recipe):
            raise ConfigError(f"recipe={_recipe(whole)} has not all settings of {group}={name}")
    values: dict[str, Any] = schema.trimmed(whole, recipe)
    nested.merge(values, schema.trimmed(own, recipe, same=whole))
    return _put(values, (text for text in lines if text.partition("=")[0] not in available), recipe, available)


def resumed(overrides: Sequence[str], config: str | Path | None = None) -> Path | None:
    """Return the folder that ``run.resume`` names; what else is said is then of the settings in it.

    Of a copy of a run at a URL, the folder here that has what is there.
    """
    path = Path(config) if config else None
    written = conf_files.read(path, named=True).get("run") if path and path.exists() and not path.is_dir() else None
    found = written.get("resume") if isinstance(written, dict) else None
    for text in overrides:
        if text.lstrip("+").startswith("run.resume="):
            _, found = _read(text, Settings, ())
    if found is None:
        return None
    folder = Path(str(found))
    return storage.fetched(str(found)) if "://" in str(found) else folder


def _choice(text: str, available: Mapping[str, Sequence[str]]) -> str:
    """Return the choice of a recipe for ``recipe.name=RECIPE``, as resumed runs name it; any other text as it is."""
    key, _, name = text.partition("=")
    return f"recipe={name}" if key == "recipe.name" and name in available["recipe"] else text


def _chosen(group: str, asked: str, available: Mapping[str, Sequence[str]]) -> str:
    """Check a choice; where there is none of this name, say what may be chosen: not what others stand on."""
    if asked in available[group]:
        return asked
    known = set(available[group]) - {"default"} or {"default"}
    hint = " (a program of your own: recipe=FILE.py:function)" if group == "recipe" else ""
    raise ConfigError(f"{group}={asked}: no such choice; {schema.nearest(asked, known - {'workload'})}{hint}")


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
        nested.merge(values, nested.nested({key: value}))
    values = _resolved(values)
    if wrong:
        raise ConfigError("\n".join(wrong))
    return values


def _resolved(values: Mapping[str, Any]) -> dict[str, Any]:
    """Fill in ``${a.b}``; ``${recipe}`` is the name for its folder."""
    found, folder = dict(values), conf_files.folder_name(str(values["recipe"]["name"]))
    for _ in range(2):  # what a setting refers to may refer to another one
        found = conf_files.resolved(found, {**dict(nested.leaves(found)), "recipe": folder})
    return found


def _read(text: str, recipe: type[Settings], available: Iterable[str], program: str = "") -> tuple[str, Any]:
    """Read an override, whose key is checked against the recipe's settings; a ``+`` before it says nothing."""
    key, equals, value = text.partition("=")
    key = key.strip().lstrip("+")
    if not equals:
        function = f"; a program is named with its function, {text}:make" if text.endswith(".py") else ""
        raise ConfigError(f"override {text!r}: expected <setting>=<value>, such as training.num_epochs=3{function}")
    if schema.at(recipe, key) is None:
        own = _program(program)
        names = [f"{GROUP}.{one.name}" for one in own.parameters] if own else []
        raise ConfigError(schema.unknown(recipe, key, also=(*available, *names)))
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
