"""Examines a user's own workload: real steps, eager and compiled, into a run record that `hotloop.diagnose` reads."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import itertools
import logging
import math
import os
import platform
import random
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from hotloop import presets
from hotloop._torch.settings import quiet_tracing
from hotloop.compiling.observe import watch
from hotloop.diagnose import diagnose
from hotloop.errors import CompiledRunError, ConfigError
from hotloop.events import Compiled
from hotloop.measure import Census, StepClock, interval, signature, typical
from hotloop.prove.doctor import busy
from hotloop.prove.doctor.eager_look import EagerLook
from hotloop.prove.doctor.eager_parts import EagerParts, device_seconds
from hotloop.prove.doctor.odd import odd_batch
from hotloop.prove.doctor.switches import Switches
from hotloop.prove.doctor.ways import Way, Ways
from hotloop.record import RunRecord
from hotloop.step.workload import Workload, arguments, load_factory
from hotloop.version import __version__

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from hotloop.events import Event

LEAST_STEPS, ROUNDS = 4, 3
_AFTER_ODD = 3
"""Steps from the odd batch to the end of the compiled ones: what it did to the full batches shows in them."""
WARM_UP = 3
"""Eager steps before anything is timed: allocations, the optimizer's state, the libraries' own choices."""
SEED = 0
_LONG_COMPILE_S = 120.0
"""Where the whole took longer to compile, blocks are not tried: the user did not ask to wait twice."""


def examine(
    name: str,
    *,
    preset: str | None = None,
    steps: int = 30,
    total_steps: int | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Run a workload's steps in each way, look at what goes on, and give the record's document with its advice.

    The workload is made anew, from a seed, and trained on for some ``3 + 2 * steps`` steps a way; nothing is written.

    Args:
        name: ``file.py:make`` or ``module:make``.
        preset: to compile with; None looks at the compile that the program itself makes, or takes ``default``.
        steps: that each way is timed for.
        total_steps: that the real run will have.
        say: is told what goes on.

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
    """One examination, from the import of the program's file to the last timed step."""

    def __init__(self, record: RunRecord, steps: int, say: Callable[[str], None]) -> None:
        self._record, self._count, self._say = record, steps, say
        self._step = 0
        self._workload: Workload
        self._batches: Iterator[Any]
        self._device = torch.device("cpu")
        self._census = Census()

    def run(self, name: str, preset: str | None) -> None:
        """Do all of it."""
        self._make(name)
        ways = Ways(self._workload, preset)
        self._record.update("settings", preset=ways.name, run=ways.name)
        self._device = _device_of(ways.models)
        self._record.update("environment", **_environment(self._device))
        eager = ways.eager()
        self._look_at_eager(eager, ways)
        found = [eager]
        if ways.name != "none":
            found += self._compile(ways)
        self._time(found)
        self._finish(found, ways)

    def _make(self, name: str) -> None:
        """Import the program and make its workload, watching who changes torch's settings."""
        own = _folder_of(name)
        self._say(f"making {name}")
        with Switches("the import", own) as importing:
            factory = load_factory(name)
        _seed()
        with Switches("make()", own) as making:
            self._workload = factory()
        self._workload.holdings()  # refuses what is no model or optimizer before a step is run
        self._batches = self._workload.endless()
        self._own = own
        self._add([*importing.events, *making.events])

    def _look_at_eager(self, way: Way, ways: Ways) -> None:
        self._say("eager steps")
        look = EagerLook(self._device, ways.compiled_modules)
        with way.running(), self._peak(way):
            with Switches("a step", self._own, meant=False) as switches:
                self._one(way, note=False)  # not noted: looking takes time of its own
            batch = next(self._batches)  # what makes it ready is no part of the step
            with look.looking():
                self._one(way, batch, note=False)
            for _ in range(WARM_UP):
                self._one(way)
        self._add([*switches.events, *look.events()])
        if self._device.type == "cuda":
            with way.running():
                batch = next(self._batches)
                step = functools.partial(self._one, way, batch, note=False)
                found = busy.host_bound(step, self._device, min(way.first[-WARM_UP:]))
            self._add([found] if found else [])

    def _compile(self, ways: Ways) -> list[Way]:
        """Compile, run real steps, and look at one of them; then by blocks, where there are any and time is left.

        The first compiled step takes an epoch's first batch, as a run's does: code that met the odd batch first would
        be for that, and the full batches what came beside it.
        """
        self._batches = self._workload.endless()
        self._say("the program's own compile" if ways.as_given else f"compiling with {ways.name}")
        with watch() as events:
            way = ways.compiled()
            with way.running():
                noted = self._pass(way, events)
                components = ways.components()
        self._add(events[noted:], self._step)
        way.cache_hits = _hits(events)
        self._record.update("components", **components)
        if way.failed:
            return [way]
        with way.running():
            self._look_at_compiled(way, ways)
        blocks = None if sum(way.first) > _LONG_COMPILE_S else ways.by_blocks(components)
        if blocks is None:
            return [way]
        self._say("compiling by blocks")
        with watch() as events, blocks.running(), self._failing(blocks), self._peak(blocks):
            for _ in range(WARM_UP + 1):
                self._one(blocks)
        blocks.cache_hits = _hits(events)
        return [way, blocks]

    def _pass(self, way: Way, events: Sequence[Event]) -> int:
        """Run steps one after another, as a run would, and note what is observed in each; gives how many that were."""
        noted = 0
        odd = odd_batch(self._workload.batches, self._count)
        odd = None if odd is None else self._workload.ready(odd)
        with self._failing(way), self._peak(way):
            for index in range(self._count):
                self._one(way, odd if index == self._count - _AFTER_ODD else None)
                self._add(events[noted:], self._step)
                noted = len(events)
        return noted

    def _look_at_compiled(self, way: Way, ways: Ways) -> None:
        """See what of a step runs outside of compiled code; nothing to say where all of it does."""
        parts = EagerParts(ways.names, self._device)
        steady = typical(way.first, skip=len(way.first) // 2)
        step = functools.partial(self._one, way, next(self._batches), note=False)
        if self._device.type == "cuda":
            with parts.looking():
                ranges, steady = device_seconds(step)
            parts.profiled(ranges)
        else:
            with parts.looking():
                step()
        self._add(parts.events(steady))

    def _time(self, ways: Sequence[Way]) -> None:
        """Time the ways in turns, on the same batches, so that what the machine does meanwhile meets all of them."""
        running = [way for way in ways if not way.failed]
        self._say(f"timing {', '.join(way.name for way in running)}")
        length = math.ceil(self._count / ROUNDS)
        for _ in range(ROUNDS):
            batches = list(itertools.islice(self._batches, length + 1))
            for way in running:
                with way.running(), self._failing(way):
                    way.samples += self._block(way, batches)

    def _block(self, way: Way, batches: Sequence[Any]) -> list[float]:
        """Time steps that follow each other; the first is not counted, since another way ran before it."""
        clock = StepClock(self._device, pending=len(batches) + 1)
        self._wait()
        for batch in batches:
            mark = clock.start()
            self._run(way, batch)
            if self._device.type != "cuda":  # only there the clock reads the device's own time
                self._wait()
            clock.stop(mark)
        self._wait()
        return [timing.seconds for timing in clock.take()][1:]

    def _one(self, way: Way, batch: Any = None, *, note: bool = True) -> None:
        """Run one step to its end; its time is noted, compiles and all. Without a batch it takes the next."""
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
        """Note a failure that is the compiled code's, or want of memory for it: the other ways go on."""
        try:
            yield
        except (CompiledRunError, torch.OutOfMemoryError) as error:
            if way.name == "eager":
                raise
            way.failed = f"{type(error).__name__}: {error}".partition("\n")[0][:300]
            self._say(f"{way.name} failed: {way.failed}")

    @contextlib.contextmanager
    def _peak(self, way: Way) -> Iterator[None]:
        """Note the most memory that was allocated on a GPU meanwhile; on a CPU nobody can tell it honestly."""
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

    def _finish(self, found: Sequence[Way], ways: Ways) -> None:
        graphs = _keeps_memory(ways.preset)
        figures = {way.name: _figures(way, with_peak=not (graphs and way.name.endswith("blocks"))) for way in found}
        name = getattr(self._workload.step, "__name__", "step")
        shapes = {name: self._census.to_dict()}
        self._record.update("measurements", ways=figures, steps_done=self._step, shapes=shapes)
        if "step_ms" in (asked := figures.get(ways.name, {})):
            self._record.update("measurements", steady_step_ms=asked["step_ms"], cold_seconds=asked["cold_seconds"])


def _figures(way: Way, *, with_peak: bool) -> dict[str, Any]:
    """Give a way's figures: a typical step, and what its first steps took beyond it, compiles among them."""
    figures: dict[str, Any] = {"failed": way.failed} if way.failed else {}
    if way.samples:
        step = typical(way.samples, skip=0)
        figures |= {"step_ms": step * 1e3, "steps": len(way.samples)}
        low, high = interval(way.samples)
        if math.isfinite(low) and math.isfinite(high):  # too few samples allow no such statement
            figures |= {"step_ms_low": low * 1e3, "step_ms_high": high * 1e3}
        figures["cold_seconds"] = sum(each - step for each in way.first if each > 2 * step)
    if way.cache_hits:
        figures["cache_hits"] = way.cache_hits
    if way.peak_bytes is not None and with_peak:
        figures["peak_bytes"] = way.peak_bytes
    return figures


def _hits(events: Sequence[Event]) -> int:
    """Count the graphs that came out of torch's caches: what was got ready with them was not got ready cold."""
    return sum(event.cache_hits for event in events if isinstance(event, Compiled))


def _keeps_memory(preset: str) -> bool:
    """Tell whether a preset's CUDA graphs hold their memory while another way runs, whose peak would count it."""
    chosen = presets.get(preset)
    return chosen.mode in ("reduce-overhead", "max-autotune") or bool(chosen.options.get("triton.cudagraphs"))


def _folder_of(name: str) -> Path | None:
    """Give the folder of the program that a workload's name points to, None where it cannot be found."""
    place = name.rpartition(":")[0]
    if place.endswith(".py"):
        return Path(place).resolve().parent
    try:
        spec = importlib.util.find_spec(place)
    except (ImportError, ValueError):
        return None
    return Path(spec.origin).resolve().parent if spec is not None and spec.origin else None


def _device_of(models: dict[str, torch.nn.Module]) -> torch.device:
    tensors = (one for model in models.values() for one in itertools.chain(model.parameters(), model.buffers()))
    first = next(tensors, None)
    return torch.device("cpu") if first is None else first.device


def _seed() -> None:
    random.seed(SEED)
    torch.manual_seed(SEED)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(SEED)


def _environment(device: torch.device) -> dict[str, Any]:
    found: dict[str, Any] = {
        "hotloop": __version__,
        "torch": str(torch.__version__),
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "device": str(device),
        "cpus": os.cpu_count(),
        "threads": torch.get_num_threads(),
    }
    if device.type == "cuda":
        found["device_name"] = torch.cuda.get_device_name(device)
        found["device_memory_bytes"] = torch.cuda.get_device_properties(device).total_memory
    if disabled := os.environ.get("HOTLOOP_DISABLE"):
        found["HOTLOOP_DISABLE"] = disabled
    return found


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep hotloop's and dynamo's warnings off the log: what they would say becomes advice."""
    log = logging.getLogger("hotloop")
    before = log.level
    log.setLevel(logging.ERROR)
    try:
        with quiet_tracing():
            yield
    finally:
        log.setLevel(before)
