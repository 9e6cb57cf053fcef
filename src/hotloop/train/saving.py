"""Keeps a run's checkpoints where the disk is full: tries again, or waits, and ends no run as if all were saved."""

from __future__ import annotations

import errno
import time
from typing import TYPE_CHECKING, Any

from hotloop.errors import TrainingFailedError
from hotloop.train import checkpoint
from hotloop.train.turn import hold_again

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from hotloop.train.interrupt import Interrupt
    from hotloop.train.start import Start

RETRY_SECONDS = 10.0
"""How long a checkpoint that could not be written waits until it is tried again."""
_FULL = (errno.ENOSPC, errno.EDQUOT)
"""What ``run.on_full_disk=wait`` waits for; any other failure would be waited for in vain."""


class Checkpoints:
    """Writes the checkpoints of a run. A failing disk is told once, and tried again.

    Args:
        start: the run's settings and folder.
        say: prints a line.
        interrupt: a wish to stop ends the waiting of ``run.on_full_disk=wait``.
    """

    def __init__(self, start: Start, say: Callable[[str], None], interrupt: Interrupt) -> None:
        self._folder, self._say, self._interrupt = start.folder / checkpoint.FOLDER, say, interrupt
        training = start.settings.training
        self._waits = start.settings.run.on_full_disk == "wait"
        # The checkpoint of a trial whose value is known is worth no failure.
        self._strict = start.within.trial is None
        self._leads, self._keeps = start.leads, start.within.keeps
        self._failed: dict[str, OSError] = {}
        self._tried = time.monotonic()
        resumed = self._keeps is None  # or nobody resumes the run by its last checkpoint
        self._kept = start.kept
        self._every = training.checkpoint_every_steps if resumed else None
        self._minutes = training.checkpoint_every_minutes if resumed else None

    def save(self, name: str, document: Mapping[str, Any]) -> None:
        """Write a checkpoint, or keep in mind that it is missing."""
        if not self._leads:
            return
        while True:
            self._tried = time.monotonic()
            try:
                hold_again(self._folder.parent)
                checkpoint.save(self._folder / name, document)
            except OSError as error:
                waits = self._waits and error.errno in _FULL
                self._tell(error, waits=waits)
                self._failed[name] = error
                if not waits or self._interrupt.signal:
                    return
                while time.monotonic() - self._tried < RETRY_SECONDS and not self._interrupt.signal:
                    time.sleep(0.1)
            else:
                if self._failed.pop(name, None):
                    self._say(f"{self._folder / name} is written again, at step {document['position']['step']}")
                self._kept.push(self._say)
                return

    def after_validation(self, metrics: Mapping[str, float], *, best: bool) -> tuple[str, ...]:
        """Return the checkpoints to write after a validation, the ``best`` so far or another."""
        if self._keeps is None:
            return (checkpoint.BEST, checkpoint.LAST) if best else (checkpoint.LAST,)
        return (checkpoint.BEST,) if best and self._keeps(metrics) else ()

    def is_due(self, step: int) -> bool:
        """Return whether it is time for the last checkpoint: by steps, by minutes, or to try again after a failure.

        The first process alone says so: the others do not know when it last wrote one.
        """
        since = time.monotonic() - self._tried
        again = self.lacks_last and since >= RETRY_SECONDS
        by_clock = self._minutes is not None and since >= 60 * self._minutes
        return self._leads and (again or by_clock or (self._every is not None and step % self._every == 0))

    @property
    def lacks_last(self) -> bool:
        """Whether the last checkpoint could not be written: whoever ends the run writes it once more."""
        return checkpoint.LAST in self._failed

    @property
    def problem(self) -> str:
        """Why the last checkpoint could not be written; empty where it was."""
        return str(self._failed.get(checkpoint.LAST, ""))

    def check(self, step: int) -> None:
        """Check at the end of a run, at a step, that its checkpoints are on disk.

        Raises:
            TrainingFailedError: a checkpoint is still missing; the message says which state is on disk.
        """
        if not self._failed or not self._strict:
            return
        states = [self._state(checkpoint.LAST)]
        if checkpoint.BEST in self._failed:  # not every run has a best one
            states.append(self._state(checkpoint.BEST))
        raise TrainingFailedError(
            f"the run is at step {step}, and not all of it is on disk: {', '.join(states)} "
            f"({next(iter(self._failed.values()))}). Make room; run.on_full_disk=wait has a run wait for it"
        ) from next(iter(self._failed.values()))

    def _state(self, name: str) -> str:
        """Say of which step a checkpoint on disk is, if there is one; an earlier start may have written it."""
        path = self._folder / name
        return f"{name} is of step {checkpoint.load(path)['position']['step']}" if path.is_file() else f"no {name}"

    def _tell(self, error: OSError, *, waits: bool) -> None:
        if all(error.errno != known.errno for known in self._failed.values()):
            goes_on = "waits for room" if waits else "goes on"
            self._say(f"{error}; the run {goes_on}, and tries again every {RETRY_SECONDS:.0f} s")
