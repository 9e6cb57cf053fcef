"""The static inputs of a captured step, and how each batch gets into them."""

from __future__ import annotations

from typing import Any

import torch

_STAGES = 3
"""Pinned buffers a host tensor has: the host may be this many batches ahead of the copies."""


class Inputs:
    """Tensors of a captured step that each batch is copied into.

    Args:
        leaves: the leaves of one call's arguments; what is no tensor is part of the captured step as it is.
        device: where the step runs. On a GPU, host tensors become device tensors, copied through pinned buffers: the
            step's own ``x.to(device)`` then finds them there.
    """

    def __init__(self, leaves: list[Any], device: torch.device) -> None:
        self.leaves = [self._static(leaf, device) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        self._staged = {
            index: _Staged(leaf, device)
            for index, leaf in enumerate(leaves)
            if isinstance(leaf, torch.Tensor) and leaf.device.type == "cpu" and device.type == "cuda"
        }

    def fill(self, leaves: list[Any]) -> None:
        """Copy a batch in; the shapes are those of the first."""
        for index, (static, leaf) in enumerate(zip(self.leaves, leaves, strict=True)):
            if not isinstance(static, torch.Tensor) or static is leaf:
                continue
            if index in self._staged:
                self._staged[index].copy(leaf, static)
            else:
                static.copy_(leaf.detach(), non_blocking=True)

    @staticmethod
    def _static(leaf: torch.Tensor, device: torch.device) -> torch.Tensor:
        where = device if leaf.device.type == "cpu" else leaf.device
        return torch.empty_strided(leaf.shape, _dense(leaf), dtype=leaf.dtype, device=where)


def _dense(leaf: torch.Tensor) -> tuple[int, ...]:
    """Give the strides of a copy: the same layout, channels last for one, without what is expanded or overlaps."""
    return torch.empty_like(leaf, device="meta").stride()


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
