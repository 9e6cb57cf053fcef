"""Decorated steps that nobody holds any more, as where a step is decorated anew in each epoch: they are let go of.

What they did still counts. Letting go is done between steps: the last reference may go anywhere, amid a capture too.
"""

from __future__ import annotations

import logging
import weakref
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hotloop.step.context import Context
    from hotloop.step.loop.runner import StepRunner
    from hotloop.step.prove.budget import SentinelStatus

_TOO_SOON = 3


class Lifetimes:
    """The runners of a loop whose steps may be gone: they are let go of.

    Args:
        context: of the loop.
        runners: of its steps; those that are let go of are taken out.

    Attributes:
        gone: weak references to decorated steps that are gone, and whose runners are still to be let go of.
        sentinels: what the sentinels of the steps that are gone did.
    """

    def __init__(self, context: Context, runners: list[StepRunner]) -> None:
        self._context, self._runners = context, runners
        self.gone: list[weakref.ref[Any]] = []
        self._too_soon = 0
        """How many steps were gone before anything had come of them."""
        self.sentinels: list[SentinelStatus] = []

    def follow(self, runner: StepRunner, step: Callable[..., Any]) -> None:
        """Let go of a runner once its decorated step is gone: the user holds that, and nothing else can call it."""
        if self._context.peers is None:  # several processes would let go of it at different steps
            runner.held = weakref.ref(step, self.gone.append)

    def let_go(self) -> None:
        """Let go of the runners whose steps are gone by now."""
        gone = [self.gone.pop() for _ in range(len(self.gone))]  # another thread may add to it meanwhile
        for runner in [runner for runner in self._runners if runner.held in gone]:
            self._runners.remove(runner)
            self.sentinels += checks_of([runner])
            self._too_soon += bool(runner.lacks(self._context.progress.tier))
            runner.capturing.forget_recordings()
        if self.anew:
            self._context.reports.say_once(self.anew, logging.WARNING)

    @property
    def anew(self) -> str:
        """Say that steps do not live long enough; empty where they do."""
        if self._too_soon < _TOO_SOON:
            return ""
        return (
            "a step is decorated anew time and again, before it was called often enough to be proven in another tier: "
            "decorate it once, before the loop over batches"
        )


def checks_of(runners: Sequence[StepRunner]) -> list[SentinelStatus]:
    """Return what the sentinels of the steps did, of those that made a check."""
    found = [status for runner in runners if (status := runner.checks()) is not None]
    return [status for status in found if status.checks or status.disagreed]
