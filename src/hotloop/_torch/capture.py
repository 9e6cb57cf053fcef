"""Puts torch right after a CUDA capture that failed half-way."""

from __future__ import annotations

import contextlib
import logging
from typing import Any

import torch

from hotloop._torch.ledger import CapabilityMissingError, private

_log = logging.getLogger("hotloop")


def recover_from_failed_capture(graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream, pool: Any) -> None:
    """End a capture that was invalidated, and what it left behind in torch.

    ``capture_end`` raises then, before it has told the allocator and the random generator that the capture is over. The
    allocator would keep memory back, and the next dropout outside of a capture would fail ("Offset increment outside
    graph capture encountered unexpectedly"). A capture of nothing resets the generator.
    """
    device = stream.device.index or 0
    with torch.cuda.stream(stream):
        with contextlib.suppress(RuntimeError):  # what failed is known; this takes the stream out of capture
            graph.capture_end()
        with contextlib.suppress(CapabilityMissingError, RuntimeError):  # it may have been told after all
            private("torch._C:_cuda_endAllocateToPool")(device, pool)
        try:
            empty = torch.cuda.CUDAGraph()
            empty.capture_begin(capture_error_mode="thread_local")
            empty.capture_end()
        except RuntimeError as error:
            _log.warning("torch could not be put right after a failed capture: %s", error)
