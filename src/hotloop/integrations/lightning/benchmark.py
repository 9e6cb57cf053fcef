"""What a training batch takes eager and compiled, and the speed-up, printed in the words of Lightning's guide."""

from __future__ import annotations

import statistics
import sys
import time
from typing import Any

import lightning.pytorch as pl
import torch

from hotloop.errors import ConfigError


class Benchmark(pl.Callback):
    """Takes the time of training batches, the first calls of each fit excluded.

    One instance goes into two fits, the eager one first; the second fit's callbacks contain `HotLoop`, or its model is
    compiled by other means. When the second has ended it prints, to standard output::

        Eager median time: 0.0412 seconds
        Compile median time: 0.0333 seconds
        Speedup: 1.2x

    Args:
        skip: first batches of a fit that are not counted: they compile, autotune, prove.

    Raises:
        ConfigError: ``skip`` is no number of batches.
    """

    def __init__(self, skip: int = 10) -> None:
        if type(skip) is not int or skip < 0:
            raise ConfigError(f"Benchmark(skip={skip!r}): expected a whole number of batches, 0 or more")
        self.skip = skip
        self.medians: list[float] = []
        """Seconds of a median batch, a fit each."""
        self._seconds: list[float] = []
        self._began = 0.0

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Begin a fit."""
        self._seconds = []

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Begin a batch, with nothing left to do on the device."""
        _wait(pl_module)
        self._began = time.perf_counter()

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """End a batch, with all done on the device."""
        _wait(pl_module)
        self._seconds.append(time.perf_counter() - self._began)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Take the median; after the second fit, print both and the speed-up.

        Raises:
            ConfigError: the fit was no longer than what is not counted.
        """
        counted = self._seconds[self.skip :]
        if not counted:
            raise ConfigError(
                f"Benchmark(skip={self.skip}): the fit had {len(self._seconds)} batches: expected more than are skipped"
            )
        self.medians.append(statistics.median(counted))
        if len(self.medians) == 2:  # noqa: PLR2004 - eager and compiled
            sys.stdout.write(self.text() + "\n")

    def text(self) -> str:
        """Give the three lines.

        Raises:
            ConfigError: there were not two fits yet.
        """
        if len(self.medians) < 2:  # noqa: PLR2004 - eager and compiled
            raise ConfigError(f"Benchmark: {len(self.medians)} fits were timed: expected an eager and a compiled one")
        eager, compiled = self.medians[:2]
        return (
            f"Eager median time: {eager:.4f} seconds\n"
            f"Compile median time: {compiled:.4f} seconds\n"
            f"Speedup: {eager / compiled:.1f}x"
        )


def _wait(module: pl.LightningModule) -> None:
    if module.device.type == "cuda":
        torch.cuda.synchronize(module.device)
