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
import weakref
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

_PREFIX = "hotloop_root_"
_DROPOUT = "drop"
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


def is_scripted(module: torch.nn.Module) -> bool:
    """Tell whether torch.jit made a module: what it holds is not Python's, and it takes no hooks."""
    return isinstance(module, torch.jit.ScriptModule)


def class_forward(kind: type[torch.nn.Module]) -> Callable[..., Any] | None:
    """Give the forward of a module's class; None for that of scripted modules, each of which has its own."""
    return getattr(kind, "forward", None)


class Method:
    """A method of a module's class, as something to trace: it holds the module weakly, as whoever calls it does not.

    Args:
        module: whose method.
        name: its name.
    """

    def __init__(self, module: torch.nn.Module, name: str) -> None:
        self._module, self.name = weakref.ref(module), name
        self.__name__ = name

    def module(self) -> Any:
        """Give the module."""
        return self._module()

    def bound(self) -> Any:
        """Give the plain method."""
        module = self._module()
        return types.MethodType(getattr(type(module), self.name), module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call it."""
        module = self._module()
        return getattr(type(module), self.name)(module, *args, **kwargs)


def module_of(target: Any) -> torch.nn.Module | None:
    """Give the module that a target is, or is a method of; None for a function."""
    if isinstance(target, Method):
        found: torch.nn.Module | None = target.module()
        return found
    return target if isinstance(target, torch.nn.Module) else None


def eager_call(target: Any, *args: Any, **kwargs: Any) -> Any:
    """Call a module with its hooks, or a function, past any compiled entry of its own."""
    return (_call_module if isinstance(target, torch.nn.Module) else _call_function)(target, *args, **kwargs)


def root_function(name: str, *, module: bool, inlined: Inlined | None = None) -> Callable[..., Any]:
    """Make a root for dynamo to trace: called with the target first, it has a code object of its own.

    Args:
        name: what messages call it.
        module: whether it calls a module, with its hooks, or a function.
        inlined: what it calls, as far as that is known; `inlined_in` gives it back.
    """
    source = _call_module if module else _call_function
    # A number of its own as well: dynamo remembers which sizes and floats have varied by file, line and name.
    number = next(_numbers)
    safe = "".join(c if c.isalnum() else "_" for c in name)
    code = source.__code__.replace(co_name=f"{_PREFIX}{number}_{safe}")
    if inlined is not None:
        _inlined[code.co_name] = inlined
        while len(_inlined) > _KEPT:
            _inlined.popitem(last=False)
    return types.FunctionType(code, source.__globals__, code.co_name)


def plain_call() -> Callable[..., Any]:
    """Give what calls a module with its hooks, as ``module.compile()`` has it: dynamo traces the forward alone."""
    call: Callable[..., Any] = torch.nn.Module._call_impl  # noqa: SLF001 - in the ledger
    return call


def root_name(function_name: str | None) -> str | None:
    """Give the name that `root_function` was made with, or None for any other function."""
    if not function_name or not function_name.startswith(_PREFIX):
        return None
    return function_name.removeprefix(_PREFIX).partition("_")[2]


def inlined_by(target: Any) -> Inlined | None:
    """Say where a module's forward, or a function, begins and what its parameters are called.

    None for what is not written in Python.
    """
    function = target.forward if isinstance(target, torch.nn.Module) else target
    function = function.bound() if isinstance(function, Method) else function
    bound = getattr(function, "__self__", None) is not None
    try:
        code = getattr(inspect.unwrap(getattr(function, "__func__", function)), "__code__", None)
    except ValueError:  # it wraps itself
        return None
    if not isinstance(code, types.CodeType):
        return None
    return Inlined(code.co_filename, code.co_firstlineno, code.co_varnames[bound : code.co_argcount])


def inlined_in(function_name: str | None) -> Inlined | None:
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


def settings_of(module: torch.nn.Module) -> tuple[Hashable, ...] | None:
    """Give what a module's code is compiled for beside its class: settings as printed, tensors' shapes, dropout.

    None where it cannot be read: lazy parameters have no shape yet, and ``extra_repr`` is the user's code.
    """
    own = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
    try:
        shapes = tuple((key, tuple(tensor.shape), tensor.dtype) for key, tensor in own)
        return module.extra_repr(), shapes, _dropouts(module)
    except Exception:  # noqa: BLE001 - whatever it raises, it must not end the run
        return None


def _dropouts(module: torch.nn.Module) -> tuple[tuple[str, float], ...]:
    """Give the dropout probabilities that a module keeps as plain numbers: dynamo compiles once for each value."""
    own = vars(module).items()
    return tuple((name, value) for name, value in own if type(value) is float and _DROPOUT in name.lower())
