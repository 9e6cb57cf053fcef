"""What each step took, known a little later: times and what they are the times of, kept in step with each other."""

from __future__ import annotations

import collections
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
        tier: what it ran in.
        kind: ``run``, ``survey``, ``proof``, ...
        turn: that of a trial, if any.
        alone: it began on an idle device.
    """

    tier: str
    kind: str
    turn: tuple[Trial, Turn] | None
    alone: bool = False


class Timed(Generic[_What]):
    """A clock whose times come with what they are the times of."""

    def __init__(self, device: torch.device) -> None:
        self.clock = StepClock(device)
        self.what: collections.deque[_What] = collections.deque()
        self._dropped = 0

    def run(self, function: Callable[[], Any], what: Callable[[], _What], *, alone: bool = False) -> Any:
        """Run and time something; ``what`` is asked when it has run. What raises is not timed.

        ``alone`` as for `StepClock.start`.
        """
        mark: Mark = self.clock.start(alone=alone)
        try:
            result = function()
        except BaseException:
            self.clock.cancel(mark)
            raise
        self.clock.stop(mark)
        self.what.append(what())
        return result

    def known(self) -> Iterator[tuple[_What, Timing]]:
        """Give the times that have become known, in order."""
        timings = self.clock.take()
        for _ in range(self.clock.dropped - self._dropped):  # the clock drops the oldest
            self.what.popleft()
        self._dropped = self.clock.dropped
        for timing in timings:
            yield self.what.popleft(), timing
