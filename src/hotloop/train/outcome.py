"""What a run has open while it goes on, and how it ended."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

    from hotloop.events import Event
    from hotloop.record import RunRecord
    from hotloop.train.interrupt import Interrupt


CHECKED = "checked"
"""The status of a dry run."""


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a run ended: ``finished`` or ``interrupted``; the best validation, what ran, and the measurements.

    A dry run is `CHECKED`, and its measurements are what it found.

    ``notes`` are what ``use_torch_compile=auto`` decided, and why; ``remarks`` by what the best validation is to be
    judged, such as baselines: both as lines. ``stop``: a signal came, if too late for this run; what it is part of does
    not go on then.
    """

    status: str
    folder: Path
    step: int
    best_step: int
    best: dict[str, float]
    components: dict[str, dict[str, Any]]
    measurements: dict[str, Any]
    seconds: float
    notes: tuple[str, ...] = ()
    remarks: tuple[str, ...] = ()
    stop: bool = False


@dataclasses.dataclass(frozen=True)
class Live:
    """What is open while a run goes on: its record, the events seen so far, and a wish to stop."""

    record: RunRecord
    events: list[Event]
    interrupt: Interrupt
