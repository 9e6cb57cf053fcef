"""What the integrations need where several processes train together: who speaks, and where DDP is made."""

from __future__ import annotations

import contextlib
import logging
from typing import TYPE_CHECKING

import torch
from torch import distributed

if TYPE_CHECKING:
    from collections.abc import Iterator

FLAT = "FSDP1 keeps parameters flat, and no step of such is captured: those of FSDP2 (fully_shard) are"
UNCOMPILED = "parameters are sharded (FSDP2), and a Trainer captures uncompiled steps alone then: run='eager+graph'"


def is_first() -> bool:
    """Return whether this process is the first of several, or the only one."""
    return not (distributed.is_available() and distributed.is_initialized()) or distributed.get_rank() == 0


def level_of(wanted: int) -> int:
    """Return the level for a line that all processes log alike: those after the first log it for debugging only."""
    return wanted if is_first() else logging.DEBUG


@contextlib.contextmanager
def first_speaks() -> Iterator[None]:
    """Keep all processes but the first from logging in the block, where all would log the same lines."""
    log = logging.getLogger("hotloop")

    def speaks(record: logging.LogRecord) -> bool:
        return record.levelno >= logging.ERROR

    if not is_first():
        log.addFilter(speaks)
    try:
        yield
    finally:
        log.removeFilter(speaks)


@contextlib.contextmanager
def own_stream(device: torch.device) -> Iterator[None]:
    """Run the block on a CUDA stream of its own, where the device has streams.

    Before torch 2.13 a step is captured only if its DistributedDataParallel was made on another stream than the
    default one.
    """
    if device.type != "cuda":
        yield
        return
    before, own = torch.cuda.current_stream(device), torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    own.wait_stream(before)
    try:
        with torch.cuda.stream(own):
            yield
    finally:
        before.wait_stream(own)
