"""Rows as tensors, and the order in which an epoch takes them."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from hotloop.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping


@dataclasses.dataclass(frozen=True)
class Batch:
    """Some rows: a model's inputs by name, and what its outputs are held against, each of shape (batch, ...)."""

    inputs: dict[str, Tensor]
    labels: Tensor

    @property
    def tokens(self) -> int:
        """How much there is to compute, to compare batches of several shapes by: tokens, padding included."""
        return next(iter(self.inputs.values())).numel()

    def to(self, device: torch.device) -> Batch:
        """Copy the batch to a device, through pinned memory if that is a GPU, which computes meanwhile."""
        if device.type != "cuda":
            return self.each(lambda tensor: tensor.to(device))
        return self.each(
            lambda tensor: (tensor if tensor.is_cuda else tensor.pin_memory()).to(device, non_blocking=True)
        )

    def each(self, change: Callable[[Tensor], Tensor]) -> Batch:
        """Return the batch with each of its tensors changed."""
        return Batch({name: change(one) for name, one in self.inputs.items()}, change(self.labels))


class Data(Protocol):
    """One side of the split: rows, perhaps of several shapes, that become batches."""

    @property
    def bucket(self) -> Tensor:
        """Which of the shapes each row has, from 0, smallest first: int64 of shape (rows,)."""

    @property
    def buckets(self) -> int:
        """How many shapes there are; rows of one shape make a batch."""

    @property
    def apart(self) -> bool:
        """Whether rows of two shapes can never make one batch; else a batch may have smaller rows than its shape."""

    def __len__(self) -> int: ...

    def take(self, rows: Tensor) -> Batch:
        """Return these rows as a batch."""


class Table:
    """Rows that all have one shape.

    Args:
        inputs: by name, each of shape (rows, ...).
        labels: of shape (rows, ...).
    """

    apart = False
    buckets = 1

    def __init__(self, inputs: dict[str, Tensor], labels: Tensor) -> None:
        self.inputs, self.labels = inputs, labels
        self.bucket = torch.zeros(len(labels), dtype=torch.int64)

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, rows: Tensor) -> Batch:
        """Return these rows as a batch."""
        return Batch({name: one[rows] for name, one in self.inputs.items()}, self.labels[rows])


def per_epoch(dataset: Data, batch_size: int, together: int = 1) -> int:
    """Return how many batches `epoch_order` makes.

    Raises:
        DataError: none, since shapes stay apart and no shape has rows enough for one.
    """
    batch_size = min(batch_size, len(dataset))
    if not dataset.apart:
        return len(dataset) // batch_size
    counts, size = dataset.bucket.bincount(), batch_size * together
    if int(counts.max()) < size:
        raise DataError(
            f"training.batch_size={batch_size}: none of the {dataset.buckets} shapes of the {len(dataset)} rows to "
            f"train on has the {size} rows of a step. Lower training.batch_size, or have fewer shapes"
        )
    return int((counts // size).sum()) * together


def epoch_order(dataset: Data, batch_size: int, seed: int, epoch: int, together: int = 1) -> list[Tensor]:
    """Shuffle rows into the batches of an epoch, all of one size; what is left over waits for another epoch.

    With several shapes, rows of one shape make a batch, and the few that do not fill one go to the next larger, or wait
    for another epoch where shapes stay apart; there the ``together`` batches of an optimizer step have one shape too,
    so that there are no more kinds of steps than shapes. The order depends on nothing but the arguments, so that a run
    can be resumed in the middle of an epoch.
    """
    generator = torch.Generator().manual_seed((seed * 1_000_003 + epoch) % 2**63)
    rows = torch.randperm(len(dataset), generator=generator)
    batch_size = min(batch_size, len(dataset))
    size = batch_size * together if dataset.apart else batch_size
    found: list[Tensor] = []
    which, left = dataset.bucket[rows], rows[:0]
    for bucket in range(dataset.buckets):
        left = torch.cat([left[:0] if dataset.apart else left, rows[which == bucket]])
        whole = len(left) - len(left) % size
        found += torch.split(left[:whole], size) if whole else []
        left = left[whole:]
    if dataset.buckets > 1:
        found = [found[index] for index in torch.randperm(len(found), generator=generator)]
    return [batch for piece in found for batch in torch.split(piece, batch_size)]


class Epochs:
    """The batches of a run's optimizer steps, each a list of ``together`` batches, epoch after epoch.

    Its state is where it is, so that a run goes on from there without reading what it was trained on.

    Args:
        data: the rows.
        batch_size: rows of a batch.
        seed: of the order.
        together: how many batches of a step this process has.
        rank: which of the processes of the run this is.
        ranks: how many there are: each has its own of the batches of a step, which all have one order.

    Raises:
        DataError: no step has a batch for each process.
    """

    def __init__(  # noqa: PLR0913, PLR0917 - what an order depends on
        self,
        data: Data,
        batch_size: int,
        seed: int,
        together: int = 1,
        rank: int = 0,
        ranks: int = 1,
    ) -> None:
        self._data, self._size, self._seed, self._together = data, batch_size, seed, together * ranks
        self._rank, self._ranks = rank, ranks
        many = per_epoch(data, batch_size, self._together)
        if ranks > 1 and many < self._together:
            raise DataError(
                f"training.batch_size={batch_size} on run.devices={ranks}: the {len(data)} rows to train on do not "
                f"fill the {self._together} batches of a step. Lower training.batch_size"
            )
        self._steps = max(1, many // self._together)
        self._epoch = self._done = 0

    def __len__(self) -> int:
        return self._steps

    def __iter__(self) -> Iterator[list[Batch]]:
        order, many = self.order(), self._together
        steps = (order[step * many : (step + 1) * many] for step in range(self._done, self._steps))
        for rows in steps:
            self._done += 1
            yield [self._data.take(one) for one in rows[self._rank :: self._ranks]]
        self._epoch, self._done = self._epoch + 1, 0

    def order(self) -> list[Tensor]:
        """Return the rows of each batch of the epoch that goes on, those of the other processes among them."""
        return epoch_order(self._data, self._size, self._seed, self._epoch, self._together)

    def state_dict(self) -> dict[str, int]:
        """Return the epoch, and how many of its steps have their batches."""
        return {"epoch": self._epoch, "done": self._done}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go on there."""
        self._epoch, self._done = state["epoch"], state["done"]


def in_order(dataset: Data, batch_size: int) -> Iterator[tuple[Batch, int]]:
    """Yield all rows as batches of one size, smallest rows first, and how many rows of each count.

    The last batch, or that of each shape where they stay apart, is filled up with rows that are there already, since a
    smaller one would be another shape.
    """
    size = len(dataset)
    batch_size = min(batch_size, size)
    order = dataset.bucket.argsort(stable=True)
    for alike in torch.split(order, dataset.bucket.bincount().tolist()) if dataset.apart else (order,):
        for start in range(0, len(alike), batch_size):
            rows = alike[torch.arange(start, start + batch_size).clamp(max=len(alike) - 1)]
            yield dataset.take(rows), min(batch_size, len(alike) - start)
