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
from hotloop.prove.bench.way import Block, NotRunError, Ready, Running, in_turns

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import torch

ROUNDS = 12
"""Blocks of each way: with 12, the 95% interval of a median reaches from the third to the tenth."""
MOST_ROUNDS = 3 * ROUNDS
"""Rounds in all, if blocks are spoilt by steps that were still getting ready."""
TURNS = 3
"""How often each way is set up, if no two of them fit into memory together."""
LEAST_SHARE = 0.5
"""The share of a way's timed steps that must have run as asked for its figures to be given."""
BLOCK_SECONDS, SHORTEST_SECONDS, MOST_STEPS = 0.15, 0.05, 400
"""A block of the slowest way takes about the first, a block of the fastest no less than the second; its most steps."""
_ROOM = 0.9
"""The share of free memory that ways which run by turns may be expected to take."""
_UNKNOWN = 1.5
"""A way whose memory is not known is expected to take so many times eager's."""


@dataclasses.dataclass
class Plan:
    """The ways that a bench is to measure, and its measurements so far.

    Args:
        ways: by name, eager first.
        cold: how ways got ready in a process of their own.
        here: how they got ready in this process; ``shared`` maps ways to the way whose compiled code they found.
        failed: why a way was not timed.
        eager_bytes: the most memory of eager steps in this process; None if it is not known.
        times: each way's blocks by round, with eager's beside them; None if the way has none.
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
        return [way for way in self.ways if way not in self.failed]

    def start(self, way: str) -> Ready:
        """Return how a way got ready, in a process of its own if possible."""
        return self.cold.get(way) or self.here[way]

    def compiled_before(self, way: str) -> float:
        """Return the seconds of a compile that a way found done by another way in this process."""
        if way in self.cold or way not in self.shared:
            return 0.0
        return max(0.0, self.here[self.shared[way]].compile_seconds - self.here[way].compile_seconds)

    def notes_on(self, way: str) -> Iterator[str]:
        """Yield the facts that a reader of a way's figures has to know."""
        share = self.as_asked[way] / self.timed[way]
        if share < 0.995:  # noqa: PLR2004 - it would be shown as 100%
            yield f"{share:.0%} of its steps ran as asked, the others as written: shapes that it has no code for"
        for name, part in self.parts.get(way, {}).items():
            if part["state"] == "partial":
                causes = "; ".join(dict.fromkeys(str(cause["reason"]) for cause in part["causes"]))
                breaks = part["graph_breaks"]
                yield f"{name} is compiled in part ({breaks} graph breaks): {causes or 'no cause known'}"
        if self.compiled_before(way):
            yield f"its cold seconds count the compile that it found made for {self.shared[way]}"


class Rounds:
    """Times the ways of a plan.

    Args:
        plan: receives the measurements.
        start: makes a program and gets a way ready.
        steps: timed steps of each way; None takes `ROUNDS` blocks of `BLOCK_SECONDS`.
        say: is called with lines of progress.
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
        """Time all ways that can be timed."""
        found = self._groups()
        if found is None:
            self._plan.notes.append(
                f"two ways do not fit into memory together: they ran one after another, {TURNS} times, which is noisier"
            )
            self._run_alone()
        for group in found or ():
            self._run_group(group)
        for way in self._plan.live():
            self._judge(way)

    def _groups(self) -> list[list[str]] | None:
        """Return the ways that run by turns together: all if they fit, else eager with as many as fit."""
        live = [way for way in self._plan.live() if way != BASELINE]
        assert self._plan.device is not None
        free, eager = free_bytes(self._plan.device), self._plan.eager_bytes
        if free is None or eager is None:
            return [[BASELINE, *live]]
        known = {way: ready.peak_bytes for way, ready in self._plan.cold.items()}
        peaks = {way: known.get(way) or _UNKNOWN * eager for way in live}
        return groups({BASELINE: known.get(BASELINE) or eager, **peaks}, _ROOM * free)

    def _run_alone(self) -> None:
        """Time each way on its own, several times over, beside the eager blocks of the same time around."""
        per_turn = -(-self._rounds // TURNS)
        blocks: dict[str, list[Block | None]] = {name: [] for name in self._plan.live()}
        for turn in range(TURNS):
            for name in self._plan.live():
                self._say(f"{name}: on its own, {turn + 1} of {TURNS}")
                if (running := self._ready(name)) is not None:
                    with contextlib.closing(running):
                        blocks[name] += self._blocks_alone(name, running, per_turn)
                running = None
                gc.collect()
        eager = [block for block in blocks.pop(BASELINE) if block is not None]
        # Eager beside itself as the others stand beside it: from another time around.
        self._plan.again = [Sample(eager[i - per_turn].seconds, block.seconds) for i, block in enumerate(eager)]
        self._plan.times[BASELINE] = [self._sample(BASELINE, block, block) for block in eager]
        for name, found in blocks.items():
            pairs = zip(found, eager, strict=False)
            self._plan.times[name] = [self._sample(name, block, beside) for block, beside in pairs]

    def _blocks_alone(self, name: str, running: Running, number: int) -> list[Block | None]:
        batches = running.workload.endless()
        group = {name: running}
        if not self._block_steps:
            self._block_steps = self._size(group, batches)
        found = [
            self._block(name, group, list(itertools.islice(batches, self._block_steps))) if group else None
            for _ in range(number)
        ]
        self._plan.parts[name] = {key: part.to_dict() for key, part in running.parts().items()}
        return found

    def _run_group(self, names: Sequence[str]) -> None:
        with contextlib.ExitStack() as stack:
            group: dict[str, Running] = {}
            for name in names:
                self._say(f"{name}: getting ready")
                running = self._ready(name)
                if running is not None:
                    stack.callback(running.close)
                    group[name] = running
            if BASELINE in group:
                self._run_turns(group, group[BASELINE].workload.endless())
            group.clear()
        gc.collect()

    def _ready(self, name: str) -> Running | None:
        """Get a way ready here; None if it fails, with the reason in the plan. Eager's exceptions are the user's."""
        try:
            running, ready = self._start(name)
        except Exception as error:
            if name == BASELINE:
                raise
            self._fail(name, error)
            return None
        self._plan.here.setdefault(name, ready)  # the first time is the one that found nothing ready
        for other in self._plan.here:  # in one process, code is compiled once
            if other != name and running.tier.compiles and other.removesuffix("+graph") == running.tier.base:
                self._plan.shared.setdefault(name, other)
        return running

    def _fail(self, name: str, error: Exception) -> None:
        """Note why a way failed; the class of an exception that is not hotloop's own is named."""
        own = isinstance(error, NotRunError | HotloopError)
        self._plan.failed[name] = str(error) if own else f"{type(error).__name__}: {error}"

    def _run_turns(self, group: dict[str, Running], batches: Iterator[Any]) -> None:
        """Run blocks by turns until each way has enough that were steady."""
        count = self._block_steps or self._size(group, batches)
        names = [*group, BASELINE]  # eager twice: how far it is from itself is the noise
        found: dict[str, list[Sample | None]] = {name: [] for name in group}
        for turn, order in enumerate(in_turns(len(names), MOST_ROUNDS)):
            self._say(f"round {turn + 1} of {self._rounds}: {', '.join(group)}")
            given = list(itertools.islice(batches, count))
            blocks: dict[int, Block] = {}
            for place in order:
                if names[place] in group and (block := self._block(names[place], group, given)) is not None:
                    blocks[place] = block
            self._note(names, blocks, found)
            enough = (sum(sample is not None for sample in found[name]) >= self._rounds for name in group)
            if all(enough) or BASELINE not in group:
                break
        for name, samples in found.items():
            self._plan.times.setdefault(name, []).extend(samples)
        for name, running in group.items():
            self._plan.parts[name] = {key: part.to_dict() for key, part in running.parts().items()}

    def _block(self, name: str, group: dict[str, Running], batches: Sequence[Any]) -> Block | None:
        """Time a block of a way; a way that fails leaves the group, and its reason is noted."""
        running = group[name]
        try:
            block = running.time_block(batches)
            running.check()
        except Exception as error:
            if name == BASELINE:
                raise
            self._fail(name, error)
        else:
            return block
        group.pop(name).close()
        return None

    def _note(self, names: Sequence[str], blocks: dict[int, Block], found: dict[str, list[Sample | None]]) -> None:
        """Keep a round's blocks beside eager's first; a block that was not steady is None."""
        eager, last = blocks.get(0), len(names) - 1
        if eager is None:
            return
        for place, name in enumerate(names[:last]):
            found[name].append(self._sample(name, blocks.get(place), eager))
        if last in blocks:
            self._plan.again.append(Sample(blocks[last].seconds, eager.seconds))

    def _sample(self, name: str, block: Block | None, eager: Block) -> Sample | None:
        """Make a sample of a steady block, and count how its steps ran."""
        if block is None or not block.steady:
            return None
        self._plan.timed[name] = self._plan.timed.get(name, 0) + block.steps
        self._plan.as_asked[name] = self._plan.as_asked.get(name, 0) + block.as_asked
        return Sample(block.seconds, eager.seconds)

    def _size(self, group: dict[str, Running], batches: Iterator[Any]) -> int:
        """Return the steps of a block, the same for all ways, from a few steps of each."""
        given = list(itertools.islice(batches, 3))
        blocks = [self._block(name, group, given) for name in list(group)]
        seconds = [block.seconds for block in blocks if block is not None]
        return block_steps(min(seconds), max(seconds))

    def _judge(self, way: str) -> None:
        """Fail a way whose blocks were not steady, or whose steps ran otherwise."""
        plan = self._plan
        blocks = plan.times.get(way, [])
        steady = [sample for sample in blocks if sample is not None]
        if len(steady) < LEAST_PAIRS:
            plan.failed[way] = (
                f"only {len(steady)} of {len(blocks)} blocks were steady: its steps went on getting ready, as with "
                "batches of ever new shapes"
            )
        elif plan.as_asked[way] < LEAST_SHARE * plan.timed[way]:
            share = plan.as_asked[way] / plan.timed[way]
            plan.failed[way] = f"only {share:.0%} of its steps ran as asked; the others ran as written"


def block_steps(fastest: float, slowest: float) -> int:
    """Return the steps of a block for the seconds of a step in the fastest and in the slowest way."""
    wanted = max(BLOCK_SECONDS / slowest, SHORTEST_SECONDS / fastest)
    return max(1, min(MOST_STEPS, math.ceil(wanted)))


def groups(peaks: dict[str, float], room: float) -> list[list[str]] | None:
    """Return groups of ways that fit into memory together; each begins with eager.

    Args:
        peaks: bytes that each way takes, eager's first.
        room: bytes of memory.

    Returns:
        the groups; None if eager and some other way do not fit together.
    """
    eager, *others = peaks
    if any(peaks[eager] + peaks[way] > room for way in others):
        return None
    found = [[eager]]
    for way in others:
        if sum(peaks[name] for name in found[-1]) + peaks[way] > room:
            found.append([eager])
        found[-1].append(way)
    return found
