"""Puts torch right after its captures: a capture that failed half-way, a capture whose GPU is late."""

from __future__ import annotations

import contextlib
import logging
import threading
from typing import TYPE_CHECKING, Any

import torch

from hotloop._torch.ledger import CapabilityMissingError, private
from hotloop._torch.thread_patch import replaced

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_failed: list[torch.cuda.CUDAGraph] = []
"""Kept for good: torch's allocator of pinned memory asks a graph whose capture failed about each later allocation."""
_lock = threading.Lock()
_overriding: list[bool] = []
"""For each recording under way, what the setting was when it began."""


@contextlib.contextmanager
def stale_streams_overridden() -> Iterator[None]:
    """Let a backward in the block accumulate gradients on the stream of the capture, whatever the nodes remember.

    The node that accumulates a parameter's gradient remembers the stream on which it was made. It lives as long as any
    graph through the parameter: a loss that is kept from an earlier step, a wrapper for several processes. On another
    stream it would end the capture. Since torch 2.13 the capture's stream can be taken instead. The setting is the
    process's, and has an effect only during captures.
    """
    try:
        now = private("torch._C:_override_stale_capture_stream")
    except CapabilityMissingError:
        yield
        return
    override = torch.autograd.graph.set_override_stale_capture_stream
    with _lock:
        _overriding.append(now())
        override(True)
    try:
        yield
    finally:
        with _lock:
            if len(_overriding) == 1:
                override(_overriding[0])
            _overriding.pop()


def captures_waited_for() -> contextlib.AbstractContextManager[None]:
    """Let the thread wait for the GPU at the end of each CUDA capture in the block, whoever captures.

    In torch 2.11 a capture zeroes the offset of a GPU's random numbers as it begins, on its own stream. A replay sets
    the offset on the current stream. Where the GPU is busy with another process, the zeroing may come last; compiled
    code that captures for itself replays at once, and its masks would be those of offset 0, not eager's. Later versions
    keep the offset of each capture apart.
    """
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return contextlib.nullcontext()

    def make(real: Callable[..., None]) -> Callable[..., None]:
        def capture_end(graph: torch.cuda.CUDAGraph) -> None:
            real(graph)
            torch.cuda.synchronize()

        return capture_end

    return replaced(torch.cuda.CUDAGraph, "capture_end", make)


def recover_from_failed_capture(graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream, pool: Any) -> None:
    """End a capture that was invalidated, and clean up what it left behind in torch.

    ``capture_end`` raises before it has told the allocator and the random generator that the capture is over. The
    allocator would keep memory back, and the next dropout outside of a capture would fail ("Offset increment outside
    graph capture encountered unexpectedly"). A capture of nothing resets the generator. The use of the pool that
    ``capture_begin`` counted is given back. The pool itself must not be used for another capture: the allocator of
    pinned memory still believes that the capture goes on, and there is no way to tell it.
    """
    device = stream.device.index or 0
    with torch.cuda.stream(stream):
        try:
            graph.capture_end()
        except RuntimeError:  # the failure is known; this call takes the stream out of capture
            _failed.append(graph)
        with contextlib.suppress(CapabilityMissingError, RuntimeError):
            # The second call is owed only where the first finds a capture: else the graph gives the pool back.
            private("torch._C:_cuda_endAllocateToPool")(device, pool)
            private("torch._C:_cuda_releasePool")(device, pool)
        with contextlib.suppress(RuntimeError):
            graph.reset()
        try:
            empty = torch.cuda.CUDAGraph()
            empty.capture_begin(capture_error_mode="thread_local")
            empty.capture_end()
        except RuntimeError as error:
            logging.getLogger("hotloop").warning("torch could not be put right after a failed capture: %s", error)
