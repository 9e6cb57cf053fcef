"""The ladder of one component: the presets that each new graph tries, before it has executed, until one compiles it."""

from __future__ import annotations

import collections
from typing import TYPE_CHECKING

from hotloop import events as ev

if TYPE_CHECKING:
    from hotloop.presets import Preset

FAILURES_TO_STEP_DOWN = 3
"""Graphs that may fail on a rung before the component stops trying it."""


class Ladder:
    """The rungs of one component in one mode, the requested preset first and ``none`` last.

    Args:
        rungs: the presets.
        start: the rung to start on.
        reason: why that is not the requested preset.
    """

    def __init__(self, rungs: tuple[Preset, ...], start: int = 0, reason: str = "") -> None:
        self.rungs, self.position, self.reason = rungs, start, reason
        self._failures: collections.Counter[int] = collections.Counter()

    @property
    def current(self) -> Preset:
        """The preset that a new graph tries first."""
        return self.rungs[self.position]

    def below(self) -> list[tuple[int, Preset]]:
        """List the rungs that a new graph tries, in order."""
        return list(enumerate(self.rungs))[self.position :]

    def failed(self, index: int, reason: str, *, systemic: bool) -> None:
        """Note that a graph failed on a rung. ``systemic``: any other graph will fail there as well."""
        self._failures[index] += 1
        if index >= self.position and (systemic or self._failures[index] >= FAILURES_TO_STEP_DOWN):
            self.position, self.reason = index + 1, reason

    def stepped_down(self, requested: Preset, running: Preset) -> ev.Fallback:
        """Return the event of a graph that began below the requested preset, for the ladder's reason."""
        return ev.Fallback(
            component=None,
            scope="component",
            from_preset=requested.name,
            to_preset=running.name,
            stage="compile",
            reason=self.reason,
        )
