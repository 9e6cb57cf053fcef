"""``hotloop.bench``: times the ways to run a user's own step side by side, and says which one pays."""

from __future__ import annotations

import contextlib
import itertools
import math
import os
from typing import TYPE_CHECKING, Any

import torch

from hotloop.errors import ConfigError, HotloopError
from hotloop.prove.bench.child import INSIDE, run_cold
from hotloop.prove.bench.result import Bench, conclude
from hotloop.prove.bench.verdict import BASELINE, LEAST_PAIRS
from hotloop.prove.bench.way import NotRunError, in_turns, start
from hotloop.prove.workloads import Source, seeded, source_of
from hotloop.step.compiled import Compiled
from hotloop.step.tiers import parse

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from hotloop.prove.bench.way import Block, Ready, Running
    from hotloop.record import RunRecord
    from hotloop.step import Workload

LEAST_STEPS = 12
"""The least timed steps of a way: fewer than half as many blocks have no interval."""
ROUNDS = 12
"""Blocks of each way: with 12, the 95% interval of a median reaches from the third to the tenth."""
MOST_ROUNDS = 3 * ROUNDS
"""Rounds in all, if blocks are spoilt by steps that were still getting ready."""
LEAST_SHARE = 0.5
"""The share of a way's timed steps that must have run as asked for its figures to be given."""
BLOCK_SECONDS, SHORTEST_SECONDS, MOST_STEPS = 0.15, 0.05, 400
"""A block of the slowest way takes about the first, a block of the fastest no less than the second; its most steps."""


def bench(  # noqa: PLR0913 - the public settings
    workload: Workload | Callable[[], Workload] | str,
    runs: Sequence[str] | None = None,
    *,
    steps: int | None = None,
    total_steps: int | None = None,
    cold: bool = False,
    record: str | os.PathLike[str] | RunRecord | None = None,
    say: Callable[[str], None] | None = None,
) -> Bench:
    """Run a program's own training step several ways side by side, and say which way pays.

    Each way runs a program of its own, made by the same function from the same seed, through `hotloop.Loop`: it is
    proven before it is timed. All ways are in memory together and take the same batches in blocks by turns. Eager takes
    each turn twice, which measures the noise. A way that does not run as asked is listed with its reason and not timed.

    Args:
        workload: a function that makes a `hotloop.Workload`, its name as ``file.py:make`` or ``module:make``, or a
            Workload whose step can be copied with its model.
        runs: tiers and presets by name; eager is always among them. None takes those that make sense on the device.
        steps: timed steps of each way, at least 12; None takes as many as fit into about two seconds, in 12 blocks.
        total_steps: the length of the run that the verdict is about.
        cold: measure cold seconds in a new process for each way, with empty caches. Needs a function that another
            process can import. With False they are this process's, with the caches that there are.
        record: a folder in which the run record is written; None keeps it in memory.
        say: is called with a line of progress now and then.

    Raises:
        ConfigError: an argument does not fit, or the model is compiled already.
        Exception: the program's own, raised in eager.
    """
    asked = _checked(runs, steps, total_steps)  # before the program's own file is run
    source = source_of(workload)
    if cold and not source.name:
        raise ConfigError(f"cold=True: another process has to make the workload, and it is {source.why}")
    measured = Measured(asked or ways_for(source), source, steps, say or (lambda _: None))
    with contextlib.ExitStack() as stack:
        measured.get_ready(stack, cold=cold)
        measured.time()
    return conclude(measured, total_steps=total_steps, steps=steps, record=record)


class Measured:
    """The measurements of a bench: each way gets ready, then all of them take blocks of steps by turns.

    Attributes:
        failed: why a way was not timed.
        ready: how each way got ready; in a process of its own if that was asked for.
        pairs: seconds of a step in each block of a way, and in eager's block beside it.
        again: the same of eager's second blocks.
        as_asked: the share of a way's timed steps that ran as asked.
        parts: the status of each way's compiled code, by component.
    """

    def __init__(self, ways: Sequence[str], source: Source, steps: int | None, say: Callable[[str], None]) -> None:
        self.ways, self.source, self._say = tuple(ways), source, say
        self._rounds = ROUNDS if steps is None else min(ROUNDS, steps // 2)
        self._block_steps = 0 if steps is None else max(1, steps // self._rounds)
        self._running: dict[str, Running] = {}
        self.device = torch.device("cpu")
        self.failed: dict[str, str] = {}
        self.ready: dict[str, Ready] = {}
        self.pairs: dict[str, list[tuple[float, float]]] = {}
        self.again: list[tuple[float, float]] = []
        self.as_asked: dict[str, float] = {}
        self.parts: dict[str, dict[str, dict[str, Any]]] = {}

    def get_ready(self, stack: contextlib.ExitStack, *, cold: bool) -> None:
        """Get each way ready, eager first, so that the user sees the program's own exception before anything else."""
        for way in self.ways:
            self._say(f"{way}: getting ready")
            try:
                found = run_cold(way, self.source.name) if cold else None
                running, ready = start(way, self.source.make)
            except Exception as error:  # noqa: BLE001 - whatever a compiler raises is the reason
                self._fail(way, error)
                continue
            stack.callback(running.close)
            self._running[way], self.ready[way] = running, found or ready

    def _fail(self, way: str, error: Exception) -> None:
        """Note why a way failed. An exception of eager is the user's.

        Raises:
            ConfigError: eager does not run, since the model is compiled already, or in no process of its own.
            Exception: eager's own.
        """
        own = isinstance(error, NotRunError | HotloopError)
        if way == BASELINE:
            if isinstance(error, NotRunError):
                raise ConfigError(f"workload: it does not run eager as written: {error}") from error
            raise error
        self.failed[way] = str(error) if own else f"{type(error).__name__}: {error}"
        self._running.pop(way, None)

    def time(self) -> None:
        """Run blocks by turns until each way has enough that were steady; fail the ways that have not."""
        self.device = self._running[BASELINE].device
        batches = self._running[BASELINE].workload.endless()
        count = self._block_steps or self._size(batches)
        blocks: dict[str, list[Block]] = {way: [] for way in self._running}
        self.pairs = {way: [] for way in self._running}
        names = [*self._running, BASELINE]  # eager twice: how far it is from itself is the noise
        for order in itertools.islice(in_turns(len(names), MOST_ROUNDS), MOST_ROUNDS):
            self._say(f"round {len(self.again) + 1} of {self._rounds}: {', '.join(self._running)}")
            given = list(itertools.islice(batches, count))
            found = {place: self._block(names[place], given) for place in order}
            self._keep(names, found, blocks)
            if all(len(self.pairs[way]) >= self._rounds for way in self._running):
                break
        for way, running in list(self._running.items()):
            self._judge(way, blocks[way])
            self.parts[way] = {name: part.to_dict() for name, part in running.parts().items()}

    def _keep(self, names: Sequence[str], found: dict[int, Block | None], blocks: dict[str, list[Block]]) -> None:
        """Keep a round's steady blocks beside eager's first."""
        eager, again = found[0], found[len(names) - 1]
        assert eager is not None
        assert again is not None
        self.again.append((again.seconds, eager.seconds))
        for place, way in enumerate(names[:-1]):
            block = found[place]
            if block is not None and block.steady and eager.steady:
                blocks[way].append(block)
                self.pairs[way].append((block.seconds, eager.seconds))

    def _block(self, way: str, batches: Sequence[Any]) -> Block | None:
        """Time a block of a way; a way that fails is out of the bench, and its reason is noted."""
        running = self._running.get(way)
        if running is None:
            return None
        try:
            block = running.time_block(batches)
            running.check()
        except Exception as error:  # noqa: BLE001 - as above
            self._fail(way, error)
            return None
        return block

    def _size(self, batches: Iterator[Any]) -> int:
        """Return the steps of a block, the same for all ways, from a few steps of each."""
        given = list(itertools.islice(batches, 3))
        blocks = [self._block(way, given) for way in list(self._running)]
        return block_steps([block.seconds for block in blocks if block is not None])

    def _judge(self, way: str, blocks: Sequence[Block]) -> None:
        """Fail a way whose blocks were not steady, or whose steps ran otherwise."""
        steps = sum(block.steps for block in blocks)
        self.as_asked[way] = sum(block.as_asked for block in blocks) / max(1, steps)
        if len(blocks) < LEAST_PAIRS:
            self.failed[way] = (
                f"only {len(blocks)} of its blocks were steady: its steps went on getting ready, as with batches of "
                "ever new shapes"
            )
        elif self.as_asked[way] < LEAST_SHARE:
            share = f"{self.as_asked[way]:.0%}"
            self.failed[way] = f"only {share} of its steps ran as asked; the others ran as written"


def block_steps(seconds: Sequence[float]) -> int:
    """Return the steps of a block for the seconds of a step of each way."""
    wanted = max(BLOCK_SECONDS / max(seconds), SHORTEST_SECONDS / min(seconds))
    return max(1, min(MOST_STEPS, math.ceil(wanted)))


def _checked(runs: Any, steps: Any, total_steps: Any) -> tuple[str, ...]:
    """Check the arguments; return the names of the ways as hotloop writes them, eager first."""
    if os.environ.get(INSIDE):
        raise ConfigError(
            "bench: this file is imported by a bench that is going on; put the call under if __name__ == '__main__':"
        )
    for name, value, least in (("steps", steps, LEAST_STEPS), ("total_steps", total_steps, 1)):
        if value is not None and (type(value) is not int or value < least):
            raise ConfigError(f"{name} {value!r}: expected a whole number of {least} or more, or None")
    if runs is None:
        return ()
    if isinstance(runs, str) or not all(isinstance(run, str) for run in runs) or not runs:
        raise ConfigError(f"runs {runs!r}: expected names of tiers or presets, as ('eager', 'full+graph')")
    if wrong := [run for run in runs if run.strip().lower() in ("auto", "as-given")]:
        raise ConfigError(
            f"runs {wrong[0]!r}: expected tiers or presets; auto is a choice among them, and no way itself"
        )
    return tuple(dict.fromkeys([BASELINE, *(parse(run).name for run in runs)]))


def ways_for(source: Source) -> tuple[str, ...]:
    """Return the ways that make sense for a program on its device."""
    with seeded():
        workload = source.make()
    ways = ["eager", "regional", "full"]
    if any(parameter.device.type == "cuda" for parameter in workload.holdings().parameters().values()):
        ways = ["eager", "eager+graph", "regional+graph", "full", "full+graph"]
    if not Compiled(workload.models()).in_blocks:
        ways = [way for way in ways if not way.startswith("regional")]
    return tuple(ways)
