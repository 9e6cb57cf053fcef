"""Lets steps beside a recording allocate in the recording's memory, which is idle between two replays.

A replay overwrites all that lies in that memory. So what outlives such a step is moved out of it (`keep`); whether
anything else does is found by the blocks in use.
"""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING, Any

import torch

from hotloop._torch.cudagraphs import captures_for_itself
from hotloop._torch.ledger import private, private_or
from hotloop._torch.places import span_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

_local = threading.local()
"""Holds ``left``: device, pool, and its blocks in use before the last step in a pool, until `keep` has looked at what
that left. Holds ``inside``: the step is still going on."""


def may_share() -> bool:
    """Return whether steps of this thread can allocate in another pool; not if compiled code has graphs of its own."""
    return private_or("torch._C:_cuda_beginAllocateToPool", None) is not None and not captures_for_itself()


def blocks_in(pool: Any) -> frozenset[int]:
    """Return the addresses of the blocks of a pool that tensors use; takes some milliseconds."""
    segments = torch.cuda.memory_snapshot(pool)  # type: ignore[no-untyped-call]
    blocks = (block for segment in segments for block in segment["blocks"])
    return frozenset(block["address"] for block in blocks if block["state"] == "active_allocated")


@contextlib.contextmanager
def allocating_in(device: torch.device, pool: Any, used: frozenset[int]) -> Iterator[None]:
    """Allocate in a pool in the block, in the backwards' threads as well.

    torch asks no thread for its own pool. What other threads allocate meanwhile lies in it too. A recording does not
    overwrite that: it is of another stream, and torch gives the memory of one stream to no other.

    Args:
        device: the device.
        pool: the handle of the pool.
        used: the blocks of the pool in use.
    """
    _begin(device, pool)
    _local.left, _local.inside = (device, pool, used), True
    try:
        yield
    finally:
        _local.inside = False
        _end(device, pool)


def is_inside() -> bool:
    """Return whether this thread allocates in a pool of recordings."""
    return getattr(_local, "inside", False)


def has_left() -> bool:
    """Return whether nobody has looked yet at what this thread's last step in a pool has left there."""
    return getattr(_local, "left", None) is not None


def keep(tensors: Iterable[torch.Tensor]) -> None:
    """Move tensors out of the pool in which this thread's last step allocated; they stay the objects that they are.

    Tensors that share memory go on sharing it.
    """
    (device, pool, used), _local.left = _local.left, None
    dense = [one for one in tensors if one.is_cuda and one.layout == torch.strided]
    fresh = blocks_in(pool) - used
    if is_inside():
        _end(device, pool)
    try:
        groups: dict[int, list[torch.Tensor]] = {}
        for one in {id(one): one for one in dense}.values():
            if (place := one.untyped_storage().data_ptr()) in fresh:
                groups.setdefault(place, []).append(one)
        for group in groups.values():
            _move(group)
    finally:
        if is_inside():
            _begin(device, pool)


def _move(group: list[torch.Tensor]) -> None:
    """Give tensors of one memory a copy of the part that they span: a loss may lie in the memory of all its terms."""
    begins = [one.storage_offset() * one.itemsize for one in group]
    ends = [begin + span_of(one) * one.itemsize for begin, one in zip(begins, group, strict=True)]
    first = min(begins) // 16 * 16  # whole elements of each dtype
    whole = torch.empty(0, dtype=torch.uint8, device=group[0].device)
    part = whole.set_(group[0].untyped_storage(), first, (max(ends) - first,), (1,)).clone().untyped_storage()
    for begin, one in zip(begins, group, strict=True):
        place = torch.empty(0, dtype=one.dtype, device=one.device)
        one.data = place.set_(part, (begin - first) // one.itemsize, one.shape, one.stride())


class _Bytes:
    """Memory as others describe it to torch, which keeps this object and not the memory."""

    def __init__(self, storage: torch.UntypedStorage) -> None:
        whole = {"shape": (storage.nbytes(),), "typestr": "|u1", "data": (storage.data_ptr(), False), "version": 3}
        self.__cuda_array_interface__ = whole


def unowned(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of the same memory that does not keep it: steps beside the recording may use it meanwhile."""
    if not tensor.is_cuda or tensor.layout != torch.strided or not tensor.numel():
        return tensor
    memory = torch.as_tensor(_Bytes(tensor.untyped_storage()), device=tensor.device).untyped_storage()
    made = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return made.set_(memory, tensor.storage_offset(), tensor.shape, tensor.stride())


def _begin(device: torch.device, pool: Any) -> None:
    private("torch._C:_cuda_beginAllocateToPool")(device.index or 0, pool)


def _end(device: torch.device, pool: Any) -> None:
    private("torch._C:_cuda_endAllocateToPool")(device.index or 0, pool)
    private("torch._C:_cuda_releasePool")(device.index or 0, pool)
