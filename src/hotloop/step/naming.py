"""Names for the models and optimizers of a program, the file that a program's name begins with, and articles."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch

from hotloop.errors import ConfigError

_T = TypeVar("_T")


def existing(place: str, name: str, what: str = "workload") -> Path:
    """Return the absolute path of the file that a factory's name begins with.

    Args:
        place: the file.
        name: the whole name, for errors.
        what: what has that name, for errors.

    Raises:
        ConfigError: there is no such file; the message names the nearest beside it.
    """
    path = Path(place).resolve()
    if not path.is_file():
        near = difflib.get_close_matches(path.name, [one.name for one in path.parent.glob("*.py")], n=1)
        hint = f": did you mean {Path(place).with_name(near[0])}?" if near else ""
        raise ConfigError(f"{what} {name!r}: there is no file {path}{hint}")
    return path


def named(what: str, given: Any, kind: type[_T]) -> dict[str, _T]:
    """Return one or several objects by name: a mapping has names, and the objects of a sequence are numbered.

    Raises:
        ConfigError: an object is not of the kind or given twice, there is none, or a name is empty or has a dot.
    """
    if isinstance(given, Mapping):
        objects = dict(given)
    elif isinstance(given, list | tuple):
        objects = {f"{what}[{index}]": value for index, value in enumerate(given)}
    else:
        objects = {what: given}
    wrong = [value for value in objects.values() if not isinstance(value, kind)]
    if wrong or not objects:
        if not objects:
            got = "an empty mapping" if isinstance(given, Mapping) else "an empty sequence"
        elif isinstance(wrong[0], type):
            got = f"the class {wrong[0].__name__}: hand over one that was made of it, {wrong[0].__name__}(...)"
        else:
            swapped = isinstance(wrong[0], torch.nn.Module | torch.optim.Optimizer)
            got = type(wrong[0]).__name__ + (" (the model comes first, then the optimizer)" if swapped else "")
        raise ConfigError(
            f"{what}: expected a {kind.__module__.partition('.')[0]} {kind.__name__} or a sequence, got {got}; a "
            "mapping of names to them will do as well"
        )
    first: dict[int, str] = {}
    for name, value in objects.items():
        if (before := first.setdefault(id(value), name)) != name:
            raise ConfigError(f"{what}: {before!r} and {name!r} are one object: name each {kind.__name__} once")
    if odd := [name for name in objects if not isinstance(name, str) or not name.strip() or "." in name]:
        raise ConfigError(f"{what}: {odd[0]!r} is no name; expected text without a dot, which parts names in settings")
    return objects


def optimizers_of(given: Any) -> dict[str, torch.optim.Optimizer]:
    """Return the optimizers of a program by name; none for None or nothing, where a step updates by hand.

    Raises:
        ConfigError: as `named`.
    """
    if given is None or (isinstance(given, list | tuple | Mapping) and not given):
        return {}
    return {name: unwrapped(one) for name, one in named("optimizer", given, torch.optim.Optimizer).items()}


def unwrapped(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return the optimizer inside a framework's wrapper, which has no hooks (Accelerate's, Fabric's, Lightning's)."""
    held = [vars(optimizer).get(name) for name in ("optimizer", "_optimizer")]
    return next((inner for inner in held if isinstance(inner, torch.optim.Optimizer)), optimizer)


def with_article(name: str) -> str:
    """Put the article before the name of a type: ``an int``, ``a list``."""
    return f"{'an' if name[:1].lower() in tuple('aeiou') else 'a'} {name}"
