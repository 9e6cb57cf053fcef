"""Which tensors lie on the host, beside the device of a step.

On a GPU those of the CPU do. Where the CPU stands in for the device, torch knows no other place: there a tensor lies on
the host if somebody said so, and so does what is computed of such tensors alone.
"""

from __future__ import annotations

import contextlib
import weakref
from typing import TYPE_CHECKING, Any

import torch

from hotloop._torch.thread_patch import replaced

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

_said: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()
"""Memory that lies on the host of a stand-in."""
_moving: list[torch.Tensor] = []
"""What is being moved from there to the device."""


def on_host(tensor: torch.Tensor) -> torch.Tensor:
    """Let a tensor lie on the host in captures that the CPU stands in for, as one without a device does on a GPU.

    An audit then finds it where it meets the device. ``tensor.clone()`` is a tensor on the device.

    Args:
        tensor: the tensor, with all that shares its memory.

    Returns:
        the tensor.
    """
    _said.add(tensor.untyped_storage())
    return tensor


def is_apart(device: torch.device) -> bool:
    """Return whether tensors can lie on a host beside the device."""
    return device.type != "cpu" or bool(_said)


def lies_on_host(tensor: torch.Tensor, device: torch.device) -> bool:
    """Return whether a tensor lies on the host, and not on the device."""
    if device.type != "cpu":
        return tensor.device.type == "cpu"
    return bool(_said) and tensor.layout == torch.strided and tensor.untyped_storage() in _said


def made_of(given: Sequence[torch.Tensor], made: Sequence[torch.Tensor], device: torch.device) -> None:
    """Let the results of an operation on host tensors alone lie there as well, where the CPU stands in."""
    if device.type == "cpu" and given and not _moving and all(lies_on_host(one, device) for one in given):
        for one in made:
            on_host(one)


@contextlib.contextmanager
def moved_by_copies(device: torch.device) -> Iterator[None]:
    """Let ``tensor.to(device)`` copy what lies on the host of a stand-in: to torch it is where it was."""

    def make(real: Callable[..., Any]) -> Callable[..., Any]:
        def to(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            target = kwargs.get("device", args[0] if args else None)
            if isinstance(target, str | torch.device) and lies_on_host(tensor, device):
                _moving.append(tensor)
                try:
                    return real(tensor, *args, **{**kwargs, "copy": True})
                finally:
                    _moving.pop()
            return real(tensor, *args, **kwargs)

        return to

    with replaced(torch.Tensor, "to", make) if device.type == "cpu" and _said else contextlib.nullcontext():
        yield
