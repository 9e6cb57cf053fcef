"""The places in memory that tensors have, each once: those that a copy is of, and that are written back from it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from hotloop._torch.fake import uncounted
from hotloop._torch.foreach import copy_all, differing

if TYPE_CHECKING:
    from collections.abc import Sequence


def unexpanded(tensor: torch.Tensor) -> torch.Tensor:
    """Give a tensor with one of the equal elements along each dimension that it was expanded in."""
    for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if stride == 0 and size > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


def overlaps(tensor: torch.Tensor) -> bool:
    """Tell whether elements of a tensor share memory, as those of an expanded one or of windows in another do."""
    if tensor.is_contiguous():
        return False
    span = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride < span:
            return tensor.numel() > 0
        span += stride * (size - 1)
    return False


def places_of(tensor: torch.Tensor) -> torch.Tensor:
    """Give a tensor's memory, each place of it once: of elements that share one, torch writes none but through a view.

    Of windows that overlap it is all from the first element to the last.
    """
    if tensor.layout != torch.strided or not overlaps(tensor):
        return tensor
    tensor = unexpanded(tensor)
    if not overlaps(tensor):
        return tensor
    return tensor.as_strided((span_of(tensor),), (1,))


def over(places: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """See a copy of a tensor's places as the tensor sees those."""
    if places.shape == tensor.shape:
        return places
    if places.dim() == tensor.dim():
        return places.expand(tensor.shape)
    return places.as_strided(tensor.shape, tensor.stride())


def is_dense(tensor: torch.Tensor) -> bool:
    """Tell whether a tensor has all places from its first element to its last."""
    return tensor.layout != torch.strided or not tensor.numel() or span_of(tensor) == tensor.numel()


def span_of(tensor: torch.Tensor) -> int:
    """Give how many places there are from a tensor's first element to its last."""
    return 1 + sum(stride * (size - 1) for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def put_back(tensors: Sequence[torch.Tensor], copies: Sequence[torch.Tensor]) -> None:
    """Have tensors hold what their copies do.

    On the host only what differs is written: what nobody changed may lie in memory that cannot be written. And no write
    counts: a graph of the program's that leads through a tensor finds there what it found.

    Args:
        tensors: each with places of its own (`places_of`).
        copies: of the same shapes and dtypes, on any device.
    """
    changed = differing(tensors, copies)
    write([tensors[place] for place in changed], [copies[place] for place in changed])


def write(tensors: Sequence[torch.Tensor], copies: Sequence[torch.Tensor]) -> None:
    """Copy into tensors with places of their own, without that counting as a write."""
    plain, others = list[int](), list[int]()
    for place, one in enumerate(tensors):  # torch copies no list into conjugate or negative views
        (others if one.is_conj() or one.is_neg() else plain).append(place)
    with torch.no_grad(), uncounted(tensors):
        copy_all([tensors[place] for place in plain], [copies[place] for place in plain])
        for place in others:
            tensors[place].copy_(copies[place])
