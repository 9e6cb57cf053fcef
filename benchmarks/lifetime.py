"""The cost of outputs of CUDA graphs that may be held: copies and marked steps of ``reduce-overhead``.

usage: OMP_NUM_THREADS=1 python benchmarks/lifetime.py [BLOCKS] > benchmarks/results/DATE-MACHINE-lifetime.json

On any machine: µs of Python for a call (marking, counting), for each output and for each gradient that is copied; the
tensors are tiny, so that the copying itself is small. On a GPU also: training steps and inference calls of an encoder
that is bound by launches and of a larger one, compiled by ``torch.compile(mode="reduce-overhead")`` (a user who knows
the rules: nothing held, a step marked each time), by ``hotloop.compile``, and with ``strict_lifetime``. The three take
turns in blocks of steps; a ratio is the median over the blocks, with its 95% interval.
"""

from __future__ import annotations

import copy
import json
import platform
import statistics
import sys
import time

import torch
from ledger import best, processor
from torch import nn

import hotloop
from hotloop.compiling.control.lane import count_call
from hotloop.compiling.fallback.step_marks import Outputs, owned_gradients
from hotloop.compiling.observe import Tally
from hotloop.measure import ratio_interval
from hotloop.testing import cudagraph_emulation

BLOCKS = 41
ROUNDS = 15
CALLS = 2_000
PARAMETERS = (16, 160)


class Encoder(nn.Module):
    """A transformer encoder with a score for each of two classes."""

    def __init__(self, width, layers):
        super().__init__()
        layer = nn.TransformerEncoderLayer(width, width // 64, 4 * width, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, 2)

    def forward(self, x):
        """Return scores (rows, 2) for ``x`` (rows, length, width)."""
        return self.head(self.layers(x).mean(1))


class Node:
    """A stand-in for the autograd node of a graph whose inputs are parameters without a gradient."""

    def __init__(self, parameters):
        self.next_functions = [(one.expand_as(one).grad_fn.next_functions[0][0], 0) for one in parameters]


def python_cost():
    """Return the µs of Python that a call, an output and a gradient cost, without a GPU's launches."""
    tally, x = Tally("model", "training"), torch.ones(1)
    tensors = (torch.ones(1), torch.ones(1))
    with cudagraph_emulation():
        call, plain, marked = best(
            (lambda: count_call(tally, (x,), {}, marks=True), lambda: count_call(tally, (x,), {}, marks=False), mark),
            ROUNDS,
            CALLS,
        )
    outputs = Outputs(lambda _x: tensors, lambda: tally)
    two, clones = best((lambda: outputs(x), lambda: [one.clone() for one in tensors]), ROUNDS, CALLS)
    found = {"call": call, "call_counted_only": plain, "mark_alone": marked, "two_outputs": two, "two_clones": clones}
    for many in PARAMETERS:
        found[f"{many}_gradients"], found[f"{many}_gradients_cloned_one_by_one"] = gradients_cost(many, tally)
    return found


def gradients_cost(many, tally):
    """Return the µs for the gradients of so many parameters: copied as a backward's are, and cloned one by one."""
    node = Node([nn.Parameter(torch.ones(1)) for _ in range(many)])
    gradients = tuple(torch.ones(1) for _ in range(many))
    each = (lambda: owned_gradients(node, gradients, tally), lambda: [one.clone() for one in gradients])
    return best(each, ROUNDS, max(1, CALLS // many))


def mark():
    """Return the µs of marking a step, alone."""
    torch.compiler.cudagraph_mark_step_begin()


def ways(model):
    """Return the model compiled in each way; marks are the user's own business in the first."""
    plain = torch.compile(copy.deepcopy(model), mode="reduce-overhead")
    ours = hotloop.compile(copy.deepcopy(model), "reduce-overhead")
    strict = hotloop.compile(copy.deepcopy(model), "reduce-overhead", strict_lifetime=True)
    return {"torch.compile": plain, "hotloop": ours, "hotloop, strict_lifetime": strict}


def stepper(name, model, x, *, trains):
    """Return a function that makes one step of training, or one call of inference, and holds nothing."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step():
        if name == "torch.compile":
            torch.compiler.cudagraph_mark_step_begin()
        if not trains:
            with torch.no_grad():
                model(x)
            return
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def seconds(step, many):
    """Return the seconds of one step, by CUDA events around many."""
    began, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    began.record()
    for _ in range(many):
        step()
    ended.record()
    ended.synchronize()
    return began.elapsed_time(ended) / 1e3 / many


def on_gpu(blocks):
    """Compare the ways on a GPU."""
    found = {}
    for name, width, layers, rows, length in (("launch-bound", 256, 8, 8, 64), ("larger", 1024, 12, 16, 256)):
        torch.manual_seed(0)
        model, x = Encoder(width, layers).cuda(), torch.randn(rows, length, width, device="cuda")
        for trains in (True, False):
            steppers = {way: stepper(way, one, x, trains=trains) for way, one in ways(model).items()}
            peaks = {}
            for way, step in steppers.items():
                seconds(step, 10)  # compiles and records
                torch.cuda.reset_peak_memory_stats()
                seconds(step, 3)
                peaks[way] = torch.cuda.max_memory_allocated()
            many = max(1, round(0.1 / seconds(steppers["torch.compile"], 10)))
            times = {way: [] for way in steppers}
            for block in range(blocks):
                order = list(steppers) if block % 2 else list(reversed(steppers))
                for way in order:
                    times[way].append(seconds(steppers[way], many))
            plain = times["torch.compile"]
            found[f"{name}, {'training' if trains else 'inference'}"] = {
                way: {
                    "ms": 1e3 * statistics.median(each),
                    "ratio": statistics.median(a / b for a, b in zip(each, plain, strict=True)),
                    "interval_95": list(ratio_interval(each, plain)),
                    "peak_bytes": peaks[way],
                }
                for way, each in times.items()
            }
    return found


def main():
    """Print everything as JSON."""
    blocks = int(sys.argv[1]) if len(sys.argv) > 1 else BLOCKS
    torch.set_num_threads(1)
    found = {
        "date": time.strftime("%Y-%m-%d"),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": processor(),
        "microseconds_of_python": python_cost(),
    }
    if torch.cuda.is_available():
        found |= {"gpu": torch.cuda.get_device_name(), "blocks": blocks, "steps": on_gpu(blocks)}
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
