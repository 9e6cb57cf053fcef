"""What a loop was given, checked before anything is done with it."""

from __future__ import annotations

import ast
import collections
import contextlib
import importlib.util
import inspect
import math
import numbers
import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hotloop.decide.horizon import MOST
from hotloop.errors import ConfigError
from hotloop.measure import flatten
from hotloop.record import RunRecord
from hotloop.step.naming import existing
from hotloop.step.tiers import ASKED

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

    from hotloop.step.state.holdings import Holdings


def check(run: Any, total_steps: Any, state: Any, workload: Any, record: Any) -> tuple[Any, ...]:
    """Refuse settings of a loop that cannot be meant; gives the other state as a tuple.

    Raises:
        ConfigError: one does not fit; the message names it, its value and what was expected.
    """
    if not isinstance(run, str):
        raise ConfigError(f"run {run!r}: expected 'auto', a tier ({', '.join(ASKED)}) or a preset, by name")
    if total_steps is not None and (not _is_whole(total_steps) or total_steps < 1):
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


def _is_whole(value: Any) -> bool:
    """Tell whether a value is a whole number, numpy's too, and no truth value."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def refuse_suspended(step: Callable[..., Any]) -> None:
    """Refuse a step whose call runs none of its Python: its body runs later, where nobody captures or proves it.

    Raises:
        ConfigError: it is a generator function, or an async one.
    """
    for one in (step, type(step).__call__):
        name = getattr(step, "__qualname__", type(step).__qualname__)
        if inspect.isgeneratorfunction(one) or inspect.isasyncgenfunction(one):
            raise ConfigError(
                f"loop.step: {name} is a generator function, whose body runs after its call has returned: expected a "
                "function that does the step and returns what it made (return loss, not yield loss)"
            )
        if inspect.iscoroutinefunction(one):
            raise ConfigError(
                f"loop.step: {name} is an async function, whose body runs after its call has returned: expected a "
                "plain function that does the step; await outside of it, and hand it what that gave"
            )


def check_name(name: str) -> None:
    """Refuse a factory's name that leads nowhere, as far as can be told without running its file.

    Raises:
        ConfigError: there is no such file or module, or the file has no function of that name.
    """
    place, _, function = name.rpartition(":")
    if not place or not function:
        raise ConfigError(f"workload {name!r}: expected FILE.py:function or module:function")
    path = existing(place, name) if place.endswith(".py") else _module_file(place, name)
    if path is None:
        return
    try:
        tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return  # Python says what is wrong with it when it is run
    words = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    words |= {getattr(node, "name", "") or "" for node in ast.walk(tree)}  # functions, classes, names of imports
    words |= {getattr(node, "asname", "") or "" for node in ast.walk(tree)}
    if function not in words and words.isdisjoint({"*", "__getattr__"}):
        raise ConfigError(f"workload {name!r}: {path} has no function {function!r}")


def _module_file(module: str, name: str) -> Path | None:
    """Give the file of Python code that a module is; None where there is none to read.

    Raises:
        ConfigError: there is no such module.
    """
    try:
        spec = importlib.util.find_spec(module)
        known = spec is not None
    except (ImportError, ValueError):
        spec, known = None, module in sys.modules
    if not known:
        raise ConfigError(f"workload {name!r}: there is no module {module!r}; for a file write FILE.py:function")
    origin = spec.origin if spec is not None else None
    return Path(origin) if origin is not None and origin.endswith(".py") else None


def check_runs(runs: Any) -> float | None:
    """Refuse a number of runs that cannot be meant.

    Raises:
        ConfigError: it is no number of 1 or more.
    """
    if runs is None:
        return None
    if isinstance(runs, bool) or not isinstance(runs, int | float) or not 1 <= runs < math.inf:
        raise ConfigError(f"runs {runs!r}: expected how many runs share compiled code, 1 or more, or None")
    return float(min(runs, MOST))


def check_batches(batches: Any) -> None:
    """Refuse batches that nothing can be looked at in.

    Raises:
        ConfigError: they are none, there is none, or the first is plain Python values, which have no shape.
    """
    if batches is None or callable(batches):
        return
    if not isinstance(batches, Iterable):
        raise ConfigError(f"batches {batches!r}: expected a DataLoader, a list, or a function that gives them")
    if not isinstance(batches, list | tuple):
        return
    if not batches:
        raise ConfigError(f"batches {batches!r}: there is none to look at; give the run's, or leave batches out")
    if all(one is None or isinstance(one, bool | int | float | str | bytes) for one in flatten(batches[0])[0]):
        raise ConfigError(
            f"batches: the first, {str(batches[0])[:_SHOWN]!r}, has no tensor: expected what the step is called with, "
            "a batch each, as it is their shapes that are looked at"
        )


_SHOWN = 60
"""Characters of a wrong value that an error repeats."""


@contextlib.contextmanager
def recording_in(record: Any) -> Iterator[None]:
    """Say of a folder that no record can be written in that it is the setting that is wrong.

    Raises:
        ConfigError: the folder cannot be made, or not be written in.
    """
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"record {str(record)!r}: expected a folder that can be written in, got {error}; name another, or leave "
            "record out to keep it in memory"
        ) from error


def check_shapes(shapes: Any, batches: Any) -> int:
    """Refuse a number of shapes that cannot be meant; gives 0 where none were declared.

    Raises:
        ConfigError: it is no number of 1 or more, or no batches say which shapes are meant.
    """
    if shapes is None:
        return 0
    if not _is_whole(shapes) or shapes < 1:
        raise ConfigError(f"shapes {shapes!r}: expected how many sizes of batches there are, 1 or more, or None")
    if batches is None:
        raise ConfigError(f"shapes={shapes} without batches: give batches=, which say what shapes they are")
    return int(shapes)


def device_of(holdings: Holdings) -> torch.device:
    """Give the device that the step runs on: that of most parameters.

    Raises:
        ConfigError: nothing has a parameter.
    """
    counts = collections.Counter(one.device for one in holdings.parameters().values())
    if not counts:
        raise ConfigError("model: it has no parameters, so there is no training step to run")
    return counts.most_common(1)[0][0]
