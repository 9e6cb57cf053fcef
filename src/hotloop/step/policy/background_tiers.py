"""The background compile of one loop: what a child process can compile, which tier it is at, which tiers are ready."""

from __future__ import annotations

import dataclasses
import time
from typing import TYPE_CHECKING

from hotloop.cache import BackgroundCompile, BackgroundUnavailableError, Done, Recorder, Request
from hotloop.decide import expect
from hotloop.step.policy import process_history
from hotloop.step.policy.process_history import Child
from hotloop.step.tiers import CHANNELS_LAST

if TYPE_CHECKING:
    from hotloop.decide import Facts, Option
    from hotloop.step.context import Context
    from hotloop.step.policy.process_history import ProgramHistory
    from hotloop.step.tiers import Tier

_LIMIT_SECONDS = 1800.0
_CPU_CONTENTION = 0.3
"""Seconds that training on a CPU loses for each second of the child, whose priority is low but which shares the caches:
a guess."""
_TRACING_SHARE = 0.3
"""Share of a cold compile that a swap with a full cache takes at most: 3.4 of 29 s and 6.7 of 116 s were measured."""


class Background:
    """The child process of a loop, at most one at a time, and what children have compiled.

    Attributes:
        tier: the name of the tier that the child compiles for just now; None where there is no child.
        failed: the tier that the last child could not compile, and why.
        unavailable: why no child can compile for this program; empty as long as one can.
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        self._recorder: Recorder | None = None
        self._child: BackgroundCompile | None = None
        self._program: ProgramHistory | None = None
        self._ready: dict[str, float] = {}
        """By base, seconds of the swap after a child has compiled it."""
        self._since = 0.0
        self._expected: float | None = None
        self._slower = 1.0
        self.tier: str | None = None
        self.failed: tuple[str, str] | None = None
        self.unavailable = ""

    def go_on_from(self, program: ProgramHistory) -> None:
        """Take over what earlier runs of the same program left: recorded calls, what is compiled, a child at work."""
        self._program, child = program, program.child
        self._recorder = self._recorder or program.recorder
        self._ready |= program.ready
        self._slower = max(self._slower, program.slower)
        if child is not None and self._child is None:
            self._child, self.tier, program.child = child.process, child.tier, None
            self._since, self._expected = time.monotonic(), None  # when the child began is not known here

    def record(self) -> Recorder | None:
        """Return a recorder for one eager step; None where there is a recorder already, or nothing can be compiled.

        A child will compile the calls that it notes. Where a factory makes the program anew, it notes no calls, only
        the memory that the step takes.
        """
        if self._recorder is not None or self._context.base_tier.base == "as-given":
            return None
        self._recorder = Recorder({} if self._context.workload else self._context.compiled.models)
        return self._recorder

    def possible(self, name: str) -> bool:
        """Return whether a child could compile for a tier."""
        base = name.removesuffix("+graph")
        if (
            base in ("eager", "as-given", CHANNELS_LAST)
            or base in self._ready
            or self.unavailable
            or self.tier is not None
        ):
            return False
        if self._context.workload:
            return True
        if self._recorder is None:
            return False
        if self._recorder.reason:
            self._refuse(self._recorder.reason)
        return not self._recorder.reason

    def options(self, name: str, facts: Facts, rejected_at: int | None) -> list[Option]:
        """Return what a tier is expected to cost and save, compiled in the foreground, or by a child if possible."""
        ready = self._ready.get(name.removesuffix("+graph"))
        foreground = expect(name, facts, background=ready is not None)
        options = [foreground]
        if ready is not None and foreground is not None:  # the child is done: only the swap is left
            swap = min(ready, foreground.prepare_seconds)
            worst = min(2.0 * swap, max(swap, foreground.prepare_worst_seconds or 2.0 * swap))
            options = [
                dataclasses.replace(
                    foreground, background_seconds=None, prepare_seconds=swap, prepare_worst_seconds=worst
                )
            ]
        elif self.possible(name):
            options.append(expect(name, facts, background=True))
        elif name == self.tier:
            option = expect(name, facts, background=True)
            if option is not None and option.background_seconds is not None:
                spent = time.monotonic() - self._since  # a late child is taken to need as long again
                left = max(option.background_seconds - spent, spent)
                option = dataclasses.replace(option, background_seconds=left)
            options = [option]
        contention = _CPU_CONTENTION if self._context.device.type == "cpu" else 0.0
        return [
            dataclasses.replace(
                option, rejected_at=rejected_at, contention=contention if option.background_seconds else 0.0
            )
            for option in options
            if option is not None
        ]

    @property
    def slower(self) -> float:
        """Return how many times longer than expected a child took, or has taken so far; 1 where none was late.

        What compiles slowly for one tier does so for the others. Beside a late child, a compile in the foreground that
        was expected to take a tenth of what the child still needs took three minutes.
        """
        late = 0.0
        if self.tier is not None and self._expected:
            late = (time.monotonic() - self._since) / self._expected
        return max(self._slower, late)

    def start(self, tier: Tier, limit_seconds: float | None, expected_seconds: float | None) -> None:
        """Start a child for a tier's code; where that is not possible, `unavailable` says why.

        The child is stopped after ``limit_seconds``. The decision expected the compile to take ``expected_seconds``,
        lateness of earlier children included.
        """
        settings = self._context.compiled.settings(tier)
        try:
            if self._context.workload:
                peak = self._recorder.peak_bytes if self._recorder is not None else None
                request = Request.of_factory(self._context.workload, settings, peak_bytes=peak)
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
        # A decision as well: the next one is for a compile in the foreground, or for none.
        self._context.reports.decided(f"background unavailable: {reason}", {"action": "no background"})

    def ended(self) -> bool:
        """Return whether the child has ended since the last look; `failed` then says whether it failed."""
        if self._child is None or (outcome := self._child.poll()) == "running":
            return False
        name, self._child, self.tier = self.tier, None, None
        assert name is not None
        self.failed = None
        if not isinstance(outcome, Done) and outcome.unable:
            self._refuse(outcome.reason)
            return True
        if not isinstance(outcome, Done):
            self.failed = name, outcome.reason
            self._context.reports.say_once(f"{name}: the background compile failed: {outcome.reason}")
            return True
        # A cold compile, less what Inductor itself took, is tracing: a swap with a full cache takes as long.
        self._ready[name.removesuffix("+graph")] = max(1.0, _TRACING_SHARE * outcome.compile_seconds)
        if self._expected:
            self._slower = max(self._slower, outcome.seconds / self._expected)
        if self._program is not None:
            self._program.ready |= self._ready
            self._program.slower = self._slower
        self._context.reports.decided(
            f"{name}: compiled in the background in {outcome.seconds:.0f} s",
            {"action": "compiled", "tier": name, **dataclasses.asdict(outcome)},
        )
        return True

    def leave(self) -> None:
        """Leave what the next run of the same program can use; a child that is at work goes on for it."""
        if self._program is None:
            return
        if self._recorder is not None and not self._recorder.reason and not self._context.workload:
            self._program.recorder = self._recorder
        if self._child is not None and self.tier is not None:
            process_history.leave(self._program, Child(self._child, self.tier))
            self._child, self.tier = None, None

    def stop(self) -> None:
        """Stop the child, if there is one."""
        if self._child is not None:
            self._child.stop()
            self._child, self.tier = None, None
