"""A program that runs one way, for a bench: it gets ready, is timed in blocks, and tells how each step ran."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import statistics
import time
from pathlib import Path
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
        steps: the first steps, including `READY` steady ones; they are real training steps.
        seconds: of these steps, each waited for.
        steady_seconds: the median of the `READY` steady steps, at the machine's speed of that moment.
        prepared_steps: steps before the first steady one.
        prepared_seconds: from the begin of the first step to that of the first steady one.
        compile_seconds: the part of them spent compiling.
        cache_hits, cache_misses: graphs found in Inductor's caches, and graphs that were not.
        preparing_bytes: the most memory held until then; None if it is not known.
        peak_bytes: the most memory held by steady steps; None if it is not known.
    """

    steps: int
    seconds: float
    steady_seconds: float
    prepared_steps: int
    prepared_seconds: float
    compile_seconds: float = 0.0
    cache_hits: int = 0
    cache_misses: int = 0
    preparing_bytes: int | None = None
    peak_bytes: int | None = None

    @property
    def cold_seconds(self) -> float:
        """Seconds of getting ready beyond the steps themselves."""
        return max(0.0, self.seconds - self.steps * self.steady_seconds)

    @property
    def caches(self) -> str:
        """The compile caches that it began with: ``empty``, ``warm``, or ``none`` if nothing was compiled."""
        if not self.cache_hits + self.cache_misses:
            return "none"
        return "empty" if self.cache_misses else "warm"


class PeakMemory:
    """The peak of the memory taken by a program that is made after this object.

    On a GPU it is the memory held by torch, on a CPU the resident memory of a process of its own.

    Args:
        alone: this process runs nothing else, so that its memory is the program's. Only then a CPU has a peak.
    """

    def __init__(self, *, alone: bool) -> None:
        self._alone, self._known = alone, True
        started = torch.cuda.is_available() and torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        self._others = {index: self._reset(index) for index in range(torch.cuda.device_count() if started else 0)}
        """Memory that torch holds for others, by GPU: reserved, and in use."""

    def restart(self, device: torch.device) -> None:
        """Forget the peak so far. Memory that others held at the start is still theirs."""
        if device.type == "cuda":
            self._reset(self._index(device))
            return
        try:  # "5" resets the peak of the resident memory: the Linux kernel's documentation of /proc/pid/clear_refs
            Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
        except OSError:  # not Linux, or a sandbox that forbids it
            self._known = False

    def bytes(self, device: torch.device) -> int | None:
        """Return the peak; on a GPU of memory reserved by torch, captured graphs included. None if it is not known.

        A program may fit into memory that others have reserved and do not use; its peak is at least the memory in use.
        """
        if device.type == "cuda":
            torch.cuda.synchronize(device)
            reserved, used = self._others.get(self._index(device), (0, 0))
            more = torch.cuda.max_memory_reserved(device) - reserved
            return max(0, more, torch.cuda.max_memory_allocated(device) - used)
        if not (self._alone and self._known):
            return None
        with contextlib.suppress(OSError, ValueError, IndexError, StopIteration):
            lines = Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines()
            return 1024 * int(next(line for line in lines if line.startswith("VmHWM:")).split()[1])
        return None

    @staticmethod
    def _index(device: torch.device) -> int:
        return torch.cuda.current_device() if device.index is None else device.index

    @staticmethod
    def _reset(index: int) -> tuple[int, int]:
        """Free unused memory and forget the peak; return the memory that is reserved and in use now."""
        torch.cuda.synchronize(index)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(index)
        return torch.cuda.memory_reserved(index), torch.cuda.memory_allocated(index)


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

    def get_ready(self, batches: Iterator[Any], memory: PeakMemory) -> Ready:
        """Run until `READY` steps in a row ran as asked and did nothing else; then measure the memory of steady steps.

        Raises:
            NotRunError: the way does not run as asked, or is not ready after `LIMIT_STEPS`.
        """
        ends = self._first_steps(batches)
        self.check()
        preparing = memory.bytes(self.device)
        memory.restart(self.device)
        for batch in itertools.islice(batches, READY):
            self.run(batch)
        prepared = len(ends) - 1 - READY
        parts = self.parts().values()
        steady = [after - before for before, after in itertools.pairwise(ends[-READY - 1 :])]
        return Ready(
            steps=len(ends) - 1,
            seconds=ends[-1],
            steady_seconds=statistics.median(steady),
            prepared_steps=prepared,
            prepared_seconds=ends[prepared],
            compile_seconds=sum(part.compile_seconds for part in parts),
            cache_hits=sum(part.cache_hits for part in parts),
            cache_misses=sum(part.cache_misses for part in parts),
            preparing_bytes=preparing,
            peak_bytes=memory.bytes(self.device),
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


def start(name: str, make: Callable[[], Workload], *, alone: bool = False) -> tuple[Running, Ready]:
    """Make a program, set it up for a way, and run it until it is steady.

    Args:
        name: of the way.
        make: makes a new workload.
        alone: this process runs nothing else, so that its memory is the program's.

    Raises:
        NotRunError: it does not run as asked here.
        Exception: the user's own, raised in eager.
    """
    memory = PeakMemory(alone=alone)
    with seeded():
        workload = make()
        running = Running(name, workload)
        try:
            return running, running.get_ready(workload.endless(), memory)
        except BaseException:
            running.close()
            raise


def in_turns(number: int, rounds: int) -> Iterator[list[int]]:
    """Yield the order of so many ways in each round: forward, then backward, and each begins once in a while."""
    for turn in range(rounds):
        at = turn // 2 % number
        order = [*range(at, number), *range(at)]
        yield order if turn % 2 == 0 else order[::-1]
