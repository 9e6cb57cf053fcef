"""Examines a user's own workload: runs real steps, eager and compiled, and writes a record for `hotloop.diagnose`."""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import math
import os
import random
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader

from hotloop import presets
from hotloop._torch.settings import quiet_tracing
from hotloop.compiling.observe import watch
from hotloop.diagnose import diagnose
from hotloop.errors import CompiledRunError, ConfigError
from hotloop.events import HostSync
from hotloop.measure import Census, StepClock, machine, signature, typical
from hotloop.prove.doctor.host_waits import with_waits
from hotloop.prove.doctor.layers import fused_attention, padded_linears
from hotloop.prove.doctor.outside import data_wait, fused_optimizers, new_shapes
from hotloop.prove.doctor.step_calls import StepCalls
from hotloop.prove.doctor.step_operations import EagerObserver, EagerParts, host_bound
from hotloop.prove.doctor.variants import variants
from hotloop.prove.doctor.ways import EAGER, Way, Ways
from hotloop.record import RunRecord
from hotloop.step.workload import Workload, arguments, load_factory

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from hotloop.events import Event

LEAST_STEPS, ROUNDS = 4, 3
_AFTER_SHORT = 3
"""Steps from the short batch to the last compiled one: they show what the batch did to the full ones."""
WARM_UP = 3
"""Eager steps before anything is timed: allocations, the optimizer's state, choices of the libraries."""
SEED = 0
_LONG_COMPILE_S = 120.0
"""If the whole took longer to compile, blocks are not tried: the user did not ask to wait twice."""


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
    if type(steps) is not int or steps < LEAST_STEPS:
        raise ConfigError(f"--steps {steps}: expected a whole number of {LEAST_STEPS} or more")
    if total_steps is not None and (type(total_steps) is not int or total_steps < 1):
        raise ConfigError(f"--total-steps {total_steps}: expected a whole number of 1 or more")
    if preset is not None:
        preset = presets.get(preset).name
    record = RunRecord(None)
    record.update("settings", name=f"hotloop doctor {name}", workload=name, steps=steps, total_steps=total_steps)
    with _quiet():
        _Examination(record, steps, say).run(name, preset)
    record.finish()
    document = record.document
    return {**document, "advice": [advice.to_dict() for advice in diagnose(document)]}


class _Examination:
    """An examination of one workload, from the import of the program's file to the last timed step."""

    def __init__(self, record: RunRecord, steps: int, say: Callable[[str], None]) -> None:
        self._record, self._count, self._say = record, steps, say
        self._step = 0
        self._workload: Workload
        self._sizes: dict[str, torch.Tensor] = {}
        self._batches: Iterator[Any]
        self._device = torch.device("cpu")
        self._census = Census()
        self._calls: StepCalls
        self._observed: Sequence[Event] = ()

    def run(self, name: str, preset: str | None) -> None:
        """Run the whole examination."""
        self._make(name)
        ways = Ways(self._workload, preset)
        self._record.update("settings", preset=ways.name, run=ways.name)
        self._device = ways.device
        self._calls = StepCalls(self._device)
        self._record.update("environment", **self._environment())
        eager = ways.eager()
        self._observe_eager(eager, ways)
        examined = [eager, *self._suggested(ways)]
        if ways.name != "none":
            examined += self._compile(ways)
        self._time(examined)
        self._finish(examined, ways)

    def _make(self, name: str) -> None:
        """Import the program and make its workload."""
        self._say(f"making {name}")
        factory = load_factory(name)
        random.seed(SEED)
        torch.manual_seed(SEED)
        if (numpy := sys.modules.get("numpy")) is not None:
            numpy.random.seed(SEED)
        self._workload = factory()
        self._workload.holdings()  # refuses a wrong model or optimizer before a step is run
        self._batches = self._workload.endless()
        self._sizes = self._sizes_of_parameters()

    def _sizes_of_parameters(self) -> dict[str, torch.Tensor]:
        """Return the norm of each parameter that requires a gradient: training changes it."""
        parameters = self._workload.holdings().parameters().items()
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

    def _observe_eager(self, way: Way, ways: Ways) -> None:
        self._say("eager steps")
        observer = EagerObserver(self._device, ways.compiled_modules)
        with way.running(), self._peak(way):
            self._run_step(way, note=False)  # not timed: a first step sets libraries up
            batch = next(self._batches)  # preparing the batch is not part of the step
            with observer.observe():
                self._run_step(way, batch, note=False)
            with self._calls.observe():
                self._run_step(way, batch, note=False)
            for _ in range(WARM_UP):
                self._run_step(way)
            self._observed = with_waits(observer.events(), functools.partial(self._run_step, way, batch, note=False))
            run, known = functools.partial(self._run_step, way, note=False), set(self._census.counts)
            shapes = new_shapes(self._workload, self._batches, run, self._count, known)
            waits = data_wait(self._workload, self._batches, run, self._count)
        self._record.update("measurements", **waits, new_shapes=shapes)
        self._measure_forms()  # after the peak is known: their memory is not the step's
        self._add(self._observed)
        if self._device.type == "cuda":
            with way.running():
                batch = next(self._batches)
                step = functools.partial(self._run_step, way, batch, note=False)
                event = host_bound(step, self._device, min(way.first[-WARM_UP:]))
            self._add([event] if event else [])

    def _measure_forms(self) -> None:
        """Measure what optimizers and layers take, and what they would in another form."""
        self._record.update(
            "measurements",
            optimizers=fused_optimizers(self._workload, self._wait),
            linears=padded_linears(self._calls, self._workload.models(), self._device, self._wait),
            attention=fused_attention(self._calls, self._device, self._wait),
        )

    def _suggested(self, ways: Ways) -> list[Way]:
        """Run some eager steps in each way that may be faster: libraries set up what they need for it."""
        modules = [module for model in self._workload.models().values() for module in model.modules()]
        reads = [event for event in self._observed if isinstance(event, HostSync)]
        found = []
        for way in variants(self._calls, reads, modules, self._device, ways.running_eagerly):
            try:
                with way.running(), self._peak(way):
                    for _ in range(WARM_UP):
                        self._run_step(way, note=False)
            except Exception as error:  # noqa: BLE001 - the step needs what it has: strides for view(), weights that attention returns
                self._say(f"{way.name} failed: {error}")
                continue
            found.append(way)
        return found

    def _compile(self, ways: Ways) -> list[Way]:
        """Compile, run real steps, and observe one; then compile by blocks, if there are any and time is left.

        The first compiled step takes an epoch's first batch, as in a real run. If it took the short batch, torch would
        compile for that size, and treat the full batches as the exception.
        """
        self._batches = self._workload.endless()
        self._say("the program's own compile" if ways.as_given else f"compiling with {ways.name}")
        with watch() as events:
            way = ways.compiled()
            with way.running():
                noted = self._run_in_order(way, events)
                components = ways.components()
        self._add(events[noted:], self._step)
        way.count_cache_hits(events)
        self._record.update("components", **components)
        if way.failed:
            return [way]
        with way.running():
            self._observe_compiled(way, ways)
        blocks = None if sum(way.first) > _LONG_COMPILE_S else ways.by_blocks(components)
        if blocks is None:
            return [way]
        self._say("compiling by blocks")
        with watch() as events, blocks.running(), self._failing(blocks), self._peak(blocks):
            for _ in range(WARM_UP + 1):
                self._run_step(blocks)
        blocks.count_cache_hits(events)
        return [way, blocks]

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

    def _observe_compiled(self, way: Way, ways: Ways) -> None:
        """Record the parts of a step that run outside of compiled code."""
        parts = EagerParts(ways.names, self._device)
        step = functools.partial(self._run_step, way, next(self._batches), note=False)
        if self._device.type == "cuda":
            whole = parts.profile(step)
        else:
            whole = typical(way.first, skip=len(way.first) // 2)
            with parts.observe():
                step()
        self._add(parts.events(whole))

    def _time(self, ways: Sequence[Way]) -> None:
        """Time the ways by turns on the same batches, so that other load on the machine meets all of them."""
        running = [way for way in ways if not way.failed]
        self._say(f"timing {', '.join(way.name for way in running)}")
        length = math.ceil(self._count / ROUNDS)
        for _ in range(ROUNDS):
            batches = list(itertools.islice(self._batches, length + 1))
            for way in running:
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
        """Note that compiled code failed or found no memory, and let the other ways go on."""
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

    def _add(self, events: Sequence[Event], step: int | None = None) -> None:
        for event in events:
            self._record.append("events", {**event.to_dict(), **({} if step is None else {"step": step})})

    def _finish(self, examined: Sequence[Way], ways: Ways) -> None:
        for way in examined:
            if ways.holds_graph_memory and way.name.endswith("blocks"):
                way.peak_bytes = None  # it would include the memory of the first compile's graphs
        figures = {way.name: way.figures() for way in examined}
        for way in [way for way in examined if way.suggested]:
            figures[way.name] |= (beside := way.beside(examined[0]))
            if beside.get("difference") != "faster":  # nobody asked for it
                del figures[way.name]
        name = getattr(self._workload.step, "__name__", "step")
        shapes = {name: self._census.to_dict()}
        self._record.update("measurements", ways=figures, steps_done=self._step, shapes=shapes, trained=self._trained())
        if "step_ms" in (asked := figures.get(ways.name, {})):
            self._record.update("measurements", steady_step_ms=asked["step_ms"], cold_seconds=asked["cold_seconds"])


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
