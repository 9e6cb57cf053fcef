"""Constants that a step makes on the host and copies to the device, in a recording.

``torch.tensor(0.0, device="cuda")`` makes the tensor on the host, copies it and waits, which no capture can hold.
transformers writes that in the masks of every model whose attention is not fused (T5, Speech2Text), and MPNet makes its
relative positions on the host. In a capture the copy begins in pinned memory, which the recording keeps. The value is
as safe there as the 2.0 of ``x * 2.0``: the Python state that it came from is looked at before each replay.
"""

from __future__ import annotations

import contextlib
import functools
from typing import TYPE_CHECKING, Any

import torch

from hotloop._torch.thread_patch import replaced

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

FEW = 32
"""Numbers in one ``torch.tensor(...)``: a longer list or array is data rather than a constant."""
MOST_BYTES = 1 << 24
"""Bytes of all constants of a step. They are copied in each replay."""
_ALIGNED = 64
_TO = torch.Tensor.to


def room_for(nbytes: int) -> int:
    """Return the bytes that a constant takes in `HostConstants`."""
    return -(-nbytes // _ALIGNED) * _ALIGNED


class HostConstants:
    """The host memory from which a recording copies its constants.

    Args:
        nbytes: how many bytes the constants take, as `room_for` counts them.
    """

    def __init__(self, nbytes: int) -> None:
        self._memory = torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=torch.cuda.is_available())
        self._used = 0

    @contextlib.contextmanager
    def copied_from(self) -> Iterator[None]:
        """Copy what this thread makes on the host, and moves to the device in the block, from the memory of these."""
        calls: tuple[tuple[Any, str, Any], ...] = (
            (torch, "tensor", self._made),
            (torch, "as_tensor", self._made),
            (torch.Tensor, "to", self._moved),
        )
        with contextlib.ExitStack() as stack:
            for owner, name, make in calls:
                stack.enter_context(replaced(owner, name, make))
            yield

    def _made(self, real: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        @functools.wraps(real)
        def made(data: Any, dtype: torch.dtype | None = None, device: Any = None, **more: Any) -> torch.Tensor:
            where = torch.device(device) if device is not None else torch.empty(0).device  # of torch.set_default_device
            is_data = isinstance(data, torch.Tensor) or more.keys() - {"requires_grad"}
            host = None if where.type == "cpu" or is_data else torch.tensor(data, dtype=dtype, device="cpu")
            held = None if host is None or host.numel() > FEW else self._held(host)
            if held is None:
                return real(data, dtype=dtype, device=device, **more)
            there = torch.empty_like(held, device=where).copy_(held, non_blocking=True)
            return there.requires_grad_() if more.get("requires_grad") else there  # vmap allows no such call

        return made

    def _moved(self, real: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        @functools.wraps(real)
        def moved(one: torch.Tensor, *args: Any, **more: Any) -> torch.Tensor:
            asked = (*args, *more.values())
            if not _can_be_held(one) or not any(map(_is_elsewhere, asked)):
                return real(one, *args, **more)
            dtypes = [each for each in asked if isinstance(each, torch.dtype)]
            dtypes += [each.dtype for each in asked if isinstance(each, torch.Tensor)]
            held = self._held(_TO(one, dtypes[0]) if dtypes else one)  # else torch converts it into other memory
            if held is None:
                return real(one, *args, **more)
            given = [each for each in args if not isinstance(each, bool)]  # but non_blocking and copy, which are known
            return _TO(held, *given, **{**more, "non_blocking": True})

        return moved

    def _held(self, host: torch.Tensor) -> torch.Tensor | None:
        """Copy a tensor into the memory that is kept, with the strides of a copy that torch makes.

        Returns:
            None where there is no room: the step copies more than it did when it was audited, or it is not the step
            that copies, but an optimizer outside of the recording.
        """
        nbytes = host.numel() * host.element_size()
        begin, end = self._used, self._used + room_for(nbytes)
        if end > self._memory.numel():
            return None
        self._used = end
        strides = torch.empty_like(host, device="meta").stride()
        held = self._memory[begin : begin + nbytes].view(host.dtype).as_strided(host.shape, strides)
        with torch.no_grad():
            return held.copy_(host)


def _can_be_held(one: torch.Tensor) -> bool:
    return one.is_cpu and not one.is_pinned() and not one.requires_grad and one.layout == torch.strided


def _is_elsewhere(argument: Any) -> bool:
    """Return whether an argument of ``Tensor.to`` names a device other than the host."""
    if isinstance(argument, torch.Tensor):
        return not argument.is_cpu
    is_device = isinstance(argument, torch.device | str | int) and not isinstance(argument, bool)
    return is_device and torch.device(argument).type != "cpu"
