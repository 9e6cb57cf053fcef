"""A program that runs one way, for a bench: it gets ready, is timed in blocks, and tells how each step ran."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import statistics
import time
from typing import TYPE_CHECKING, Any

import torch

from hotloop import presets
from hotloop.compiling.control import status
from hotloop.compiling.fallback.availability import missing
from hotloop.measure import StepClock
from hotloop.prove.workloads import seeded
from hotloop.step import Loop
from hotloop.step.state.trial_run import wait_for
from hotloop.step.tiers import parse
from hotloop.step.workload import arguments

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from hotloop.compiling.control import ComponentStatus
    from hotloop.step import Workload

LIMIT_STEPS = 48
"""Steps that a way may take to get ready: a survey, three proofs of the code and five steps to a graph take 12."""
READY = 3
"""Plain steps in a row after which a way is ready; they do not count as getting ready."""


class NotRunError(Exception):
    """A way does not run as asked here; the message says why, for people."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ready:
    """Figures of getting a way ready.

    Args:
        cold_seconds: of getting ready, without the time of the steps themselves.
        compile_seconds: the part of it spent compiling.
        caches: the compile caches that it began with: ``empty``, ``warm``, or ``none`` if nothing is compiled.
        peak_bytes: the most memory that torch held for it on a GPU, captured graphs included; None on a CPU.
    """

    cold_seconds: float
    compile_seconds: float
    caches: str
    peak_bytes: int | None


def reserved_bytes() -> int | None:
    """Free unused memory and forget its peak; return what torch holds on all GPUs. None if it has begun on none."""
    if not (torch.cuda.is_available() and torch.cuda.is_initialized()):  # type: ignore[no-untyped-call]
        return None
    torch.cuda.empty_cache()
    for index in range(torch.cuda.device_count()):
        torch.cuda.reset_peak_memory_stats(index)
    return sum(map(torch.cuda.memory_reserved, range(torch.cuda.device_count())))


@dataclasses.dataclass(frozen=True)
class Block:
    """A block of steps: seconds of a step on average, and how many ran as asked; ``steady``: none did more than run."""

    seconds: float
    as_asked: int
    steps: int
    steady: bool


class Running:
    """A program of its own that runs one way.

    Args:
        name: a tier or a preset.
        workload: made for this way alone.

    Raises:
        NotRunError: it cannot run here; the message says why.
        ConfigError: the workload does not fit.
    """

    def __init__(self, name: str, workload: Workload) -> None:
        self.name, self.tier = name, parse(name)
        self.loop = Loop(workload.model, workload.optimizer, state=workload.state, run=name, sentinel=0)
        self.workload, self.device = workload, self.loop.context.device
        self._step = self.loop.step(workload.step)
        self.last = ("", "")
        """The tier of the last step, and what the step did (``run``, ``proof``, ...)."""
        try:
            self._refuse()
        except NotRunError:
            self.close()
            raise

    def _refuse(self) -> None:
        """Raise NotRunError if the way cannot run here."""
        if self.loop.policy.start != self.tier:
            disabled = f"HOTLOOP_DISABLE={os.environ.get('HOTLOOP_DISABLE')} is set"
            why = "the model is compiled already" if self.loop.context.compiled.given else disabled
            raise NotRunError(f"it would run {self.loop.policy.start.name}: {why}")
        if self.tier.compiles:
            lacking = missing(presets.get(self.tier.settings["preset"]), self.device.type)
            if lacking:
                raise NotRunError(f"this machine cannot run it: {lacking}")
        if self.tier.settings.get("regions") == "blocks" and not self.loop.context.compiled.in_blocks:
            raise NotRunError("the model has no repeated blocks, so that it would be compiled as a whole: that is full")

    def run(self, batch: Any) -> tuple[str, str]:
        """Run a step; return the tier that it ran in, and what it did."""
        self._step(*arguments(batch))
        self.last = self.loop.last_ran()
        return self.last

    def parts(self) -> dict[str, ComponentStatus]:
        """Return the status of the compiled code by component; empty if nothing is compiled."""
        return status(self.workload.models()).components if self.tier.compiles else {}

    def plain(self, ran: tuple[str, str]) -> bool:
        """Return whether a step ran as asked, and did nothing else."""
        return ran == (self.tier.name, "run")

    def check_tier(self) -> None:
        """Check that the tier in force is the one that was asked for.

        Raises:
            NotRunError: it is another one.
        """
        if self.loop.tier != self.tier:
            raise NotRunError(f"it went back to {self.loop.tier.name}: {self._why()}")

    def check(self) -> None:
        """Check that the tier is in force, and that no compiled code stepped down.

        Raises:
            NotRunError: the way does not run as asked.
        """
        self.check_tier()
        for name, part in self.parts().items():
            below = part.running != part.requested or part.fallbacks or part.state == "eager"
            if part.state != "pending" and below:
                causes = "; ".join(dict.fromkeys(cause.reason for cause in part.causes)) or "no cause is known"
                runs = "eager" if part.running in ("none", part.requested) else part.running
                raise NotRunError(
                    f"{name} was asked for {part.requested}, and it or a part of it runs {runs}: {causes}"
                )

    def _why(self) -> str:
        """Say why the tier does not run, as far as the loop knows."""
        tiers = [tier for tier in self.loop.status().tiers if tier.why]
        known, below = {tier.name: tier.why for tier in tiers}, self.tier.without_graph().name
        declined = (tier.why for tier in tiers if tier.state == "declined")
        return known.get(self.tier.name) or known.get(below) or next(declined, "no reason is known")

    def get_ready(self, batches: Iterator[Any], reserved: int) -> Ready:
        """Run until `READY` steps in a row ran as asked and did nothing else; then measure the memory of steady steps.

        Args:
            batches: without an end.
            reserved: bytes that torch held before the program was made.

        Raises:
            NotRunError: the way does not run as asked, or is not ready after `LIMIT_STEPS`.
        """
        ends = self._first_steps(batches)
        self.check()
        reserved_bytes()
        for batch in itertools.islice(batches, READY):
            self.run(batch)
        peak = None
        if self.device.type == "cuda":
            peak = sum(map(torch.cuda.max_memory_reserved, range(torch.cuda.device_count()))) - reserved
        steady = statistics.median(after - before for before, after in itertools.pairwise(ends[-READY - 1 :]))
        parts = self.parts().values()
        missed = sum(part.cache_misses for part in parts)
        warm = "warm" if sum(part.cache_hits for part in parts) else "none"
        return Ready(
            cold_seconds=max(0.0, ends[-1] - (len(ends) - 1) * steady),
            compile_seconds=sum(part.compile_seconds for part in parts),
            caches="empty" if missed else warm,
            peak_bytes=peak,
        )

    def _first_steps(self, batches: Iterator[Any]) -> list[float]:
        """Run the first steps; return the seconds at which each of them was done, beginning with 0."""
        ends, in_row = [0.0], 0
        least = READY + 1  # the very first step sets libraries up, even if nothing has to be prepared
        wait_for(self.device)
        begin = time.perf_counter()
        while in_row < READY or len(ends) <= least:
            if len(ends) > LIMIT_STEPS:
                tier, kind = self.last
                raise NotRunError(
                    f"it was not ready after {LIMIT_STEPS} steps (the last one: {tier}, {kind}): {self._why()}"
                )
            ran = self.run(next(batches))
            wait_for(self.device)
            ends.append(time.perf_counter() - begin)
            in_row = in_row + 1 if self.plain(ran) else 0
            if not in_row:
                self.check_tier()
        return ends

    def time_block(self, batches: Sequence[Any]) -> Block:
        """Time a step for each batch, after an untimed step, since the step before ran another way.

        On a GPU the time is between two CUDA events: the device's time, including its waits for the host.
        """
        clock = StepClock(self.device)
        first = self.run(batches[0])
        wait_for(self.device)
        mark = clock.start()
        ran = [self.run(batch) for batch in batches]
        clock.stop(mark)
        wait_for(self.device)
        (timing,) = clock.take()
        steady = all(kind == "run" for _, kind in (first, *ran))
        return Block(timing.seconds / len(ran), sum(map(self.plain, ran)), len(ran), steady)

    def close(self) -> None:
        """Release everything that the program holds; a failure of that is no result of a bench."""
        with contextlib.suppress(Exception):
            self.loop.close()


def start(name: str, make: Callable[[], Workload]) -> tuple[Running, Ready]:
    """Make a program, set it up for a way, and run it until it is steady.

    Raises:
        NotRunError: it does not run as asked here.
        Exception: the user's own, raised in eager.
    """
    reserved = reserved_bytes() or 0
    with seeded():
        workload = make()
        running = Running(name, workload)
        try:
            return running, running.get_ready(workload.endless(), reserved)
        except BaseException:
            running.close()
            raise


def in_turns(number: int, rounds: int) -> Iterator[list[int]]:
    """Yield the order of so many ways in each round: forward, then backward, and each begins once in a while."""
    for turn in range(rounds):
        at = turn // 2 % number
        order = [*range(at, number), *range(at)]
        yield order if turn % 2 == 0 else order[::-1]
