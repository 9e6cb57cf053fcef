"""The calls that read and set a device's random state: those of checkpoints, of ``fork_rng``, and of the program."""

from __future__ import annotations

import contextlib
import ctypes
import inspect
import os
from typing import TYPE_CHECKING, Any

import torch

from hotloop._torch.cudagraphs import is_fake
from hotloop._torch.thread_patch import replaced

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_COMPILERS = tuple(
    os.path.join(os.path.dirname(torch.__file__), name, "")  # noqa: PTH118, PTH120 - compared as strings
    for name in ("_dynamo", "_functorch", "_inductor")
)
"""Compilers keep the random state while they trace, and put it back: no work of the step."""


@contextlib.contextmanager
def rng_calls(
    device: torch.device,
    read: Callable[[Callable[[], torch.Tensor]], torch.Tensor],
    put: Callable[[Callable[[torch.Tensor], None], torch.Tensor], None],
    *,
    forbidden: bool = False,
) -> Iterator[None]:
    """Call ``read(real)`` and ``put(real, state)`` where this thread reads and sets the random state of a device.

    Calls for other devices, and those of compilers, are left alone.

    Args:
        device: the device of the step.
        read: returns the state.
        put: sets the state.
        forbidden: a CUDA capture is under way, in which nobody can read or set a state. Calls that are left alone
            read an empty state, and set nothing.
    """

    def reading(real: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def get_rng_state(*where: Any, **by_name: Any) -> torch.Tensor:
            if not _by_compiler() and _is(device, *where, **by_name):
                return read(lambda: real(*where, **by_name))
            return torch.empty(0, dtype=torch.uint8) if forbidden else real(*where, **by_name)

        return get_rng_state

    def setting(real: Callable[..., None]) -> Callable[..., None]:
        def set_rng_state(new_state: torch.Tensor, *where: Any, **by_name: Any) -> None:
            if not _by_compiler() and _is_state(new_state) and _is(device, *where, **by_name):
                put(lambda state: real(state, *where, **by_name), new_state)
            elif not forbidden:
                real(new_state, *where, **by_name)

        return set_rng_state

    owners = (torch.cuda, torch.cuda.random) if device.type == "cuda" else (torch, torch.random)
    with contextlib.ExitStack() as stack:
        for owner in owners:
            stack.enter_context(replaced(owner, "get_rng_state", reading))
            stack.enter_context(replaced(owner, "set_rng_state", setting))
        yield


def content(state: torch.Tensor) -> bytes:
    """Return the bytes of a random state; no operation of torch's takes part, which an audit or a tape would hear."""
    return ctypes.string_at(state.data_ptr(), state.nbytes)


def state_of(held: bytes) -> torch.Tensor:
    """Return a random state that has these bytes."""
    return torch.frombuffer(bytearray(held), dtype=torch.uint8)


def position(device: torch.device) -> bytes:
    """Return where the stream of a device is."""
    if device.type == "cuda":
        return content(torch.cuda.default_generators[index_of(device)].get_state())
    return content(torch.default_generator.get_state())


def index_of(device: torch.device) -> int:
    """Return the number of a GPU."""
    return torch.cuda.current_device() if device.index is None else device.index


def _is(ours: torch.device, /, device: int | str | torch.device = "cuda") -> bool:
    """Return whether a call with these arguments is about our device."""
    if ours.type != "cuda":
        return True
    named = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    return index_of(named) == index_of(ours)


def _is_state(value: Any) -> bool:
    """Return whether a value is a random state; torch refuses all others itself."""
    return isinstance(value, torch.Tensor) and value.is_cpu and value.is_contiguous() and not is_fake(value)


def _by_compiler() -> bool:
    """Return whether a compiler of torch's called: its frame is beyond the replacement's and the dispatcher's."""
    frame = inspect.currentframe()
    for _ in range(3):
        frame = frame.f_back if frame is not None else None
    return frame is not None and frame.f_code.co_filename.startswith(_COMPILERS)
