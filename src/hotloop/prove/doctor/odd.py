"""The last batch of an epoch, where it is smaller than the others: most recompiles come from it, once an epoch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.utils.data import DataLoader


def odd_batch(batches: Any, within: int) -> Any | None:
    """Give the last batch of an epoch longer than ``within`` steps, which a short look would never meet.

    It is a list's last batch; of a DataLoader, as many samples as its last batch has, collated as it collates. None
    where the epoch is short enough to be seen, where nothing tells (a generator), or where all batches are alike.
    """
    if isinstance(batches, DataLoader):
        size = _left_over(batches)
        if not size or len(batches) <= within:
            return None
        dataset: Any = batches.dataset
        return batches.collate_fn([dataset[index] for index in range(size)])
    if isinstance(batches, Sequence) and len(batches) > within:
        return batches[-1]
    return None


def _left_over(loader: DataLoader[Any]) -> int:
    """Give how many samples a loader's last batch has; 0 where it is full, dropped, or nothing tells."""
    if loader.batch_size is None or loader.drop_last:
        return 0
    try:
        samples = len(loader.sampler)  # type: ignore[arg-type]  # an endless one has no length
        return samples % loader.batch_size if hasattr(loader.dataset, "__getitem__") else 0
    except TypeError:
        return 0
