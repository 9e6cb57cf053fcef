"""The places in memory that a tensor's elements lie in, which are copied and written back.

A place is the memory of one element. Elements of an expanded tensor, or of overlapping windows, share places.
"""

from __future__ import annotations

import bisect
from typing import TYPE_CHECKING, Any

import torch

from hotloop._torch.fake import uncounted
from hotloop._torch.foreach import copy_all, differing

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


def unexpanded(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view with a single element along each dimension that the tensor was expanded in."""
    for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if stride == 0 and size > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


def overlaps(tensor: torch.Tensor) -> bool:
    """Return whether elements of a tensor share memory: it was expanded, or is made of overlapping windows."""
    if tensor.is_contiguous():
        return False
    span = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride < span:
            return tensor.numel() > 0
        span += stride * (size - 1)
    return False


def places_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view of a tensor's memory in which no two elements share a place.

    torch refuses to write into elements that share memory. For overlapping windows the view is the whole stretch of
    memory from the first element to the last.
    """
    if tensor.layout != torch.strided or not overlaps(tensor):
        return tensor
    tensor = unexpanded(tensor)
    if not overlaps(tensor):
        return tensor
    return tensor.as_strided((span_of(tensor),), (1,))


def viewed_like(places: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """View a copy of a tensor's places in the way in which the tensor views the places themselves."""
    if places.shape == tensor.shape:
        return places
    if places.dim() == tensor.dim():
        return places.expand(tensor.shape)
    return places.as_strided(tensor.shape, tensor.stride())


def span_of(tensor: torch.Tensor) -> int:
    """Return the number of places from a tensor's first element to its last."""
    return 1 + sum(stride * (size - 1) for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def address_of(tensor: torch.Tensor) -> int:
    """Return the address of the memory that a strided tensor lies in; 0 for a class that only stands for others."""
    try:
        return tensor.untyped_storage().data_ptr()
    except RuntimeError:  # a wrapper subclass
        return 0


def whole_memory(tensor: torch.Tensor) -> torch.Tensor:
    """Return a flat view of all the memory that a tensor lies in; a sparse tensor has several, and is returned itself.

    The next step may write another part of it: a queue is written at a position that moves.
    """
    if tensor.layout != torch.strided or tensor.is_meta:
        return tensor
    memory = tensor.untyped_storage()
    dtype = torch.uint8 if tensor.is_quantized or memory.nbytes() % tensor.itemsize else tensor.dtype
    flat = torch.empty(0, dtype=dtype, device=tensor.device)
    return flat.set_(memory, 0, (memory.nbytes() // dtype.itemsize,), (1,))


class Stretches:
    """Knows which memory the copies of some tensors hold, since of a tensor only its own places are copied.

    Args:
        tensors: the tensors that are copied.
    """

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        strided = [one for one in tensors if one.layout == torch.strided and one.numel()]
        self._views = set(map(_looks, strided))
        self._begins, self._ends = list[int](), list[int]()
        dense = [_extent(places) for one in strided if span_of(places := places_of(one)) == places.numel()]
        for begin, end in sorted(dense):
            if self._ends and begin <= self._ends[-1]:  # side by side, or one within the other
                self._ends[-1] = max(end, self._ends[-1])
            else:
                self._begins.append(begin)
                self._ends.append(end)

    def hold(self, tensor: torch.Tensor) -> bool:
        """Return whether each place of a strided tensor is copied."""
        if _looks(tensor) in self._views:
            return True
        begin, end = _extent(tensor)
        at = bisect.bisect_right(self._begins, begin) - 1
        return at >= 0 and end <= self._ends[at]


def _looks(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.itemsize


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the addresses at which a tensor's places begin and end."""
    begin = tensor.data_ptr()
    return begin, begin + span_of(tensor) * tensor.itemsize


def put_back(tensors: Sequence[torch.Tensor], copies: Sequence[torch.Tensor]) -> None:
    """Write the values of copies back into tensors.

    On the host only tensors that differ are written: what nobody changed may lie in memory that cannot be written. The
    writes are not counted by torch, so autograd graphs of the program that lead through a tensor stay valid.

    Args:
        tensors: without shared places (`places_of`).
        copies: of the same shapes and dtypes, on any device.
    """
    changed = differing(tensors, copies)
    write([tensors[place] for place in changed], [copies[place] for place in changed])


def write(tensors: Sequence[torch.Tensor], copies: Sequence[torch.Tensor]) -> None:
    """Copy into tensors without shared places, and without torch counting that as a write."""
    plain, others = list[int](), list[int]()
    for place, tensor in enumerate(tensors):  # torch's list copy does not take conjugate or negative views
        (others if tensor.is_conj() or tensor.is_neg() else plain).append(place)
    with torch.no_grad(), uncounted(tensors):
        copy_all([tensors[place] for place in plain], [copies[place] for place in plain])
        for place in others:
            tensors[place].copy_(copies[place])
