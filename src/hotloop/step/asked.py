"""What a loop was given, checked before anything is done with it."""

from __future__ import annotations

import ast
import collections
import importlib.util
import math
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from hotloop.errors import ConfigError
from hotloop.record import RunRecord
from hotloop.step.tiers import NAMED

if TYPE_CHECKING:
    from hotloop.step.holdings import Holdings

_One = TypeVar("_One")


def check(run: Any, total_steps: Any, state: Any, workload: Any, record: Any) -> tuple[Any, ...]:
    """Refuse settings of a loop that cannot be meant; gives the other state as a tuple.

    Raises:
        ConfigError: one does not fit; the message names it, its value and what was expected.
    """
    if not isinstance(run, str):
        raise ConfigError(f"run {run!r}: expected 'auto', a tier ({', '.join(NAMED)}) or a preset, by name")
    if total_steps is not None and (type(total_steps) is not int or total_steps < 1):
        raise ConfigError(f"total_steps {total_steps!r}: expected a whole number of 1 or more, or None")
    if workload is not None and (not isinstance(workload, str) or ":" not in workload):
        raise ConfigError(f"workload {workload!r}: expected 'file.py:make' or 'module:make', or None")
    if workload is not None:
        check_name(workload)
    if record is not None and not isinstance(record, str | os.PathLike | RunRecord):
        raise ConfigError(f"record {record!r}: expected a folder, a RunRecord, or None")
    others = tuple(state) if isinstance(state, list | tuple) else (state,)
    if any(isinstance(one, bool | int | float | str | bytes) or one is None for one in others):
        raise ConfigError(f"state {state!r}: expected objects that a step changes: a GradScaler, an EMA, a module")
    return others


def check_name(name: str) -> None:
    """Refuse a factory's name that leads nowhere, as far as can be told without running its file.

    Raises:
        ConfigError: there is no such file or module, or the file has no function of that name.
    """
    place, _, function = name.rpartition(":")
    if not place or not function:
        raise ConfigError(f"workload {name!r}: expected FILE.py:function or module:function")
    if not place.endswith(".py"):
        try:
            known = importlib.util.find_spec(place) is not None
        except (ImportError, ValueError):
            known = place in sys.modules
        if not known:
            raise ConfigError(f"workload {name!r}: there is no module {place!r}; for a file write FILE.py:function")
        return
    path = existing(place, name)
    try:
        tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return  # Python says what is wrong with it when it is run
    words = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    words |= {getattr(node, "name", "") or "" for node in ast.walk(tree)}  # functions, classes, names of imports
    words |= {getattr(node, "asname", "") or "" for node in ast.walk(tree)}
    if function not in words and "*" not in words:
        raise ConfigError(f"workload {name!r}: {path} has no function {function!r}")


def existing(place: str, name: str) -> Path:
    """Give the file that a factory's name begins with.

    Raises:
        ConfigError: there is none.
    """
    path = Path(place).resolve()
    if not path.is_file():
        raise ConfigError(f"workload {name!r}: there is no file {path}")
    return path


def check_runs(runs: Any) -> float | None:
    """Refuse a number of runs that cannot be meant.

    Raises:
        ConfigError: it is no number of 1 or more.
    """
    if runs is None:
        return None
    if isinstance(runs, bool) or not isinstance(runs, int | float) or not math.isfinite(runs) or runs < 1:
        raise ConfigError(f"runs {runs!r}: expected how many runs share compiled code, 1 or more, or None")
    return float(runs)


def check_shapes(shapes: Any, batches: Any) -> int:
    """Refuse a number of shapes that cannot be meant; gives 0 where none were declared.

    Raises:
        ConfigError: it is no number of 1 or more, or no batches say which shapes are meant.
    """
    if shapes is None:
        return 0
    if type(shapes) is not int or shapes < 1:
        raise ConfigError(f"shapes {shapes!r}: expected how many sizes of batches there are, 1 or more, or None")
    if batches is None:
        raise ConfigError(f"shapes={shapes} without batches: give batches=, which say what shapes they are")
    return shapes


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
        got = type(wrong[0]).__name__ if wrong else empty
        raise ConfigError(
            f"{what}: expected a {kind.__module__.partition('.')[0]} {kind.__name__} or a sequence, got {got}; a "
            "mapping of names to them will do as well"
        )
    if odd := [name for name in found if not isinstance(name, str) or not name.strip() or "." in name]:
        raise ConfigError(f"{what}: {odd[0]!r} is no name; expected text without a dot, which parts names in settings")
    return found


def unwrapped(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Give the optimizer inside a framework's, which has no hooks of its own (Accelerate's, Fabric's, Lightning's)."""
    held = [vars(optimizer).get(name) for name in ("optimizer", "_optimizer")]
    return next((one for one in held if isinstance(one, torch.optim.Optimizer)), optimizer)


def device_of(holdings: Holdings) -> torch.device:
    """Give the device that the step runs on: that of most parameters.

    Raises:
        ConfigError: nothing has a parameter.
    """
    counts = collections.Counter(one.device for one in holdings.parameters().values())
    if not counts:
        raise ConfigError("model: it has no parameters, so there is no training step to run")
    return counts.most_common(1)[0][0]
