"""Validation of a diffusion model: the same noise on the same pictures at the same timesteps, each time."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hotloop.train.batches import Batch

if TYPE_CHECKING:
    from collections.abc import Callable

    from hotloop.train.batches import Data

LEAST = 256
"""Pairs of a picture and a timestep that a validation has at least: fewer pictures come at several timesteps each."""
_GOLDEN = (math.sqrt(5) - 1) / 2


class Fixed:
    """A side of the split with noise of its own for each row, which follows from the row's number and nothing else.

    Timesteps are spread evenly by multiples of the golden ratio, so that few rows meet all amounts of noise as well.

    Args:
        data: the rows; their labels are numbers of pictures.
        shape: gives the shape of the latents of a batch's inputs, without the batch: (channels, height, width).
        steps: how many timesteps there are.
        seed: of the noise.
    """

    apart = True

    def __init__(
        self, data: Data, shape: Callable[[dict[str, Tensor]], tuple[int, ...]], steps: int, seed: int
    ) -> None:
        self._data, self._shape, self._steps, self._seed = data, shape, steps, seed
        self._times = max(1, math.ceil(LEAST / len(data)))
        self.bucket, self.buckets = data.bucket.repeat(self._times), data.buckets

    def __len__(self) -> int:
        return self._times * len(self._data)

    def take(self, rows: Tensor) -> Batch:
        """Return these rows as a batch, with ``noise`` and ``timesteps`` among its inputs."""
        batch = self._data.take(rows % len(self._data))
        shape = self._shape(batch.inputs)
        noise = [torch.randn(shape, generator=self._generator(row)) for row in rows.tolist()]
        timesteps = ((rows + 1).double() * _GOLDEN % 1 * self._steps).long()
        return Batch({**batch.inputs, "noise": torch.stack(noise), "timesteps": timesteps}, batch.labels)

    def _generator(self, row: int) -> torch.Generator:
        return torch.Generator().manual_seed((self._seed * 1_000_003 + row) % 2**63)


class MeanError:
    """Judges by the mean squared error of the prediction, which no weights of training change."""

    def __init__(self) -> None:
        self._sum, self._count = 0.0, 0

    def see(self, output: Tensor, labels: Tensor) -> None:
        """Add up the squared errors of some rows."""
        self._sum += float(output.float().square().sum())
        self._count += output.numel()
        del labels

    def figures(self) -> dict[str, float]:
        """Return ``loss``."""
        return {"loss": self._sum / self._count}
