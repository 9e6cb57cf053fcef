"""Small tensors of Python numbers, made on a device by kernels instead of a copy from the host.

``torch.tensor(0.0, device="cuda")`` makes the tensor on the host, copies it and waits, which no capture can hold.
transformers writes that in the masks of every model whose attention is not fused (T5, Speech2Text). The number itself
is as safe in a recording as one in ``x * 2.0``: Python state that it came from is looked at before each replay.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import numbers
from typing import TYPE_CHECKING, Any

import torch

from hotloop._torch.thread_patch import replaced

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

MOST = 32
"""Numbers in one tensor: each takes a launch, and longer lists are data rather than constants."""


@contextlib.contextmanager
def numbers_made_on_device() -> Iterator[None]:
    """Have torch.tensor, torch.as_tensor and Tensor.new_tensor make numbers on the device, in this thread."""
    with contextlib.ExitStack() as stack:
        for owner, name in ((torch, "tensor"), (torch, "as_tensor"), (torch.Tensor, "new_tensor")):
            stack.enter_context(replaced(owner, name, _like_new_tensor if owner is torch.Tensor else _like_tensor))
        yield


def _like_tensor(real: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(real)
    def made(data: Any, dtype: torch.dtype | None = None, device: Any = None, **more: Any) -> torch.Tensor:
        where = torch.device(device) if device is not None else torch.empty(0).device  # of torch.set_default_device
        if where.type == "cpu" or not _are_numbers(data) or more.keys() - {"requires_grad"}:
            return real(data, dtype=dtype, device=device, **more)
        there = filled(torch.tensor(data, dtype=dtype, device="cpu"), where)
        return there.requires_grad_(more.get("requires_grad", False))

    return made


def _like_new_tensor(real: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(real)
    def made(like: torch.Tensor, data: Any, **more: Any) -> torch.Tensor:
        if like.device.type == "cpu" or not _are_numbers(data):
            return real(like, data, **more)
        return torch.tensor(data, **{"dtype": like.dtype, "device": like.device, **more})

    return made


def _are_numbers(data: Any) -> bool:
    """Return whether data is a number, or lists and tuples of a few numbers."""
    if isinstance(data, list | tuple):
        return len(data) <= MOST and all(map(_are_numbers, data)) and _count(data) <= MOST
    return isinstance(data, numbers.Number)


def _count(data: Any) -> int:
    return sum(map(_count, data)) if isinstance(data, list | tuple) else 1


def filled(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Make a tensor on a device with the values of one on the host, without a copy: one launch for equal neighbours."""
    runs = [(value, len(list(run))) for value, run in itertools.groupby(host.flatten().tolist())]
    if len(runs) <= 1:
        return torch.full(host.shape, runs[0][0] if runs else 0, dtype=host.dtype, device=device)
    there = [torch.full((long,), value, dtype=host.dtype, device=device) for value, long in runs]
    return torch.cat(there).reshape(host.shape)
