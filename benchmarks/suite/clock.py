"""Measuring steps: blocks of several ways in turns, the GPU's busy time of a step, and memory."""

from __future__ import annotations

import json
import math
import pathlib
import statistics
import tempfile
import time

import torch

from hotloop.measure import interval, ratio_interval
from hotloop.prove.bench.way import in_turns
from hotloop.step.state.trial_run import wait_for

PAIRS = 12
"""Blocks of each way: with 12, the 95% interval of a median goes from the third to the tenth."""
FEW_PAIRS = 6
"""With 6 the interval goes from the first to the last: for eager beside each of several runs."""
BLOCK_SECONDS = 0.15
_MEBI = 2**20
_WARM = 2
"""Steps at the begin of a block that are not timed: the step before was another way's."""
_DEVICE_WORK = ("kernel", "gpu_memcpy", "gpu_memset")


class Turns:
    """A running way that takes its batches in order, and goes on from its last batch."""

    def __init__(self, program, running, device, done=0):
        self.program, self.running, self.device, self.done = program, running, device, done

    def step(self):
        """Run one step."""
        self.done += 1
        return self.running.run(*self.program.batch(self.done - 1))

    def block(self, steps):
        """Return the seconds of a step, over a block of so many that ends with the device being done."""
        for _ in range(_WARM):
            self.step()
        wait_for(self.device)
        begin = time.perf_counter()
        for _ in range(steps):
            self.step()
        wait_for(self.device)
        return (time.perf_counter() - begin) / steps


def side_by_side(way, eager, *, pairs=PAIRS, seconds=BLOCK_SECONDS, together=False):
    """Time a way and eager in blocks by turns (AB, BA, BA, AB, ...).

    Args:
        way: `Turns` of it.
        eager: `Turns` of eager; None times the way alone.
        pairs: blocks of each.
        seconds: that a block takes, about; never less than three steps.
        together: blocks have as many steps for both, and the same batches: for batches that differ in size.

    Returns:
        ``ms``: of a step, median over blocks, with the 95% interval ``ms_low``, ``ms_high``; with eager also
        ``eager_ms``, and ``ratio`` of eager to the way with ``ratio_low`` and ``ratio_high``; and the ``blocks`` in ms.
    """
    ways = [way] if eager is None else [way, eager]
    counts = [max(3, math.ceil(seconds / max(1e-6, one.block(3)))) for one in ways]
    if together:
        counts = [min(counts)] * len(ways)
    times = [[] for _ in ways]
    for order in in_turns(len(ways), pairs):
        if together and eager is not None:
            eager.done = way.done
        for place in order:
            times[place].append(1e3 * ways[place].block(counts[place]))
    low, high = interval(times[0])
    found = {"ms": statistics.median(times[0]), "ms_low": low, "ms_high": high, "blocks": [times[0]], "steps": counts}
    if eager is not None:
        low, high = ratio_interval(times[1], times[0])
        ratio = statistics.median(theirs / ours for ours, theirs in zip(*times, strict=True))
        found |= {"eager_ms": statistics.median(times[1]), "ratio": ratio, "ratio_low": low, "ratio_high": high}
        found["blocks"] = times
    return plain(found)


def plain(value):
    """Round to five digits, the precision of clocks; return None for infinity, which JSON lacks."""
    if isinstance(value, dict):
        return {key: plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [plain(one) for one in value]
    if isinstance(value, float):
        return float(f"{value:.5g}") if math.isfinite(value) else None
    return value


def merged(spans):
    """Return the length of the union of spans (begin, length), so that work that overlaps counts once."""
    covered, end = 0.0, -math.inf
    for begin, length in sorted(spans):
        covered += max(0.0, begin + length - max(begin, end))
        end = max(end, begin + length)
    return covered


def busy(turns, steps=5):
    """Return ``busy_ms`` and ``kernels`` of a step as torch's profiler sees them on the GPU; None on a CPU.

    Kernels, copies and fills count, each moment once. Profile last: the tracing stays in the process.
    """
    if turns.device.type != "cuda":
        return {"busy_ms": None, "kernels": None}
    for count in (1, steps):  # the first profile of a process also sets the tracing up
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            for _ in range(count):
                turns.step()
            wait_for(turns.device)
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder, "trace.json")
        profile.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    return busy_of(events, steps)


def busy_of(events, steps):
    """Read a step's busy time off the events of a trace over so many steps; their times are in µs."""
    work = [(event["ts"], event["dur"]) for event in events if event.get("cat") in _DEVICE_WORK]
    if not work:
        return {"busy_ms": None, "kernels": None, "busy_why": "the profiler saw no work on the GPU"}
    return {"busy_ms": plain(merged(work) / 1e3 / steps), "kernels": round(len(work) / steps)}


def begin_memory(device, *, keep=False):
    """Reset the peak memory; ``keep`` torch's cached memory, so that the next steps take no longer."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        if not keep:
            torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def memory(device):
    """Return the highest memory in MB that tensors took, and that torch held, since `begin_memory`; none on a CPU."""
    if device.type != "cuda":
        return None
    torch.cuda.synchronize(device)
    return {
        "allocated_mb": round(torch.cuda.max_memory_allocated(device) / _MEBI),
        "reserved_mb": round(torch.cuda.max_memory_reserved(device) / _MEBI),
    }
