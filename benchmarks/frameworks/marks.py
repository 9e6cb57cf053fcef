"""When each step of a fit was done, as the framework's hooks tell it."""

from __future__ import annotations

import time

from hotloop.step.state.trial_run import wait_for


class Marks:
    """A clock that is read when a step has ended.

    Args:
        device: that is waited for before a look.
        at: the steps after which to look, from 1; None for each.
        then: what to do after which step, beside that: ``{step: function}``.
    """

    def __init__(self, device, at=None, then=None):
        self.device, self._at, self._then = device, at, then or {}
        self.count = 0
        self.ends: dict[int, float] = {}
        self.losses: list[float] = []
        self._begin = None

    def begin(self):
        """Start the clock before the first step; setup until then counts to it."""
        if self._begin is None:
            wait_for(self.device)
            self._begin = time.perf_counter()

    def done(self, loss=None):
        """Read the clock, if the step that has ended is one to note."""
        self.count += 1
        if self._at is None or self.count in self._at:
            wait_for(self.device)
            self.ends[self.count] = time.perf_counter() - self._begin
            if loss is not None and self._at is None:
                self.losses.append(float(loss.detach()))
        self._then.get(self.count, _nothing)()

    def block(self):
        """Return the seconds of a step between the last two looks."""
        (first, began), (last, ended) = list(self.ends.items())[-2:]
        return (ended - began) / (last - first)


def _nothing():
    pass
