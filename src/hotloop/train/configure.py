"""Settings from the command line: Hydra composes the groups in ``conf/``, a file of the user's own, and overrides."""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib.metadata
import math
import re
import shlex
from importlib import resources
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Any

from hotloop.errors import ConfigError
from hotloop.train import schema
from hotloop.train.optional import require
from hotloop.train.settings import GROUP, Settings

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

CONF = "hotloop.train.conf"
ENTRY_POINTS = "hotloop.recipes"
"""The group of entry points, ``name = "module:function"``, by which a package ships a program as a recipe."""
_USER_NODE = "hotloop_user_file"
BEGIN, END = "# The settings of a run. The file is whole where its last line is three dots.", "..."
_MOST_NODES = 100_000
"""Values in a YAML file once its aliases are replaced: YAML takes few lines to make billions of them."""


def load(overrides: Sequence[str] = (), config: str | Path | None = None) -> Settings:
    """Compose the settings of a run.

    Args:
        overrides: ``a.b=c`` and group choices (``data=csv``), in Hydra's grammar; later ones win.
        config: a YAML file whose settings lie between the defaults and the overrides, or a folder of groups
            (``data/mine.yaml``) that adds choices.

    Raises:
        ConfigError: an override, a key, a group choice or a value that cannot be used, with what was expected.
    """
    return schema.build(Settings, compose(overrides, config))


def load_search(overrides: Sequence[str] = (), config: str | Path | None = None) -> Settings:
    """Compose the settings of a search, in which those that the overrides name are as they name them.

    What ``hpo.trial`` would set otherwise for trials is left out of it, and the setting is out of the space, unless the
    overrides say it of ``hpo.trial`` and ``hpo.space`` themselves.

    Raises:
        ConfigError: as `load`.
    """
    composed = compose(overrides, config)
    named_keys = (text.partition("=")[0].strip().lstrip("+~") for text in overrides)
    keys = [one for one in named_keys if "." in one]  # the others are choices
    for key in keys:
        *groups, last = key.split(".")
        for part, own in (("trial", False), ("space", groups[0] == GROUP)):
            named = f"hpo.{part}.{key}"
            if any(f"{one}.".startswith(f"{named}.") or named.startswith(f"{one}.") for one in keys):
                continue
            at = composed["hpo"][part]
            for group in groups:  # what a program says of its space is put into it later
                at = at.setdefault(group, {}) if own else at.get(group) or {}
            if part == "trial":
                at.pop(last, None)
            elif own or last in at:
                at[last] = None
    return schema.build(Settings, composed)


def groups(folder: Path | None = None) -> dict[str, list[str]]:
    """Return the groups and their choices, those of the user's own folder included."""
    found: dict[str, set[str]] = {}
    package = resources.files("hotloop.train") / "conf"
    for root in [package, *([folder] if folder else [])]:
        for group in root.iterdir():
            if group.is_dir():
                names = (file.name for file in group.iterdir())
                found.setdefault(group.name, set()).update(name[:-5] for name in names if name.endswith(".yaml"))
    return {name: sorted(choices) for name, choices in sorted(found.items()) if choices}


def compose(overrides: Sequence[str] = (), config: str | Path | None = None) -> dict[str, Any]:
    """Compose the settings as plain data, before their types are checked."""
    hydra = require("hydra", "Reading settings")
    require("omegaconf", "Reading settings")
    path = Path(config) if config else None
    if path and not path.exists():
        raise ConfigError(f"--config {path}: no such file or folder")
    folder = path if path and path.is_dir() else None
    choices, values = _user_file(path) if path and not folder else ({}, {})
    available = groups(folder)
    given = [*(f"{key}={value}" for key, value in choices.items()), *overrides]
    named = next((name for one in reversed(given) if (name := program_name(one))), "")
    texts = [text for one in given for text in own_program(_as_written(one, named))]
    lines = [_checked(text, available, of_program="recipe=workload" in texts) for text in texts]
    if folder:
        for file in folder.glob("*/*.yaml"):
            _read(file)
        lines.append(f"hydra.searchpath=[file://{folder.resolve()}]")
    if values:
        from hydra.core.config_store import ConfigStore  # noqa: PLC0415 - optional, its presence was checked above

        ConfigStore.instance().store(name=_USER_NODE, node=values, group="user", package="_global_")
        lines.insert(0, f"+user={_USER_NODE}")
    return _compose(hydra, lines, known=not path)


def _compose(hydra: Any, lines: list[str], *, known: bool) -> dict[str, Any]:
    """Compose the lines; ``known`` says that no file or folder of the user's own has a part in it."""
    from hydra.errors import HydraException  # noqa: PLC0415 - optional, its presence was checked by the caller
    from omegaconf import OmegaConf  # noqa: PLC0415
    from omegaconf.errors import OmegaConfBaseException  # noqa: PLC0415

    OmegaConf.register_new_resolver("folder_name", folder_name, replace=True)
    # Hydra takes choices first, wherever they stand, and a third of a second to find and merge what they name. Values
    # behind the last that it has to judge (``+`` is an error where there is a value, ``~`` where there is none) are put
    # on top of what it made of the same choices before.
    choices = [line for line in lines if line[0] not in "+~"]
    values = [line for line in lines if line[0] in "+~"]
    judged = max((at for at, line in enumerate(values, 1) if not line.startswith("++")), default=0)
    chosen = _chosen if known else _chosen.__wrapped__
    try:
        composed = copy.deepcopy(chosen(hydra, (*choices, *values[:judged])))
        for line in values[judged:]:
            _put(composed, line)
        plain = OmegaConf.to_container(composed, resolve=True)
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(f"settings cannot be composed: {error}") from error
    assert isinstance(plain, dict)
    return {str(key): value for key, value in plain.items()}


@functools.lru_cache(maxsize=32)
def _chosen(hydra: Any, lines: tuple[str, ...]) -> Any:
    from hydra.core.global_hydra import GlobalHydra  # noqa: PLC0415 - optional, its presence was checked by the caller

    callers = GlobalHydra.instance().hydra  # Hydra keeps one global state, and a caller of ours may be using it
    GlobalHydra.instance().clear()
    try:
        with hydra.initialize_config_module(CONF, version_base="1.3"):
            return hydra.compose("config", overrides=list(lines))
    finally:
        GlobalHydra.instance().clear()
        if callers:
            GlobalHydra.instance().initialize(callers)


def _put(config: Any, line: str) -> None:
    """Put the value of an override, ``a.b=c`` in Hydra's grammar, into a configuration."""
    from omegaconf import OmegaConf  # noqa: PLC0415 - optional, its presence was checked by the caller

    key, text = line.lstrip("+~").split("=", 1)
    OmegaConf.update(config, key.strip(), _parsed(text), force_add=True)


def resume(folder: str | Path) -> str:
    """Return the override that goes on with what is in a folder, whatever signs its name has."""
    text = str(folder)
    if re.fullmatch(r"[\w./+@-]+", text, re.ASCII):
        return f"run.resume={text}"
    # In Hydra's grammar a backslash is one of its own, unless a quote comes behind it.
    quoted = re.sub(r"(\\*)('|$)", lambda found: 2 * found[1] + ("\\'" if found[2] else ""), text)
    return f"run.resume='{quoted}'"


def again(folder: str | Path, verb: str = "train") -> str:
    """Return the command, as it is typed into a shell, that goes on with a run or a cross-validation."""
    return f"hotloop {verb} {shlex.quote(resume(folder))}"


def folder_name(recipe: str) -> str:
    """Return the name of the folder for a recipe's runs and studies: ``train.py-make`` of ``/my/train.py:make``."""
    return re.sub(r"[^\w.-]+", "-", recipe.replace("\\", "/").rsplit("/", 1)[-1])


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
    from hydra.errors import HydraException  # noqa: PLC0415 - optional, its presence was checked by the caller

    key, _, value = text.partition("=")
    if ":" not in named or not key.strip().lstrip("+").startswith(f"{GROUP}."):
        return text
    from hotloop.train.program import known  # noqa: PLC0415 - loads torch

    setting = known(named).of(key.strip().lstrip("+").removeprefix(f"{GROUP}."))
    kinds = set(schema.members(setting.kind)) if setting else set()
    if kinds - {NoneType} != {str} or (NoneType in kinds and value.strip() == "null"):
        return text
    with contextlib.suppress(HydraException):  # what Hydra cannot read is text as well
        if isinstance(_parsed(value), str):
            return text
    # A backslash stands for itself but in front of a quote.
    quoted = re.sub(r"(\\*)('|$)", lambda found: found[1] * 2 + found[2].replace("'", "\\'"), value.strip())
    return f"{key}='{quoted}'"


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
    place, _, function = value.rpartition(":")
    # A resumed run finds the file from any folder.
    return f"{Path(place).resolve() if place.endswith('.py') else place}:{function}"


def own_program(text: str) -> list[str]:
    """Return the override that names a program as a choice and the name; any other override as it is."""
    name = program_name(text)
    if name is None:
        return [text]
    quoted = name.replace("\\", "\\\\").replace("'", "\\'")
    return ["recipe=workload", f"recipe.name='{quoted}'"]


def _choices(group: str, asked: str, available: list[str]) -> str:
    """Say what may be chosen: not the choices that others stand on."""
    known = set(available) - {"default"} or {"default"}
    if group != "recipe":
        return schema.nearest(asked, known)
    named = {*known, *installed()} - {"workload"}
    return f"{schema.nearest(asked, named)} (a program of your own: recipe=FILE.py:function)"


def _checked(text: str, available: Mapping[str, list[str]], *, of_program: bool = False) -> str:
    """Check one override's key against the settings, and give it in the form that Hydra takes for new keys too.

    ``of_program`` says that a program is named, whose own settings an unknown key may mean.
    """
    from hydra.core.override_parser.overrides_parser import OverridesParser  # noqa: PLC0415 - checked by the caller
    from hydra.errors import HydraException  # noqa: PLC0415

    if "=" not in text:
        function = f"; a program is named with its function, {text}:make" if text.endswith(".py") else ""
        raise ConfigError(f"override {text!r}: expected <setting>=<value>, such as training.num_epochs=3{function}")
    key = text.split("=", 1)[0].strip().lstrip("+~")
    value = text.split("=", 1)[1].strip()
    if key in available:
        if value not in available[key]:
            raise ConfigError(f"{key}={value}: no such choice; {_choices(key, value, available[key])}")
        return f"{key}={value}"
    if schema.at(Settings, key) is None:
        own = {f"{GROUP}.{key}"} if of_program and "." not in key else set()
        raise ConfigError(schema.unknown(Settings, key, also={*available, *own}))
    try:
        parsed = OverridesParser.create().parse_override(text)
    except HydraException as error:
        raise ConfigError(f"override {text!r} cannot be read (quote text that has special signs): {error}") from error
    if parsed.is_sweep_override():
        raise ConfigError(f"override {text!r} names several values: one run takes one")
    return text if text[:1] in "+~" else f"++{text}"


def _user_file(path: Path) -> tuple[dict[str, str], dict[str, Any]]:
    """Read a file of settings: a group given as text (``data: csv``) is a choice, all else are values."""
    loaded = _read(path)
    if not isinstance(loaded, dict):
        raise ConfigError(f"--config {path}: expected a mapping of settings, found {type(loaded).__name__}")
    names = set(Settings.model_fields)
    for key in map(str, loaded):
        if key not in names:
            raise ConfigError(f"--config {path}: unknown setting {key}: {schema.nearest(key, names)}")
    choices = {str(key): value for key, value in loaded.items() if isinstance(value, str)}
    return choices, {str(key): value for key, value in loaded.items() if not isinstance(value, str)}


def _check_text(text: str) -> None:
    """Check a YAML file of settings before it is read.

    Raises:
        ConfigError: it is torn, or its aliases would fill the memory, or hold themselves.
    """
    import yaml  # noqa: PLC0415 - comes with omegaconf

    if not text.strip() or (text.startswith(BEGIN) and not text.endswith(f"{END}\n")):
        raise ConfigError("the file is torn, as a full disk or a power cut leaves it: its end is missing")
    sizes: dict[int, float] = {}

    def size(node: Any) -> float:
        if id(node) not in sizes:
            sizes[id(node)] = math.inf  # while its own parts are counted
            parts = node.value if isinstance(node, yaml.CollectionNode) else ()
            inner = (one for part in parts for one in (part if isinstance(part, tuple) else (part,)))
            sizes[id(node)] = 1 + sum(map(size, inner))
        return sizes[id(node)]

    root = yaml.compose(text, Loader=yaml.SafeLoader)
    if root is not None and size(root) > _MOST_NODES:
        raise ConfigError(f"its aliases (&name, *name) make more than {_MOST_NODES:,} values: write out what is meant")


def _read(path: Path) -> Any:
    """Read a YAML file of settings.

    Raises:
        ConfigError: it cannot be read, is torn, or its aliases make more of it than settings are.
    """
    from omegaconf import OmegaConf  # noqa: PLC0415 - optional, its presence was checked by the caller

    try:
        _check_text(path.read_text(encoding="utf-8"))
        return OmegaConf.to_container(OmegaConf.load(path))
    except Exception as error:  # yaml and omegaconf raise classes of their own; each means the same here
        raise ConfigError(f"--config {path} cannot be read as YAML: {error}") from error


def to_dict(settings: Settings) -> dict[str, Any]:
    """Return settings as plain data: what the record, the checkpoints and ``settings.yaml`` hold."""
    return settings.model_dump(mode="json")


def to_yaml(settings: Settings) -> str:
    """Return settings as a YAML file that ``--config`` takes."""
    omegaconf = require("omegaconf", "Writing settings")
    return str(omegaconf.OmegaConf.to_yaml(omegaconf.OmegaConf.create(to_dict(settings))))


def from_dict(values: Mapping[str, Any], overrides: Sequence[str] = ()) -> Settings:
    """Rebuild settings from `to_dict`'s data, with overrides on top.

    Raises:
        ConfigError: as `load`.
    """
    from omegaconf import OmegaConf  # noqa: PLC0415 - optional, as in compose

    require("hydra", "Reading settings")
    lines = [_checked(_as_written(text, values["recipe"]["name"]), {}) for text in overrides]
    merged = OmegaConf.create(dict(values))
    for line in lines:
        _put(merged, line)
    plain = OmegaConf.to_container(merged, resolve=True)
    assert isinstance(plain, dict)
    return schema.build(Settings, {str(key): value for key, value in plain.items()})


def _parsed(text: str) -> Any:
    from hydra.core.override_parser.overrides_parser import OverridesParser  # noqa: PLC0415 - checked by the caller

    return OverridesParser.create().parse_override(f"value={text}").value()
