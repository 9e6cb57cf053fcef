"""A run that is being set up: from the fields of a form to settings, a command, and all that is wrong with them."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import json
import os
import re
import shlex
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hotloop.errors import ConfigError
from hotloop.train import conf_files, configure, idle, nested, schema
from hotloop.train.settings import GROUP
from hotloop.ui import compilation, ranges, unread
from hotloop.ui.fields import Field, fields, shortened, to_text
from hotloop.ui.program_schema import program_schema

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hotloop.train.settings import Settings

RECIPES = ("criteria", "digits", "diffusion", "focus")
"""The first is the one that the page opens on, as the command line does."""
VERBS = {"train": "Train once", "kfold": "Cross-validate", "hpo": "Search for settings"}
HIDDEN = ("recipe.name", "run.folder", "run.resume", "hpo.folder", "hpo.name", *compilation.OWN)
"""Settings that the page sets itself, or that have a place of their own in it."""
_NAMED = re.compile(r"[a-z]\w*(?:\.\w+)+")
LONGEST = 80
"""Characters in the name of a run."""
_FOLDER = re.compile(rf"[A-Za-z0-9_][\w.-]{{0,{LONGEST - 1}}}", re.ASCII)
CHOICE, WHERE = "choice.", "where"


@dataclasses.dataclass
class Draft:
    """What a form holds.

    Args:
        recipe: its name, or a program's, ``FILE.py:make``.
        choices: of groups, such as ``pictures=folder``.
        form: all that was typed, by the fields' names.
        components: of the recipe.
        root: the runs folder.
        may_run: whether a program's file may run, to tell its settings.
        clusters: on which a run can be started.
        errors: what is wrong, by the field that it stands beside; the empty name is of no field.
        changes: the settings that differ from the defaults.
        notes: what a person may not expect of a field that is right, by its name.
        idle: the settings that nothing reads beside the others; of those in the form the notes say why.
    """

    recipe: str
    choices: dict[str, str]
    form: Mapping[str, str]
    components: list[str]
    root: Path
    may_run: bool
    clusters: list[str] = dataclasses.field(default_factory=list)
    errors: dict[str, str] = dataclasses.field(default_factory=dict)
    changes: dict[str, Any] = dataclasses.field(default_factory=dict)
    notes: dict[str, str] = dataclasses.field(default_factory=dict)
    idle: set[str] = dataclasses.field(default_factory=set)

    @functools.cached_property
    def base(self) -> dict[str, Any]:
        """The settings before anything is changed.

        Raises:
            ConfigError: there is no such recipe or choice, or the program cannot be read.
        """
        chosen = [f"{group}={name}" for group, name in self.choices.items() if name]
        values = configure.compose([f"recipe={self.recipe}", *chosen])
        with contextlib.suppress(ConfigError):  # a choice may leave something to be set, such as a path
            return configure.to_dict(configure.build(values))
        return values

    @functools.cached_property
    def groups(self) -> dict[str, list[Field]]:
        """The fields of each group of settings, the recipe's own groups first."""
        model = configure.model(configure.recipe_choice(self.recipe) if ":" in self.recipe else self.recipe)
        whole = dict(model.model_json_schema())
        if ":" in self.recipe:
            own = program_schema(self.recipe, may_run=self.may_run)
            whole["$defs"] = {**whole.get("$defs", {}), **own.get("$defs", {})}
            whole["properties"] = {**whole["properties"], GROUP: own["properties"][GROUP]["anyOf"][0]}
        found = fields(whole, self.base)
        declared = nested.nested({one.name: dict(one.search) for some in found.values() for one in some if one.search})
        found["hpo"] = [
            dataclasses.replace(one, default=nested.merge(declared, one.default)) if one.name == ranges.SPACE else one
            for one in found["hpo"]
        ]
        last = ("data", "compile", "kfold", "hpo", "engine", "run")
        order = sorted(
            found, key=lambda group: (group != GROUP, group in last, last.index(group) if group in last else 0)
        )
        hidden = tuple(f"{name}." for name in HIDDEN)
        kept = {group: [one for one in found[group] if not f"{one.name}.".startswith(hidden)] for group in order}
        return {group: some for group, some in kept.items() if some}

    @property
    def fields(self) -> list[Field]:
        """All fields."""
        return [*self.by_name.values()]

    @functools.cached_property
    def by_name(self) -> dict[str, Field]:
        """All fields by their names."""
        return {one.name: one for some in self.groups.values() for one in some}

    @property
    def slots(self) -> list[str]:
        """The places of mistakes and notes beside those of the fields."""
        parts = [f"part.{name}" for name in self.components]
        return ["mode", "inference", "name", WHERE, *parts, *(row.slot for row in self.ranges)]

    @property
    def grey(self) -> list[str]:
        """The ids of the controls that nothing reads."""
        parts = [(f"part.{one.name}", one) for one in compilation.parts(self.base, self.components)]
        off = [
            f"part-mode-{one.name}"
            for key, one in parts
            if not (f"{key}.on" in self.form if f"{key}.mode" in self.form else one.on)
        ]
        return [*unread.controls(sorted(self.idle), self.ranges), *off]

    def title(self, name: str) -> str:
        """Return how a field, or another place of mistakes, is called."""
        of_row = next((row.setting for row in self.ranges if row.slot == name), None)
        bare = ".".join((name if of_row is None else of_row).split(".")[1:])
        return bare or name if of_row is None else f"range of {bare or 'no setting'}"

    def typed(self, field: Field) -> str:
        """Return what stands in a field."""
        return self.form.get(field.name, field.text(field.default))

    def read(self, *, whole: bool = False) -> None:
        """Read the form: find ``changes``, ``notes``, and all ``errors`` at once.

        Args:
            whole: also the groups that what is to be done does not use, as a preset keeps them.
        """
        self.errors, self.notes, self.idle = {}, {}, set()
        self.changes = compilation.read(self.form, self.base, self.components)
        for one in self.fields:
            if not whole and one.name.startswith(self._unused):
                self._note_unused(one)
            elif one.name == ranges.SPACE and ranges.ROWS in self.form:
                self._read_ranges(one)
            elif one.name in self.form:
                self._read(one)
        self._check_place()
        self._leave_out_idle()
        if ranges.SPACE in self.changes:
            for name in self.fixed:
                nested.put(self.changes[ranges.SPACE], name, None)
        if not self.errors:
            self._check_together()

    def _check_place(self) -> None:
        """Check on which machine and in which folder the run would be."""
        if self.where and self.where not in self.clusters:
            self.errors[WHERE] = f"where={shortened(self.where)!r}: expected this machine, or a cluster that was added"
        if self.named and not _FOLDER.fullmatch(self.named):
            self.errors["name"] = (
                f"name={shortened(self.named)!r}: expected at most {LONGEST} letters, digits, dots, dashes and "
                "underscores, the first a letter, a digit or an underscore"
            )
        elif self.named and (self._place / self.named).exists():
            there = f"{self._place.name}/{self.named}"
            self.errors["name"] = (
                f"name={self.named!r}: {there} is there already; choose another name, such as {self._free}"
            )

    def _read(self, field: Field) -> None:
        try:
            value = field.read(self.form[field.name])
            if value != field.default and (wrong := self._wrong(field, value)):
                self.errors[field.name] = wrong
            elif value != field.default:
                self.changes[field.name] = _without(value, field.default)
        except (ValueError, StopIteration) as error:
            self.errors[field.name] = str(error) or f"{field.name}: expected {field.takes}"

    def _read_ranges(self, field: Field) -> None:
        found, wrong = ranges.read(self.ranges, self.by_name)
        self.errors |= wrong
        if not wrong and found != dict(ranges.leaves(field.default)):
            self.changes[field.name] = _without(nested.nested(found), field.default)

    @property
    def ranges(self) -> list[ranges.Row]:
        """The ranges of a search as they stand in the form."""
        if ranges.ROWS in self.form:
            return ranges.typed(self.form)
        return ranges.of(self.space, self.by_name)

    @property
    def space(self) -> dict[str, Any]:
        """What a search varies, with what a program declares."""
        field = self.by_name[ranges.SPACE]
        return nested.merge(json.loads(json.dumps(field.default)), self.changes.get(field.name, {}))

    def _leave_out_idle(self) -> None:
        """Find what nothing reads beside the other settings; what would be refused for that is left out."""
        varied = tuple(self.space) if self.verb == "hpo" else ()
        for name, why, refused in unread.find(self.values(), self.by_name, self.components, varied):
            self.idle.add(name)
            self.errors.pop(name, None)
            if refused:
                self.changes.pop(name, None)
            if why:
                self.notes[_slot(name)] = why

    @property
    def _unused(self) -> tuple[str, ...]:
        """The groups that what is to be done does not use: they would make it something else."""
        inner = self.form.get("kfold.inner_trials", "").strip()
        return {"train": ("kfold.", "hpo.", "engine."), "kfold": () if inner else ("hpo.",), "hpo": ()}[self.verb]

    def _note_unused(self, field: Field) -> None:
        needs = "a search" if field.name.startswith("hpo.") else "a cross-validation or a search"
        self.notes[field.name] = f"not used: it is for {needs}"
        self.idle.add(field.name)

    @property
    def fixed(self) -> list[str]:
        """The changed settings that the search would vary, had nobody set them: a range that was changed too wins."""
        if self.verb != "hpo":
            return []
        usual = dict(ranges.leaves(self.by_name[ranges.SPACE].default))
        own = {row.setting for row in self.ranges} if ranges.ROWS in self.form else usual
        now = dict(ranges.leaves(self.changes.get(ranges.SPACE, {})))
        return [one for one in self.changes if one in own and one in usual and now.get(one, usual[one]) == usual[one]]

    def _wrong(self, field: Field, value: Any) -> str:
        if field.name.startswith(f"{GROUP}."):
            return field.wrong(value)
        model = configure.model(configure.recipe_choice(self.recipe))
        return schema.problem(model, field.name, value)

    def _check_together(self) -> None:
        try:
            settings = configure.build(self.values())
            idle.refuse_idle(settings, tuple(settings.hpo.space) if self.verb == "hpo" else ())
            if not f"{ranges.SPACE}.".startswith(self._unused):
                self._check_ranges(settings)
            self.notes |= dict.fromkeys(self.fixed, "fixed here, so the search does not vary it")
        except ConfigError as error:
            self.blame(str(error))

    def _check_ranges(self, settings: Settings) -> None:
        """Say beside each range why its setting cannot vary so, and that one is fixed by its field."""
        space = dict(ranges.leaves(self.space))
        for row in self.ranges:
            leaf = space.get(row.setting)
            if leaf is not None and (wrong := ranges.wrong(row, leaf, settings, self.by_name.get(row.setting))):
                self.errors[row.slot] = wrong
            if row.setting in self.fixed:
                self.notes[row.slot] = "not varied: its field has another value than the default, and fixes it"
            elif row.setting in self.changes:
                self.notes[row.setting] = "not used: its range was changed as well, and the search varies it"
        if not space:
            self.errors[ranges.SPACE] = "a search needs a setting that varies: add a range"

    def blame(self, text: str) -> None:
        """Put each line of an error beside the field that it names first, or above the form."""
        parts = {f"part.{name}" for name in self.components}
        known = {one.name for one in self.fields} | {"mode", "inference"} | parts
        for each in filter(None, (one.strip() for one in text.splitlines())):
            named = next((name for found in _NAMED.findall(each) if (name := _slot(found)) in known), "")
            self.errors[named] = "\n".join(filter(None, (self.errors.get(named), each.removeprefix("hotloop: "))))

    def values(self) -> dict[str, Any]:
        """Return the settings as plain data, with what was changed."""
        return dict(nested.merge(json.loads(json.dumps(self.base)), nested.nested(self.changes)))

    @property
    def verb(self) -> str:
        """The command: ``train``, ``kfold`` or ``hpo``."""
        asked = self.form.get("verb", "train")
        return asked if asked in VERBS else "train"

    @property
    def overrides(self) -> list[str]:
        """The arguments of the command, without the folder."""
        chosen = [f"{group}={name}" for group, name in self.choices.items() if name]
        return [f"recipe={self.recipe}", *chosen, *(f"{name}={to_text(value)}" for name, value in self.changes.items())]

    @property
    def where(self) -> str:
        """The cluster that the run is started on; empty where that is this machine."""
        return self.form.get(WHERE, "").strip()

    @property
    def named(self) -> str:
        """The name of the run; empty where it gets the date and time."""
        return self.form.get("name", "").strip()

    @property
    def command(self) -> str:
        """The command as it is typed into a shell: the one that is started, but for a folder that nobody named."""
        if self.where:
            return shlex.join(["hotloop", "submit", "--address", self.where, "--", *self.arguments(self.folder())])
        return shlex.join(["hotloop", *(self.arguments(self.folder()) if self.named else [self.verb, *self.overrides])])

    def yaml(self) -> str:
        """Return the settings as a file for ``--config``."""
        return conf_files.to_yaml(self.values())

    @property
    def _place(self) -> Path:
        return self.root / conf_files.folder_name(self.recipe)

    @property
    def _free(self) -> str:
        """A name like the one that is taken, which nothing has."""
        stem = re.sub(r"-\d+$", "", self.named)[: LONGEST - 8]
        names = (f"{stem}-{number}" for number in itertools.count(2))
        return next(one for one in names if not (self._place / one).exists())

    def folder(self) -> Path:
        """Choose the folder of the run: the one that was named, or else one that is not there yet."""
        if self.named:
            return self._place / self.named
        stamp = time.strftime("%Y%m%d-%H%M%S")
        base = f"search-{stamp}" if self.verb == "hpo" else stamp
        tried = [base, *(f"{base}-{number}" for number in range(2, 100))]
        return next(self._place / one for one in tried if not (self._place / one).exists())

    def arguments(self, folder: Path) -> list[str]:
        """Return the arguments of the command that is started for a folder."""
        if self.where:  # its folder there is chosen by `hotloop submit`
            return [self.verb, *self.overrides]
        key = "hpo.folder" if self.verb == "hpo" else "run.folder"
        return [self.verb, *self.overrides, f"{key}={to_text(str(folder))}"]


def of(
    form: Mapping[str, str], components: Mapping[str, list[str]], root: Path, clusters: list[str] | None = None,
    *, may_run: bool = False,
) -> Draft:  # fmt: skip
    """Return the draft of a form, whose recipe may be a program's name.

    Args:
        form: what was typed.
        components: of each recipe.
        root: the runs folder.
        clusters: on which a run can be started.
        may_run: whether a program's file may run, to tell its settings.

    Raises:
        ConfigError: the program's file is not there, or not named with its function.
    """
    asked = form.get("program", "").strip() or form.get("recipe", RECIPES[0]).strip()
    recipe = asked if asked in RECIPES else configure.program_name(f"recipe={asked}") or ""
    if not recipe:
        raise ConfigError(f"program={shortened(asked)!r}: expected a file and its function, such as train.py:make")
    place = Path(recipe.rpartition(":")[0])
    if ":" in recipe and place.suffix == ".py" and not os.path.isfile(place):  # noqa: PTH113 - of any length
        raise ConfigError(f"program={shortened(asked)!r}: there is no such file")
    choices = {key.removeprefix(CHOICE): value for key, value in form.items() if key.startswith(CHOICE) and value}
    known = conf_files.groups()
    for group, name in choices.items():
        if name not in known.get(group, ()):
            raise ConfigError(f"{group}={name!r}: no such choice; expected one of {', '.join(known.get(group, ()))}")
    parts = list(components.get(recipe, ["model", "loss"] if ":" in recipe else []))
    return Draft(recipe, choices, form, parts, root, may_run, clusters or [])


def choices_of(draft: Draft) -> dict[str, list[str]]:
    """Return the choices of the recipe's groups, where there are any beside the defaults."""
    found = {group: [one for one in names if one != "default"] for group, names in conf_files.groups().items()}
    left_out = ("recipe", "hpo", "program", "training", "compile")
    return {group: names for group, names in found.items() if names and group in draft.base and group not in left_out}


def _without(value: Any, default: Any) -> Any:
    """Return a mapping with null for what is in the default and not in it: settings are merged into the default."""
    if not isinstance(value, dict) or not isinstance(default, dict):
        return value
    gone = dict.fromkeys(name for name in default if name not in value)
    return {**gone, **{name: _without(one, default.get(name)) for name, one in value.items()}}


def _slot(name: str) -> str:
    """Return the field that shows a setting."""
    if name.startswith("compile.components."):
        return f"part.{name.split('.')[2]}"
    return {compilation.COMPILE: "mode", "compile.preset": "mode", "compile.inference": "inference"}.get(name, name)
