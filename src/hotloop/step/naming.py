"""Names for the models and optimizers of a program, and the file that a program's name begins with."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch

from hotloop.errors import ConfigError

_One = TypeVar("_One")


def existing(place: str, name: str) -> Path:
    """Give the file that a factory's name begins with.

    Raises:
        ConfigError: there is none.
    """
    path = Path(place).resolve()
    if not path.is_file():
        raise ConfigError(f"workload {name!r}: there is no file {path}")
    return path


def named(what: str, given: Any, kind: type[_One]) -> dict[str, _One]:
    """Name one or several objects: those of a mapping have their names, those of a sequence are numbered."""
    if isinstance(given, Mapping):
        found = dict(given)
    elif isinstance(given, list | tuple):
        found = {f"{what}[{index}]": one for index, one in enumerate(given)}
    else:
        found = {what: given}
    wrong = [one for one in found.values() if not isinstance(one, kind)]
    if wrong or not found:
        empty = "an empty mapping" if isinstance(given, Mapping) else "an empty sequence"
        got = _told(wrong[0]) if wrong else empty
        raise ConfigError(
            f"{what}: expected a {kind.__module__.partition('.')[0]} {kind.__name__} or a sequence, got {got}; a "
            "mapping of names to them will do as well"
        )
    first: dict[int, str] = {}
    for name, one in found.items():
        if (before := first.setdefault(id(one), name)) != name:
            raise ConfigError(f"{what}: {before!r} and {name!r} are one object: name each {kind.__name__} once")
    if odd := [name for name in found if not isinstance(name, str) or not name.strip() or "." in name]:
        raise ConfigError(f"{what}: {odd[0]!r} is no name; expected text without a dot, which parts names in settings")
    return found


def _told(value: Any) -> str:
    """Say what a wrong value is, with what may have been meant."""
    if isinstance(value, type):
        return f"the class {value.__name__}: hand over one that was made of it, {value.__name__}(...)"
    swapped = isinstance(value, torch.nn.Module | torch.optim.Optimizer)
    return type(value).__name__ + (" (the model comes first, then the optimizer)" if swapped else "")


def unwrapped(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Give the optimizer inside a framework's, which has no hooks of its own (Accelerate's, Fabric's, Lightning's)."""
    held = [vars(optimizer).get(name) for name in ("optimizer", "_optimizer")]
    return next((one for one in held if isinstance(one, torch.optim.Optimizer)), optimizer)
