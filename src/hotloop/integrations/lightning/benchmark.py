"""Times training batches eager and compiled, and prints the speed-up in the words of Lightning's guide."""

from __future__ import annotations

import statistics
import sys
import time
from typing import Any

import lightning.pytorch as pl
import torch

from hotloop.errors import ConfigError
from hotloop.integrations.lightning.callback import HotLoop
from hotloop.integrations.lightning.user_compiles import compiled_by_user


class Benchmark(pl.Callback):
    """A callback that times training batches, the first calls of each fit excluded.

    The same instance goes into two fits, the eager one first. In the second, the callbacks contain `HotLoop`, or the
    module is compiled by torch's means. When the second has ended, it prints to standard output::

        Eager median time: 0.0412 seconds
        Compile median time: 0.0333 seconds
        Speedup: 1.2x

    Where most of the counted batches of the second fit ran eager, or those of the first did not, it prints the cause
    and no speed-up.

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
        """Seconds of the median batch of each fit."""
        self._why_eager: list[str] = []
        """Why each fit ran eager; empty where it ran compiled or captured."""
        self._tiers: list[str] = []
        """The tier that each batch ran in, where a loop owns the step."""
        self._seconds: list[float] = []
        self._began = 0.0

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Begin a fit."""
        self._seconds, self._tiers = [], []

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Begin a batch, with no work left on the device."""
        self._synchronize(pl_module)
        self._began = time.perf_counter()

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """End a batch, once the device has done its work."""
        self._synchronize(pl_module)
        self._seconds.append(time.perf_counter() - self._began)
        if (hot := self._hotloop(trainer)) is not None and hot.loop is not None:
            self._tiers.append(hot.loop.last_ran()[0])

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
        self._why_eager.append(self._find_why_eager(self._hotloop(trainer), pl_module))
        if len(self.medians) == 2:  # noqa: PLR2004 - eager and compiled
            sys.stdout.write(self.text() + "\n")

    def text(self) -> str:
        """Return the three lines; the cause instead of a speed-up, if one of the fits did not run as it should.

        Raises:
            ConfigError: there were not two fits yet.
        """
        if len(self.medians) < 2:  # noqa: PLR2004 - eager and compiled
            raise ConfigError(f"Benchmark: {len(self.medians)} fits were timed: expected an eager and a compiled one")
        (eager, compiled), (first, second) = self.medians[:2], self._why_eager[:2]
        if first and not second:
            return (
                f"Eager median time: {eager:.4f} seconds\n"
                f"Compile median time: {compiled:.4f} seconds\n"
                f"Speedup: {eager / compiled:.1f}x"
            )
        why = f"the second fit ran eager: {second}" if second else "the first fit ran compiled as well: fit it eager"
        return (
            f"First fit's median time: {eager:.4f} seconds\n"
            f"Second fit's median time: {compiled:.4f} seconds\n"
            f"No speed-up to tell: {why}"
        )

    def _find_why_eager(self, hot: HotLoop | None, module: pl.LightningModule) -> str:
        """Return why a fit, or most of its counted batches, ran eager; empty where it ran compiled or captured."""
        if hot is None:
            return "" if compiled_by_user(module) else "it has no HotLoop, and its module was not compiled"
        status = hot.status()
        if not status.owned:
            return "" if status.running != "eager" else "; ".join((*status.why, *status.notes))
        counted = self._tiers[self.skip :]
        fast = [tier for tier in counted if tier not in ("eager", "as-given")]
        if 2 * len(fast) > len(counted):
            return ""
        assert status.loop is not None
        if fast:
            came = f"only {len(fast)} of {len(counted)} counted batches ran in {fast[-1]}"
            return f"{came}: make the fit longer, and count later ones by Benchmark(skip=...)"
        declined = [f"{tier.name}: {tier.why}" for tier in status.loop.tiers if tier.state == "declined"]
        causes = (*status.notes, *declined, *reversed(status.loop.decisions))
        return causes[0] if causes else f"in its {status.loop.step} steps nothing was decided yet: make the fit longer"

    @staticmethod
    def _hotloop(trainer: pl.Trainer) -> HotLoop | None:
        return next((callback for callback in vars(trainer)["callbacks"] if isinstance(callback, HotLoop)), None)

    @staticmethod
    def _synchronize(module: pl.LightningModule) -> None:
        if module.device.type == "cuda":
            torch.cuda.synchronize(module.device)
