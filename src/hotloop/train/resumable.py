"""A DataLoader that goes on within an epoch: what was trained on is read again and left out."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader

from hotloop.train import checkpoint

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence


def generators_of(batches: Any) -> list[torch.Generator]:
    """Return the generators that the order of a loader's samples is drawn from."""
    batch_sampler = getattr(batches, "batch_sampler", None)
    holders = [batches, getattr(batches, "sampler", None), batch_sampler, getattr(batch_sampler, "sampler", None)]
    found = [getattr(holder, "generator", None) for holder in holders]
    return list({id(one): one for one in found if isinstance(one, torch.Generator)}.values())


@dataclasses.dataclass
class Place:
    """Where the reading of an epoch is: the random numbers that it began with, and what a new start has to leave out.

    Args:
        began: the state of all generators when the epoch was begun, ``loader`` those of the loader's own among them;
            None before the first.
        skip: how many batches the next epoch leaves out; the epoch after it none.
        now: the state of all generators behind these batches.
        epoch: the number of the epoch that a new start begins in, for a sampler that shuffles by it.
        own: the state of the loader's own generators that the next epoch begins with, if it leaves nothing out.
        known: whether the loader is one whose place can be told.
    """

    began: Mapping[str, Any] | None = None
    skip: int = 0
    now: Mapping[str, Any] | None = None
    epoch: int = 0
    own: Sequence[Any] = ()
    known: bool = False
    _loader: Any = None

    def generators(self) -> list[Any]:
        """Return the states of the loader's own generators; none before it was read."""
        return [one.get_state() for one in generators_of(self._loader)]

    def follow(self, loader: Any) -> Any:
        """Return the loader, which keeps its place here from now on.

        A loader that keeps its own state, or is no DataLoader, is returned as it is.
        """
        own_state = hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")
        self.known = isinstance(loader, DataLoader)
        if self.known and not own_state:
            # A subclass, and no wrapper: a trainer makes its loaders anew by their class, for several processes.
            kind = type(loader)
            own = {"__iter__": self._read(kind), "__module__": kind.__module__}
            loader.__class__ = type(kind.__name__, (kind,), own)
        return loader

    def _read(self, kind: type[DataLoader[Any]]) -> Callable[[DataLoader[Any]], Any]:
        """Return what begins an epoch of a loader of a class, and leaves out what was trained on."""

        def read(loader: DataLoader[Any]) -> Any:
            skip, self.skip = self.skip, 0
            epoch, self.epoch = self.epoch, 0
            if epoch:  # the Trainer tells its sampler after it has begun to read
                for sampler in (loader.sampler, getattr(loader.batch_sampler, "sampler", None)):
                    getattr(sampler, "set_epoch", lambda _: None)(epoch)
            self._loader, states, self.own = loader, self.own, ()
            if skip:
                assert self.began is not None
                checkpoint.restore_random_state(self.began)
                states = self.began.get("loader", ())
            for generator, state in zip(generators_of(loader), states, strict=False):
                generator.set_state(state)
            self.began = {**checkpoint.random_state(), "loader": self.generators()}
            source = kind.__iter__(loader)
            for _ in range(skip):
                next(source)
            if skip and self.now is not None:
                checkpoint.restore_random_state(self.now)
            return source

        return read
