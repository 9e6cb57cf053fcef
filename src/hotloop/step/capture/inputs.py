"""The static inputs of a captured step, and the way in which each batch is copied into them."""

from __future__ import annotations

import collections
from typing import Any

import torch

from hotloop._torch.dynamo import attributes_of
from hotloop._torch.places import overlaps, span_of, unexpanded
from hotloop.step.state.storages import view_of


class Inputs:
    """Tensors of a captured step that each batch is copied into.

    Args:
        leaves: the leaves of one call's arguments; a leaf that is no tensor is part of the captured step as it is.
        device: the device of the step. On a GPU, host tensors become device tensors, copied through pinned buffers:
            the step's own ``x.to(device)`` then finds them on the device.
    """

    def __init__(self, leaves: list[Any], device: torch.device) -> None:
        self._written: list[torch.Tensor | None] = []
        self.leaves: list[Any] = []
        """The leaves that the step is called with: one tensor for arguments that are one tensor, and memory with one
        beginning for arguments that begin at one address. Other memory in common matters only for writes, and a step
        that writes there is not captured."""
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
        """Copy a batch in; its shapes and strides are those of the first batch."""
        for index, (static, leaf) in enumerate(zip(self._written, leaves, strict=True)):
            if static is None or self.leaves[index] is leaf:
                continue
            if index in self._staged:
                self._staged[index].copy(unexpanded(leaf), static)
            else:
                static.copy_(unexpanded(leaf).detach(), non_blocking=True)


class _Memory:
    """The memory of the static tensors of one call: tensors that begin at one address share memory."""

    def __init__(self, leaves: list[Any], device: torch.device) -> None:
        self._device = device
        tensors = {id(leaf): unexpanded(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor)}.values()
        self._spans: dict[tuple[Any, ...], int] = {}
        count = collections.Counter(map(self._begin, tensors))
        for tensor in tensors:
            if (begin := self._begin(tensor)) and count[begin] > 1 and self._keeps_strides(tensor):
                self._spans[begin] = max(span_of(tensor), self._spans.get(begin, 0))
        self._made: dict[tuple[Any, ...], torch.Tensor] = {}

    def static(self, leaf: torch.Tensor) -> torch.Tensor:
        """Return memory for a tensor, each element once; the caller expands it as the tensor is expanded.

        It has the tensor's strides, since compiled code is made for them (``tokens[:, :-1]``). A tensor that overlaps,
        or is spread thinly over a large memory, gets the strides of a copy that torch makes.
        """
        where = self._device if leaf.device.type == "cpu" else leaf.device
        base = unexpanded(leaf)
        begin, keeps = self._begin(base), self._keeps_strides(base)
        if begin not in self._spans or not keeps:
            strides = base.stride() if keeps else torch.empty_like(base, device="meta").stride()
            return torch.empty_strided(base.shape, strides, dtype=leaf.dtype, device=where)
        if begin not in self._made:
            self._made[begin] = torch.empty(self._spans[begin], dtype=leaf.dtype, device=where)
        return self._made[begin].as_strided(base.shape, base.stride())

    @staticmethod
    def _begin(tensor: torch.Tensor) -> tuple[Any, ...]:
        """Return address, dtype and device of a tensor's memory; empty if it has no address."""
        at = view_of(tensor)
        return (at[0], tensor.dtype, tensor.device) if at and at[0] else ()

    @staticmethod
    def _keeps_strides(leaf: torch.Tensor) -> bool:
        # With its strides a buffer may take twice the memory of its elements, and 16 MiB more.
        small = span_of(leaf) * leaf.element_size() <= 2 * leaf.nbytes + 2**24
        return leaf.numel() > 0 and small and not overlaps(leaf)


class _Staged:
    """Pinned buffers for one host tensor, used in turn; each waits for its last copy before it is written again.

    A tensor that is pinned itself is copied through a buffer as well. Copied from directly, it would be read after the
    call has returned, when a loader that reuses its buffers may have filled it with another batch.
    """

    BUFFERS = 3
    """The host may be this many batches ahead of the copies."""

    def __init__(self, leaf: torch.Tensor, device: torch.device) -> None:
        self._buffers = [torch.empty_like(leaf, pin_memory=True) for _ in range(self.BUFFERS)]
        self._copied: list[Any] = [torch.cuda.Event() for _ in range(self.BUFFERS)]  # type: ignore[no-untyped-call]
        self._device, self._next = device, 0

    def copy(self, leaf: torch.Tensor, static: torch.Tensor) -> None:
        buffer, copied = self._buffers[self._next], self._copied[self._next]
        copied.synchronize()
        buffer.copy_(leaf)
        static.copy_(buffer, non_blocking=True)
        copied.record(torch.cuda.current_stream(self._device))
        self._next = (self._next + 1) % self.BUFFERS
