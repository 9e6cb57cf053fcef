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

_NAMELESS = ("a list of", "a tuple of", "a set of", "a mapping's entry", "a variable that a function")
_CLOSED = ", closed over by "


def holders(storage: int) -> list[str]:
    """Return who holds the memory that `GraphOutput.storage` identifies, in the user's terms; it must still be alive.

    The search finds variables of the functions that are running, attributes, globals, entries of lists and mappings,
    and gradients of parameters. Memory that only C++ holds, as a graph of autograd its saved tensors, is named as such.
    """
    objects = gc.get_objects()
    tensors = [value for value in objects if issubclass(type(value), torch.Tensor) and storage_key(value) == storage]
    names = []
    modules = [value for value in objects if issubclass(type(value), torch.nn.Module)]
    for module in modules:
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.grad is not None and storage_key(parameter.grad) == storage:
                names.append(f"{type(module).__name__}.{name}.grad")
    del objects, modules
    names += _variables(tensors)
    places = [place for tensor in tensors for place in _places(tensor, tensors)]
    # A value without a name of its own is mostly on its way, as the arguments of the call that is going on.
    names += [place for place in places if not place.startswith(_NAMELESS)] or ([] if names else places)
    return list(dict.fromkeys(names))[:5] or ["nothing in Python: a graph of autograd, which saved it"]


def _variables(tensors: list[torch.Tensor]) -> Iterator[str]:
    """Yield variables of running functions, which the garbage collector does not list."""
    frame = inspect.currentframe()
    while frame is not None:
        if is_user_file(frame.f_code.co_filename):
            for name, value in frame.f_locals.items():
                if (path := _path_inside(value, tensors)) is not None:
                    yield f"{name}{path} in {frame.f_code.co_name} ({frame.f_code.co_filename}:{frame.f_lineno})"
        frame = frame.f_back


def _path_inside(value: Any, tensors: list[torch.Tensor]) -> str | None:
    """Return the path to one of the tensors in a variable, through one list or mapping; None where there is none."""
    if any(value is tensor for tensor in tensors):
        return ""
    if not isinstance(value, dict | list | tuple) or len(value) > 10_000:  # noqa: PLR2004 - a search has to end
        return None
    entries = value.items() if isinstance(value, dict) else enumerate(value)
    return next((f"[{key!r}]" for key, entry in entries if any(entry is tensor for tensor in tensors)), None)


def _places(tensor: torch.Tensor, ours: list[torch.Tensor]) -> list[str]:
    """Return the containers and objects that refer to a tensor, without our own list."""
    found = []  # no generator: since Python 3.14 one that runs is listed as a holder of its variables
    for holder in gc.get_referrers(tensor):
        if isinstance(holder, types.FrameType) or holder is ours:
            continue
        if isinstance(holder, dict | list | tuple | set | types.CellType):
            found.append(_place(holder, tensor, depth=3))
        elif not isinstance(holder, torch.Tensor):
            found.append(_attribute(holder, tensor) or f"an object of {type(holder).__name__}")
    return found


def _place(holder: Any, value: Any, depth: int) -> str:
    """Name a value's place in its container, and the container's in turn, up to a depth: ``Trainer.kept[3]``."""
    if isinstance(holder, types.CellType):
        return _closed_over(holder)
    if isinstance(holder, dict):
        key = _key_of(holder, value)
        if isinstance(key, str) and (owner := _owner(holder)):
            return f"{owner}{key}"
        entry, nameless = f"[{key!r}]", f"a mapping's entry {key!r}"
    else:
        index = next((place for place, held in enumerate(holder) if held is value), None)
        entry, nameless = f"[{index}]", f"a {type(holder).__name__} of {len(holder)}"
    for outer in gc.get_referrers(holder) if depth else ():
        if outer is holder or isinstance(outer, types.FrameType):
            continue
        container = isinstance(outer, dict | list | tuple | types.CellType)
        place = _place(outer, holder, depth - 1) if container else _attribute(outer, holder)
        if place and not place.startswith(_NAMELESS):
            name, closed, function = place.partition(_CLOSED)
            return f"{name}{entry}{closed}{function}"
    return nameless


def _attribute(owner: Any, value: Any) -> str:
    """Name the attribute of an object that a value is; empty where it is none, or the object has no ``__dict__``."""
    names = getattr(owner, "__dict__", None)
    key = _key_of(names, value) if isinstance(names, dict) else None
    return f"{type(owner).__name__}.{key}" if isinstance(key, str) else ""


def _closed_over(cell: types.CellType) -> str:
    """Name the variable of a cell by the function that closes over it."""
    for closure in gc.get_referrers(cell):
        for function in gc.get_referrers(closure) if isinstance(closure, tuple) else ():
            if isinstance(function, types.FunctionType) and function.__closure__ is closure:
                code = function.__code__
                name = next(
                    name
                    for name, held in zip(code.co_freevars, function.__closure__ or (), strict=True)
                    if held is cell
                )
                return f"{name}{_CLOSED}{function.__qualname__} ({code.co_filename}:{code.co_firstlineno})"
    return "a variable that a function closes over"


def _key_of(mapping: dict[Any, Any], wanted: Any) -> Any:
    for key, value in list(mapping.items()):  # no generator, whose variables would hold the tensor as well
        if value is wanted:
            return key
    return None


def _owner(namespace: dict[str, Any]) -> str:
    """Name whose attributes a dictionary holds, with a dot; empty where it is nobody's."""
    if "__name__" in namespace and "__builtins__" in namespace:
        return f"{namespace['__name__']}."
    for holder in gc.get_referrers(namespace):
        if not isinstance(holder, types.FrameType) and getattr(holder, "__dict__", None) is namespace:
            return f"{type(holder).__name__}."
    return ""
