"""The slot of nn.Module that holds its compiled call, and the root functions that dynamo traces.

torch's own in-place compile hands ``_call_impl`` to dynamo, which skips it as library code and looks for user frames
below: an ``nn.Sequential`` has none, so nothing is compiled. A root function of ours is traced, and inlines the rest.
The recompile limit belongs to the code object, so each thing that should be compiled apart gets a copy with a code
object of its own.
"""

from __future__ import annotations

import collections
import inspect
import itertools
import types
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

_PREFIX = "hotloop_root_"
_numbers = itertools.count()
_KEPT = 1024
_inlined: collections.OrderedDict[str, Inlined] = collections.OrderedDict()
"""What each root calls, by the root's name; the newest only."""


class Inlined(NamedTuple):
    """The function that a root calls: where it begins, and its positional parameters without ``self``."""

    file: str
    line: int
    parameters: tuple[str, ...]


def _call_module(module: Any, *args: Any, **kwargs: Any) -> Any:
    return module._call_impl(*args, **kwargs)  # noqa: SLF001 - in the ledger


def _call_function(function: Any, *args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs)


def eager_call(target: Any, *args: Any, **kwargs: Any) -> Any:
    """Call a module with its hooks, or a function, past any compiled entry of its own."""
    return (_call_module if isinstance(target, torch.nn.Module) else _call_function)(target, *args, **kwargs)


def root_function(name: str, target: Any) -> Callable[..., Any]:
    """Make a root for dynamo to trace: called with the target first, it has a code object of its own."""
    module = isinstance(target, torch.nn.Module)
    source = _call_module if module else _call_function
    # A number of its own as well: dynamo remembers which sizes and floats have varied by file, line and name.
    number = next(_numbers)
    safe = "".join(c if c.isalnum() else "_" for c in name)
    code = source.__code__.replace(co_name=f"{_PREFIX}{number}_{safe}")
    if (found := _inlined_by(target.forward if module else target)) is not None:
        _inlined[code.co_name] = found
        while len(_inlined) > _KEPT:
            _inlined.popitem(last=False)
    return types.FunctionType(code, source.__globals__, code.co_name)


def root_name(function_name: str | None) -> str | None:
    """Give the name that `root_function` was made with, or None for any other function."""
    if not function_name or not function_name.startswith(_PREFIX):
        return None
    return function_name.removeprefix(_PREFIX).partition("_")[2]


def _inlined_by(function: Any) -> Inlined | None:
    """Say where a function begins and what its parameters are called; None for what is not written in Python."""
    bound = getattr(function, "__self__", None) is not None
    try:
        code = getattr(inspect.unwrap(getattr(function, "__func__", function)), "__code__", None)
    except ValueError:  # it wraps itself
        return None
    if not isinstance(code, types.CodeType):
        return None
    return Inlined(code.co_filename, code.co_firstlineno, code.co_varnames[bound : code.co_argcount])


def inlined_by(function_name: str | None) -> Inlined | None:
    """Give what the root of that name calls, or None for any other function."""
    return _inlined.get(function_name) if function_name else None


def get_entry(module: torch.nn.Module) -> Callable[..., Any] | None:
    """Give what the module's call is routed to, or None when it is eager."""
    return module._compiled_call_impl  # noqa: SLF001 - in the ledger


def set_entry(module: torch.nn.Module, entry: Callable[..., Any] | None) -> None:
    """Route the module's call to ``entry``; None takes it off and leaves no trace in ``__dict__``."""
    if entry is None:
        module.__dict__.pop("_compiled_call_impl", None)
    else:
        module.__dict__["_compiled_call_impl"] = entry
