"""Who holds a tensor's memory: variables, attributes, lists, gradients. It looks through everything, so it is slow."""

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

_SHOWN = 5
_NAMELESS = ("a list of", "a tuple of", "a set of", "a mapping's entry", "a variable that a function")
_CLOSED = ", closed over by "
_DEPTH = 3
"""Containers inside one another through which a holder is looked for."""
_FEW = 10_000
"""A container with more entries than these is not searched for its entry."""


def holders(storage: int) -> list[str]:
    """Say who holds the memory that `GraphOutput.storage` identifies, in the user's terms; it must still be alive.

    Found are variables of the functions that are running, attributes, globals, entries of lists and mappings, and
    gradients of parameters. What only C++ holds, as a graph of autograd does its saved tensors, is named as such.
    """
    objects = gc.get_objects()
    tensors = [one for one in objects if issubclass(type(one), torch.Tensor) and storage_key(one) == storage]
    found = [*_gradients(objects, storage), *_variables(tensors)]
    del objects
    places = [place for tensor in tensors for place in _places(tensor, (tensors,))]
    # What has no name of its own is mostly a value on its way, as the arguments of the call that is going on.
    found += [place for place in places if not place.startswith(_NAMELESS)] or ([] if found else places)
    return list(dict.fromkeys(found))[:_SHOWN] or ["nothing in Python: a graph of autograd, which saved it"]


def _gradients(objects: list[Any], storage: int) -> Iterator[str]:
    for one in objects:
        if not issubclass(type(one), torch.nn.Module):
            continue
        for name, parameter in one.named_parameters(recurse=False):
            if parameter.grad is not None and storage_key(parameter.grad) == storage:
                yield f"{type(one).__name__}.{name}.grad"


def _variables(tensors: list[torch.Tensor]) -> Iterator[str]:
    """Give variables of running functions, which the garbage collector does not list."""
    frame = inspect.currentframe()
    while frame is not None:
        if is_user_file(frame.f_code.co_filename):
            for name, value in frame.f_locals.items():
                if (path := _inside(value, tensors)) is not None:
                    yield f"{name}{path} in {frame.f_code.co_name} ({frame.f_code.co_filename}:{frame.f_lineno})"
        frame = frame.f_back


def _inside(value: Any, tensors: list[torch.Tensor]) -> str | None:
    """Give the path to one of the tensors in a variable, through one list or mapping; None where there is none."""
    if any(value is one for one in tensors):
        return ""
    if isinstance(value, dict):
        entries: Any = value.items()
    elif isinstance(value, list | tuple):
        entries = enumerate(value)
    else:
        return None
    if len(value) > _FEW:
        return None
    return next((f"[{key!r}]" for key, entry in entries if any(entry is one for one in tensors)), None)


def _places(tensor: torch.Tensor, ours: tuple[Any, ...]) -> Iterator[str]:
    for holder in gc.get_referrers(tensor):
        if isinstance(holder, types.FrameType) or any(holder is one for one in ours):
            continue
        if isinstance(holder, dict | list | tuple | set | types.CellType):
            yield _place(holder, tensor, _DEPTH)
        elif not isinstance(holder, torch.Tensor):
            yield _attribute(holder, tensor) or f"an object of {type(holder).__name__}"


def _place(holder: Any, value: Any, depth: int) -> str:
    """Say where a value stands in what holds it, and where that stands: ``Trainer.kept[3]``."""
    if isinstance(holder, types.CellType):
        return _closed_over(holder)
    if isinstance(holder, dict):
        key = _key_of(holder, value)
        if isinstance(key, str) and (owner := _owner(holder)):
            return f"{owner}{key}"
        said, nameless = f"[{key!r}]", f"a mapping's entry {key!r}"
    else:
        index = next((place for place, one in enumerate(holder) if one is value), None)
        said, nameless = f"[{index}]", f"a {type(holder).__name__} of {len(holder)}"
    for outer in gc.get_referrers(holder) if depth else ():
        if outer is holder or isinstance(outer, types.FrameType):
            continue
        container = isinstance(outer, dict | list | tuple | types.CellType)
        found = _place(outer, holder, depth - 1) if container else _attribute(outer, holder)
        if found and not found.startswith(_NAMELESS):
            name, closed, function = found.partition(_CLOSED)
            return f"{name}{said}{closed}{function}"
    return nameless


def _attribute(owner: Any, value: Any) -> str:
    """Name the attribute of an object that a value is: such objects hold their attributes without a dictionary."""
    names = getattr(owner, "__dict__", None)
    key = _key_of(names, value) if isinstance(names, dict) else None
    return f"{type(owner).__name__}.{key}" if isinstance(key, str) else ""


def _closed_over(cell: types.CellType) -> str:
    """Name the variable of a cell by the function that closes over it."""
    for closure in gc.get_referrers(cell):
        for function in gc.get_referrers(closure) if isinstance(closure, tuple) else ():
            if isinstance(function, types.FunctionType) and function.__closure__ is closure:
                code = function.__code__
                cells = zip(code.co_freevars, function.__closure__ or (), strict=True)
                name = next(name for name, one in cells if one is cell)
                return f"{name}{_CLOSED}{function.__qualname__} ({code.co_filename}:{code.co_firstlineno})"
    return "a variable that a function closes over"


def _key_of(mapping: dict[Any, Any], wanted: Any) -> Any:
    for key, value in list(mapping.items()):  # no generator, whose variables would hold the tensor as well
        if value is wanted:
            return key
    return None


def _owner(namespace: dict[str, Any]) -> str:
    """Say whose attributes a dictionary holds; empty where it is nobody's."""
    if "__name__" in namespace and "__builtins__" in namespace:
        return f"{namespace['__name__']}."
    for holder in gc.get_referrers(namespace):
        if not isinstance(holder, types.FrameType) and getattr(holder, "__dict__", None) is namespace:
            return f"{type(holder).__name__}."
    return ""
