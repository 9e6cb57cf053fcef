"""A bounded look at a run's batches before its first step, after which the run draws the batches it would have drawn.

Samples are read in this process, past the loader's workers and its ``worker_init_fn``. Random streams of Python, NumPy
and torch are put back, and the generators of loader and samplers; what a look might use up (an iterator, a stream) is
not read at all. What a data set keeps to itself stays as the look leaves it: a generator of its own has advanced, a
cache is filled, and a file that is opened at the first sample (HDF5, LMDB) is open here when the workers fork, which
inherit its handle. Do not give such a data set, or have it begin anew in each process.
"""

from __future__ import annotations

import copy
import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from hotloop.step.state.random_state import RandomState
from hotloop.step.workload import arguments

BATCHES, SECONDS = 64, 0.5
"""A look ends after so many batches, or after so long, whichever comes first."""
_MOST_SAMPLES = 1_000_000
"""Of a larger data set the order of an epoch is not drawn, which finding its last batch would take."""


@dataclasses.dataclass(frozen=True)
class Looked:
    """How far a look came: batches read, those of one epoch where that is known, and why none was read."""

    read: int
    total: int | None = None
    why_not: str = ""


class _NotLookedAtError(Exception):
    """Reading these batches could change the run."""


def look(batches: Any, visit: Callable[[tuple[Any, ...]], None]) -> Looked:
    """Read some batches, the last one of an epoch among them where it can be had.

    Args:
        batches: a DataLoader over a data set with numbered samples, a sequence, or a function that gives an iterable.
        visit: called with each batch as the arguments of a step.

    Raises:
        Exception: what ``visit`` raises.
    """
    before = RandomState([torch.device("cpu")])
    generators = [(one, one.get_state()) for one in generators_of(batches)]
    total, count, began = None, 0, time.monotonic()
    try:
        total, read = _reader(batches)
        for batch in _until_it_fails(read):
            visit(arguments(batch))
            count += 1
            if time.monotonic() - began > SECONDS:
                break
    except _NotLookedAtError as error:
        return Looked(count, total, str(error))
    finally:
        before.restore()
        for one, state in generators:
            one.set_state(state)
    return Looked(count, total, "" if count else "there is no batch to read")


def _until_it_fails(read: Iterator[Any]) -> Iterator[Any]:
    """A batch that cannot be read fails in the run as well, where that is the user's to see."""
    try:
        yield from read
    except Exception as error:
        if isinstance(error, _NotLookedAtError):
            raise
        raise _NotLookedAtError(f"reading a batch failed: {type(error).__name__}: {error}") from error


def generators_of(batches: Any) -> list[torch.Generator]:
    """Give the generators that the order of a loader's samples is drawn from."""
    batch_sampler = getattr(batches, "batch_sampler", None)
    holders = [batches, getattr(batches, "sampler", None), batch_sampler, getattr(batch_sampler, "sampler", None)]
    found = [getattr(holder, "generator", None) for holder in holders]
    return list({id(one): one for one in found if isinstance(one, torch.Generator)}.values())


def _reader(batches: Any) -> tuple[int | None, Iterator[Any]]:
    """Give the number of batches of an epoch, and an iterator over some of them, the odd last one first."""
    if isinstance(batches, DataLoader):
        return _from_loader(batches)
    if isinstance(batches, Sequence):
        return len(batches), iter(_some(batches))
    if callable(batches):
        made = batches()
        if isinstance(made, DataLoader | Sequence):
            return _reader(made)
        return None, (batch for batch, _ in zip(made, range(BATCHES), strict=False))
    raise _NotLookedAtError(f"a look might use up a {type(batches).__name__}: give a DataLoader, a list or a function")


def _some(batches: Sequence[Any]) -> list[Any]:
    return [*batches[-1:], *batches[: min(BATCHES, len(batches)) - 1]]


def _from_loader(loader: DataLoader[Any]) -> tuple[int | None, Iterator[Any]]:
    dataset: Any = loader.dataset
    if isinstance(dataset, IterableDataset):
        raise _NotLookedAtError("the loader's data set is a stream, which a look would use up")
    if loader.batch_sampler is None:
        raise _NotLookedAtError("the loader gives single samples (batch_size=None)")
    if len(dataset) > _MOST_SAMPLES:
        raise _NotLookedAtError(f"the data set has {len(dataset):,} samples: drawing their order would take too long")
    order = list(_own_sampler(loader))
    return len(order), (loader.collate_fn(_fetch(dataset, indices)) for indices in _some(order))


def _own_sampler(loader: DataLoader[Any]) -> Any:
    """Give a sampler that may be iterated: torch's own keep nothing but generators, others may count their epochs."""
    given: Any = loader.batch_sampler
    parts = (given, getattr(given, "sampler", None))
    if all(one is None or type(one).__module__.startswith("torch.utils.data") for one in parts):
        return given
    try:
        return copy.deepcopy(given, {id(loader.dataset): loader.dataset})
    except Exception as error:
        raise _NotLookedAtError(f"{type(given).__name__} cannot be copied: {error}") from error


def _fetch(dataset: Any, indices: list[Any]) -> list[Any]:
    if (several := getattr(dataset, "__getitems__", None)) is not None:  # as DataLoader fetches them
        return list(several(indices))
    return [dataset[index] for index in indices]
