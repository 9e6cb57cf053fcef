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
    for tensor in tensors:
        found += _places(tensor, (tensors,))
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
                if path := _inside(value, tensors):
                    yield f"{name}{path} in {frame.f_code.co_name} ({frame.f_code.co_filename}:{frame.f_lineno})"
        frame = frame.f_back


def _inside(value: Any, tensors: list[torch.Tensor]) -> str | None:
    """Give the path to one of the tensors in a variable, through one list or mapping; None where there is none."""
    if any(value is one for one in tensors):
        return " "
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
        if isinstance(holder, dict):
            key = _key_of(holder, tensor)
            yield f"{_owner(holder)}{key}" if isinstance(key, str) else f"an entry {key!r} of a mapping"
        elif isinstance(holder, list | tuple | set):
            yield f"a {type(holder).__name__} of {len(holder)}"
        elif isinstance(holder, types.CellType):
            yield "a variable that a function closes over"
        elif not isinstance(holder, torch.Tensor):
            yield f"an object of {type(holder).__name__}"


def _key_of(mapping: dict[Any, Any], tensor: torch.Tensor) -> Any:
    for key, value in list(mapping.items()):  # no generator, whose variables would hold the tensor as well
        if value is tensor:
            return key
    return None


def _owner(namespace: dict[str, Any]) -> str:
    """Say whose attributes a dictionary holds."""
    if "__name__" in namespace and "__builtins__" in namespace:
        return f"{namespace['__name__']}."
    for holder in gc.get_referrers(namespace):
        if not isinstance(holder, types.FrameType) and getattr(holder, "__dict__", None) is namespace:
            return f"{type(holder).__name__}."
    return "the mapping's "
