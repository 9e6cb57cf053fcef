"""The groups of settings in ``conf/`` and their choices, and YAML files of settings: read, and put together."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Iterator, Mapping
from importlib import resources
from pathlib import Path
from typing import Any, ClassVar

from hotloop import files
from hotloop.errors import ConfigError
from hotloop.train.nested import leaves, merge, nested
from hotloop.train.optional import require

CONF = resources.files("hotloop.train") / "conf"
_NUMBER = ("tag:yaml.org,2002:float", re.compile(r"^[-+]?(?:\d[\d_]*\.?\d*|\.\d[\d_]*)[eE][-+]?\d+$"))
"""How the loader reads numbers that YAML 1.1 takes for text, which are quoted where they are text."""
_INTERPOLATION = re.compile(r"\$\{([\w.-]+)\}")


def groups(folder: Path | None = None) -> dict[str, list[str]]:
    """Return the groups and their choices, those of the user's own folder included."""
    found: dict[str, set[str]] = {}
    for root in [CONF, *([folder] if folder else [])]:
        for group in root.iterdir():
            if group.is_dir():
                files = (file.name for file in group.iterdir())
                found.setdefault(group.name, set()).update(name[:-5] for name in files if name.endswith(".yaml"))
    return {name: sorted(choices) for name, choices in sorted(found.items()) if choices}


def composed(choices: Mapping[str, str], folder: Path | None = None) -> dict[str, Any]:
    """Return the values of all groups, each as its choice has it.

    A choice lies on top of its group's ``default.yaml``. One of the group ``recipe`` may choose for other groups, where
    nobody else does; what ``GROUP/CHOICE_of/RECIPE.yaml`` says comes on top, where there is one.
    """
    usual = _file(CONF / "config.yaml")
    recipe = choices.get("recipe", usual["recipe"])
    for entry in _file(_path("recipe", recipe, folder)).get("defaults", []):
        if isinstance(entry, dict):
            usual |= {key.rpartition("/")[2]: name for key, name in entry.items()}
    values: dict[str, Any] = {}
    for group, name in {**usual, **choices}.items():
        merge(values, _choice(group, name, folder))
        further = CONF / group / f"{name}_of" / f"{recipe}.yaml"
        if further.is_file():
            merge(values, {group: _file(further)})
    return values


def _choice(group: str, name: str, folder: Path | None) -> dict[str, Any]:
    """Read a choice, on top of what it lies on: the files that its ``defaults`` name, and the group's ``default``."""
    entries = _file(_path(group, name, folder)).get("defaults", [])
    below = [one.partition("@")[0] for one in entries if isinstance(one, str) and one != "_self_"]
    if name != "default" and "default" not in below and (CONF / group / "default.yaml").is_file():
        below.insert(0, "default")
    found: dict[str, Any] = {}
    for one in below:
        merge(found, _choice(group, one, folder))
    return merge(found, own(group, name, folder))


def own(group: str, name: str, folder: Path | None = None) -> dict[str, Any]:
    """Return the values that a choice sets itself, without those of the files below it."""
    path = _path(group, name, folder)
    values = {key: value for key, value in _file(path).items() if key != "defaults"}
    return values if "@package _global_" in _text(path) else {group: values}


def _path(group: str, name: str, folder: Path | None) -> Any:
    path = CONF / group / f"{name}.yaml"
    return folder / group / f"{name}.yaml" if folder and not path.is_file() else path


def _file(path: Any) -> dict[str, Any]:
    return dict(_shipped(path) if str(path).startswith(str(CONF)) else read(path, named=True))


@functools.cache
def _shipped(path: Any) -> dict[str, Any]:
    return _mapping(_text(path))


def _text(path: Any) -> str:
    """Return the text of a file of groups, ours or one that ``--config`` names."""
    return _named(path).decode() if isinstance(path, Path) else str(path.read_text(encoding="utf-8"))


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
    found = require("yaml", "Reading settings").load(text, Loader=loader())
    if found is None:  # comments alone
        return {}
    if not isinstance(found, dict):
        raise ConfigError(f"expected a mapping of settings, found {type(found).__name__}")
    values: dict[str, Any] = {}
    for name, value in found.items():  # `training.num_epochs: 3` is below its group
        merge(values, nested({str(name): value}))
    return values


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
        yaml_implicit_resolvers: ClassVar[dict[str, Any]] = {
            **yaml.SafeDumper.yaml_implicit_resolvers,
            **{sign: [*yaml.SafeDumper.yaml_implicit_resolvers.get(sign, ()), _NUMBER] for sign in "-+0123456789."},
        }

    return str(yaml.dump(values, Dumper=Dumper, sort_keys=False, allow_unicode=True))


def resolved(value: Any, root: Mapping[str, Any], within: tuple[str, ...] = ()) -> Any:
    """Return values in which ``${a.b}`` has become that setting's own; ``${recipe}`` is the name for its folder.

    Raises:
        ConfigError: it names no setting, or itself.
    """
    if isinstance(value, Mapping):
        return {name: resolved(one, root, within) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [resolved(one, root, within) for one in value]
    if not isinstance(value, str) or "${" not in value:
        return value
    known = {**dict(leaves(root)), "recipe": folder_name(str(root["recipe"]["name"]))}

    def meant(name: str) -> Any:
        if name in within or name not in known:
            why = "refers to itself" if name in within else "names no setting"
            raise ConfigError(f"settings cannot be composed: ${{{name}}} {why}")
        return resolved(known[name], root, (*within, name))

    whole = _INTERPOLATION.fullmatch(value)
    return meant(whole[1]) if whole else _INTERPOLATION.sub(lambda found: str(meant(found[1])), value)


def folder_name(recipe: str) -> str:
    """Return the name of the folder for a recipe's runs and studies: ``train.py-make`` of ``/my/train.py:make``."""
    return re.sub(r"[^\w.-]+", "-", recipe.replace("\\", "/").rsplit("/", 1)[-1])


@dataclasses.dataclass(frozen=True)
class Entry:
    """A setting as its YAML file has it: dotted name within the group, the text of its value, and the comment above."""

    name: str
    value: str
    comment: str


def entries(text: str) -> Iterator[Entry]:
    """Read the keys of a YAML file with the comments above them; only block mappings of our own plain kind."""
    path: list[tuple[int, str]] = []
    comment: list[str] = []
    for line in text.splitlines():
        stripped = line.strip()
        if stripped.startswith("#"):
            comment.append(stripped.lstrip("# "))
        elif not stripped:
            comment = []
        else:
            indent = len(line) - len(line.lstrip())
            while path and path[-1][0] >= indent:
                path.pop()
            key, _, value = stripped.partition(":")
            path.append((indent, key))
            yield Entry(".".join(part for _, part in path), value.strip(), " ".join(comment))
            comment = []


@functools.cache
def comments() -> dict[str, str]:
    """Return what the files ``default.yaml`` say of each setting, by its dotted name."""
    usual = ((group, CONF / group / "default.yaml") for group in groups())
    texts = ((group, file.read_text(encoding="utf-8")) for group, file in usual if file.is_file())
    return {f"{group}.{one.name}": one.comment for group, text in texts for one in entries(text) if one.comment}
