"""``hotloop.bench``: times the ways to run a user's own step side by side, and says which one pays."""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING, Any

from hotloop.errors import ConfigError
from hotloop.prove.bench.child import INSIDE
from hotloop.prove.bench.measured import Measured
from hotloop.prove.bench.result import Bench, conclude
from hotloop.prove.bench.verdict import BASELINE
from hotloop.prove.workloads import Source, seeded, source_of
from hotloop.step.compiled import Compiled
from hotloop.step.tiers import parse

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

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
