"""Who holds a tensor's memory: variables, attributes, lists, gradients. The search reads all objects, so it is slow."""

from __future__ import annotations

import gc
import inspect
import types
from typing import TYPE_CHECKING, Any

import torch

from hotloop._torch.cudagraphs import storage_key
from hotloop._torch.graphs import is_user_file

if TYPE_CHECKING:
    from collections.abc import Iterator

_MOST = 5
"""Holders that are named."""


def holders(storage: int) -> list[str]:
    """Return who holds the memory that `GraphOutput.storage` identifies, in the user's terms; it must still be alive.

    The search finds variables of the functions that are running, attributes, globals, entries of lists and mappings,
    and gradients of parameters. Memory that only C++ holds, as a graph of autograd its saved tensors, is named as such.
    """
    objects = gc.get_objects()
    tensors = [value for value in objects if issubclass(type(value), torch.Tensor) and storage_key(value) == storage]
    modules = [value for value in objects if issubclass(type(value), torch.nn.Module)]
    del objects
    names = [
        f"{type(module).__name__}.{name}.grad"
        for module in modules
        for name, parameter in module.named_parameters(recurse=False)
        if parameter.grad is not None and storage_key(parameter.grad) == storage
    ]
    del modules
    names += _variables(tensors)
    for tensor in tensors:
        names += _paths(tensor, [tensors], depth=3)
    return list(dict.fromkeys(names))[:_MOST] or ["nothing with a name: a graph of autograd, which saved it"]


def _variables(tensors: list[torch.Tensor]) -> Iterator[str]:
    """Yield variables of running functions, which the garbage collector does not list."""
    frame = inspect.currentframe()
    while frame is not None:
        if is_user_file(frame.f_code.co_filename):
            for name, value in frame.f_locals.items():
                place = f"in {frame.f_code.co_name} ({frame.f_code.co_filename}:{frame.f_lineno})"
                if _among(value, tensors):
                    yield f"{name} {place}"
                for key, entry in _entries(value):
                    if _among(entry, tensors):
                        yield f"{name}[{key!r}] {place}"
        frame = frame.f_back


def _among(value: Any, tensors: list[torch.Tensor]) -> bool:
    return any(value is tensor for tensor in tensors)


def _entries(value: Any) -> list[tuple[Any, Any]]:
    """Return the entries of a container with their keys; as a list, since a generator would hold what it yields."""
    if isinstance(value, dict):
        return list(value.items())
    return list(enumerate(value)) if isinstance(value, list | tuple | set) else []


def _paths(value: Any, ours: list[Any], depth: int) -> list[str]:
    """Return the paths that lead to a value, through containers down to a depth: ``Trainer.kept[3]``."""
    found = []  # no generator: since Python 3.14 one that runs is listed as a holder of its variables
    for holder in gc.get_referrers(value):
        if isinstance(holder, types.FrameType | torch.Tensor) or _among(holder, ours):
            continue
        if isinstance(holder, types.CellType):
            found += _closed_over(holder)
            continue
        attributes = getattr(holder, "__dict__", None)
        key = next((key for key, held in _entries(attributes or holder) if held is value), None)
        if isinstance(attributes, dict):
            found += [f"{type(holder).__name__}.{key}"] if key else []
        elif isinstance(holder, dict) and (owner := _owner(holder)):
            found.append(f"{owner}.{key}")
        elif depth and isinstance(holder, dict | list | tuple | set):
            found += [f"{path}[{key!r}]" for path in _paths(holder, [*ours, value], depth - 1)]
    return found


def _closed_over(cell: types.CellType) -> list[str]:
    """Name the variable of a cell by the functions that close over it."""
    found = []
    for closure in gc.get_referrers(cell):
        for function in gc.get_referrers(closure) if isinstance(closure, tuple) else ():
            if isinstance(function, types.FunctionType) and function.__closure__ is closure:
                code = function.__code__
                names = [
                    name for name, one in zip(code.co_freevars, function.__closure__ or (), strict=True) if one is cell
                ]
                found.append(f"{function.__qualname__} ({code.co_filename}:{code.co_firstlineno}), variable {names[0]}")
    return found


def _owner(namespace: dict[str, Any]) -> str:
    """Name the module or the class of the object whose attributes a dictionary holds; empty where it is nobody's."""
    if "__name__" in namespace and "__builtins__" in namespace:
        return str(namespace["__name__"])
    for holder in gc.get_referrers(namespace):
        if not isinstance(holder, types.FrameType) and getattr(holder, "__dict__", None) is namespace:
            return type(holder).__name__
    return ""
