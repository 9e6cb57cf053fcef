"""The groups of settings in ``conf/`` and their choices, and YAML files of settings: read, and put together."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Iterator, Mapping
from importlib import resources
from pathlib import Path
from typing import Any

from hotloop import files
from hotloop.errors import ConfigError
from hotloop.train.nested import leaves, merge, nested
from hotloop.train.optional import require

CONF = resources.files("hotloop.train") / "conf"
BEGIN, END = "# The settings of a run. The file is whole where its last line is three dots.", "..."
_MOST_NODES = 100_000
"""Values in a YAML file once its aliases are replaced: YAML takes few lines to make billions of them."""
_DEEPEST = 50
"""Mappings and lists within each other in a YAML file: some 900 exhaust Python's stack, some 30,000 that of PyYAML."""
_FLOAT = re.compile(r"[-+]?(?:\d[\d_]*\.?\d*|\.\d[\d_]*)[eE][-+]?\d+")
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


def read(path: Path, *, of_run: bool = False, named: bool = False) -> dict[str, Any]:
    """Read a YAML file of settings.

    Args:
        path: of the file.
        of_run: a run wrote it into its folder, so its first and last line are known.
        named: the user names it by ``--config``: it may be a link or a pipe, which nobody can have planted there.

    Raises:
        ConfigError: it cannot be read, is torn, is no mapping, or its aliases make more of it than settings are.
    """
    yaml = require("yaml", "Reading settings")
    shown = f"--config {path}" if named else str(path)
    try:
        text = (_named(path) if named else files.read(path)).decode("utf-8-sig")  # editors of Windows mark it so
    except OSError as error:
        raise ConfigError(f"{shown} cannot be read: {error}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{shown} cannot be read: it is no text in UTF-8") from error
    try:
        return _mapping(text.replace("\r\n", "\n"), of_run=of_run)
    except (ValueError, RecursionError, yaml.YAMLError) as error:
        raise ConfigError(f"{shown} cannot be read as YAML: {error}") from error


def _mapping(text: str, *, of_run: bool = False) -> dict[str, Any]:
    """Read a YAML text, checked before anything is made of it."""
    yaml = require("yaml", "Reading settings")

    first = text.partition("\n")[0]
    cut = len(text.strip()) > 1 and BEGIN.startswith(text.strip())  # it would be read as a comment, and no settings
    begun = of_run or first == BEGIN or cut
    if begun and not (first == BEGIN and text.endswith(f"\n{END}\n")):
        raise ConfigError("the file is torn, as a full disk or a power cut leaves it: its end is missing")
    loader = _loader()
    depth = 0
    for event in yaml.parse(text, Loader=loader):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > _DEEPEST:
            raise ConfigError(f"it has more than {_DEEPEST} mappings or lists within each other: settings have a few")
    sizes: dict[int, float] = {}

    def size(node: Any) -> float:
        if id(node) not in sizes:
            sizes[id(node)] = math.inf  # while its own parts are counted
            parts = node.value if isinstance(node, yaml.CollectionNode) else ()
            inner = (one for part in parts for one in (part if isinstance(part, tuple) else (part,)))
            sizes[id(node)] = 1 + sum(map(size, inner))
        return sizes[id(node)]

    root = yaml.compose(text, Loader=loader)
    if root is not None and size(root) > _MOST_NODES:
        raise ConfigError(f"its aliases (&name, *name) make more than {_MOST_NODES:,} values: write out what is meant")
    found = yaml.load(text, Loader=loader)
    if found is None:  # comments alone
        return {}
    if not isinstance(found, dict):
        raise ConfigError(f"expected a mapping of settings, found {type(found).__name__}")
    return _undotted({str(key): value for key, value in found.items()})


def _undotted(given: Mapping[str, Any]) -> dict[str, Any]:
    """Put what a file names from its top level on, ``training.num_epochs: 3``, below its groups."""
    found: dict[str, Any] = {}
    for name, value in given.items():
        below = nested({name: value})
        there = dict(leaves(found))
        if twice := next((one for one, _ in leaves(below) if one in there), None):
            raise ConfigError(f"{twice} stands there twice")
        merge(found, below)
    return found


@functools.cache
def _loader() -> Any:
    """Return YAML's safe loader as settings are written: ``1e-3`` is a number, a date is text, no key stands twice."""
    yaml = require("yaml", "Reading settings")

    base: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # made in C where it can be

    class Loader(base):  # type: ignore[misc]
        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            keys = [one.value for one, _ in node.value]
            if twice := next((one for at, one in enumerate(keys) if one in keys[:at]), None):
                raise yaml.constructor.ConstructorError(None, None, f"{twice} stands there twice", node.start_mark)
            return super().construct_mapping(node, deep=deep)

    _resolve(Loader)
    dates = "tag:yaml.org,2002:timestamp"
    Loader.yaml_implicit_resolvers = {
        sign: [one for one in known if one[0] != dates] for sign, known in Loader.yaml_implicit_resolvers.items()
    }
    return Loader


@functools.cache
def _dumper() -> Any:
    base: Any = require("yaml", "Writing settings").SafeDumper

    class Dumper(base):  # type: ignore[misc]
        """Puts text into quotes that the loader would take for a number."""

    _resolve(Dumper)
    return Dumper


def _resolve(kind: Any) -> None:
    kind.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+0123456789."))


def to_yaml(values: Mapping[str, Any]) -> str:
    """Return values as YAML that `read` reads back."""
    yaml = require("yaml", "Writing settings")
    return str(yaml.dump(values, Dumper=_dumper(), sort_keys=False, allow_unicode=True))


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


_PAIR = re.compile(r"(.+:\w+),(.+:\w+)")


def pair(recipe: str) -> tuple[str, ...]:
    """Return the names of a LightningModule and its data, ``module.py:Module,data.py:Data``; () for another recipe."""
    found = _PAIR.fullmatch(recipe)
    return found.groups() if found else ()


def folder_name(recipe: str) -> str:
    """Return the name of the folder for a recipe's runs and studies: ``train.py-make`` of ``/my/train.py:make``."""
    recipe = (pair(recipe) or (recipe,))[0]
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
