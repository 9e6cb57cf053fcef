"""The groups of settings in ``conf/`` and their choices, and YAML files of settings: read, and put together."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Mapping
from importlib import resources
from typing import TYPE_CHECKING, Any, ClassVar

from hotloop import files
from hotloop.errors import ConfigError
from hotloop.train.nested import merge, nested
from hotloop.train.optional import require

if TYPE_CHECKING:
    from pathlib import Path

CONF = resources.files("hotloop.train") / "conf"
_MOST_NODES = 10_000
"""Values in a YAML file once its aliases are replaced: a few lines of YAML make billions of them."""
_INTERPOLATION = re.compile(r"\$\{([\w.-]+)\}")


@functools.cache
def groups() -> dict[str, list[str]]:
    """Return the groups and their choices."""
    folders = sorted((one for one in CONF.iterdir() if one.is_dir()), key=lambda one: one.name)
    found = {one.name: sorted(file.name for file in one.iterdir()) for one in folders}
    choices = {name: [file[:-5] for file in files if file.endswith(".yaml")] for name, files in found.items()}
    return {name: some for name, some in choices.items() if some}


def composed(choices: Mapping[str, str]) -> dict[str, Any]:
    """Return the values of all groups, each as its choice has it.

    A choice lies on top of its group's ``default.yaml``. One of the group ``recipe`` may choose for other groups, where
    nobody else does; what ``GROUP/CHOICE_of/RECIPE.yaml`` says comes on top, where there is one.
    """
    usual = _mapping((CONF / "config.yaml").read_text(encoding="utf-8"))
    recipe = choices.get("recipe", usual["recipe"])
    for entry in _file("recipe", recipe).get("defaults", []):
        if isinstance(entry, dict):
            usual |= {key.rpartition("/")[2]: name for key, name in entry.items()}
    values: dict[str, Any] = {}
    for group, name in {**usual, **choices}.items():
        merge(values, _choice(group, name))
        if (CONF / group / f"{name}_of" / f"{recipe}.yaml").is_file():
            merge(values, {group: _file(group, f"{name}_of/{recipe}")})
    return values


def _choice(group: str, name: str) -> dict[str, Any]:
    """Read a choice, on top of what it lies on: the files that its ``defaults`` name, and the group's ``default``."""
    entries = _file(group, name).get("defaults", [])
    below = [one.partition("@")[0] for one in entries if isinstance(one, str) and one != "_self_"]
    if name != "default" and "default" not in below and (CONF / group / "default.yaml").is_file():
        below.insert(0, "default")
    found: dict[str, Any] = {}
    for one in below:
        merge(found, _choice(group, one))
    return merge(found, own(group, name))


def own(group: str, name: str) -> dict[str, Any]:
    """Return the values that a choice sets itself, without those of the files below it."""
    values = {key: value for key, value in _file(group, name).items() if key != "defaults"}
    return values if "@package _global_" in _text(group, name) else {group: values}


@functools.cache
def _text(group: str, name: str) -> str:
    return (CONF / group / f"{name}.yaml").read_text(encoding="utf-8")


@functools.cache
def _file(group: str, name: str) -> dict[str, Any]:
    return _mapping(_text(group, name))


def _named(path: Path) -> bytes:
    """Read what ``--config`` names: it may be a link, of which some systems make their mounted settings, or a pipe."""
    return _piped(path) if path.is_fifo() else files.read(path, links=True)


@functools.cache
def _piped(path: Path) -> bytes:
    """Read a pipe of the command line's: settings are read several times, and a pipe gives its content once."""
    return files.read_pipe(path)


def read(path: Path, *, named: bool = False) -> dict[str, Any]:
    """Read a YAML file of settings.

    Args:
        path: of the file.
        named: the user names it by ``--config``: it may be a link or a pipe, which nobody can have planted there.

    Raises:
        ConfigError: it cannot be read, or is no mapping.
    """
    yaml, shown = require("yaml", "Reading settings"), f"--config {path}" if named else str(path)
    try:
        text = (_named(path) if named else files.read(path)).decode("utf-8-sig")  # editors of Windows mark it so
        return _mapping(text)
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise ConfigError(f"{shown} cannot be read: {error}") from error


def _mapping(text: str) -> dict[str, Any]:
    yaml = require("yaml", "Reading settings")
    if _size(yaml.compose(text, Loader=loader()), {}) > _MOST_NODES:
        raise ConfigError(f"its aliases (&name, *name) make more than {_MOST_NODES:,} values: write out what is meant")
    found = yaml.load(text, Loader=loader())
    if found is None:  # comments alone
        return {}
    if not isinstance(found, dict):
        raise ConfigError(f"expected a mapping of settings, found {type(found).__name__}")
    values: dict[str, Any] = {}
    for name, value in found.items():  # `training.num_epochs: 3` is below its group
        merge(values, nested({str(name): value}))
    return values


def _size(node: Any, known: dict[int, float]) -> float:
    """Count the values of a YAML node with its aliases replaced; one that is within itself is endless."""
    if id(node) not in known:
        known[id(node)] = math.inf  # while its parts are counted
        parts = node.value if isinstance(getattr(node, "value", None), list) else ()
        inner = (one for part in parts for one in (part if isinstance(part, tuple) else (part,)))
        known[id(node)] = 1 + sum(_size(one, known) for one in inner)
    return known[id(node)]


@functools.cache
def loader() -> Any:
    """Return YAML's safe loader as settings are written: ``1e-3`` is a number, ``no`` and dates are text."""
    yaml = require("yaml", "Reading settings")
    base: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # made in C where it can be

    class Loader(base):  # type: ignore[misc]
        yaml_implicit_resolvers: ClassVar[dict[str, Any]] = {}

    for tag, form, first in _PLAIN:
        Loader.add_implicit_resolver(f"tag:yaml.org,2002:{tag}", re.compile(rf"^(?:{form})$"), first)
    return Loader


_PLAIN = (
    ("bool", r"true|false|True|False|TRUE|FALSE", list("tTfF")),
    ("null", r"null|Null|NULL|~|", ["n", "N", "~", ""]),
    ("int", r"[-+]?(?:0|[1-9][\d_]*)", list("-+0123456789")),
    ("float", r"[-+]?(?:\d[\d_]*\.[\d_]*|\.\d[\d_]*|\d[\d_]*(?=[eE]))(?:[eE][-+]?\d+)?", list("-+0123456789.")),
    ("float", r"[-+]?\.(?:inf|nan)", list("-+.")),
    ("merge", r"<<", ["<"]),
)
"""Plain words that are no text: their kinds, their forms, and the signs that they begin with."""


def to_yaml(values: Mapping[str, Any]) -> str:
    """Return values as YAML that `read` reads back."""
    yaml = require("yaml", "Writing settings")

    class Dumper(yaml.SafeDumper):  # type: ignore[misc, name-defined]
        yaml_implicit_resolvers: ClassVar[dict[str, Any]] = loader().yaml_implicit_resolvers

    return str(yaml.dump(values, Dumper=Dumper, sort_keys=False, allow_unicode=True))


def resolved(value: Any, known: Mapping[str, Any]) -> Any:
    """Return values in which ``${a.b}`` has become that setting's own, by its name in ``known``.

    Raises:
        ConfigError: it names no setting.
    """
    if isinstance(value, Mapping):
        return {name: resolved(one, known) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [resolved(one, known) for one in value]
    names = _INTERPOLATION.findall(value) if isinstance(value, str) else []
    if wrong := next((name for name in names if name not in known), ""):
        raise ConfigError(f"settings cannot be composed: ${{{wrong}}} names no setting")
    for name in names:
        value = known[name] if value == f"${{{name}}}" else value.replace(f"${{{name}}}", str(known[name]))
    return value


def folder_name(recipe: str) -> str:
    """Return the name of the folder for a recipe's runs and studies: ``train.py-make`` of ``/my/train.py:make``."""
    return re.sub(r"[^\w.-]+", "-", recipe.replace("\\", "/").rsplit("/", 1)[-1])


@functools.cache
def comments() -> dict[str, str]:
    """Return what the files ``default.yaml`` say of each setting, by its dotted name: the comment above its key."""
    found: dict[str, str] = {}
    for group in (one for one, names in groups().items() if "default" in names):
        path, comment = [group], ""
        for line in _text(group, "default").splitlines():
            key, indent = line.strip().partition(":")[0], len(line) - len(line.lstrip())
            if key.startswith("#"):
                comment += f" {line.strip().lstrip('# ')}"
            elif key:
                path = [*path[: 1 + indent // 2], key]  # two spaces a level
                found[".".join(path)] = comment.strip()
            comment = comment if key.startswith("#") else ""
    return {name: text for name, text in found.items() if text}
