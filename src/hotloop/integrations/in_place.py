"""The run record of a fit whose steps are the trainer's own, with its model compiled in place at most.

No integration, but what those of trainers share: a `hotloop.Loop`, which keeps a record by itself, owns no step there.
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
from hotloop.measure.machine import record_folder
from hotloop.record import RunRecord

if TYPE_CHECKING:
    import os

    import torch

_log = logging.getLogger("hotloop")
_ALL, _THINNED = 10, 20
"""Steps that are all written down, and of those after them one in so many: each asks for the status."""


class InPlace:
    """Compiles a model in place for the time of a fit, and keeps the fit's record; made when the fit begins.

    Args:
        model: whose steps they are.
        run: what was asked for, as the record tells it.
        settings: as `hotloop.compile` takes them; empty to compile nothing.
        folder: for the record; None keeps it in memory.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        run: str,
        settings: dict[str, Any],
        folder: str | os.PathLike[str] | RunRecord | None,
    ) -> None:
        self._model, self._began, self._open = model, 0.0, contextlib.ExitStack()
        self._run, self._compiles = run, bool(settings)
        self._as_given, self._causes = False, list[Cause]()
        if isinstance(folder, RunRecord):
            self.record = folder  # whoever handed it over settles it
        else:
            self.record = self._open.enter_context(RunRecord(record_folder(folder)))
        self.record.update("settings", run=run)
        self._events = self._open.enter_context(watch())
        if settings:
            self._open.callback(uncompile, model)
        self._open.callback(self._write_down)
        if settings:
            try:
                compile_in_place(model, **settings)
            except BaseException as error:
                self.close(error)
                raise

    def decided(self, reason: str, level: int = logging.INFO) -> None:
        """Write a decision down, and say it."""
        self.record.append("decisions", {"step": 0, "reason": reason})
        _log.log(level, "%s", reason)

    def differs(self, reason: str, hint: str, level: int = logging.WARNING, *, as_given: bool = False) -> None:
        """Write down, say, and keep for the status why not all that was asked for runs, and what to change.

        Args:
            reason: why.
            hint: what to change.
            level: of the line on the log.
            as_given: the trainer itself has compiled the model, which the model does not show.
        """
        self._as_given = self._as_given or as_given
        self.decided(f"{reason} ({hint})", level)
        self._causes.append(Cause(reason, "in place", None, None, "", hint))

    def status(self) -> Status:
        """Say what runs of the model, and why it is not what was asked for."""
        found = status(self._model)
        if not self._causes:
            return found
        parts = {name: self._explained(one) for name, one in found.components.items()}
        return dataclasses.replace(found, components=parts)

    def _explained(self, one: ComponentStatus) -> ComponentStatus:
        if not self._compiles and one.requested == "none":
            one = dataclasses.replace(one, requested=self._run, inference=self._run)
        if self._as_given:
            one = dataclasses.replace(one, running=AS_GIVEN, state=AS_GIVEN)
        known = () if one.state == AS_GIVEN else one.causes  # which say it, and nothing of what was asked for
        return dataclasses.replace(one, causes=(*known, *self._causes))

    def step_begins(self) -> None:
        """Note when a step of the trainer's begins."""
        self._began = time.perf_counter()

    def step_ends(self, step: int) -> None:
        """Write down what it took, as far as the host has waited for it; of a long fit one in so many."""
        if step > _ALL and step % _THINNED:
            return
        seconds = time.perf_counter() - self._began
        running = next((one.running for one in status(self._model).components.values()), "none")
        self.record.append("steps", {"step": step, "seconds": seconds, "running": running})

    def close(self, error: BaseException | None = None) -> None:
        """Take the compile off, and settle the record."""
        self._open.__exit__(type(error) if error else None, error, None)

    def _write_down(self) -> None:
        """Put into the record what ran, before it is taken off."""
        for event in self._events:
            self.record.append("events", event.to_dict())
        self.record.update("components", **self.status().to_dict()["components"])
