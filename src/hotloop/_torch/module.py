"""The slot of nn.Module that holds its compiled call, and the root functions that dynamo traces.

torch's own in-place compile hands ``_call_impl`` to dynamo, which skips it as library code and looks for user frames
below: an ``nn.Sequential`` has none, so nothing is compiled. A root function of ours is traced, and inlines the rest.
The recompile limit belongs to the code object, so each component that is compiled apart gets a copy with a code object
of its own.
"""

from __future__ import annotations

import collections
import dataclasses
import inspect
import itertools
import types
import weakref
from typing import TYPE_CHECKING, Any, ClassVar

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

_PREFIX = "hotloop_root_"
_numbers = itertools.count()


@dataclasses.dataclass(frozen=True)
class Inlined:
    """The function that a root calls: where it begins, and its positional parameters without ``self``."""

    file: str
    line: int
    parameters: tuple[str, ...]

    by_root: ClassVar[collections.OrderedDict[str, Inlined]] = collections.OrderedDict()
    """By a root's name; only the newest 1024 roots."""

    @classmethod
    def of(cls, target: Any) -> Inlined | None:
        """Return the forward of a module, or a function; None for a function that is not written in Python."""
        function = target.forward if isinstance(target, torch.nn.Module) else target
        function = function.bound() if isinstance(function, Method) else function
        bound = getattr(function, "__self__", None) is not None
        try:
            code = getattr(inspect.unwrap(getattr(function, "__func__", function)), "__code__", None)
        except ValueError:  # it wraps itself
            return None
        if not isinstance(code, types.CodeType):
            return None
        return cls(code.co_filename, code.co_firstlineno, code.co_varnames[bound : code.co_argcount])


def _call_module(module: Any, *args: Any, **kwargs: Any) -> Any:
    return module._call_impl(*args, **kwargs)  # noqa: SLF001 - in the ledger


def _call_function(function: Any, *args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs)


def is_scripted(module: torch.nn.Module) -> bool:
    """Return whether torch.jit made a module: its contents are not Python's, and it takes no hooks."""
    return isinstance(module, torch.jit.ScriptModule)


def class_forward(kind: type[torch.nn.Module]) -> Callable[..., Any] | None:
    """Return the forward of a module's class; None for the class of scripted modules, which have their own forwards."""
    return getattr(kind, "forward", None)


class Method:
    """A method of a module's class, to be traced: it holds the module weakly, unlike a bound method.

    Args:
        module: the module.
        name: of the method.
    """

    def __init__(self, module: torch.nn.Module, name: str) -> None:
        self._module, self.name = weakref.ref(module), name
        self.__name__ = name

    def module(self) -> Any:
        """Return the module, or None where it is gone."""
        return self._module()

    def bound(self) -> Any:
        """Return the plain bound method."""
        module = self._module()
        return types.MethodType(getattr(type(module), self.name), module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the method."""
        module = self._module()
        return getattr(type(module), self.name)(module, *args, **kwargs)


def module_of(target: Any) -> torch.nn.Module | None:
    """Return the module that a target is, or is a method of; None for a function."""
    if isinstance(target, Method):
        found: torch.nn.Module | None = target.module()
        return found
    return target if isinstance(target, torch.nn.Module) else None


def eager_call(target: Any, *args: Any, **kwargs: Any) -> Any:
    """Call a module with its hooks, or a function, without any compiled entry of its own."""
    return (_call_module if isinstance(target, torch.nn.Module) else _call_function)(target, *args, **kwargs)


def root_function(name: str, *, module: bool, inlined: Inlined | None = None) -> Callable[..., Any]:
    """Make a root function for dynamo to trace, with a code object of its own. Its first argument is the target.

    Args:
        name: its name in messages.
        module: whether it calls a module, with its hooks, or a function.
        inlined: the function that it calls, where it is known; kept in `Inlined.by_root`.
    """
    source = _call_module if module else _call_function
    # The name has a number: dynamo remembers by file, line and name which sizes and floats have varied.
    number = next(_numbers)
    safe = "".join(c if c.isalnum() else "_" for c in name)
    code = source.__code__.replace(co_name=f"{_PREFIX}{number}_{safe}")
    if inlined is not None:
        known, most = Inlined.by_root, 1024
        known[code.co_name] = inlined
        while len(known) > most:
            known.popitem(last=False)
    return types.FunctionType(code, source.__globals__, code.co_name)


def plain_call() -> Callable[..., Any]:
    """Return the call of a module with its hooks, as in ``module.compile()``: dynamo traces the forward only."""
    call: Callable[..., Any] = torch.nn.Module._call_impl  # noqa: SLF001 - in the ledger
    return call


def root_name(function_name: str | None) -> str | None:
    """Return the name that a root function was made with, or None for any other function."""
    if not function_name or not function_name.startswith(_PREFIX):
        return None
    return function_name.removeprefix(_PREFIX).partition("_")[2]


def is_compiled_function(function: Any) -> bool:
    """Return whether ``torch.compile(function)`` made a function, or a method."""
    return getattr(function, "_torchdynamo_orig_callable", None) is not None


def get_entry(module: torch.nn.Module) -> Callable[..., Any] | None:
    """Return the function that a module's call is routed to, or None where it runs eager."""
    return module._compiled_call_impl  # noqa: SLF001 - in the ledger


def set_entry(module: torch.nn.Module, entry: Callable[..., Any] | None) -> None:
    """Route a module's call to ``entry``; None removes the entry without a trace in ``__dict__``."""
    if entry is None:
        module.__dict__.pop("_compiled_call_impl", None)
    else:
        module.__dict__["_compiled_call_impl"] = entry


def settings_of(module: torch.nn.Module) -> tuple[Hashable, ...] | None:
    """Return what a module's compiled code depends on beside its class: settings as printed, shapes, dropout.

    None where it cannot be read: lazy parameters have no shape yet, and ``extra_repr`` is the user's code.
    """
    own = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
    try:
        shapes = tuple((key, tuple(tensor.shape), tensor.dtype) for key, tensor in own)
        # dynamo compiles once for each value of a plain number, such as a dropout probability.
        plain = vars(module).items()
        dropouts = tuple((name, value) for name, value in plain if type(value) is float and "drop" in name.lower())
        return module.extra_repr(), shapes, dropouts
    except Exception:  # noqa: BLE001 - whatever it raises, it must not end the run
        return None
