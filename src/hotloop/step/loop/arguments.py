"""What a loop was given, checked before anything is done with it."""

from __future__ import annotations

import collections
import contextlib
import inspect
import logging
import math
import numbers
import os
import weakref
from typing import TYPE_CHECKING, Any

from hotloop._torch.sharded import Sharded
from hotloop.decide.horizon import MOST
from hotloop.errors import ConfigError
from hotloop.presets import expected
from hotloop.record import RunRecord
from hotloop.step.naming import existing
from hotloop.step.tiers import LAYOUTS, tier_of_setting

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import torch

    from hotloop.step.state.holdings import Holdings


_log = logging.getLogger("hotloop")
_owners: weakref.WeakKeyDictionary[torch.optim.Optimizer, weakref.ref[Any]] = weakref.WeakKeyDictionary()
"""The latest loop of each optimizer."""


def check(run: Any, total_steps: Any, state: Any, workload: Any, record: Any) -> tuple[Any, ...]:
    """Return ``state`` as a tuple; raise `ConfigError` for a setting that cannot be meant."""
    tier_of_setting(run)
    if total_steps is not None and (not _is_whole(total_steps) or total_steps < 1):
        raise ConfigError(f"total_steps {total_steps!r}: expected a whole number of 1 or more, or None")
    if workload is not None and not isinstance(workload, str):
        raise ConfigError(
            f"workload of type {type(workload).__name__}: expected the name of a function that returns a "
            "hotloop.Workload, as text, such as workload='train.py:make'; the background compile calls it in a process "
            "of its own"
        )
    if workload is not None:
        check_name(workload)
    if record is not None and not isinstance(record, str | os.PathLike | RunRecord):
        raise ConfigError(f"record {record!r}: expected a folder, a RunRecord, or None")
    state = () if state is None else state
    others = tuple(state) if isinstance(state, list | tuple) else (state,)
    if any(isinstance(other, bool | int | float | str | bytes) or other is None for other in others):
        raise ConfigError(f"state {state!r}: expected objects that a step changes: a GradScaler, an EMA, a module")
    return others


def _is_whole(value: Any) -> bool:
    """Return whether a value is a whole number, Python's or numpy's, and no truth value."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def refuse_suspended(step: Callable[..., Any]) -> None:
    """Raise `ConfigError` for a generator function or an async one: its call runs none of its Python."""
    name = getattr(step, "__qualname__", type(step).__qualname__)
    for function in (step, type(step).__call__):
        if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
            raise ConfigError(
                f"loop.step: {name} is a generator function, whose body runs after its call has returned: expected a "
                "function that does the step and returns what it made (return loss, not yield loss)"
            )
        if inspect.iscoroutinefunction(function):
            raise ConfigError(
                f"loop.step: {name} is an async function, whose body runs after its call has returned: expected a "
                "plain function that does the step; await outside of it, and hand it what that gave"
            )


def check_name(name: str) -> None:
    """Raise `ConfigError` for the name of a factory that has no form or no file; its file is not run."""
    place, _, function = name.rpartition(":")
    if not place or not function:
        raise ConfigError(
            f"workload {name!r}: expected FILE.py:function or module:function, such as workload='train.py:make'"
        )
    if place.endswith(".py"):
        existing(place, name)


def check_runs(runs: Any) -> float | None:
    """Return a number of runs; raise `ConfigError` for what is no number of 1 or more."""
    if runs is None:
        return None
    if isinstance(runs, bool) or not isinstance(runs, int | float) or not 1 <= runs < math.inf:
        raise ConfigError(f"runs {runs!r}: expected how many runs share compiled code, 1 or more, or None")
    return float(min(runs, MOST))


def check_layout(layout: Any) -> str:
    """Return the layout that was asked for; raise `ConfigError` for another setting."""
    if layout not in LAYOUTS:
        raise ConfigError(f"layout {layout!r}: {expected(str(layout), LAYOUTS)}")
    return str(layout)


@contextlib.contextmanager
def recording_in(record: Any) -> Iterator[None]:
    """Raise `ConfigError` where the path of a record, in the block, can be no folder."""
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"record {str(record)!r}: expected a folder, got {error}; name another, or leave "
            "record out to keep it in memory"
        ) from error


def device_of(holdings: Holdings) -> torch.device:
    """Return the device of most parameters, where the step runs; raise `ConfigError` where there is no parameter."""
    counts = collections.Counter(parameter.device for parameter in holdings.parameters().values())
    if not counts:
        raise ConfigError("model: it has no parameters, so there is no training step to run")
    return counts.most_common(1)[0][0]


def share_of(setting: Any) -> float:
    """Check the setting ``sentinel`` and return the share of time; 0 for no sentinel.

    Raises:
        ConfigError: the setting is no share of time.
    """
    if setting is None:
        return 0.0
    if isinstance(setting, bool) or not isinstance(setting, int | float) or not 0 <= setting <= 1:
        raise ConfigError(
            f"sentinel {setting!r}: expected the share of time that it may cost, from 0 to 1 (0.01, say), or None"
        )
    return float(setting)


def warn_of_strangers(holdings: Holdings) -> None:
    """Warn of optimizers none of whose parameters the loop's models or other state have: another model's, mostly."""
    known = {id(parameter) for module in holdings.modules.values() for parameter in module.parameters()}
    known |= {id(tensor) for tensor in holdings.other_tensors().values()}
    sharded = Sharded(holdings.modules.values())  # after an evaluation its modules hold whole parameters, not shards
    models = ", ".join(f"{name} ({type(module).__name__})" for name, module in holdings.modules.items())
    for name, optimizer in holdings.optimizers.items():
        held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        if not any(id(parameter) in known or sharded.holds(parameter) for parameter in held):
            _log.warning(
                "%s (%s): none of its parameters is one of %s: give the optimizer that was made of model.parameters(), "
                "or what has them as state=",
                name, type(optimizer).__name__, models,
            )  # fmt: skip


def warn_of_another_loop(loop: Any, holdings: Holdings) -> None:
    """Warn where another open loop owns one of the optimizers: what one loop steps, the other finds changed."""
    for name, optimizer in holdings.optimizers.items():
        before = _owners.get(optimizer, lambda: None)()
        if before is not None and not before.bypassed:
            _log.warning(
                "%s (%s) is owned by two loops, %s and %s, of which each takes the other's steps for changes from "
                "outside: decorate both steps with one loop, or close() the first",
                name, type(optimizer).__name__, repr(before), repr(loop),  # a handler may keep what it is given
            )  # fmt: skip
        _owners[optimizer] = weakref.ref(loop)
