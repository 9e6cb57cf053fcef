"""Decorated steps that nobody holds any more, as where one is decorated anew in each epoch: they are let go of.

What they did still counts. It is done between steps: the last reference may go anywhere, amid a capture too.
"""

from __future__ import annotations

import logging
import weakref
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hotloop.step.loop.loop import Loop
    from hotloop.step.loop.runner import Runner
    from hotloop.step.loop.status import SentinelStatus

_TOO_SOON = 3
_ANEW = (
    "a step is decorated anew time and again, before it was called often enough to be proven in another tier: decorate "
    "it once, before the loop over batches"
)


class Unheld:
    """Lets go of the runners of steps that are gone.

    Args:
        loop: whose steps.
        runners: its runners; those that are let go of are taken out.
    """

    def __init__(self, loop: Loop, runners: list[Runner]) -> None:
        self._loop, self._runners = loop, runners
        self._gone: list[weakref.ref[Any]] = []
        self._too_soon = 0
        """How many were gone before anything had come of them."""
        self.calls = 0
        self.sentinels: list[SentinelStatus] = []
        """What was done in steps that were let go of."""

    def __bool__(self) -> bool:
        return bool(self._gone)

    def follow(self, runner: Runner, step: Callable[..., Any]) -> None:
        """Have a runner let go of once its decorated step is gone: what the user holds, and the only way to call it."""
        if self._loop.peers is None:  # several processes would let go of it at different steps
            runner.held = weakref.ref(step, self._gone.append)

    def let_go(self) -> None:
        """Let go of those that are gone by now."""
        gone = [self._gone.pop() for _ in range(len(self._gone))]  # another thread may add to it meanwhile
        self._loop.settle()
        for runner in [one for one in self._runners if one.held in gone]:
            self._runners.remove(runner)
            self.calls += runner.calls
            self.sentinels += checked([runner])
            self._too_soon += not self._loop.plain and bool(runner.lacks(self._loop.goal))
            runner.forget_recordings()
        if self.anew:
            self._loop.say_once(self.anew, logging.WARNING)

    @property
    def anew(self) -> str:
        """Say that steps do not live long enough; empty where they do."""
        return _ANEW if self._too_soon >= _TOO_SOON else ""


def checked(runners: Sequence[Runner]) -> list[SentinelStatus]:
    """Give what the sentinels of the steps did, of those that made a check."""
    found = [runner.sentinel.status for runner in runners if runner.sentinel is not None]
    return [one for one in found if one.checks]
