"""The batches of a run, epoch by epoch, also from within an epoch that an earlier start has begun."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from hotloop.errors import ConfigError
from hotloop.train import checkpoint
from hotloop.train.ahead import CopiedAhead, copy_stream
from hotloop.train.optional import require

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from hotloop.train.task import Task

NO_MORE = object()
_DRAW_AT_THE_START = (SequentialSampler, DistributedSampler, SubsetRandomSampler, WeightedRandomSampler)


class Feed:
    """Reads a program's batches.

    A loader with ``state_dict()`` and ``load_state_dict()``, such as torchdata's ``StatefulDataLoader``, goes on where
    its state was kept. From another loader, the batches that were trained on are read again and left out: the epoch
    begins with the random numbers that it began with, and goes on with those of the checkpoint. With
    ``run.prefetch`` the next batch is read before the step that is to come, in every start alike.
    """

    def __init__(self, task: Task) -> None:
        self._task = task
        self._stream = copy_stream(task.device) if task.prefetch else None
        self._began: dict[str, Any] = {}
        """Random numbers at the start of the epoch, those of the loader's own generators among them."""
        self._before_next: dict[str, Any] | None = None
        """Random numbers before the next batch was read ahead: empty if reading draws none, None if none was read."""
        self._loader: Any = None
        self._kept: Any = None
        self.exhausted = False

    def epoch(self, number: int, done: int) -> Iterator[Any]:
        """Yield the batches of an epoch that are left after the first ``done`` ones.

        Raises:
            ConfigError: the epoch has no batches.
        """
        given, now, generators = self._task.workload.batches, checkpoint.random_state(), self._generators()
        if done:
            with checkpoint.part("epoch_began"):
                checkpoint.restore_random_state(self._began["random"])
                self._set_generators(self._began["loader"])
        else:
            self._began = {"random": now, "loader": generators}
        self._loader, kept, self._kept = _in_epoch(given() if callable(given) else given, number), self._kept, None
        # What a function returns for a new epoch is a new loader, which goes on from nowhere.
        resumes = kept is not None and (done or not callable(given)) and self._keeps_state()
        if resumes:
            self._loader.load_state_dict(kept)
        source, self.exhausted, count = iter(self._loader), False, 0
        for _ in range(0 if resumes else done):
            next(source, None)
        source = self._ahead(source, resumed=bool(done)) if self._stream else source
        if resumes or done:  # what was drawn here, the run had drawn before
            checkpoint.restore_random_state(now)
        if resumes:
            self._set_generators(generators)
        if resumes and not done:  # the state was that of the end of an epoch
            source = iter(self._loader)
        first = next(source, NO_MORE)
        if first is NO_MORE and resumes and not done:
            first = next(source := iter(self._loader), NO_MORE)
        while first is not NO_MORE:
            count += 1
            yield first
            first = next(source, NO_MORE)
        self.exhausted = True
        if not count + done:
            raise ConfigError(
                f"recipe={self._task.name}: there are no batches in epoch {number + 1}: give the Workload a list, a "
                "DataLoader, or a function that makes an iterable"
            )

    def _ahead(self, source: Iterator[Any], *, resumed: bool) -> Iterator[Any]:
        assert self._stream is not None
        if self._keeps_state():
            raise ConfigError(
                "run.prefetch=true: the batches are of a loader that keeps its state, which would be that of a batch "
                "too far. Leave it out; a loader with num_workers and pin_memory=True reads ahead by itself"
            )
        move, draws = require("lightning.fabric.utilities", "run.prefetch").move_data_to_device, _draws(self._loader)

        def before() -> None:
            self._before_next = checkpoint.random_state() if draws else {}

        found = CopiedAhead(source, lambda batch: move(batch, self._task.device), self._stream, before)
        if resumed and self._before_next is not None:  # when the checkpoint was written, it had been read
            if self._before_next:
                checkpoint.restore_random_state(self._before_next)
            found.fetch()
        return iter(found)

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint keeps."""
        state = self._loader.state_dict() if self._keeps_state() else self._kept
        ahead = {} if self._before_next is None else {"before_next": self._before_next}
        return {"epoch_began": self._began, "loader": state, "generators": self._generators(), **ahead}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where a checkpoint was written."""
        self._began, self._kept = state["epoch_began"], state["loader"]
        self._before_next = state.get("before_next")
        with checkpoint.part("generators"):
            self._set_generators(state["generators"])

    def _keeps_state(self) -> bool:
        return hasattr(self._loader, "state_dict") and hasattr(self._loader, "load_state_dict")

    def _generators(self) -> list[Any]:
        return [one.get_state() for one in self._task.generators]

    def _set_generators(self, states: list[Any]) -> None:
        for generator, state in zip(self._task.generators, states, strict=False):
            generator.set_state(state)


def _draws(loader: Any) -> bool:
    """Return whether reading a batch may draw random numbers in this process, which are copied before it then.

    A list draws none. Nor does a ``DataLoader`` with workers, which have random numbers of their own, if a sampler of
    torch's draws the order when the epoch begins. Anything else may draw, such as a class of the program's.
    """
    fabrics = getattr(require("lightning.fabric.wrappers", "run.prefetch"), "_FabricDataLoader", None)
    inner = loader._dataloader if type(loader) is fabrics else loader  # noqa: SLF001 - it draws nothing itself
    if type(inner) is not DataLoader:
        return type(inner) is not list
    return not inner.num_workers or _draws_late(inner.sampler if inner.batch_sampler is None else inner.batch_sampler)


def _draws_late(sampler: Any) -> bool:
    if type(sampler) is BatchSampler:
        return _draws_late(sampler.sampler)
    if type(sampler) is RandomSampler:  # from a generator of its own, unless it was given torch's
        return sampler.generator is torch.default_generator
    return type(sampler) not in _DRAW_AT_THE_START


def _in_epoch(loader: Any, number: int) -> Any:
    """Return a loader that is told the epoch which it reads: Fabric's counts them from 0 in each start of a run."""
    if hasattr(loader, "_num_iter_calls"):
        loader._num_iter_calls = number  # noqa: SLF001
    return loader
