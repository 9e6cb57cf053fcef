"""The background compile of one loop: which tier its child process is at, and which tiers children have compiled."""

from __future__ import annotations

import dataclasses
import time
from typing import TYPE_CHECKING

import torch

from hotloop.cache import BackgroundCompile, BackgroundUnavailableError, Done
from hotloop.decide import expect
from hotloop.step.policy.history import Child, stop_left_children

if TYPE_CHECKING:
    from hotloop.decide import Facts, Option
    from hotloop.step.context import Context
    from hotloop.step.policy.history import History, ProgramHistory
    from hotloop.step.tiers import Tier

_LIMIT_SECONDS = 1800.0
_CPU_CONTENTION = 0.3
"""Seconds that training on a CPU loses for each second of the child, whose priority is low but which shares the caches:
a guess."""
_TRACING_SHARE = 0.3
"""Share of a cold compile that a swap with a full cache takes at most: 3.4 of 29 s and 6.7 of 116 s were measured."""


class Background:
    """The child process of a loop, at most one at a time, where a factory makes the program anew for it.

    Attributes:
        failed: the name of the tier that the last child could not compile.
        unavailable: why no child can compile for this program.
    """

    def __init__(self, context: Context, history: History) -> None:
        self._context, self._history = context, history
        self._peak_bytes = 0
        self.failed: str | None = None
        self.unavailable = "" if context.workload else "the loop has no workload="

    @property
    def program(self) -> ProgramHistory:
        """What the runs of this program found out; it holds the child and what children have compiled."""
        return self._history.program

    @property
    def tier(self) -> str | None:
        """The name of the tier that the child compiles for just now; None where there is no child."""
        return self.program.child.tier if self.program.child is not None else None

    def note_peak(self) -> None:
        """Note the GPU memory that eager steps need; later peaks may be those of proofs."""
        if self._context.device.type == "cuda" and not self._peak_bytes:
            self._peak_bytes = torch.cuda.max_memory_allocated(self._context.device)

    def options(self, name: str, facts: Facts, rejected_at: int | None) -> list[Option]:
        """Return what a tier is expected to cost and save, compiled in the foreground, or by a child if possible."""
        ready = self.program.ready.get(name.removesuffix("+graph"))
        foreground = expect(name, facts, background=ready is not None)
        behind = expect(name, facts, background=True) if ready is None and not self.unavailable else None
        if foreground is not None and ready is not None:  # the child is done: only the swap is left
            swap = min(ready, foreground.prepare_seconds)
            worst = min(2.0 * swap, max(swap, foreground.prepare_worst_seconds or 2.0 * swap))
            foreground = dataclasses.replace(
                foreground, background_seconds=None, prepare_seconds=swap, prepare_worst_seconds=worst
            )
        child = self.program.child
        if child is not None and behind is not None and behind.background_seconds is not None:
            spent = time.monotonic() - child.since  # a late child is taken to need as long again
            left = max(behind.background_seconds - spent, spent)
            foreground = None if name == child.tier else foreground
            behind = dataclasses.replace(behind, background_seconds=left) if name == child.tier else None
        if behind is not None and self._context.device.type == "cpu":
            behind = dataclasses.replace(behind, contention=_CPU_CONTENTION)
        found = [option for option in (foreground, behind) if option is not None]
        return [dataclasses.replace(option, rejected_at=rejected_at) for option in found]

    @property
    def slower(self) -> float:
        """Return how many times longer than expected a child took, or has taken so far; 1 where none was late.

        What compiles slowly for one tier does so for the others.
        """
        child, late = self.program.child, 0.0
        if child is not None and child.expected:
            late = (time.monotonic() - child.since) / child.expected
        return max(self.program.slower, late)

    def start(self, tier: Tier, limit_seconds: float | None, expected_seconds: float | None) -> None:
        """Start a child for a tier's code; where that is not possible, `unavailable` says why.

        The child is stopped after ``limit_seconds``. The decision expected the compile to take ``expected_seconds``,
        lateness of earlier children included.
        """
        assert self._context.workload is not None
        limit = _LIMIT_SECONDS if limit_seconds is None else max(60.0, min(_LIMIT_SECONDS, limit_seconds))
        stop_left_children()
        try:
            process = BackgroundCompile.start(
                self._context.workload,
                self._context.compiled.settings(tier),
                peak_bytes=self._peak_bytes,
                limit_seconds=limit,
            )
        except BackgroundUnavailableError as error:
            self._refuse(str(error))
            return
        expected = expected_seconds / self.program.slower if expected_seconds else None
        self.program.child = Child(process, tier.name, time.monotonic(), expected)

    def _refuse(self, reason: str) -> None:
        self.unavailable = reason
        # A decision as well: the next one is for a compile in the foreground, or for none.
        self._context.reports.decided(f"background unavailable: {reason}", {"action": "no background"})

    def ended(self) -> bool:
        """Return whether the child has ended since the last look; `failed` then says whether it failed."""
        program, child = self.program, self.program.child
        if child is None or (outcome := child.process.poll()) == "running":
            return False
        name, program.child, self.failed = child.tier, None, None
        if not isinstance(outcome, Done) and outcome.unable:
            self._refuse(outcome.reason)
        elif not isinstance(outcome, Done):
            self.failed = name
            self._context.reports.say_once(f"{name}: the background compile failed: {outcome.reason}")
        else:
            # A cold compile, less what Inductor itself took, is tracing: a swap with a full cache takes as long.
            program.ready[name.removesuffix("+graph")] = max(1.0, _TRACING_SHARE * outcome.compile_seconds)
            if child.expected:
                program.slower = max(program.slower, outcome.seconds / child.expected)
            self._context.reports.decided(
                f"{name}: compiled in the background in {outcome.seconds:.0f} s",
                {"action": "compiled", "tier": name, **dataclasses.asdict(outcome)},
            )
        return True

    def leave(self) -> None:
        """Leave a child that is at work to the next run of the same program."""
        if self.program.child is not None:
            self.program.child.left = True

    def stop(self) -> None:
        """Stop the child, if there is one."""
        self.program.stop_child()
