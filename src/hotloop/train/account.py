"""The account of a run: every step, event and validation goes into its record as it happens, with what was measured."""

from __future__ import annotations

import contextlib
import statistics
import time
from typing import TYPE_CHECKING, Any

from hotloop.train.compiling import compiles_in

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from hotloop.events import Event
    from hotloop.record import RunRecord

COLD_STEPS = 3
"""``cold_seconds`` runs from the start of the first step that runs as asked to the end of this many; what is done
between them, such as a validation or a sheet of samples, does not count."""
WARM_UP_STEPS = 2
"""Steps after the start, or after compiling was switched on, that never count as steady."""


class Account:
    """Writes a run into its record and keeps the figures that sum it up.

    Args:
        record: the run's.
        batch: what an optimizer step takes, and how many of it: ``{"samples": 32, "tokens": 4096}``.
    """

    def __init__(self, record: RunRecord, batch: Mapping[str, int]) -> None:
        self.record = record
        self._batch = dict(batch)
        self._began: float | None = None
        self._steps = 0
        self._cold: float | None = None
        self._steady: dict[str, list[float]] = {}
        """By what ran: with `auto`, several ways take turns, and the one that ran most is the run's."""

    @property
    def idle(self) -> bool:
        """Whether no step counts yet."""
        return self._began is None

    def starts(self) -> None:
        """Note that steps run as asked from here on; what came before (eager steps to compare with) is left out."""
        self._began, self._steps, self._cold, self._steady = time.perf_counter(), 0, None, {}

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """Leave the time of what is no step, and stands between two, out of the first steps' time."""
        began = time.perf_counter()
        try:
            yield
        finally:
            if self._began is not None:
                self._began += time.perf_counter() - began

    def step(self, entry: Mapping[str, Any], events: Sequence[Event]) -> None:
        """Record a step that was just finished; ``events`` were observed in it."""
        self.record.append("steps", entry)
        if self._began is None:
            return
        self._steps += 1
        if self._steps == COLD_STEPS:
            self._cold = time.perf_counter() - self._began
        if self._steps > WARM_UP_STEPS and not compiles_in(events):
            self._steady.setdefault(entry["running"], []).append(entry["seconds"])

    def observed(self, step: int, events: Sequence[Event]) -> None:
        """Record what was observed in a step, or in the validation after it."""
        for event in events:
            self.record.append("events", {**event.to_dict(), "step": step})

    def validated(self, step: int, epoch: int, metrics: Mapping[str, float]) -> None:
        """Record a validation."""
        self.record.append("metrics", {"step": step, "epoch": epoch, "split": "validation", **metrics})

    def settle(
        self, components: Mapping[str, Mapping[str, Any]], memory: int | None, more: Mapping[str, float | None]
    ) -> None:
        """Bring components and measurements in the record up to date; ``more`` are measurements of others."""
        self.record.update("components", **components)
        longest = max(self._steady.values(), key=len, default=[])
        steady = statistics.median(longest) if longest else None
        figures = {
            "cold_seconds": self._cold,
            "steady_step_ms": 1000 * steady if steady else None,
            **{f"{what}_per_second": many / steady if steady else None for what, many in self._batch.items()},
            "compile_seconds": sum(one.get("compile_seconds", 0.0) for one in components.values()),
            "peak_memory_bytes": memory,
            **more,
        }
        self.record.update("measurements", **{name: value for name, value in figures.items() if value is not None})
