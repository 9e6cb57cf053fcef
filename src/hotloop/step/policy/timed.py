"""What each step took, known a few steps later: a clock that keeps each time with what it is the time of."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from hotloop.measure import StepClock

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import torch

    from hotloop.decide import Trial, Turn
    from hotloop.measure import Mark, Timing

_What = TypeVar("_What")


@dataclasses.dataclass(frozen=True)
class Ran:
    """A step that ran.

    Args:
        tier: the name of the tier that it ran in.
        kind: ``run``, ``survey``, ``proof``, ...
        turn: its trial and its turn there, if any.
        alone: it began on an idle device.
    """

    tier: str
    kind: str
    turn: tuple[Trial, Turn] | None
    alone: bool = False


class Timed(Generic[_What]):
    """A clock whose times come with what they are the times of.

    Args:
        device: where the steps run.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._begin()

    def _begin(self) -> None:
        self.clock = StepClock(self._device)
        self.what: collections.deque[_What] = collections.deque()
        self._dropped = 0

    @contextlib.contextmanager
    def _kept_together(self) -> Iterator[None]:
        """Forget all times where an interrupt comes in the block: they would be counted for other steps."""
        try:
            yield
        except BaseException:
            self._begin()
            raise

    def run(self, function: Callable[[], Any], what: Callable[[], _What], *, alone: bool = False) -> Any:
        """Run and time a function; a call that raises is not timed.

        Args:
            function: what to run.
            what: asked afterwards what the time is the time of.
            alone: as for `StepClock.start`.
        """
        mark: Mark = self.clock.start(alone=alone)
        try:
            result = function()
        except BaseException:
            self.clock.cancel(mark)
            raise
        with self._kept_together():
            self.clock.stop(mark)
            self.what.append(what())
        return result

    def known(self) -> list[tuple[_What, Timing]]:
        """Return the times that have become known, in order."""
        with self._kept_together():
            timings = self.clock.take()
            for _ in range(self.clock.dropped - self._dropped):  # the clock drops the oldest
                self.what.popleft()
            self._dropped = self.clock.dropped
            return [(self.what.popleft(), timing) for timing in timings]
