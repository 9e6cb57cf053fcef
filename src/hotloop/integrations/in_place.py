"""The run record of a fit whose steps the trainer runs itself, with the model compiled in place at most.

Trainers share it. A `hotloop.Loop`, which keeps a record by itself, owns no step in such a fit.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import time
from typing import TYPE_CHECKING, Any

from hotloop.compiling.control import AS_GIVEN, ComponentStatus, Status, status, uncompile
from hotloop.compiling.control import compile as compile_in_place
from hotloop.compiling.observe import Cause, watch
from hotloop.integrations.several import level_of
from hotloop.measure.machine import record_folder
from hotloop.record import RunRecord

if TYPE_CHECKING:
    import os

    import torch


class InPlace:
    """A fit with a model that is compiled in place, and the record of the fit; made when the fit begins.

    Args:
        model: the model of the fit.
        run: what was asked for, as the record shows it.
        settings: as `hotloop.compile` takes them; empty to compile nothing.
        folder: for the record; None keeps it in memory. A record that is handed over is written, but not settled.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        run: str,
        settings: dict[str, Any],
        folder: str | os.PathLike[str] | RunRecord | None,
    ) -> None:
        self._model, self._run, self._compiles = model, run, bool(settings)
        self._step_start = 0.0
        self._compiled_by_trainer = False
        self._causes: list[Cause] = []
        self._open = contextlib.ExitStack()
        if isinstance(folder, RunRecord):
            self.record = folder
        else:
            self.record = self._open.enter_context(RunRecord(record_folder(folder)))
        self.record.update("settings", run=run)
        self._events = self._open.enter_context(watch())
        if settings:
            self._open.callback(uncompile, model)
        self._open.callback(self._write_outcome)  # the last callback runs first: it reads what uncompile takes off
        if settings:
            try:
                compile_in_place(model, **settings)
            except BaseException as error:
                self.close(error)
                raise

    def decided(self, reason: str, level: int = logging.INFO) -> None:
        """Record a decision, and log it: of several processes, which decide alike, in the first."""
        self.record.append("decisions", {"step": 0, "reason": reason})
        logging.getLogger("hotloop").log(level_of(level), "%s", reason)

    def differs(
        self, reason: str, hint: str, level: int = logging.WARNING, *, compiled_by_trainer: bool = False
    ) -> None:
        """Record, log, and keep for the status why not everything runs as asked, and what to change.

        Args:
            reason: the cause.
            hint: what to change.
            level: of the line on the log.
            compiled_by_trainer: whether the trainer itself has compiled the model, which the model does not show.
        """
        self._compiled_by_trainer = self._compiled_by_trainer or compiled_by_trainer
        self.decided(f"{reason} ({hint})", level)
        self._causes.append(Cause(reason, "in place", None, None, "", hint))

    def status(self) -> Status:
        """Return what runs of the model, and why it is not what was asked for."""
        model = status(self._model)
        if not self._causes:
            return model
        return dataclasses.replace(
            model, components={name: self._explained(part) for name, part in model.components.items()}
        )

    def _explained(self, part: ComponentStatus) -> ComponentStatus:
        """Return the status of a component with our causes in it."""
        if not self._compiles and part.requested == "none":
            part = dataclasses.replace(part, requested=self._run, inference=self._run)
        if self._compiled_by_trainer:
            part = dataclasses.replace(part, running=AS_GIVEN, state=AS_GIVEN)
        # For a model that runs as it was given, our causes say the same as its own, and what was asked for.
        own = () if part.state == AS_GIVEN else part.causes
        return dataclasses.replace(part, causes=(*own, *self._causes))

    def step_begins(self) -> None:
        """Note the time at which a step of the trainer begins."""
        self._step_start = time.perf_counter()

    def step_ends(self, step: int) -> None:
        """Record the seconds of a step, as far as the host has waited for it.

        The first 10 steps are recorded, then each 20th, since each record asks for the status.
        """
        if step > 10 and step % 20:  # noqa: PLR2004 - see above
            return
        seconds = time.perf_counter() - self._step_start
        running = next((part.running for part in status(self._model).components.values()), "none")
        self.record.append("steps", {"step": step, "seconds": seconds, "running": running})

    def close(self, error: BaseException | None = None) -> None:
        """Take the compile off, and settle the record."""
        self._open.__exit__(type(error) if error else None, error, None)

    def _write_outcome(self) -> None:
        """Record the events and the status, before the compile is taken off."""
        for event in self._events:
            self.record.append("events", event.to_dict())
        self.record.update("components", **self.status().to_dict()["components"])
