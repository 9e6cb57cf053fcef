"""The ladder of one component: where new graphs start, and when the component as a whole steps down.

States: a position among the rungs, and perhaps a step that is due. A graph that fails walks down by itself, at once,
before it has executed. The component's position moves only in `at_step_boundary`, so never between a forward and its
backward.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hotloop.presets import Preset

FAILURES_TO_STEP_DOWN = 3
"""Graphs that may fail on a rung before the component stops trying it."""


@dataclasses.dataclass(frozen=True)
class Move:
    """A component stepped down as a whole, and why."""

    from_preset: str
    to_preset: str
    reason: str


class Ladder:
    """The rungs of one component in one mode, the requested preset first and ``none`` last."""

    def __init__(self, rungs: tuple[Preset, ...], start: int = 0, reason: str = "") -> None:
        if not rungs or rungs[-1].backend != "eager":
            raise ValueError(f"a ladder ends in none, found {[rung.name for rung in rungs]}")
        self.rungs = rungs
        self.position = start
        self.reason = reason
        """Why the position is not the requested preset."""
        self._failures = [0] * len(rungs)
        self._due: tuple[int, str] | None = None

    @property
    def current(self) -> Preset:
        """The preset that a new graph tries first."""
        return self.rungs[self.position]

    def below(self) -> Iterator[tuple[int, Preset]]:
        """Give the rungs that a new graph tries, in order."""
        yield from list(enumerate(self.rungs))[self.position :]

    def failed(self, index: int, reason: str, *, systemic: bool) -> None:
        """A graph failed on a rung. ``systemic``: any other graph will fail there as well (no compiler, say)."""
        self._failures[index] += 1
        if systemic or self._failures[index] >= FAILURES_TO_STEP_DOWN:
            target = min(index + 1, len(self.rungs) - 1)
            if target > max(self.position, self._due[0] if self._due else 0):
                self._due = (target, reason)

    def at_step_boundary(self) -> Move | None:
        """Step down if that is due; called between optimizer steps only."""
        if self._due is None:
            return None
        (target, reason), self._due = self._due, None
        move = Move(self.current.name, self.rungs[target].name, reason)
        self.position, self.reason = target, reason
        return move
