"""Where a bench takes its programs from: each way runs on one of its own, made anew."""

from __future__ import annotations

import copy
import dataclasses
import importlib.util
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hotloop.errors import ConfigError
from hotloop.step.workload import Workload, load_factory

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclasses.dataclass(frozen=True)
class Source:
    """Makes a program for each way.

    Args:
        make: gives a new workload.
        name: by which another process can make it, ``file.py:function`` or ``module:function``; empty where none can.
        why: without a name, why there is none.
    """

    make: Callable[[], Workload]
    name: str = ""
    why: str = ""


def source_of(given: Any) -> Source:
    """Take a workload, a function that makes one, or the name of such a function.

    Raises:
        ConfigError: it is none of them, or a workload that cannot be copied.
    """
    if isinstance(given, str):
        return Source(load_factory(given), name=_with_whole_path(given))
    if isinstance(given, Workload):
        return Source(copies_of(given), why="a Workload that exists in this process only")
    if not callable(given):
        raise ConfigError(
            f"workload {given!r}: expected a hotloop.Workload, a function that makes one, or its name as 'file.py:make'"
        )

    def make() -> Workload:
        made = given()
        if not isinstance(made, Workload):
            raise ConfigError(f"workload {_name_of(given)}() gave a {type(made).__name__}, expected a hotloop.Workload")
        return made

    name = _importable(given)
    why = "" if name else f"{_name_of(given)} cannot be imported by another process: no function of a file's own"
    return Source(make, name, why)


def copies_of(workload: Workload) -> Callable[[], Workload]:
    """Give a function that copies a workload as it is now: its model, its optimizer and its step together.

    Raises:
        ConfigError: the step is a function that holds on to this one model, so that a copy would train it.
    """
    first = _copied(workload)
    if first.step is workload.step:
        raise ConfigError(
            f"workload step {_name_of(workload.step)}: it works on this one model, and each way needs its own; give "
            "the function that makes the workload, hotloop.bench(make), or its name, hotloop.bench('file.py:make')"
        )
    return lambda: _copied(first)


def _copied(workload: Workload) -> Workload:
    memo: dict[int, Any] = {}
    if not callable(workload.batches):
        memo[id(workload.batches)] = workload.batches  # batches are read only, and a loader's workers cannot be copied
    try:
        return copy.deepcopy(workload, memo)
    except Exception as error:
        raise ConfigError(
            f"workload: it cannot be copied ({type(error).__name__}: {error}), and each way needs one of its own; give "
            "the function that makes it, hotloop.bench(make), or its name, hotloop.bench('file.py:make')"
        ) from error


def _with_whole_path(name: str) -> str:
    place, _, function = name.rpartition(":")
    return f"{Path(place).resolve()}:{function}" if place.endswith(".py") else name


def _importable(function: Any) -> str:
    """Give the name by which another process finds a function; empty where it would not find it."""
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", "")
    if module not in sys.modules or not name.isidentifier() or getattr(sys.modules[module], name, None) is not function:
        return ""
    if module == "__main__":
        file = getattr(sys.modules[module], "__file__", None)
        return f"{Path(file).resolve()}:{name}" if file and file.endswith(".py") else ""
    try:
        return f"{module}:{name}" if importlib.util.find_spec(module) is not None else ""
    except (ImportError, ValueError):
        return ""


def _name_of(function: Any) -> str:
    return str(getattr(function, "__qualname__", type(function).__name__))
