"""A run that is being set up: from the fields of a form to settings, a command, and all that is wrong with them."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import os
import re
import secrets
import shlex
import time
from typing import TYPE_CHECKING, Any

from hotloop.errors import ConfigError
from hotloop.train import conf_files, configure, nested
from hotloop.train.settings import GROUP
from hotloop.ui import compilation
from hotloop.ui.fields import Field, fields, override, shortened
from hotloop.ui.probe import program_schema

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

RECIPES = tuple(one for one in sorted(conf_files.groups()["recipe"]) if one not in ("default", "workload"))
"""The first is the one that the page opens on, as the command line does."""
VERBS = {"train": "Train once", "kfold": "Cross-validate", "hpo": "Search for settings"}
_HIDDEN = ("recipe.name", "run.folder", "run.resume", "hpo.folder", "hpo.name", *compilation.OWN)
"""Settings that the page sets itself, or that have a place of their own in it."""
_LAST = ("data", "compile", "kfold", "hpo", "engine", "run")
_UNUSED = {"train": ("kfold.", "hpo.", "engine."), "kfold": ("hpo.",), "hpo": ()}
"""The groups that a command does not use: they would make it something else."""
_NAMED = re.compile(r"[a-z]\w*(?:\.\w+)+")
_FOLDER = re.compile(r"[A-Za-z0-9_][\w.-]{0,79}", re.ASCII)
CHOICE, WHERE = "choice.", "where"


@dataclasses.dataclass
class Draft:
    """What a form holds.

    Args:
        recipe: its name, or a program's, ``FILE.py:make``.
        choices: of groups, such as ``data=csv``.
        form: all that was typed, by the fields' names.
        components: of the recipe.
        root: the runs folder.
        may_run: whether a program's file may run, to tell its settings.
        errors: what is wrong, by the field that it stands beside; the empty name is of no field.
        changes: the settings that differ from the defaults.
    """

    recipe: str
    choices: dict[str, str]
    form: Mapping[str, str]
    components: list[str]
    root: Path
    may_run: bool
    errors: dict[str, str] = dataclasses.field(default_factory=dict)
    changes: dict[str, Any] = dataclasses.field(default_factory=dict)

    @functools.cached_property
    def base(self) -> dict[str, Any]:
        """The settings before anything is changed.

        Raises:
            ConfigError: there is no such recipe or choice, or the program cannot be read.
        """
        values = configure.compose(self._chosen)
        with contextlib.suppress(ConfigError):  # a choice may leave something to be set, such as a path
            return configure.to_dict(configure.build(values))
        return values

    @property
    def _chosen(self) -> list[str]:
        return [f"recipe={self.recipe}", *(f"{group}={name}" for group, name in self.choices.items())]

    @functools.cached_property
    def groups(self) -> dict[str, list[Field]]:
        """The fields of each group of settings, the recipe's own groups first."""
        is_program = ":" in self.recipe
        model = configure.model(configure.recipe_choice(self.recipe) if is_program else self.recipe)
        schema = dict(model.model_json_schema())
        if is_program:
            own = program_schema(self.recipe, may_run=self.may_run)
            schema["$defs"] = {**schema.get("$defs", {}), **own.get("$defs", {})}
            schema["properties"] = {**schema["properties"], GROUP: own["properties"][GROUP]}
        found = fields(schema, self.base)
        order = sorted(found, key=lambda one: (one != GROUP, one in _LAST, _LAST.index(one) if one in _LAST else 0))
        hidden = tuple(f"{name}." for name in _HIDDEN)
        kept = {group: [one for one in found[group] if not f"{one.name}.".startswith(hidden)] for group in order}
        return {group: some for group, some in kept.items() if some}

    @property
    def fields(self) -> list[Field]:
        """All fields."""
        return [one for some in self.groups.values() for one in some]

    @property
    def slots(self) -> list[str]:
        """The places of mistakes beside those of the fields."""
        return ["mode", "inference", "name", *(f"part.{name}" for name in self.components)]

    def typed(self, field: Field) -> str:
        """Return what stands in a field."""
        return self.form.get(field.name, field.text(field.default))

    def read(self) -> None:
        """Read the form: find ``changes``, and all ``errors`` at once."""
        self.errors = {}
        self.changes = compilation.read(self.form, self.base, self.components)
        for one in self.fields:
            if one.name in self.form and not one.name.startswith(self._unused):
                value = one.read(self.form[one.name])
                if value != one.default:
                    self.changes[one.name] = _without(value, one.default)
        self._check_name()
        try:
            configure.build(self.values())
        except ConfigError as error:
            self.blame(str(error))

    @property
    def _unused(self) -> tuple[str, ...]:
        searches = self.verb == "kfold" and self.form.get("kfold.inner_trials", "").strip()
        return () if searches else _UNUSED[self.verb]

    def _check_name(self) -> None:
        if self.named and not _FOLDER.fullmatch(self.named):
            self.errors["name"] = (
                f"name={shortened(self.named)!r}: expected at most 80 letters, digits, dots, dashes and underscores, "
                "the first a letter, a digit or an underscore"
            )
        elif self.named and (self._place / self.named).exists():
            self.errors["name"] = f"name={self.named!r}: {self._place.name}/{self.named} is there; choose another name"

    def blame(self, text: str) -> None:
        """Put each line of an error beside the field that it names first, or above the form."""
        known = {one.name for one in self.fields} | {*self.slots}
        for each in filter(None, (one.strip() for one in text.splitlines())):
            named = next((name for found in _NAMED.findall(each) if (name := _slot(found)) in known), "")
            self.errors[named] = "\n".join(filter(None, (self.errors.get(named), each)))

    def values(self) -> dict[str, Any]:
        """Return the settings as plain data, with what was changed."""
        return nested.merge(copy.deepcopy(self.base), nested.nested(self.changes))

    @property
    def verb(self) -> str:
        """The command: ``train``, ``kfold`` or ``hpo``."""
        asked = self.form.get("verb", "train")
        return asked if asked in VERBS else "train"

    @property
    def overrides(self) -> list[str]:
        """The arguments of the command, without the folder."""
        return [*self._chosen, *(override(name, value) for name, value in self.changes.items())]

    @property
    def where(self) -> str:
        """The cluster that the run is started on; empty where that is this machine."""
        return self.form.get(WHERE, "").strip()

    @property
    def named(self) -> str:
        """The name of the run; empty where it gets the date and time."""
        return self.form.get("name", "").strip()

    def command(self, *options: str) -> list[str]:
        """Return the arguments of hotloop that run this, here or on the cluster; options are those of the command."""
        if self.where:  # which chooses the folder itself
            return ["submit", *options, "--address", self.where, "--", self.verb, *self.overrides]
        key = "hpo.folder" if self.verb == "hpo" else "run.folder"
        folder = [override(key, str(self.folder()))] if self.named else []
        return [self.verb, *self.overrides, *folder, *options]

    @property
    def shown(self) -> str:
        """The command as it is typed into a shell."""
        return shlex.join(["hotloop", *self.command()])

    def yaml(self) -> str:
        """Return the settings as a file for ``--config``."""
        return conf_files.to_yaml(self.values())

    @property
    def _place(self) -> Path:
        return self.root / conf_files.folder_name(self.recipe)

    def folder(self) -> Path:
        """Choose the folder of the run: the one that was named, or else one that is not there yet."""
        if self.named:
            return self._place / self.named
        kind = "search-" if self.verb == "hpo" else ""
        return self._place / f"{kind}{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"


def of(form: Mapping[str, str], components: Mapping[str, list[str]], root: Path, *, may_run: bool = False) -> Draft:
    """Return the draft of a form, whose recipe may be a program's name.

    Args:
        form: what was typed.
        components: of each recipe.
        root: the runs folder.
        may_run: whether a program's file may run, to tell its settings.

    Raises:
        ConfigError: the program's file is not there, or not named with its function.
    """
    asked = form.get("program", "").strip() or form.get("recipe", RECIPES[0]).strip()
    recipe = asked if asked in RECIPES else configure.program_name(f"recipe={asked}") or ""
    if not recipe:
        raise ConfigError(f"program={shortened(asked)!r}: expected a file and its function, such as train.py:make")
    place = recipe.rpartition(":")[0]
    if place.endswith(".py") and not os.path.isfile(place):  # noqa: PTH113 - of any length
        raise ConfigError(f"program={shortened(asked)!r}: there is no such file")
    choices = {key.removeprefix(CHOICE): value for key, value in form.items() if key.startswith(CHOICE) and value}
    known = conf_files.groups()
    for group, name in choices.items():
        if name not in known.get(group, ()):
            raise ConfigError(f"{group}={name!r}: no such choice; expected one of {', '.join(known.get(group, ()))}")
    parts = components.get(recipe, ["model", "loss"] if ":" in recipe else [])
    return Draft(recipe, choices, form, [*parts], root, may_run)


def choices_of(draft: Draft) -> dict[str, list[str]]:
    """Return the choices of the recipe's groups, where there are any beside the defaults."""
    found = {group: [one for one in names if one != "default"] for group, names in conf_files.groups().items()}
    left_out = ("recipe", "hpo", "program", "training", "compile")
    return {group: names for group, names in found.items() if names and group in draft.base and group not in left_out}


def _without(value: Any, default: Any) -> Any:
    """Return a mapping with null for what is in the default alone: settings are merged into the default."""
    if not isinstance(value, dict) or not isinstance(default, dict):
        return value
    gone = dict.fromkeys(name for name in default if name not in value)
    return {**gone, **{name: _without(one, default.get(name)) for name, one in value.items()}}


def _slot(name: str) -> str:
    """Return the field that shows a setting."""
    if name.startswith("compile.components."):
        return f"part.{name.split('.')[2]}"
    return {compilation.COMPILE: "mode", "compile.preset": "mode", "compile.inference": "inference"}.get(name, name)
