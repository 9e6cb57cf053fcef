"""Settings that a person keeps by name: YAML files of what differs from the defaults, as ``--config`` takes them."""

from __future__ import annotations

import contextlib
import os
import re
import stat
from typing import TYPE_CHECKING, Any

from hotloop import files
from hotloop.errors import ConfigError
from hotloop.train import conf_files, configure, schema
from hotloop.train.nested import leaves

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

FOLDER = ".hotloop-ui/presets"
"""Below the runs folder: hidden, so that no run is looked for in it."""
_NAME = re.compile(r"[A-Za-z0-9_](?:[\w .-]{0,62}[\w-])?", re.ASCII)
_LARGEST = 2**18


class Presets:
    """The presets below one runs folder.

    Args:
        root: the runs folder.
    """

    def __init__(self, root: Path) -> None:
        self._folder = root / FOLDER

    def names(self) -> list[str]:
        """Return the names of all presets, in their order."""
        try:
            files = [one.name for one in os.scandir(self._folder) if one.is_file(follow_symlinks=False)]
        except OSError:
            return []
        return sorted(name for file in files if file.endswith(".yaml") and _NAME.fullmatch(name := file[:-5]))

    def file(self, name: str) -> Path:
        """Return the file of a preset, whether it is there or not.

        Raises:
            ConfigError: it cannot be a preset's name, or it is there and is no plain file.
        """
        if not _NAME.fullmatch(name):
            raise ConfigError(
                f"preset={name!r}: expected up to 64 letters, digits, spaces, dots, dashes and underscores"
            )
        path = self._folder / f"{name}.yaml"
        if path.resolve() != path.parent.resolve() / path.name:  # a link leads elsewhere
            raise ConfigError(f"preset={name!r}: {path} is a link; remove it")
        return path

    def values(self, name: str) -> dict[str, Any]:
        """Return the whole settings that a preset stands for: the defaults, and on top what it has.

        Raises:
            ConfigError: there is no such preset, or it cannot be read.
        """
        path = self.file(name)
        try:
            there = path.lstat()
        except OSError:
            raise ConfigError(f"preset={name!r}: there is none of this name by now") from None
        if not stat.S_ISREG(there.st_mode) or there.st_size > _LARGEST:
            raise ConfigError(f"preset={name!r}: {path} is no file of settings")
        own = conf_files.read(path)  # first: what is wrong with it is no matter of --config
        found = configure.compose((), path)
        recipe, known = configure.recipe_choice(str(found["recipe"]["name"])), conf_files.groups()["recipe"]
        if recipe not in known:
            raise ConfigError(f"preset={name!r} is of recipe={recipe!r}: expected one of {', '.join(known)}")
        model = configure.model(recipe)
        unknown = [key for key, _ in leaves(own) if schema.at(model, key) is None]
        if unknown:
            raise ConfigError(f"preset={name!r}: {schema.unknown(model, unknown[0])}")
        return whole(found)

    def save(self, name: str, values: Mapping[str, Any]) -> None:
        """Keep settings; those of this name are replaced.

        Raises:
            ConfigError: it cannot be written.
        """
        path = self.file(name)
        recipe = str(values["recipe"]["name"])
        kept = differing(values, whole(configure.compose([f"recipe={recipe}"])))
        kept["recipe"] = {"name": recipe, **kept.get("recipe", {})}
        try:
            with files.whole(path) as file:
                file.write(conf_files.to_yaml(kept).encode())
        except OSError as error:
            raise ConfigError(f"{path} cannot be written: {files.cannot(error)}") from error

    def delete(self, name: str) -> None:
        """Delete a preset, if it is still there."""
        self.file(name).unlink(missing_ok=True)


def whole(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings as they are written down; those that lack something, such as a path, as they are."""
    with contextlib.suppress(ConfigError):
        return configure.to_dict(configure.build(values))
    return dict(values)


def differing(values: Mapping[str, Any], base: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part of values that differs from others; null for what those have in addition."""
    found: dict[str, Any] = {name: None for name in base if name not in values and base[name] is not None}
    for name, value in values.items():
        other = base.get(name)
        if isinstance(value, dict) and isinstance(other, dict):
            if inner := differing(value, other):
                found[name] = inner
        elif name not in base or value != other:
            found[name] = value
    return found


def beside(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return the settings that differ, by their dotted names, as both have them."""
    one, other = dict(leaves(first)), dict(leaves(second))
    names = dict.fromkeys([*one, *other])
    return {name: (one.get(name), other.get(name)) for name in names if one.get(name) != other.get(name)}
