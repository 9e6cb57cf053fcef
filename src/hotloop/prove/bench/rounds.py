"""The rounds of a bench: ways that are ready take blocks of steps by turns, as many together as memory holds."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import itertools
import math
from typing import TYPE_CHECKING, Any

from hotloop.errors import HotloopError
from hotloop.measure.machine import free_bytes
from hotloop.prove.bench.verdict import BASELINE, LEAST_PAIRS, Sample
from hotloop.prove.bench.way import Block, NotRunError, Ready, Running, block, in_turns

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import torch

ROUNDS = 12
"""Blocks of each way: with 12, the 95% interval of a median goes from the third to the tenth."""
MOST_ROUNDS = 3 * ROUNDS
"""Rounds in all, where a way's blocks are spoilt by steps that were still getting ready."""
TURNS = 3
"""How often each way is set up, where no two of them fit into memory together."""
LEAST_SHARE = 0.5
"""Of a way's timed steps, how many must have run as asked for its figures to be given."""
BLOCK_SECONDS, SHORTEST_SECONDS, MOST_STEPS = 0.15, 0.05, 400
"""A block of the slowest way takes about this long, and one of the fastest no less than the second; steps at most."""
_ROOM = 0.9
"""Of free memory, how much ways that run by turns may be expected to take."""
_UNKNOWN = 1.5
"""Times eager's memory that a way is expected to take whose own is not known."""


@dataclasses.dataclass
class Plan:
    """What a bench is to measure, and what it has found so far.

    Args:
        ways: by name, eager first.
        cold: how ways got ready in a process of their own.
        here: how they got ready in this process; ``shared`` names those that found code that another way had compiled.
        failed: why a way was not timed.
        eager_bytes: the most memory of eager steps in this process; None where it is not known.
        times: each way's blocks by round, with eager's beside them; None where the way has none.
        again: eager's second blocks.
        as_asked, timed: how many of a way's timed steps ran as asked, and all of them.
    """

    ways: tuple[str, ...]
    device: torch.device | None = None
    eager_bytes: int | None = None
    cold: dict[str, Ready] = dataclasses.field(default_factory=dict)
    here: dict[str, Ready] = dataclasses.field(default_factory=dict)
    shared: dict[str, str] = dataclasses.field(default_factory=dict)
    failed: dict[str, str] = dataclasses.field(default_factory=dict)
    times: dict[str, list[Sample | None]] = dataclasses.field(default_factory=dict)
    again: list[Sample | None] = dataclasses.field(default_factory=list)
    as_asked: dict[str, int] = dataclasses.field(default_factory=dict)
    timed: dict[str, int] = dataclasses.field(default_factory=dict)
    parts: dict[str, dict[str, dict[str, Any]]] = dataclasses.field(default_factory=dict)
    notes: list[str] = dataclasses.field(default_factory=list)

    def live(self) -> list[str]:
        """Name the ways that have not failed."""
        return [one for one in self.ways if one not in self.failed]


class Rounds:
    """Times the ways of a plan.

    Args:
        plan: gets what is found.
        start: makes a program and gets a way ready.
        steps: timed steps of each way; None takes what `BLOCK_SECONDS` hold, `ROUNDS` times.
        say: gets lines of progress.
    """

    def __init__(
        self,
        plan: Plan,
        start: Callable[[str], tuple[Running, Ready]],
        steps: int | None,
        say: Callable[[str], None],
    ) -> None:
        self._plan, self._start, self._say = plan, start, say
        self._rounds = ROUNDS if steps is None else min(ROUNDS, steps // 2)
        self._block_steps = 0 if steps is None else max(1, steps // self._rounds)

    def run(self) -> None:
        """Time everything that can be timed."""
        found = self._groups()
        if found is None:
            self._plan.notes.append(
                f"two ways do not fit into memory together: they ran one after another, {TURNS} times, which is noisier"
            )
            self._alone()
        for group in found or ():
            self._group(group)
        for way in self._plan.live():
            self._judge(way)

    def _groups(self) -> list[list[str]] | None:
        """Give the ways that run by turns together: all, if that fits; else eager with as many as fit."""
        live = [one for one in self._plan.live() if one != BASELINE]
        assert self._plan.device is not None
        free, eager = free_bytes(self._plan.device), self._plan.eager_bytes
        if free is None or eager is None:
            return [[BASELINE, *live]]
        known = {way: ready.peak_bytes for way, ready in self._plan.cold.items()}
        peaks = {way: known.get(way) or _UNKNOWN * eager for way in live}
        return groups({BASELINE: known.get(BASELINE) or eager, **peaks}, _ROOM * free)

    def _alone(self) -> None:
        """Time each way on its own, several times over; what stands beside is eager of the same time around."""
        each = -(-self._rounds // TURNS)
        blocks: dict[str, list[Block | None]] = {name: [] for name in self._plan.live()}
        for turn in range(TURNS):
            for name in self._plan.live():
                self._say(f"{name}: on its own, {turn + 1} of {TURNS}")
                if (running := self._ready(name)) is not None:
                    with contextlib.closing(running):
                        blocks[name] += self._blocks_alone(name, running, each)
                running = None
                gc.collect()
        eager = [one for one in blocks.pop(BASELINE) if one is not None]
        # Eager beside itself as the others stand beside it: from another time around.
        self._plan.again = [Sample(eager[i - each].seconds, one.seconds) for i, one in enumerate(eager)]
        self._plan.times[BASELINE] = [self._sample(BASELINE, one, one) for one in eager]
        for name, found in blocks.items():
            self._plan.times[name] = [
                self._sample(name, one, beside) for one, beside in zip(found, eager, strict=False)
            ]

    def _blocks_alone(self, name: str, running: Running, number: int) -> list[Block | None]:
        batches = running.workload.endless()
        if not self._block_steps:
            self._block_steps = self._size({name: running}, batches)
        group = {name: running}
        found = [
            self._block(name, group, list(itertools.islice(batches, self._block_steps))) if group else None
            for _ in range(number)
        ]
        self._plan.parts[name] = {key: part.to_dict() for key, part in running.parts().items()}
        return found

    def _group(self, names: Sequence[str]) -> None:
        with contextlib.ExitStack() as stack:
            group: dict[str, Running] = {}
            for name in names:
                self._say(f"{name}: getting ready")
                running = self._ready(name)
                if running is not None:
                    stack.callback(running.close)
                    group[name] = running
            if BASELINE in group:
                self._turns(group, group[BASELINE].workload.endless())
            group.clear()
        gc.collect()

    def _ready(self, name: str) -> Running | None:
        """Get a way ready here; where it does not, the plan says why. What eager raises is the user's."""
        try:
            running, ready = self._start(name)
        except Exception as error:
            if name == BASELINE:
                raise
            self._plan.failed[name] = _said(error)
            return None
        self._plan.here.setdefault(name, ready)  # the first time is the one that found nothing ready
        self._share(name, running)
        return running

    def _share(self, name: str, running: Running) -> None:
        """Note whose code a way found compiled: in one process, code is compiled once."""
        for other in self._plan.here:
            if other != name and running.tier.compiles and other.removesuffix("+graph") == running.tier.base:
                self._plan.shared.setdefault(name, other)

    def _turns(self, group: dict[str, Running], batches: Iterator[Any]) -> None:
        """Run blocks by turns until each way has enough that were steady."""
        count = self._block_steps or self._size(group, batches)
        names = [*group, BASELINE]  # eager twice: how far it is from itself is the noise
        found: dict[str, list[Sample | None]] = {name: [] for name in group}
        for turn, order in enumerate(in_turns(len(names), MOST_ROUNDS)):
            self._say(f"round {turn + 1} of {self._rounds}: {', '.join(group)}")
            given = list(itertools.islice(batches, count))
            times: dict[int, Block] = {}
            for place in order:
                if names[place] in group and (done := self._block(names[place], group, given)) is not None:
                    times[place] = done
            self._note(names, times, found)
            enough = (sum(one is not None for one in found[name]) >= self._rounds for name in group)
            if all(enough) or BASELINE not in group:
                break
        for name, samples in found.items():
            self._plan.times.setdefault(name, []).extend(samples)
        for name, running in group.items():
            self._plan.parts[name] = {key: part.to_dict() for key, part in running.parts().items()}

    def _block(self, name: str, group: dict[str, Running], batches: Sequence[Any]) -> Block | None:
        """Time a block of a way; one that is left then leaves the group, with its reason."""
        running = group[name]
        try:
            done = block(running, batches)
            running.check()
        except Exception as error:
            if name == BASELINE:
                raise
            self._plan.failed[name] = _said(error)
        else:
            return done
        group.pop(name).close()
        return None

    def _note(self, names: Sequence[str], times: dict[int, Block], found: dict[str, list[Sample | None]]) -> None:
        """Keep a round's blocks beside eager's first one; what was not steady is none."""
        eager, last = times.get(0), len(names) - 1
        if eager is None:
            return
        for place, name in enumerate(names[:last]):
            found[name].append(self._sample(name, times.get(place), eager))
        if last in times:
            self._plan.again.append(Sample(times[last].seconds, eager.seconds))

    def _sample(self, name: str, one: Block | None, eager: Block) -> Sample | None:
        """Make a sample of a block that was steady, and count how its steps ran."""
        if one is None or not one.steady:
            return None
        self._plan.timed[name] = self._plan.timed.get(name, 0) + one.steps
        self._plan.as_asked[name] = self._plan.as_asked.get(name, 0) + one.as_asked
        return Sample(one.seconds, eager.seconds)

    def _size(self, group: dict[str, Running], batches: Iterator[Any]) -> int:
        """Give the steps of a block, the same for all: from a few steps of each."""
        given = list(itertools.islice(batches, 3))
        done = [self._block(name, group, given) for name in list(group)]
        seconds = [one.seconds for one in done if one is not None]
        return block_steps(min(seconds), max(seconds))

    def _judge(self, way: str) -> None:
        """A way whose blocks were not steady, or whose steps ran otherwise, is not timed."""
        plan = self._plan
        known = [one for one in plan.times.get(way, ()) if one is not None]
        if len(known) < LEAST_PAIRS:
            plan.failed[way] = (
                f"only {len(known)} of {len(plan.times.get(way, ()))} blocks were steady: its steps went on getting "
                "ready, as with batches of ever new shapes"
            )
        elif plan.as_asked[way] < LEAST_SHARE * plan.timed[way]:
            share = plan.as_asked[way] / plan.timed[way]
            plan.failed[way] = f"only {share:.0%} of its steps ran as asked; the others ran as written"


def _said(error: Exception) -> str:
    """Give the reason that an exception is; what is not hotloop's own is named."""
    own = isinstance(error, NotRunError | HotloopError)
    return str(error) if own else f"{type(error).__name__}: {error}"


def block_steps(fastest: float, slowest: float) -> int:
    """Give the steps of a block from the seconds of a step in the fastest and in the slowest way."""
    wanted = max(BLOCK_SECONDS / slowest, SHORTEST_SECONDS / fastest)
    return max(1, min(MOST_STEPS, math.ceil(wanted)))


def groups(peaks: dict[str, float], room: float) -> list[list[str]] | None:
    """Give the ways that run by turns together: each group has eager, and takes no more than the room.

    Args:
        peaks: bytes that each takes, eager's first.
        room: bytes there are.

    Returns:
        the groups; None where not even eager and each other one fit together.
    """
    eager, *others = peaks
    if any(peaks[eager] + peaks[one] > room for one in others):
        return None
    found = [[eager]]
    for one in others:
        if sum(peaks[name] for name in found[-1]) + peaks[one] > room:
            found.append([eager])
        found[-1].append(one)
    return found
