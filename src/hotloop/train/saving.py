"""Writes a run's checkpoints: a failing disk is printed, and the former checkpoint stays."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from hotloop.train import checkpoint

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from hotloop.train.start import Start


class Checkpoints:
    """The checkpoints of a run.

    Args:
        start: the run's settings and folder.
        say: prints a line.
    """

    def __init__(self, start: Start, say: Callable[[str], None]) -> None:
        self._folder, self._say, self._copy = start.folder / checkpoint.FOLDER, say, start.copy
        self._leads, self._keeps = start.leads, start.within.keeps
        self.missing: OSError | None = None
        """Why the last checkpoint is not on disk."""
        self._tried = time.monotonic()
        training = start.settings.training
        self._every = None if self._keeps else training.checkpoint_every_steps
        self._minutes = None if self._keeps else training.checkpoint_every_minutes

    def save(self, name: str, document: Mapping[str, Any]) -> None:
        """Write a checkpoint, and send it to the run's storage."""
        self._tried = time.monotonic()
        try:
            checkpoint.save(self._folder / name, document)
        except OSError as error:
            self._say(f"{error}; the run goes on, and the former {name} stays")
            self.missing = error
            return
        self.missing = None
        if self._copy:
            self._copy.push(self._say)

    def after_validation(self, metrics: Mapping[str, float], *, best: bool) -> tuple[str, ...]:
        """Return the checkpoints to write after a validation, the ``best`` so far or another."""
        if self._keeps is None:
            return (checkpoint.BEST, checkpoint.LAST) if best else (checkpoint.LAST,)
        return (checkpoint.BEST,) if best and self._keeps(metrics) else ()

    def is_due(self, step: int) -> bool:
        """Return whether the last checkpoint is to be written now; the first process alone knows."""
        by_clock = self._minutes is not None and time.monotonic() - self._tried >= 60 * self._minutes
        by_steps = self._every is not None and step % self._every == 0
        return self._leads and (by_clock or by_steps)
