"""A bounded look at a run's batches before its first step; the run then draws the batches it would have drawn.

Samples are read in this process, past the loader's workers and its ``worker_init_fn``. Random streams of Python, NumPy
and torch are put back, and the generators of loader and samplers. A source that a look might use up (an iterator, a
stream) is not read at all. State that a data set keeps to itself stays as the look leaves it: a generator of its own
has advanced, a cache is filled, and a file that is opened at the first sample (HDF5, LMDB) is open here when the
workers fork, which inherit its handle. Do not pass such a data set, or let it open its files anew in each process.
"""

from __future__ import annotations

import copy
import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from hotloop._torch.random_state import RandomState
from hotloop.step.workload import arguments

BATCHES, SECONDS = 64, 0.5
"""A look ends after so many batches, or after so many seconds, whichever comes first."""


@dataclasses.dataclass(frozen=True)
class Looked:
    """The outcome of a look: batches read, and why none was read."""

    read: int
    why_not: str = ""


class _NotLookedAtError(Exception):
    """Reading these batches could change the run, or failed."""


def look(batches: Any, visit: Callable[[tuple[Any, ...]], None]) -> Looked:
    """Read some batches, with the last batch of an epoch first if it can be reached.

    Args:
        batches: a DataLoader over a data set with numbered samples, a sequence, or a function that returns an iterable.
        visit: called with each batch as the arguments of a step.

    Raises:
        Exception: an exception that ``visit`` raises.
    """
    before = RandomState([torch.device("cpu")])
    generators = [(generator, generator.get_state()) for generator in generators_of(batches)]
    count, began = 0, time.monotonic()
    try:
        read = _reader(batches)
        while True:
            try:
                batch = next(read)
            except StopIteration:
                break
            except _NotLookedAtError:
                raise
            except Exception as error:  # it fails in the run as well, where the user sees it
                raise _NotLookedAtError(f"reading a batch failed: {type(error).__name__}: {error}") from error
            visit(arguments(batch))
            count += 1
            if time.monotonic() - began > SECONDS:
                break
    except _NotLookedAtError as error:
        return Looked(count, str(error))
    finally:
        before.restore()
        for generator, state in generators:
            generator.set_state(state)
    return Looked(count, "" if count else "there is no batch to read")


def generators_of(batches: Any) -> list[torch.Generator]:
    """Return the generators that the order of a loader's samples is drawn from."""
    batch_sampler = getattr(batches, "batch_sampler", None)
    holders = [batches, getattr(batches, "sampler", None), batch_sampler, getattr(batch_sampler, "sampler", None)]
    found = [getattr(holder, "generator", None) for holder in holders]
    return list({id(one): one for one in found if isinstance(one, torch.Generator)}.values())


def _reader(batches: Any) -> Iterator[Any]:
    """Return an iterator over some batches of an epoch, the odd last batch first."""
    if isinstance(batches, DataLoader):
        return (batches.collate_fn(_fetch(batches.dataset, indices)) for indices in _some(_order(batches)))
    if isinstance(batches, Sequence):
        return iter(_some(batches))
    if callable(batches):
        made = batches()
        if isinstance(made, DataLoader | Sequence):
            return _reader(made)
        return (batch for batch, _ in zip(made, range(BATCHES), strict=False))
    raise _NotLookedAtError(f"a look might use up a {type(batches).__name__}: give a DataLoader, a list or a function")


def _some(batches: Sequence[Any]) -> list[Any]:
    return [*batches[-1:], *batches[: min(BATCHES, len(batches)) - 1]]


def _order(loader: DataLoader[Any]) -> list[list[Any]]:
    """Return the indices of the samples in each batch of an epoch."""
    dataset: Any = loader.dataset
    if isinstance(dataset, IterableDataset):
        raise _NotLookedAtError("the loader's data set is a stream, which a look would use up")
    if loader.batch_sampler is None:
        raise _NotLookedAtError("the loader gives single samples (batch_size=None)")
    most = 1_000_000
    if len(dataset) > most:
        raise _NotLookedAtError(f"the data set has {len(dataset):,} samples: drawing their order would take too long")
    # torch's own samplers keep only generators, and may be iterated; others may count their epochs, and are copied.
    sampler: Any = loader.batch_sampler
    parts = (sampler, getattr(sampler, "sampler", None))
    if all(part is None or type(part).__module__.startswith("torch.utils.data") for part in parts):
        return list(sampler)
    try:
        copied = copy.deepcopy(sampler, {id(dataset): dataset})
    except Exception as error:
        raise _NotLookedAtError(f"{type(sampler).__name__} cannot be copied: {error}") from error
    return list(copied)


def _fetch(dataset: Any, indices: list[Any]) -> list[Any]:
    if (several := getattr(dataset, "__getitems__", None)) is not None:  # as DataLoader fetches them
        return list(several(indices))
    return [dataset[index] for index in indices]
