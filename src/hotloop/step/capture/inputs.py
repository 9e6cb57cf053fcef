"""The static inputs of a captured step, and how each batch gets into them."""

from __future__ import annotations

import collections
from typing import Any

import torch

from hotloop.step.calls.aliasing import attributes_of
from hotloop.step.state.memory import view_of
from hotloop.step.state.places import overlaps, span_of, unexpanded

_STAGES = 3
"""Pinned buffers a host tensor has: the host may be this many batches ahead of the copies."""
_PADDED, _SPARE_BYTES = 2, 2**24
"""A buffer may take so many times the memory of its elements, and so much more, to have their strides."""


class Inputs:
    """Tensors of a captured step that each batch is copied into.

    Args:
        leaves: the leaves of one call's arguments; what is no tensor is part of the captured step as it is.
        device: where the step runs. On a GPU, host tensors become device tensors, copied through pinned buffers: the
            step's own ``x.to(device)`` then finds them there.
    """

    def __init__(self, leaves: list[Any], device: torch.device) -> None:
        self._written: list[torch.Tensor | None] = []
        self.leaves: list[Any] = []
        """What the step is handed: one tensor where arguments are one, memory that begins at one place where theirs
        does. Other memory in common shows in nothing but writes, and a step that writes there is not captured."""
        memory, given = _Memory(leaves, device), dict[int, Any]()
        for leaf in leaves:
            again = not isinstance(leaf, torch.Tensor) or id(leaf) in given
            self._written.append(None if again else (static := memory.static(leaf)))
            if not again:
                given[id(leaf)] = static if static.shape == leaf.shape else static.expand(leaf.shape)
                given[id(leaf)].__dict__.update(attributes_of(leaf))
            self.leaves.append(given.get(id(leaf), leaf))
        self._staged = {
            index: _Staged(unexpanded(leaf), device)
            for index, leaf in enumerate(leaves)
            if self._written[index] is not None and leaf.device.type == "cpu" and device.type == "cuda"
        }

    def fill(self, leaves: list[Any]) -> None:
        """Copy a batch in; shapes and strides are those of the first."""
        for index, (static, leaf) in enumerate(zip(self._written, leaves, strict=True)):
            if static is None or self.leaves[index] is leaf:
                continue
            if index in self._staged:
                self._staged[index].copy(unexpanded(leaf), static)
            else:
                static.copy_(unexpanded(leaf).detach(), non_blocking=True)


class _Memory:
    """Makes the static tensors of one call's leaves: those that begin at one place share memory."""

    def __init__(self, leaves: list[Any], device: torch.device) -> None:
        self._device = device
        tensors = {id(leaf): unexpanded(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor)}.values()
        self._spans: dict[tuple[Any, ...], int] = {}
        count = collections.Counter(map(_begin, tensors))
        for one in tensors:
            if (begin := _begin(one)) and count[begin] > 1 and _keeps_strides(one):
                self._spans[begin] = max(span_of(one), self._spans.get(begin, 0))
        self._made: dict[tuple[Any, ...], torch.Tensor] = {}

    def static(self, leaf: torch.Tensor) -> torch.Tensor:
        """Give memory for a tensor, each element once: to be expanded as the tensor is."""
        where = self._device if leaf.device.type == "cpu" else leaf.device
        base = unexpanded(leaf)
        begin = _begin(base)
        if begin not in self._spans or not _keeps_strides(base):
            return torch.empty_strided(base.shape, _strides(base), dtype=leaf.dtype, device=where)
        if begin not in self._made:
            self._made[begin] = torch.empty(self._spans[begin], dtype=leaf.dtype, device=where)
        return self._made[begin].as_strided(base.shape, base.stride())


def _begin(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Tell where the memory of a tensor begins; empty where it has none with an address."""
    at = view_of(tensor)
    return (at[0], tensor.dtype, tensor.device) if at and at[0] else ()


def _strides(leaf: torch.Tensor) -> tuple[int, ...]:
    """Give the strides of a copy: its own, since compiled code is made for them (``tokens[:, :-1]``).

    What overlaps, or is spread thinly over a large memory, gets those of a copy that torch makes.
    """
    return leaf.stride() if _keeps_strides(leaf) else torch.empty_like(leaf, device="meta").stride()


def _keeps_strides(leaf: torch.Tensor) -> bool:
    small = span_of(leaf) * leaf.element_size() <= _PADDED * leaf.nbytes + _SPARE_BYTES
    return leaf.numel() > 0 and small and not overlaps(leaf)


class _Staged:
    """Pinned buffers for one host tensor, used in turn; each waits for its last copy before it is written again.

    A tensor that is pinned itself takes the same way: copied from directly, it would be read after the call has
    returned, when a loader that uses its buffers again may have filled it with another batch.
    """

    def __init__(self, leaf: torch.Tensor, device: torch.device) -> None:
        self._buffers = [torch.empty_like(leaf, pin_memory=True) for _ in range(_STAGES)]
        self._copied: list[Any] = [torch.cuda.Event() for _ in range(_STAGES)]  # type: ignore[no-untyped-call]
        self._device, self._next = device, 0

    def copy(self, leaf: torch.Tensor, static: torch.Tensor) -> None:
        buffer, copied = self._buffers[self._next], self._copied[self._next]
        copied.synchronize()
        buffer.copy_(leaf)
        static.copy_(buffer, non_blocking=True)
        copied.record(torch.cuda.current_stream(self._device))
        self._next = (self._next + 1) % _STAGES
