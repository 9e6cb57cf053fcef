"""A clock of a device whose times come with what they are the times of."""

from __future__ import annotations

import collections
import contextlib
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from hotloop.measure import StepClock

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import torch

    from hotloop.measure import Mark, Timing

_What = TypeVar("_What")


class Timed(Generic[_What]):
    """A clock of a device whose times come with what they are the times of."""

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
        """Run and time a function, and ask afterwards what the time is the time of; a call that raises is not timed."""
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
