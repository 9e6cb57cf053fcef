"""The sentinel in several processes: now and then, all of them prove a recording again in the same calls.

A check is a proof: three steps that run both ways, with the votes and the room for noise that a proof has. So what one
process finds wrong or suspects is wrong or suspected in all, and no step is checked in one process alone. When the next
check comes is agreed: replays are counted, which all make together; the distance is the greatest that the share of time
asks for in any process, and its random part is drawn from the number of the call, which is the same in all.
"""

from __future__ import annotations

import math
import random
import time
from typing import TYPE_CHECKING

from hotloop.step.prove.check import SentinelStatus
from hotloop.step.prove.outcomes import STEPS

if TYPE_CHECKING:
    from hotloop.step.context import DecoratedStep
    from hotloop.step.prove.graph_proofs import GraphProofs

FIRST, LEAST = 100, 10
"""Replays before the first check, and the least mean distance of two checks."""
_ABANDONED = 256
"""Replays after which another check begins, though the calls of the one under way have not come again."""
_FARTHEST = 2.0**40
"""Replays between two checks, at most: a vote holds whole numbers of 64 bits."""


class AgreedSentinel:
    """The plan of one decorated step's checks, the same in all processes.

    Args:
        step: the decorated step.
        graphs: the proofs of its recordings, which know what a proof step takes.
        share: the share of time that checks may cost.
    """

    def __init__(self, step: DecoratedStep, graphs: GraphProofs, share: float) -> None:
        self._step, self._context, self._graphs, self._share = step, step.context, graphs, share
        self._left: int | None = None
        """Replays until the next check; None before anything is proven."""
        self._every, self._checks, self._spent, self._cost = FIRST, 0, 0.0, 0.0
        self._began = 0.0
        self._disagreed = ""

    @property
    def status(self) -> SentinelStatus:
        """The checks so far."""
        return SentinelStatus(
            function=self._step.name,
            every=self._every,
            checks=self._checks * STEPS,
            seconds=self._spent,
            disagreed=self._disagreed,
        )

    def due(self) -> bool:
        """Count a replay of all processes; return whether its recording is proven again after it."""
        if self._left is None or self._context.progress.in_trial:
            return False
        self._left -= 1
        if self._left > 0:
            return False
        self._left, self._cost = _ABANDONED, 0.0
        return True

    def step_begins(self) -> None:
        """Begin to time a step of a proof."""
        self._began = time.perf_counter()

    def step_ends(self, *, checked: bool) -> int:
        """Add what a step has cost, and return the replays to the next check by what this process knows.

        In a run of known length, the first check comes early if the run pays for it later.
        """
        usual = self._context.reports.seconds_of(self._context.progress.tier.name) or self._graphs.replay_seconds
        if checked:
            extra = max(0.0, time.perf_counter() - self._began - (usual or 0.0))
            self._cost, self._spent = self._cost + extra, self._spent + extra
        if not usual:
            return FIRST
        cost = self._cost or STEPS * (self._graphs.seconds or 0.0)
        distance = max(LEAST, math.ceil(min(cost / (self._share * usual), _FARTHEST)))
        total = self._context.total_steps
        pays = total is not None and distance <= total - self._context.progress.steps
        return FIRST if pays and not self._checks and not checked else distance

    def proven(self, distance: int, *, checked: bool) -> None:
        """Plan the next check once a recording is proven in all processes, a first time or again.

        Args:
            distance: the greatest that a process has returned of `step_ends`.
            checked: the proof was a check.
        """
        self._checks += checked
        if not checked and self._left is not None:  # another kind of call: what was planned stays
            return
        assert self._context.peers is not None
        draws = random.Random(self._context.peers.calls)  # noqa: S311 - its own: no stream of the program moves
        self._every = distance
        self._left = max(1, distance + draws.randint(-(distance // 2), distance // 2))

    def disagreed(self, why: str) -> None:
        """Note that a recording was found wrong."""
        self._disagreed = f"step {self._context.progress.steps + 1} in {self._context.progress.tier.name}: {why}"
