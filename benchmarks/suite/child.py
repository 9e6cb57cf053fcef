"""One row of the plan, measured in a process of its own; results are written as soon as they are known."""

from __future__ import annotations

import dataclasses
import json
import statistics
import time

import torch

import hotloop
from hotloop.step.state.trial_run import wait_for

from . import clock
from .plan import VARYING, Row
from .totals import SHORT
from .ways import emulated, start
from .workloads import build

FIRST = {"gpu": 24, "cpu": 16}
"""First steps, each waited for: enough for any tier to be proven. The loss is compared after them."""
_BLOCK = 50
"""Steps of a real run between two looks at the clock."""
_MARKS = (50, 200, 1_000)
_TAIL = 10
_LONGEST_SECONDS = 150.0
"""The time limit of a run that has done its steps and waits for `auto` to settle."""
_SEED = 2


@dataclasses.dataclass
class Bench:
    """The state of a measuring process: the row, its device and size, and the path for results."""

    row: Row
    device: torch.device
    size: str
    out: str
    begun: float = dataclasses.field(default_factory=time.perf_counter)
    results: list = dataclasses.field(default_factory=list)

    def result(self, way):
        """Begin the result of one way."""
        found = {
            "row": self.row.key,
            "kind": self.row.kind,
            "workload": self.row.workload,
            "way": way,
            "size": self.size,
            "number": self.row.number,
            "emulated": self.row.emulated,
            "varying": self.row.workload in VARYING,
        }
        self.results.append(found)
        return found

    def keep(self):
        """Write the results so far; they stay if the process is killed at its time limit."""
        with open(self.out, "w", encoding="utf-8") as file:  # noqa: PTH123 - many times a row
            json.dump(clock.plain(self.results), file)

    def turns(self, way, told=None):
        """Build the workload anew and set it up for a way, from the same seed each time."""
        program = build(self.row.workload, self.device, self.size)
        running = start(program, way, told=told)
        torch.manual_seed(_SEED)
        return clock.Turns(program, running, self.device)

    def steady(self, way, eager):
        """Time a way beside eager; a CPU's steps are short, so blocks are."""
        seconds = clock.BLOCK_SECONDS if self.size == "gpu" else 0.06
        pairs = clock.FEW_PAIRS if self.row.told == SHORT else clock.PAIRS
        return clock.side_by_side(way, eager, pairs=pairs, seconds=seconds, together=self.row.workload in VARYING)


def main(order):
    """Measure the row of an order: the fields of a `Row`, device, size, and the path for results."""
    row = Row(**{**order["row"], "ways": tuple(order["row"]["ways"])})
    bench = Bench(row, torch.device(order["device"]), order["size"], order["out"])
    torch.set_float32_matmul_precision("high")
    with emulated(row):
        (run_auto if row.kind == "auto" else run_ways)(bench)
    bench.keep()


# -- fixed ways --------------------------------------------------------------------------------------------------------


def run_ways(bench):
    """Measure all ways of a row: the first from cold, the others with the caches that it filled."""
    measured, twin, cold_from = [], None, None
    for place, way in enumerate(bench.row.ways):
        result = bench.result(way)
        began = time.perf_counter()
        clock.begin_memory(bench.device)
        held = torch.cuda.memory_allocated(bench.device) if bench.device.type == "cuda" else 0
        turns = bench.turns(way)
        first_steps(bench, turns, result)
        if place == 0:
            prepared(turns, result)
            cold_from = turns
        else:
            prepared_with(cold_from, way, bench.results[0], result)
        bench.keep()
        if bench.row.kind == "cold":
            return
        if bench.row.steps and place == 0:
            real_run(bench, turns, result)
        memory_of(bench, turns, result, held, alone=place == 0)
        beside = {"eager": None, "eager+buckets": None}.get(way, "eager+buckets" if result["varying"] else "eager")
        if beside is not None and twin is None:
            twin = bench.turns(beside)
            losses = [float(twin.step().detach()) for _ in range(FIRST[bench.size])]
        if beside is not None:
            result["eager_losses"] = losses
            result["loss_difference"] = difference(result["losses"], losses)
        result["beside"] = beside
        result["steady"] = bench.steady(turns, twin if beside else None)
        what_ran(turns, result)
        result["row_seconds"] = time.perf_counter() - began
        measured.append((turns, result))
        bench.keep()
    for turns, result in measured:
        busy(bench, turns, result)


def first_steps(bench, turns, result):
    """Run the first steps, each to its end, as ``cold`` has always been measured here."""
    losses, ends = [], []
    begin = time.perf_counter()
    for _ in range(FIRST[bench.size]):
        losses.append(float(turns.step().detach()))
        wait_for(bench.device)
        ends.append(time.perf_counter() - begin)
    result |= {"first_seconds": [round(end, 5) for end in ends], "losses": losses}


def memory_of(bench, turns, result, held, *, alone):
    """Note the peak memory of preparation and of a few steps; ``held`` bytes belong to other programs."""
    others = round(held / 2**20)
    getting_ready = clock.memory(bench.device)
    clock.begin_memory(bench.device, keep=True)  # what proofs leave behind is held, and counts
    for _ in range(3):
        turns.step()
    running = clock.memory(bench.device)
    result["memory"] = None
    if running is not None:
        reserved = [one["reserved_mb"] if alone else None for one in (getting_ready, running)]  # torch tells no owner
        result["memory"] = {
            "preparing_mb": getting_ready["allocated_mb"] - others,
            "preparing_reserved_mb": reserved[0],
            "peak_mb": running["allocated_mb"] - others,
            "reserved_mb": reserved[1],
        }


def prepared(turns, result):
    """Note when the way was in force: after three steps, or when the loop had proven the tier."""
    ends, loop = result["first_seconds"], turns.running.loop
    steps = 3
    if loop is not None:
        entries = loop.record.document["steps"][: len(ends)]
        asked = turns.running.asked
        plain = (i for i, one in enumerate(entries) if one["running"] == asked and "doing" not in one)
        steps = next(plain, None)
    result["prepared_steps"] = steps
    result["prepared_seconds"] = ends[steps - 1] if steps else None
    result["after_first_seconds"] = ends[steps - 1] - ends[0] if steps else None


def prepared_with(turns, way, first, result):
    """Note that a tier below the first was in force as soon as the code of the first was proven."""
    proven = [event for event in turns.running.loop.record.document["events"] if event["kind"] == "tier_proven"]
    steps = next((event["step"] + 1 for event in proven if event["tier"] == way), None)
    ends = first["first_seconds"]
    known = steps is not None and steps <= len(ends)
    result["prepared_from"] = first["way"]
    result["prepared_steps"] = steps if known else None
    result["prepared_seconds"] = ends[steps - 1] if known else None
    result["after_first_seconds"] = ends[steps - 1] - ends[0] if known else None


def real_run(bench, turns, result):
    """Go on to the number of steps that the row asks for; totals count from the first step's begin."""
    spent = result["first_seconds"][-1]
    real, blocks = result.setdefault("real", {}), result.setdefault("block_seconds", [])
    done = len(result["first_seconds"])
    while done < bench.row.steps:
        steps = min(_BLOCK - done % _BLOCK, bench.row.steps - done)
        begin = time.perf_counter()
        for _ in range(steps):
            turns.step()
        wait_for(bench.device)
        blocks.append([steps, round(time.perf_counter() - begin, 5)])
        spent, done = spent + blocks[-1][1], done + steps
        if done in _MARKS or done == bench.row.steps:
            real[str(done)] = round(spent, 4)
            bench.keep()
    tail = blocks[-_TAIL:]
    result["tail_ms"] = 1e3 * sum(seconds for _, seconds in tail) / sum(steps for steps, _ in tail)


def what_ran(turns, result):
    """Note which part of the requested way ran."""
    loop = turns.running.loop
    if loop is None:
        parts = hotloop.status(dict(turns.program.components) or turns.program.model).components
        result["compiled"] = {name: _state(one.to_dict()) for name, one in parts.items() if one.requested != "none"}
        return
    status, asked = loop.status(), turns.running.asked
    why = next((one.why for one in status.tiers if one.name == asked), "")
    result["ran"] = status.tier
    if status.tier != asked and (why or not result["varying"]):
        result["declined"] = why or f"ran {status.tier}"
    result["undone"], result["dropped"] = status.undone, list(status.dropped)
    result["compiled"] = {name: _state(one) for name, one in loop.record.document["components"].items()}


def _state(component):
    return {key: component.get(key) for key in ("state", "running", "compiles", "graph_breaks", "causes")}


def busy(bench, turns, result):
    """Note the GPU's busy time of a step, and the step as a multiple of it."""
    result |= clock.busy(turns)
    if result["busy_ms"]:
        result["of_busy"] = result["steady"]["ms"] / result["busy_ms"]
        result["waiting_share"] = max(0.0, 1 - result["busy_ms"] / result["steady"]["ms"])
    bench.keep()


def difference(ours, eager):
    """Return the largest relative difference of two runs' losses, step by step."""
    return max(abs(a - b) / max(abs(b), 1e-12) for a, b in zip(ours, eager, strict=True))


# -- auto --------------------------------------------------------------------------------------------------------------


def run_auto(bench):
    """Run `auto` as a user would, reading the clock at few steps only; then time its final tier beside eager."""
    row, result = bench.row, bench.result("auto")
    clock.begin_memory(bench.device)
    result |= {"told": row.told, "real": {}}
    turns = bench.turns("auto", told=row.told)
    begin = time.perf_counter()
    marks = [mark for mark in _MARKS if mark < row.steps] + [row.steps]
    for mark in marks:
        while turns.done < mark:
            turns.step()
        wait_for(bench.device)
        result["real"][str(mark)] = round(time.perf_counter() - begin, 4)
        bench.keep()
    if row.told > row.steps:
        settle(bench, turns, result, begin)
    note_decisions(turns.running.loop, result)
    bench.keep()
    turns.running.loop.policy.close()  # the run is over: a child that still compiles would disturb what follows
    for _ in range(_BLOCK):
        if turns.running.loop.policy.trial is None:
            break
        turns.step()
    memory_of(bench, turns, result, 0, alone=True)
    twin = bench.turns("eager")
    for _ in range(3):
        twin.step()
    result["beside"] = "eager"
    result["steady"] = bench.steady(turns, twin)
    result["tier_after"] = turns.running.loop.status().tier
    turns.running.close()


def settle(bench, turns, result, begin):
    """Run on until nothing is prepared or tried any more, or until the time limit."""
    policy = turns.running.loop.policy
    until = time.perf_counter() + (_LONGEST_SECONDS if bench.size == "gpu" else 5)
    quiet = 0
    while quiet < 2 * _BLOCK and time.perf_counter() < until and turns.done < bench.row.told:
        turns.step()
        quiet = 0 if policy.busy else quiet + 1
    wait_for(bench.device)
    result["real"][str(turns.done)] = round(time.perf_counter() - begin, 4)
    result["settled"] = quiet >= 2 * _BLOCK


def note_decisions(loop, result):
    """Keep the decisions, with reasons and figures, and the final state of each tier."""
    status, document = loop.status(), loop.record.document
    result |= {
        "ran": status.tier,
        "decisions": list(document["decisions"]),
        "tiers": [dataclasses.asdict(one) for one in status.tiers],
        "tier_changes": [
            {key: event[key] for key in ("step", "from_tier", "to_tier", "reason")}
            for event in document["events"]
            if event["kind"] == "tier_changed"
        ],
        "saved_seconds": status.seconds_saved,
        "prepare_seconds": status.prepare_seconds,
    }
    steps = [one["seconds"] for one in document["steps"] if one["running"] == status.tier and "doing" not in one]
    result["last_steps_ms"] = 1e3 * statistics.median(steps[-50:]) if steps else None
