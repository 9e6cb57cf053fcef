"""One way to run a program, for a bench: gets ready, is timed in blocks, and says of each step what ran."""

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
from hotloop.prove.bench.memory import Peak
from hotloop.prove.workloads import seeded
from hotloop.step import Loop
from hotloop.step.tiers import parse
from hotloop.step.workload import arguments

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from hotloop.compiling.control import ComponentStatus
    from hotloop.step import Workload

LIMIT_STEPS = 48
"""Steps that a way may take to get ready: a survey, three proofs of the code and five steps to a graph take 12."""
READY = 3
"""Plain steps in a row after which a way is ready; they are not counted as getting ready."""


class NotRunError(Exception):
    """A way does not run as asked here; the message says why, for people."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ready:
    """How a way got ready.

    Args:
        steps: the first steps, up to and with `READY` steady ones; they are real training steps.
        seconds: that these took, each waited for.
        steady_seconds: the middle one of the `READY` steady steps, at the machine's speed of that moment.
        prepared_steps: steps before the first steady one.
        prepared_seconds: from the first step's begin to the first steady step's.
        compile_seconds: of them spent compiling.
        cache_hits, cache_misses: graphs that were found in Inductor's caches, and those that were not.
        preparing_bytes: the most memory that was held until then; None where it cannot be told.
        peak_bytes: the most memory that steady steps hold; None where it cannot be told.
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
        """What getting ready took beyond the steps themselves."""
        return max(0.0, self.seconds - self.steps * self.steady_seconds)


class Running:
    """A program of its own that runs in one way.

    Args:
        name: a tier or a preset.
        workload: made for this way alone.

    Raises:
        NotRunError: it cannot run here; the message says why.
        ConfigError: the workload does not fit.
    """

    def __init__(self, name: str, workload: Workload) -> None:
        self.name, self.tier = name, parse(name)
        self.loop = Loop(workload.model, workload.optimizer, state=workload.state, run=name)
        self.workload, self.device = workload, self.loop.device
        self._step = self.loop.step(workload.step)
        self.last = ("", "")
        """What the last step ran in, and what it did (``run``, ``proof``, ...)."""
        if self.loop.asked != self.tier:
            self.close()
            disabled = f"HOTLOOP_DISABLE={os.environ.get('HOTLOOP_DISABLE')} is set"
            why = "the model is compiled already" if self.loop.compiled.given else disabled
            raise NotRunError(f"it would run {self.loop.asked.name}: {why}")
        if (
            lacking := missing(presets.get(self.tier.settings["preset"]), self.device.type)
            if self.tier.compiles
            else ""
        ):
            self.close()
            raise NotRunError(f"this machine cannot run it: {lacking}")
        if self.tier.settings.get("regions") == "blocks" and not self.loop.compiled.in_blocks:
            self.close()
            raise NotRunError("the model has no repeated blocks, so that it would be compiled as a whole: that is full")

    def run(self, batch: Any) -> tuple[str, str]:
        """Run one step; gives what it ran in and what it did."""
        self._step(*arguments(batch))
        self.last = self.loop.last_ran()
        return self.last

    def parts(self) -> dict[str, ComponentStatus]:
        """Give the status of the models' compiled code, by component; empty where nothing is compiled."""
        return status(self.workload.models()).components if self.tier.compiles else {}

    def plain(self, found: tuple[str, str]) -> bool:
        """Tell whether a step ran as asked, and did nothing besides."""
        return found == (self.tier.name, "run")

    def check_tier(self) -> None:
        """Hold the tier in force against the one that was asked for.

        Raises:
            NotRunError: it is another one.
        """
        if self.loop.goal != self.tier:
            raise NotRunError(f"it went back to {self.loop.goal.name}: {self.why()}")

    def check(self) -> None:
        """Hold what runs against what was asked for.

        Raises:
            NotRunError: another tier is in force, or compiled code stepped down.
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

    def why(self) -> str:
        """Say why its tier does not run, as far as the loop knows."""
        tiers = [one for one in self.loop.status().tiers if one.why]
        known, below = {one.name: one.why for one in tiers}, self.tier.without_graph().name
        declined = (one.why for one in tiers if one.state == "declined")
        return known.get(self.tier.name) or known.get(below) or next(declined, "no reason is known")

    def close(self) -> None:
        """Give back what it holds; a failure of that is no result of a bench."""
        with contextlib.suppress(Exception):
            self.loop.close()


def start(name: str, make: Callable[[], Workload], *, alone: bool = False) -> tuple[Running, Ready]:
    """Make a program, set it up for a way, and run it until it is steady.

    Args:
        name: of the way.
        make: gives a new workload.
        alone: this process runs nothing else, so that its memory is the program's.

    Raises:
        NotRunError: it does not run as asked here.
        Exception: what the user's own code raises in eager.
    """
    memory = Peak(alone=alone)
    with seeded():
        workload = make()
        running = Running(name, workload)
        try:
            return running, _get_ready(running, workload.endless(), memory)
        except BaseException:
            running.close()
            raise


def _get_ready(running: Running, batches: Iterator[Any], memory: Peak) -> Ready:
    """Run a way until `READY` steps in a row ran as asked and did nothing besides."""
    ends = _first_steps(running, batches)
    running.check()
    preparing = memory.bytes(running.device)
    memory.again(running.device)
    for batch in itertools.islice(batches, READY):
        running.run(batch)
    prepared = len(ends) - 1 - READY
    parts = running.parts().values()
    return Ready(
        steps=len(ends) - 1,
        seconds=ends[-1],
        steady_seconds=statistics.median(after - before for before, after in itertools.pairwise(ends[-READY - 1 :])),
        prepared_steps=prepared,
        prepared_seconds=ends[prepared],
        compile_seconds=sum(part.compile_seconds for part in parts),
        cache_hits=sum(part.cache_hits for part in parts),
        cache_misses=sum(part.cache_misses for part in parts),
        preparing_bytes=preparing,
        peak_bytes=memory.bytes(running.device),
    )


def _first_steps(running: Running, batches: Iterator[Any]) -> list[float]:
    """Give the seconds at which each of the first steps was done, the begin first."""
    ends, row, least = [0.0], 0, READY + 1  # the very first step sets libraries up, also where nothing is prepared
    synchronize(running.device)
    begin = time.perf_counter()
    while row < READY or len(ends) <= least:
        if len(ends) > LIMIT_STEPS:
            tier, kind = running.last
            raise NotRunError(
                f"it was not ready after {LIMIT_STEPS} steps (the last one: {tier}, {kind}): {running.why()}"
            )
        found = running.run(next(batches))
        synchronize(running.device)
        ends.append(time.perf_counter() - begin)
        row = row + 1 if running.plain(found) else 0
        if not row:
            running.check_tier()
    return ends


@dataclasses.dataclass(frozen=True)
class Block:
    """A block of steps: seconds of each on average, and how many ran as asked; ``steady``: all did nothing besides."""

    seconds: float
    as_asked: int
    steps: int
    steady: bool


def block(running: Running, batches: Sequence[Any]) -> Block:
    """Time a block of steps, one for each batch, after an untimed one: the step before was another way's.

    On a GPU the time is between two CUDA events, so that it is the device's, with what it waits for the host.
    """
    clock = StepClock(running.device)
    first = running.run(batches[0])
    synchronize(running.device)
    mark = clock.start()
    found = [running.run(batch) for batch in batches]
    clock.stop(mark)
    synchronize(running.device)
    (timing,) = clock.take()
    steady = all(kind == "run" for _, kind in (first, *found))
    return Block(timing.seconds / len(found), sum(map(running.plain, found)), len(found), steady)


def in_turns(number: int, rounds: int) -> Iterator[list[int]]:
    """Give the order of so many ways in each round: forward and backward, and each begins once in a while."""
    for turn in range(rounds):
        at = turn // 2 % number
        order = [*range(at, number), *range(at)]
        yield order if turn % 2 == 0 else order[::-1]


def synchronize(device: torch.device) -> None:
    """Wait until the device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
