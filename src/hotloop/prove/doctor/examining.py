"""Examines a user's own workload: runs real steps, eager and compiled, and writes a record for `hotloop.diagnose`."""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import os
import random
import sys
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader

from hotloop import presets
from hotloop._torch.settings import quiet_tracing
from hotloop.compiling.observe import watch
from hotloop.diagnose import diagnose
from hotloop.errors import CompiledRunError, ConfigError
from hotloop.events import Compiled
from hotloop.measure import Census, StepClock, machine, signature
from hotloop.prove.doctor.observers import EagerObserver
from hotloop.prove.doctor.ways import EAGER, Way, Ways
from hotloop.record import RunRecord
from hotloop.step.workload import Workload, arguments, load_factory

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from hotloop.events import Event

LEAST_STEPS, ROUNDS = 4, 3
_AFTER_SHORT = 3
"""Steps from the short batch to the last compiled one: they show what the batch did to the full ones."""
WARM_UP = 3
"""Eager steps before anything is timed: allocations, the optimizer's state, choices of the libraries."""
SEED = 0


def examine(
    name: str,
    *,
    preset: str | None = None,
    steps: int = 30,
    total_steps: int | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Run a workload's steps each way, observe them, and return the record's document with its advice.

    The workload is made anew from a seed, and trains for some ``3 + 2 * steps`` steps each way. Nothing is written.

    Args:
        name: ``file.py:make`` or ``module:make``.
        preset: to compile with; None takes the compile that the program itself makes, or else ``default``.
        steps: that each way is timed for.
        total_steps: of the real run.
        say: is called with lines of progress.

    Raises:
        ConfigError: the workload or a setting cannot be used.
        Exception: the program's own, with a note of the step that raised it.
    """
    for option, given, least in (("--steps", steps, LEAST_STEPS), ("--total-steps", total_steps, 1)):
        if given is not None and (type(given) is not int or given < least):
            raise ConfigError(f"{option} {given}: expected a whole number of {least} or more")
    if preset is not None:
        preset = presets.get(preset).name
    record = RunRecord(None)
    record.update("settings", name=f"hotloop doctor {name}", workload=name, steps=steps, total_steps=total_steps)
    with _quiet():
        say(f"making {name}")
        _Examination(_made(name), record, steps, say).run(preset)
    record.finish()
    document = record.document
    return {**document, "advice": [advice.to_dict() for advice in diagnose(document)]}


def _made(name: str) -> Workload:
    """Import the program and make its workload from the seed."""
    factory = load_factory(name)
    random.seed(SEED)
    torch.manual_seed(SEED)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(SEED)
    return factory()


class _Examination:
    """An examination of one workload, from its first eager step to the last timed one."""

    def __init__(self, workload: Workload, record: RunRecord, steps: int, say: Callable[[str], None]) -> None:
        self._workload, self._record, self._count, self._say = workload, record, steps, say
        self._holdings = workload.holdings()  # refuses a wrong model or optimizer before a step is run
        self._batches = workload.endless()
        self._sizes = self._sizes_of_parameters()
        self._step = 0
        self._census = Census()
        self._device = torch.device("cpu")

    def run(self, preset: str | None) -> None:
        """Run the whole examination."""
        ways = Ways(self._workload, preset)
        self._device = ways.device
        self._record.update("settings", preset=ways.name, run=ways.name)
        self._record.update("environment", **self._environment())
        examined = [self._observe_eager(ways)]
        if ways.name != "none":
            examined.append(self._compile(ways))
        self._time([way for way in examined if not way.failed])
        figures = {way.name: way.figures() for way in examined}
        name = getattr(self._workload.step, "__name__", "step")
        shapes = {name: self._census.to_dict()}
        self._record.update("measurements", ways=figures, steps_done=self._step, shapes=shapes, trained=self._trained())
        if "step_ms" in (asked := figures.get(ways.name, {})):
            self._record.update("measurements", steady_step_ms=asked["step_ms"], cold_seconds=asked["cold_seconds"])

    def _sizes_of_parameters(self) -> dict[str, torch.Tensor]:
        """Return the norm of each parameter that requires a gradient: training changes it."""
        parameters = self._holdings.parameters().items()
        return {name: torch.linalg.vector_norm(one.detach()) for name, one in parameters if one.requires_grad}

    def _trained(self) -> dict[str, int]:
        """Return how many parameters no step so far has changed."""
        now = self._sizes_of_parameters()
        unchanged = sum(name in self._sizes and torch.equal(size, self._sizes[name]) for name, size in now.items())
        return {"parameters": len(now), "unchanged": unchanged, "steps": self._step}

    def _environment(self) -> dict[str, Any]:
        environment = machine.describe(self._device)
        if self._device.type == "cuda":
            environment["device_memory_bytes"] = torch.cuda.get_device_properties(self._device).total_memory
        if disabled := os.environ.get("HOTLOOP_DISABLE"):
            environment["HOTLOOP_DISABLE"] = disabled
        return environment

    def _observe_eager(self, ways: Ways) -> Way:
        self._say("eager steps")
        way = Way(EAGER, ways.running_eagerly)
        observer = EagerObserver(self._device, ways.compiled_modules)
        with way.running(), self._peak(way):
            self._run_step(way, note=False)  # not timed: a first step sets libraries up
            batch = next(self._batches)  # preparing the batch is not part of the step
            with observer.observe():
                self._run_step(way, batch, note=False)
            for _ in range(WARM_UP):
                self._run_step(way)
            waits = self._data_wait(way)
        self._record.update("measurements", **waits)
        self._add(observer.events())
        return way

    def _data_wait(self, way: Way) -> dict[str, Any]:
        """Run steps one after another, and return how long they waited for their batches.

        Workers load while a step runs, so only what the step had to wait for counts. The mean counts, not the median:
        of four workers that are too slow, every fourth batch is late.

        Returns:
            ``data_wait_ms`` and ``data_step_ms``, means a step; and ``data_workers``, for a DataLoader. Empty where the
            batches are a list, which nothing waits for, or an iterator, which would be used up.
        """
        given = self._workload.batches
        if isinstance(given, Iterator) or (isinstance(given, Sequence) and self._workload.before is None):
            return {}
        waited = ran = 0.0
        self._run_step(way, note=False)  # workers that still begin are no part of it
        for _ in range(self._count):
            began = time.perf_counter()
            batch = next(self._batches)
            there = time.perf_counter()
            self._run_step(way, batch, note=False)
            waited += there - began
            ran += time.perf_counter() - there
        found = {"data_wait_ms": 1e3 * waited / self._count, "data_step_ms": 1e3 * ran / self._count}
        return found | ({"data_workers": given.num_workers} if isinstance(given, DataLoader) else {})

    def _compile(self, ways: Ways) -> Way:
        """Compile, and run real steps.

        The first compiled step takes an epoch's first batch, as in a real run. If it took the short batch, torch would
        compile for that size, and treat the full batches as the exception.
        """
        self._batches = self._workload.endless()
        self._say("the program's own compile" if ways.as_given else f"compiling with {ways.name}")
        with watch() as events:
            way = ways.compiled()
            noted = self._run_in_order(way, events)
            self._record.update("components", **ways.components())
        self._add(events[noted:], self._step)
        way.cache_hits = sum(event.cache_hits for event in events if isinstance(event, Compiled))
        return way

    def _run_in_order(self, way: Way, events: Sequence[Event]) -> int:
        """Run steps one after another, as a run would; record each step's events, and return how many there were."""
        noted = 0
        short = last_batch(self._workload.batches, self._count)
        short = None if short is None else self._workload.ready(short)
        with self._failing(way), self._peak(way):
            for index in range(self._count):
                self._run_step(way, short if index == self._count - _AFTER_SHORT else None)
                self._add(events[noted:], self._step)
                noted = len(events)
        return noted

    def _time(self, ways: Sequence[Way]) -> None:
        """Time the ways by turns on the same batches, so that other load on the machine meets all of them."""
        self._say(f"timing {', '.join(way.name for way in ways)}")
        length = math.ceil(self._count / ROUNDS)
        for _ in range(ROUNDS):
            batches = list(itertools.islice(self._batches, length + 1))
            for way in ways:
                with way.running(), self._failing(way):
                    way.samples += self._time_block(way, batches)

    def _time_block(self, way: Way, batches: Sequence[Any]) -> list[float]:
        """Time consecutive steps; the first does not count, since another way ran before it."""
        clock = StepClock(self._device, pending=len(batches) + 1)
        self._wait()
        for batch in batches:
            mark = clock.start()
            self._run(way, batch)
            if self._device.type != "cuda":  # on a GPU the clock reads the device's own time
                self._wait()
            clock.stop(mark)
        self._wait()
        return [timing.seconds for timing in clock.take()][1:]

    def _run_step(self, way: Way, batch: Any = None, *, note: bool = True) -> None:
        """Run a step to its end and note its time, compiles included.

        Args:
            way: in force.
            batch: of the step; None takes the next one.
            note: False leaves the time out.
        """
        batch = next(self._batches) if batch is None else batch
        self._census.note(signature(arguments(batch), {}))
        began = time.perf_counter()
        self._run(way, batch)
        self._wait()
        if note:
            way.first.append(time.perf_counter() - began)
            self._record.append("steps", {"step": self._step, "seconds": way.first[-1], "running": way.name})

    def _run(self, way: Way, batch: Any) -> None:
        self._step += 1
        try:
            self._workload.run(batch)
        except Exception as error:
            error.add_note(f"hotloop doctor: raised in step {self._step}, which ran {way.name}")
            raise

    @contextlib.contextmanager
    def _failing(self, way: Way) -> Iterator[None]:
        """Note that compiled code failed or found no memory, and let the other way go on."""
        try:
            yield
        except (CompiledRunError, torch.OutOfMemoryError) as error:
            if way.name == EAGER:
                raise
            way.failed = f"{type(error).__name__}: {error}".partition("\n")[0][:300]
            self._say(f"{way.name} failed: {way.failed}")

    @contextlib.contextmanager
    def _peak(self, way: Way) -> Iterator[None]:
        """Note the most memory allocated on a GPU in the block; a CPU has no honest figure."""
        if self._device.type != "cuda":
            yield
            return
        torch.cuda.reset_peak_memory_stats(self._device)
        yield
        way.peak_bytes = torch.cuda.max_memory_allocated(self._device)

    def _wait(self) -> None:
        if self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)

    def _add(self, events: Iterable[Event], step: int | None = None) -> None:
        for event in events:
            self._record.append("events", {**event.to_dict(), **({} if step is None else {"step": step})})


def last_batch(batches: Any, within: int) -> Any | None:
    """Return the last batch of an epoch longer than ``within`` steps, which a short examination would never meet.

    It is often smaller than the others, and most recompiles come from it. For a list it is the last element; for a
    DataLoader it has as many samples as the loader's last batch, collated by the loader. None if the epoch is short, if
    its batches are all alike, or if they cannot be known beforehand (a generator).
    """
    if isinstance(batches, Sequence) and len(batches) > within:
        return batches[-1]
    if not isinstance(batches, DataLoader) or batches.batch_size is None or batches.drop_last:
        return None
    dataset: Any = batches.dataset
    try:
        size = len(batches.sampler) % batches.batch_size  # type: ignore[arg-type]
    except TypeError:  # an endless sampler has no length
        return None
    if not size or not hasattr(dataset, "__getitem__") or len(batches) <= within:
        return None
    return batches.collate_fn([dataset[index] for index in range(size)])


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep warnings of hotloop and dynamo off the log: they become advice."""
    log = logging.getLogger("hotloop")
    before = log.level
    log.setLevel(logging.ERROR)
    try:
        with quiet_tracing():
            yield
    finally:
        log.setLevel(before)
