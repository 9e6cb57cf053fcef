"""The measurements of a bench: each way gets ready, then all of them take blocks of steps by turns."""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING, Any

import torch

from hotloop.errors import ConfigError, HotloopError
from hotloop.prove.bench.child import run_cold
from hotloop.prove.bench.verdict import BASELINE, LEAST_PAIRS
from hotloop.prove.bench.way import NotRunError, in_turns, start

if TYPE_CHECKING:
    import contextlib
    from collections.abc import Callable, Iterator, Sequence

    from hotloop.prove.bench.way import Block, Ready, Running
    from hotloop.prove.workloads import Source

ROUNDS = 12
"""Blocks of each way: with 12, the 95% interval of a median reaches from the third to the tenth."""
MOST_ROUNDS = 3 * ROUNDS
"""Rounds in all, if blocks are spoilt by steps that were still getting ready."""
LEAST_SHARE = 0.5
"""The share of a way's timed steps that must have run as asked for its figures to be given."""
BLOCK_SECONDS, SHORTEST_SECONDS, MOST_STEPS = 0.15, 0.05, 400
"""A block of the slowest way takes about the first, a block of the fastest no less than the second; its most steps."""


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
            if block is not None and (block.steady or way == BASELINE):
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
