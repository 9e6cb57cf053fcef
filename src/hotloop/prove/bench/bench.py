"""``hotloop.bench``: times the ways to run a user's own step side by side, and says which one pays."""

from __future__ import annotations

import gc
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from hotloop.errors import ConfigError
from hotloop.prove.bench.child import INSIDE, CannotStartError, caches_in, run_cold
from hotloop.prove.bench.report import finish
from hotloop.prove.bench.rounds import Plan, Rounds
from hotloop.prove.bench.verdict import BASELINE
from hotloop.prove.bench.way import NotRunError, start
from hotloop.prove.workloads import Source, seeded, source_of
from hotloop.step.compiled import Compiled
from hotloop.step.tiers import parse

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hotloop.prove.bench.result import Bench
    from hotloop.prove.bench.way import Ready, Running
    from hotloop.record import RunRecord
    from hotloop.step import Workload

LEAST_STEPS = 12
"""The least timed steps of a way: fewer than half as many blocks have no interval."""


def bench(  # noqa: PLR0913 - the public settings
    workload: Workload | Callable[[], Workload] | str,
    runs: Sequence[str] | None = None,
    *,
    steps: int | None = None,
    total_steps: int | None = None,
    cold: bool = True,
    record: str | os.PathLike[str] | RunRecord | None = None,
    say: Callable[[str], None] | None = None,
) -> Bench:
    """Run a program's own training step several ways side by side, and say which way pays.

    Each way runs a program of its own, made by the same function from the same seed, through `hotloop.Loop`: it is
    proven before it is timed. All ways take the same batches in blocks by turns. Eager takes each turn twice, which
    measures the noise. A way that does not run as asked is listed with its reason and not timed.

    Args:
        workload: a function that makes a `hotloop.Workload`, its name as ``file.py:make`` or ``module:make``, or a
            Workload whose step can be copied with its model.
        runs: tiers and presets by name; eager is always among them. None takes those that make sense on the device.
        steps: timed steps of each way, at least 12; None takes as many as fit into about two seconds, in 12 blocks.
        total_steps: the length of the run that the verdict is about.
        cold: get each way ready in a new process with empty caches first, which measures cold seconds and memory. Needs
            a function that another process can import. Without it, or with False, the figures are this process's, and
            a note says so.
        record: a folder in which the run record is written; None keeps it in memory.
        say: is called with a line of progress now and then.

    Raises:
        ConfigError: an argument does not fit, or the model is compiled already.
        Exception: the program's own, raised in eager.
    """
    asked = _checked(runs, steps, total_steps)  # before the program's own file is run
    source = source_of(workload)
    with tempfile.TemporaryDirectory(prefix="hotloop-bench-") as name:
        job = _Job(source, asked or ways_for(source), Path(name), say or (lambda _: None))
        job.baseline()
        if cold:
            job.run_cold()
        plan = job.in_turns(steps)
    return finish(plan, total_steps=total_steps, steps=steps, source=source, record=record)


class _Job:
    """The stages of one bench: eager alone, each way cold in its own process, all ways by turns."""

    def __init__(self, source: Source, runs: Sequence[str], folder: Path, say: Callable[[str], None]) -> None:
        self._source, self._folder, self._say = source, folder, say
        self._plan = Plan(tuple(runs))

    def baseline(self) -> None:
        """Run the program as written first, so that the user sees its own exception before anything else."""
        self._say("eager: the first steps")
        try:
            running, ready = start(BASELINE, self._source.make)
        except NotRunError as error:
            raise ConfigError(
                f"workload: its model is compiled already ({error}); give it as written: the bench compiles it"
            ) from error
        self._plan.device, self._plan.eager_bytes = running.device, ready.peak_bytes
        self._plan.here[BASELINE] = ready
        running.close()

    def run_cold(self) -> None:
        """Get each way ready in a process of its own, one after another, while this one holds no GPU memory."""
        if not self._source.name:
            self._plan.notes.append(f"cold seconds are this process's: the workload is {self._source.why}")
            return
        gc.collect()
        if self._plan.device is not None and self._plan.device.type == "cuda":
            torch.cuda.empty_cache()
        for way in self._plan.ways:
            self._say(f"{way}: getting ready in a process of its own, caches empty")
            try:
                self._plan.cold[way] = run_cold(way, self._source.name, self._place(way))
            except NotRunError as error:
                self._plan.failed[way] = str(error)
            except CannotStartError as error:
                self._plan.cold.clear()
                self._plan.failed.clear()
                self._plan.notes.append(
                    f"cold seconds are this process's: another one cannot make the workload: {error}"
                )
                return

    def in_turns(self, steps: int | None) -> Plan:
        """Time the ways by turns, in groups if they do not all fit into memory together."""
        rounds = Rounds(self._plan, self._start, steps, self._say)
        rounds.run()
        return self._plan

    def _start(self, way: str) -> tuple[Running, Ready]:
        with caches_in(self._place(way)):
            return start(way, self._source.make)

    def _place(self, way: str) -> Path:
        return self._folder / way.replace("+", "-")


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
