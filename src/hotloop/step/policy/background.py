"""The background compile of one loop: what can be compiled by a child, which tier is under way, which are ready."""

from __future__ import annotations

import dataclasses
import time
from typing import TYPE_CHECKING

from hotloop.cache import BackgroundCompile, BackgroundUnavailableError, Done, Recorder, Request
from hotloop.decide import expect
from hotloop.step.policy import history_store
from hotloop.step.policy.history_store import Child

if TYPE_CHECKING:
    from hotloop.decide import Facts, Option
    from hotloop.step.loop.loop import Loop
    from hotloop.step.policy.history_store import Program
    from hotloop.step.tiers import Tier

_LIMIT_SECONDS = 1800.0
_CPU_CONTENTION = 0.3
"""Seconds that training on a CPU loses for a second of the child, which gives way but shares the caches: a guess."""
_TRACING_SHARE = 0.3
"""Of a cold compile, what a swap with a full cache takes at most: 3.4 of 29 s, 6.7 of 116 s were measured."""


class Background:
    """Looks after at most one child at a time."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._recorder: Recorder | None = None
        self._child: BackgroundCompile | None = None
        self._program: Program | None = None
        self._ready: dict[str, float] = {}
        self.tier: str | None = None
        """The tier that a child compiles for just now, and since when."""
        self._since = 0.0
        self._expected: float | None = None
        self._slower = 1.0
        self.failed: tuple[str, str] | None = None
        """The tier that could not be compiled, and why."""
        self.unavailable = ""
        """Why no child can compile for this program; empty as long as one can."""

    def go_on_from(self, program: Program) -> None:
        """Take up what earlier runs of the same program left: recorded calls, what is compiled, a child at work."""
        self._program, child = program, program.child
        self._recorder = self._recorder or program.recorder
        self._ready |= program.ready
        self._slower = max(self._slower, program.slower)
        if child is not None and self._child is None:
            self._child, self.tier, program.child = child.process, child.tier, None
            self._since, self._expected = time.monotonic(), None  # when it began is not known here

    def record(self) -> Recorder | None:
        """Give the recorder for one eager step, the first time; its calls are what a child will compile.

        Where a factory makes the program anew, it notes what memory the step takes, and no calls.
        """
        if self._recorder is not None or self._loop.given == "as-given":
            return None
        self._recorder = Recorder({} if self._loop.workload else self._loop.compiled.models)
        return self._recorder

    def possible(self, name: str) -> bool:
        """Tell whether a child could compile for a tier."""
        base = name.removesuffix("+graph")
        if base in ("eager", "as-given") or base in self._ready or self.unavailable or self.tier is not None:
            return False
        if self._loop.workload:
            return True
        if self._recorder is None:
            return False
        if self._recorder.reason:
            self._refuse(self._recorder.reason)
        return not self._recorder.reason

    def offers(self, name: str, facts: Facts, rejected_at: int | None) -> list[Option]:
        """Give what a tier is expected to cost and give: in the foreground, and by a child where one can compile."""
        ready = self._ready.get(name.removesuffix("+graph"))
        found = [expect(name, facts, background=ready is not None)]
        if ready is not None and found[0] is not None:  # the child is done: only the swap is left
            swap = min(ready, found[0].prepare_seconds)
            worst = min(2.0 * swap, max(swap, found[0].prepare_worst_seconds or 2.0 * swap))
            found = [
                dataclasses.replace(
                    found[0], background_seconds=None, prepare_seconds=swap, prepare_worst_seconds=worst
                )
            ]
        elif self.possible(name):
            found.append(expect(name, facts, background=True))
        elif name == self.tier:
            found = [self._coming(name, facts)]
        contention = _CPU_CONTENTION if self._loop.device.type == "cpu" else 0.0
        return [
            dataclasses.replace(one, rejected_at=rejected_at, contention=contention if one.background_seconds else 0.0)
            for one in found
            if one is not None
        ]

    @property
    def slower(self) -> float:
        """How many times longer than was expected of it a child took, or has taken so far; 1 where none was late.

        What compiles slowly for one tier does so for the others: a compile in the foreground that is expected to take a
        tenth of what the child still needs took three minutes, beside a child that was late.
        """
        late = 0.0
        if self.tier is not None and self._expected:
            late = (time.monotonic() - self._since) / self._expected
        return max(self._slower, late)

    def _coming(self, name: str, facts: Facts) -> Option | None:
        """Give what is left of the tier that a child compiles for; one that is late is taken to need as long again."""
        option = expect(name, facts, background=True)
        if option is None or option.background_seconds is None:
            return option
        spent = time.monotonic() - self._since
        return dataclasses.replace(option, background_seconds=max(option.background_seconds - spent, spent))

    def start(self, tier: Tier, limit_seconds: float | None, expected_seconds: float | None) -> None:
        """Start a child for a tier's code; where that is not possible, `unavailable` says why.

        Args:
            tier: the tier.
            limit_seconds: when to stop the child.
            expected_seconds: what the decision expected it to take, with what is known of earlier ones; None where it
                expected nothing.
        """
        settings = self._loop.compiled.settings(tier)
        try:
            if self._loop.workload:
                peak = self._recorder.peak_bytes if self._recorder is not None else None
                request = Request.of_factory(self._loop.workload, settings, peak_bytes=peak)
            else:
                assert self._recorder is not None
                request = self._recorder.request(settings)
            limit = _LIMIT_SECONDS if limit_seconds is None else max(60.0, min(_LIMIT_SECONDS, limit_seconds))
            self._child = BackgroundCompile.start(request, limit_seconds=limit)
        except BackgroundUnavailableError as error:
            self._refuse(str(error))
            return
        self._expected = expected_seconds / self._slower if expected_seconds else None
        self.tier, self._since = tier.name, time.monotonic()

    def _refuse(self, reason: str) -> None:
        self.unavailable = reason
        # Written down as well: the next decision is one for a compile in the foreground, or for none.
        self._loop.decided(f"background unavailable: {reason}", {"action": "no background"})

    def ended(self) -> bool:
        """Tell whether the child has ended since this was last asked."""
        if self._child is None or (outcome := self._child.poll()) == "running":
            return False
        name, self._child, self.tier = self.tier, None, None
        assert name is not None
        self.failed = None
        if isinstance(outcome, Done):
            # Compiled cold, less what Inductor itself took, is tracing: what a swap with a full cache takes.
            self._ready[name.removesuffix("+graph")] = _swap_seconds(outcome)
            if self._expected:
                self._slower = max(self._slower, outcome.seconds / self._expected)
            if self._program is not None:
                self._program.ready |= self._ready
                self._program.slower = self._slower
            self._loop.say_once(f"{name}: compiled in the background in {outcome.seconds:.0f} s")
        else:
            self.failed = name, outcome.reason
            self._loop.say_once(f"{name}: the background compile failed: {outcome.reason}")
        return True

    def leave(self) -> None:
        """Leave what the next run of the same program can use; a child that is at work goes on for it."""
        if self._program is None:
            return
        if self._recorder is not None and not self._recorder.reason and not self._loop.workload:
            self._program.recorder = self._recorder
        if self._child is not None and self.tier is not None:
            history_store.leave(self._program, Child(self._child, self.tier))
            self._child, self.tier = None, None

    def stop(self) -> None:
        """Stop the child."""
        if self._child is not None:
            self._child.stop()
            self._child, self.tier = None, None


def _swap_seconds(outcome: Done) -> float:
    return max(1.0, _TRACING_SHARE * outcome.compile_seconds)
