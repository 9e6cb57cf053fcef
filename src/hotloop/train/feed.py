"""The batches of a run, epoch by epoch, also from within an epoch that an earlier start has begun."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hotloop.errors import ConfigError
from hotloop.train import checkpoint

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from hotloop.train.task import Task

NO_MORE = object()


class Feed:
    """Reads a program's batches.

    A loader with ``state_dict()`` and ``load_state_dict()``, such as torchdata's ``StatefulDataLoader``, goes on where
    its state was kept. From another loader, the batches that were trained on are read again and left out: the epoch
    begins with the random numbers that it began with, and goes on with those of the checkpoint.
    """

    def __init__(self, task: Task) -> None:
        self._task = task
        self._began: dict[str, Any] = {}
        """Random numbers at the start of the epoch, those of the loader's own generators among them."""
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

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint keeps."""
        state = self._loader.state_dict() if self._keeps_state() else self._kept
        return {"epoch_began": self._began, "loader": state, "generators": self._generators()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where a checkpoint was written."""
        self._began, self._kept = state["epoch_began"], state["loader"]
        self._set_generators(state["generators"])

    def _keeps_state(self) -> bool:
        return hasattr(self._loader, "state_dict") and hasattr(self._loader, "load_state_dict")

    def _generators(self) -> list[Any]:
        return [one.get_state() for one in self._task.generators]

    def _set_generators(self, states: list[Any]) -> None:
        for generator, state in zip(self._task.generators, states, strict=False):
            generator.set_state(state)


def _in_epoch(loader: Any, number: int) -> Any:
    """Return a loader that is told the epoch which it reads: Fabric's counts them from 0 in each start of a run."""
    if hasattr(loader, "_num_iter_calls"):
        loader._num_iter_calls = number  # noqa: SLF001
    return loader
