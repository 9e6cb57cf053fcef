"""What a call found, so that it can be put back before eager repeats the call."""

from __future__ import annotations

import collections
import types
from typing import TYPE_CHECKING, Any

import torch
from torch.cuda import is_current_stream_capturing  # itself: a captured step may be given another answer
from torch.nn.parameter import is_lazy

from hotloop._torch.fake import version_of
from hotloop._torch.foreach import copies
from hotloop._torch.places import places_of, put_back
from hotloop._torch.random_state import RandomState
from hotloop.interrupts import uninterrupted

if TYPE_CHECKING:
    from collections.abc import Iterable

_LISTS = (list, collections.deque)
_CONTAINERS = {*_LISTS, dict, set, collections.OrderedDict, collections.defaultdict, collections.Counter}
_MOST = 10_000
"""Items of a container that is copied; of a larger one only the number is noted."""
_MOST_ARGUMENTS = 1_000
"""Values that are looked at in the arguments of a call."""
_PLAIN = {bool, int, float, str, tuple, type(None)}
_TABLES = {"_parameters", "_buffers", "_modules"}
_NO_STATE = (type, types.FunctionType, types.MethodType, types.ModuleType)


class Before:
    """What a call found: its module's attributes, buffers, containers and objects, the random streams, its arguments.

    Of other tensors (parameters, arguments, attributes) only the number of writes is noted: `lost` says that one was
    written. Neither held nor noted is what lies deeper in a module's containers and objects, and what is beside both.

    It takes some 7 us a module and 50 us for the random streams, so only calls that may need it make it.

    Raises:
        RuntimeError: there is no memory for copies, or a CUDA graph is being captured.
    """

    def __init__(self, module: torch.nn.Module | None, arguments: Iterable[Any] = ()) -> None:
        on_gpu: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        if on_gpu and is_current_stream_capturing():
            raise RuntimeError("a CUDA graph is being captured")  # copies would be a part of it
        self._random = RandomState([torch.device("cuda", at) for at in range(torch.cuda.device_count() * on_gpu)])
        # Lists side by side, since thousands of small tuples would have Python collect garbage.
        self._objects: list[Any] = []
        self._attributes: list[dict[str, Any]] = []
        self._containers: list[Any] = []
        self._contents: list[Any] = []
        self._empty: list[Any] = []
        self._large: list[tuple[Any, int]] = []
        self._noted: list[torch.Tensor] = []
        self._opaque = ""
        buffers: list[torch.Tensor] = []
        if module is not None:
            self._hold_module(module, buffers)
        self._hold_arguments([*arguments], buffers)
        if any(map(is_lazy, [*self._noted, *buffers])):
            self._opaque, self._noted, buffers = "its parameters had no values yet", [], []
        uncounted = [tensor for tensor in self._noted if tensor.is_inference()]
        if uncounted:
            buffers += uncounted
            self._noted = [tensor for tensor in self._noted if not tensor.is_inference()]
        self._writes = [*map(_writes_of, self._noted)]
        self._buffers = [places_of(buffer) for buffer in buffers]
        self._copies = copies(self._buffers)

    def _hold_module(self, module: torch.nn.Module, buffers: list[torch.Tensor]) -> None:
        others: dict[int, Any] = {}
        for part in module.modules():
            held = self._hold_object(part)
            buffers += filter(_is_tensor, held["_buffers"].values())
            self._noted += filter(_is_tensor, held["_parameters"].values())
            for name, value in held.items():
                kind = type(value)
                if kind in _PLAIN:
                    continue
                if kind in _CONTAINERS:
                    if not value:  # as a module's tables of hooks mostly are
                        self._empty.append(value)
                        continue
                    items = self._hold_container(value)
                    if name not in _TABLES:
                        self._hold_items(items)
                elif _is_tensor(value):
                    self._noted.append(value)
                elif kind not in _NO_STATE:
                    others[id(value)] = value
        # A meter, a cache. Not what they refer to in turn, which may be a whole trainer.
        for value in filter(_has_attributes, others.values()):
            self._hold_items(self._hold_object(value).values())

    def _hold_items(self, items: Iterable[Any]) -> None:
        """Hold containers among items, and what containers are among theirs; note tensors."""
        for value in items:
            if _is_tensor(value):
                self._noted.append(value)
            elif isinstance(value, tuple):
                self._noted += filter(_is_tensor, value)
            elif type(value) in _CONTAINERS:
                self._noted += filter(_is_tensor, self._hold_container(value))

    def _hold_arguments(self, waiting: list[Any], buffers: list[torch.Tensor]) -> None:
        """Hold what arguments consist of, a cache of keys and values among it; too many are not looked at."""
        seen: set[int] = set()
        for value in waiting:  # which grows meanwhile
            if id(value) in seen:
                continue
            seen.add(id(value))
            if isinstance(value, torch.Tensor):
                self._noted.append(value)
            elif isinstance(value, torch.nn.Module):
                self._hold_module(value, buffers)
            elif isinstance(value, tuple):
                waiting.extend(value)
            elif type(value) in _CONTAINERS:
                waiting.extend(self._hold_container(value))
            elif hasattr(value, "__next__"):
                self._opaque = "an argument is an iterator"
            elif _has_attributes(value):
                waiting.extend(self._hold_object(value).values())
            if len(waiting) > _MOST_ARGUMENTS:
                self._opaque = f"its arguments hold more than {_MOST_ARGUMENTS} values"
                return

    def _hold_object(self, value: Any) -> dict[str, Any]:
        held: dict[str, Any] = value.__dict__.copy()
        self._objects.append(value)
        self._attributes.append(held)
        return held

    def _hold_container(self, value: Any) -> Iterable[Any]:
        """Hold a container, and return its items; none of a large one."""
        if len(value) > _MOST:
            self._large.append((value, len(value)))
            return ()
        self._containers.append(value)
        self._contents.append(value.copy())
        return value.values() if isinstance(value, dict) else value

    def lost(self) -> str:
        """Return why the call cannot be repeated, since not all that it changed can be put back; empty if it can."""
        if any(len(value) != size for value, size in self._large):
            return f"a container of more than {_MOST} items changed"
        if [*map(_writes_of, self._noted)] != self._writes:
            return "it has written into a parameter, a gradient, an argument or an attribute"
        return self._opaque

    @uninterrupted
    def restore(self) -> None:
        """Put back what was held."""
        for value, held in zip(self._objects, self._attributes, strict=True):
            for name in value.__dict__.keys() - held.keys():  # never empty in between: threads may use the object
                del value.__dict__[name]
            value.__dict__.update(held)
        for value in self._empty:
            value.clear()
        for value, held in zip(self._containers, self._contents, strict=True):
            value.clear()
            value.extend(held) if isinstance(value, _LISTS) else value.update(held)
        put_back(self._buffers, self._copies)
        self._random.restore()


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _has_attributes(value: Any) -> bool:
    """Return whether a value keeps attributes of its own, and is no module, whose parts are held on their own."""
    return isinstance(getattr(value, "__dict__", None), dict) and not isinstance(value, (torch.nn.Module, *_NO_STATE))


def _writes_of(tensor: torch.Tensor) -> tuple[int, int, int]:
    """Return how often a tensor was written, its gradient, and how often that was written."""
    grad = tensor.grad if tensor.requires_grad and tensor.is_leaf else None
    return version_of(tensor), id(grad), -1 if grad is None else version_of(grad)
