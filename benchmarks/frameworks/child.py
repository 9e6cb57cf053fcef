"""One job, in a process of its own."""

from __future__ import annotations

import contextlib
import json
import pathlib
from unittest import mock

import torch

import hotloop
from benchmarks.suite import clock
from hotloop import events as ev
from hotloop.measure import interval, ratio_interval
from hotloop.testing.planted import planted_failure

from . import show
from .fits import make, ours
from .marks import Marks
from .plan import EAGER, THEIRS

STEPS = {"cold": {"gpu": 40, "cpu": 24}, "real": {"gpu": 1_000, "cpu": 200}, "failure": 12}
COLD_STEPS = 3
"""Steps until ``torch.compile``'s ways have compiled all that a training step needs."""
BLOCK = {"gpu": 30, "cpu": 30}
SKIP = {"gpu": 24, "cpu": 20}
"""First steps of a fit that are not timed: a loop proves its tier in them."""
LAST = 8
"""The last steps of a cold fit, whose memory is looked at apart: what was prepared and proven is behind them."""
ROUNDS = {"gpu": 8, "cpu": 12}


class Run:
    """The objects that a job's fits share."""

    def __init__(self, size, backend="inductor"):
        self.size, self.backend = size, backend
        self.device = torch.device("cuda" if size == "gpu" else "cpu")

    @staticmethod
    def pin():
        """Set TF32 as it is for all: a framework may have switched it."""
        torch.set_float32_matmul_precision("high")


def main(order):
    """Run the job of an order, and write its result."""
    job = order["job"]
    do = {"cold": cold, "steady": steady, "failure": failure}[job["kind"]]
    found = clock.plain(do(job, Run(order["size"])))
    here = f"{pathlib.Path(__file__).parents[2]}/"  # a result file holds no path of one machine
    pathlib.Path(order["out"]).write_text(json.dumps(found).replace(here, ""), encoding="utf-8")


def cold(job, run):
    """Fit once from cold: seconds until the way is in force, memory, recompiles, and the names that are saved."""
    (way,) = job["ways"]
    real = ours(way) == "auto"
    steps = STEPS["real" if real else "cold"][run.size]
    clock.begin_memory(run.device)
    until = []
    then = {steps - LAST: lambda: (until.append(clock.memory(run.device)), clock.begin_memory(run.device, keep=True))}
    with hotloop.watch() as events:
        ready = make(job["row"], way, run)
        marks = Marks(run.device, at={1, 50, 200, steps} if real else None, then=None if real else then)
        ready.go(marks, steps)
    ends = list(marks.ends.values())
    memory = clock.memory(run.device)
    found = {
        "way": way,
        "ends": ends,
        "memory": memory,
        "compiles": sum(isinstance(one, ev.Compiled) for one in events),
        "recompiles": sum(isinstance(one, ev.Recompiled) for one in events),
        "fell_back": sum(isinstance(one, ev.Fallback) for one in events),
        "leaked_keys": sum("_orig_mod" in name for name in ready.state()),
        "status": ready.status(),
    }
    if real:
        return found | {"real": {str(count): seconds for count, seconds in marks.ends.items() if count > 1}}
    proven = [one.step + 1 for one in events if isinstance(one, ev.TierProven)]
    if memory is not None:
        (before,) = until
        found["memory"] = {name: max(most, before[name]) for name, most in memory.items()}
        found["memory_in_force"] = memory
    found["cold_steps"] = max([COLD_STEPS, *proven])
    found["cold_seconds"] = ends[found["cold_steps"] - 1]
    return found


def steady(job, run):
    """Time the ways in turns, a fit each; a framework's own fit cannot be left in the middle."""
    ways = [way for way in job["ways"] if ours(way) != "auto"]
    ready, compiled = {}, {}
    skip, block, seconds = SKIP[run.size], BLOCK[run.size], {way: [] for way in ways}

    def once(way):
        marks = Marks(run.device, at={skip, skip + block})
        run.pin()
        ready[way].go(marks, skip + block)
        return 1e3 * marks.block()

    for way in ways:  # each compiles before the next is made: Accelerate's state belongs to the whole process
        with hotloop.watch() as events:
            ready[way] = make(job["row"], way, run)
            once(way)
        here = any(isinstance(one, ev.Compiled) for one in events)  # not where another way has compiled the same
        compiled[way] = not show.ran_eager(here, ready[way].status())
    for number in range(ROUNDS[run.size]):
        for way in ways if number % 2 else reversed(ways):
            seconds[way].append(once(way))
    found = {}
    for way in ways:
        low, high = interval(seconds[way])
        found[way] = {"ms": _middle(seconds[way]), "ms_low": low, "ms_high": high, "blocks": seconds[way]}
        for other in (EAGER, THEIRS):
            if way not in (EAGER, other):
                ratios = [theirs / mine for theirs, mine in zip(seconds[other], seconds[way], strict=True)]
                low, high = ratio_interval(seconds[other], seconds[way])
                found[way][f"over_{other}"] = {"ratio": _middle(ratios), "low": low, "high": high}
    return {"ways": found, "compiled": compiled, "status": {way: ready[way].status() for way in ways}}


def _middle(values):
    return float(torch.tensor(values, dtype=torch.float64).quantile(0.5))


def failure(job, run):
    """Make the compiler, or compiled code, fail in the middle of a fit, and record the outcome of the run."""
    (way,), stage = job["ways"], job["stage"]
    after = STEPS["failure"] // 2 if stage.endswith("run") else 0
    expected = _loss_of(job["row"], EAGER, run)
    run.backend = "aot_eager"
    with planted_failure(stage, after=after) as planted, _theirs_too(planted):
        try:
            found = _loss_of(job["row"], way, run)
        except Exception as error:
            return {"way": way, "stage": stage, "outcome": f"ended: {type(error).__name__}", "says": str(error)[:300]}
    if not planted.fired:
        return {"way": way, "stage": stage, "outcome": "nothing failed, so nothing was tested"}
    again = _loss_of(job["row"], EAGER, run)  # kernels that are not deterministic leave two eager runs apart as well
    off = {"off_by": _apart(expected, found), "eager_off_by": _apart(expected, again)}
    return {"way": way, "stage": stage, "outcome": "trained on", **off, "fired": planted.fired}


def _apart(one, other):
    return max(float((a.double() - b.double()).abs().max()) for a, b in zip(one, other, strict=True))


def _loss_of(row, way, run):
    """Fit, and return the parameters."""
    ready = make(row, way, run)
    ready.go(Marks(run.device), STEPS["failure"])
    return [one.detach().cpu().clone() for one in ready.state().values() if one.is_floating_point()]


@contextlib.contextmanager
def _theirs_too(planted):
    """Plant the same failure into torch's own ``aot_eager``, which a framework's compile takes by its name."""
    from torch._dynamo.backends import registry

    registry.lookup_backend("aot_eager")  # is registered when it is first looked up
    with mock.patch.dict(registry._COMPILER_FNS, {"aot_eager": planted.compile}):  # noqa: SLF001 - it has no setter
        yield
