"""Where networks run, and where what they make is kept."""

from __future__ import annotations

import dataclasses
import time
from typing import TYPE_CHECKING

import torch

from hotloop.cache.files import default_folder
from hotloop.recipes.diffusion.pictures.stored import PART, Cache

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

OFTEN = 30.0
"""Seconds between two words about work that goes on."""


def told(what: str, say: Callable[[str], None]) -> Callable[[int, int], None]:
    """Return what says now and then how far work is, which is short on most machines and takes hours on some."""
    said = time.monotonic()

    def progress(done: int, total: int) -> None:
        nonlocal said
        if time.monotonic() - said >= OFTEN:
            said = time.monotonic()
            say(f"{what}: {done:,} of {total:,}")

    return progress


@dataclasses.dataclass(frozen=True)
class Place:
    """Where networks run, and where what they make is kept.

    Args:
        device: where they run.
        folder: the run's, for what is kept where ``HOTLOOP_CACHE_DIR`` is empty; else all runs share hotloop's own.
        say: prints a line.
    """

    device: torch.device
    folder: Path
    say: Callable[[str], None]

    def cache(self, batch_size: int = 1) -> Cache:
        """Return where encoded rows are kept, made by batches of this size; what they depend on is still to be said."""
        kept = default_folder()
        return Cache(
            folder=kept / "pictures" if kept else self.folder / "cache",
            # Kernels may differ between devices and versions, and a run is to be resumed to the same result.
            key={"torch": torch.__version__, "device": self.device.type},
            dtype=torch.float32,
            batch_size=min(batch_size, PART),
            progress=told("Encoded", self.say),
            say=self.say,
        )
