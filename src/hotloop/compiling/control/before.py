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

_CONTAINERS = (list, collections.deque, dict, set)
_MOST = 10_000
"""Values that are held; where there are more, the call is not repeated."""
_NO_STATE = (type, types.FunctionType, types.MethodType, types.ModuleType)


class Before:
    """What a call found: attributes and containers of its module and arguments, buffers, the random streams.

    Of other tensors (parameters, arguments, attributes) only the number of writes is noted: `lost` says that one was
    written. What lies deeper than a container in an attribute of an object is neither held nor noted.

    Raises:
        RuntimeError: there is no memory for copies, or a CUDA graph is being captured.
    """

    def __init__(self, module: torch.nn.Module | None, arguments: Iterable[Any] = ()) -> None:
        on_gpu: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        if on_gpu and is_current_stream_capturing():
            raise RuntimeError("a CUDA graph is being captured")  # copies would be a part of it
        self._random = RandomState([torch.device("cuda", at) for at in range(torch.cuda.device_count() * on_gpu)])
        self._held: dict[int, tuple[Any, Any]] = {}
        """Objects and containers by id, with shallow copies."""
        self._noted: list[torch.Tensor] = []
        self._whole: list[torch.Tensor] = []
        self._opaque = ""
        for value in (module, *arguments):
            self._hold(value, depth=5)
            if hasattr(value, "__next__"):
                self._opaque = "an argument is an iterator"
        if any(map(is_lazy, [*self._noted, *self._whole])):
            self._opaque, self._noted, self._whole = "its parameters had no values yet", [], []
        buffers = [*self._whole, *(tensor for tensor in self._noted if tensor.is_inference())]
        whole = {id(buffer) for buffer in buffers}  # copied; of inference tensors no writes are counted
        self._noted = [tensor for tensor in self._noted if id(tensor) not in whole]
        self._writes = [*map(_writes_of, self._noted)]
        self._buffers = [places_of(buffer) for buffer in buffers]
        self._copies = copies(self._buffers)

    def _hold(self, value: Any, depth: int) -> None:
        """Hold what a value consists of, down to a depth; note its tensors. Modules are held with all their parts."""
        if isinstance(value, torch.Tensor):
            self._noted.append(value)
        elif isinstance(value, tuple):
            for item in value:
                self._hold(item, depth)
        elif id(value) in self._held or len(self._held) > _MOST:
            return
        elif isinstance(value, torch.nn.Module):
            self._whole += value.buffers(recurse=False)
            self._hold_items(value, 2)
        elif depth:
            self._hold_items(value, depth - 1)

    def _hold_items(self, value: Any, depth: int) -> None:
        if isinstance(value, _CONTAINERS):
            held, items = value.copy(), value.values() if isinstance(value, dict) else value
        elif isinstance(getattr(value, "__dict__", None), dict) and not isinstance(value, _NO_STATE):
            held = value.__dict__.copy()
            items = held.values()
        else:
            return
        self._held[id(value)] = value, held
        if len(self._held) + len(held) > _MOST:
            self._opaque = f"its module and arguments hold more than {_MOST} values"
            return
        for item in items:
            self._hold(item, depth)

    def lost(self) -> str:
        """Return why the call cannot be repeated, since not all that it changed can be put back; empty if it can."""
        if [*map(_writes_of, self._noted)] != self._writes:
            return "it has written into a parameter, a gradient, an argument or an attribute"
        return self._opaque

    @uninterrupted
    def restore(self) -> None:
        """Put back what was held."""
        for value, held in self._held.values():
            if isinstance(value, _CONTAINERS):
                value.clear()
                value.extend(held) if isinstance(value, (list, collections.deque)) else value.update(held)
                continue
            for name in value.__dict__.keys() - held.keys():  # never empty in between: threads may use the object
                del value.__dict__[name]
            value.__dict__.update(held)
        put_back(self._buffers, self._copies)
        self._random.restore()


def _writes_of(tensor: torch.Tensor) -> tuple[int, int, int]:
    """Return how often a tensor was written, its gradient, and how often that was written."""
    grad = tensor.grad if tensor.requires_grad and tensor.is_leaf else None
    return version_of(tensor), id(grad), -1 if grad is None else version_of(grad)
