"""The ladder of one component: where new graphs start, and when the component as a whole steps down.

States: a position among the rungs, and perhaps a step that is due. A graph that fails walks down by itself, at once,
before it has executed. The component's position moves only in `at_step_boundary`, so never between a forward and its
backward.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hotloop import events as ev

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hotloop.presets import Preset


class Ladder:
    """The rungs of one component in one mode, the requested preset first and ``none`` last.

    Args:
        rungs: the presets.
        start: the rung to start on.
        reason: why that is not the requested preset.
    """

    FAILURES_TO_STEP_DOWN = 3
    """Graphs that may fail on a rung before the component stops trying it."""

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
        """Yield the rungs that a new graph tries, in order."""
        yield from list(enumerate(self.rungs))[self.position :]

    def failed(self, index: int, reason: str, *, systemic: bool) -> None:
        """Note that a graph failed on a rung. ``systemic``: any other graph will fail there as well."""
        self._failures[index] += 1
        if systemic or self._failures[index] >= self.FAILURES_TO_STEP_DOWN:
            target = min(index + 1, len(self.rungs) - 1)
            if target > max(self.position, self._due[0] if self._due else 0):
                self._due = (target, reason)

    def at_step_boundary(self, component: str) -> ev.Fallback | None:
        """Step down if that is due, and return the event of it; called between optimizer steps only."""
        if self._due is None:
            return None
        before = self.current
        (self.position, self.reason), self._due = self._due, None
        return self.stepped_down(before, self.current, component)

    def stepped_down(self, requested: Preset, running: Preset, component: str | None = None) -> ev.Fallback:
        """Return the event of a component that stepped down as a whole, for the ladder's reason."""
        return ev.Fallback(
            component=component,
            scope="component",
            from_preset=requested.name,
            to_preset=running.name,
            stage="compile",
            reason=self.reason,
        )
