"""The static inputs of a captured step, and how each batch gets into them."""

from __future__ import annotations

from typing import Any

import torch

from hotloop.step.places import overlaps, span_of, unexpanded

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
        self._written = [self._static(leaf, device) if isinstance(leaf, torch.Tensor) else None for leaf in leaves]
        self.leaves = [
            leaf if static is None else static if static.shape == leaf.shape else static.expand(leaf.shape)
            for static, leaf in zip(self._written, leaves, strict=True)
        ]
        self._staged = {
            index: _Staged(unexpanded(leaf), device)
            for index, leaf in enumerate(leaves)
            if isinstance(leaf, torch.Tensor) and leaf.device.type == "cpu" and device.type == "cuda"
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

    @staticmethod
    def _static(leaf: torch.Tensor, device: torch.device) -> torch.Tensor:
        """Give memory for a tensor, each element once: to be expanded as the tensor is."""
        where = device if leaf.device.type == "cpu" else leaf.device
        base = unexpanded(leaf)
        return torch.empty_strided(base.shape, _strides(base), dtype=leaf.dtype, device=where)


def _strides(leaf: torch.Tensor) -> tuple[int, ...]:
    """Give the strides of a copy: its own, since compiled code is made for them (``tokens[:, :-1]``).

    What overlaps, or is spread thinly over a large memory, gets those of a copy that torch makes.
    """
    small = span_of(leaf) * leaf.element_size() <= _PADDED * leaf.nbytes + _SPARE_BYTES
    own = leaf.numel() > 0 and small and not overlaps(leaf)
    return leaf.stride() if own else torch.empty_like(leaf, device="meta").stride()


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
