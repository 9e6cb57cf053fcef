"""The cost of the ledger: µs for each executed graph, and for each call of a compiled component.

usage: python benchmarks/ledger.py [ROUNDS]

A graph that does nothing is called directly, and as the ledger's runner calls it; a call of a compiled module is held
against the same root function compiled by torch.compile alone, so that torch's own guards are in both. Each pair
alternates in rounds of many calls, and the best round of each counts. Goal: 0.3 µs a graph.
"""

from __future__ import annotations

import contextlib
import json
import pathlib
import platform
import sys
import time

import torch
from torch import fx, nn

import hotloop
from hotloop._torch.module import root_function
from hotloop.compiling.fallback import ladder_backend
from hotloop.compiling.observe import GraphInfo, Tally, active

CALLS = 20_000
ROUNDS = 15


def processor():
    """Name the processor, where the system tells."""
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def best(functions, rounds, calls):
    """Return the least µs a call of each function, timed in turns."""
    found = [float("inf")] * len(functions)
    for _ in range(rounds):
        for place, function in enumerate(functions):
            start = time.perf_counter()
            for _ in range(calls):
                function()
            found[place] = min(found[place], (time.perf_counter() - start) / calls * 1e6)
    return found


def graph(rounds):
    """A graph of no work, called directly and through the runner, with the component's tally in force."""
    x = torch.ones(1)

    def compiled(*args):
        return args

    pristine = fx.symbolic_trace(nn.Identity())
    run = ladder_backend._Runner(GraphInfo("default", "default", "whole"), compiled, pristine).run  # noqa: SLF001 - measured here
    for _ in range(10):
        run(x)  # past the calls in which the backward is looked for
    active.tally = Tally("model", "training")
    direct, counted = best((lambda: compiled(x), lambda: run(x)), rounds, CALLS)
    return {"direct": direct, "counted": counted, "ledger": counted - direct}


class Tiny(nn.Module):
    """A module with the smallest graph."""

    def forward(self, x):
        """Return ``x + 1``."""
        return x + 1


def call(rounds):
    """A module of one addition, compiled by hotloop and by torch alone on the same kind of root."""
    x, ours, theirs = torch.ones(1), Tiny(), Tiny()

    def backend_of_nothing(_graph, _inputs):
        return lambda *args: args

    hotloop.compile(ours, "aot_eager")
    plain = torch.compile(root_function("Tiny", module=True), backend=backend_of_nothing)
    found = {}
    for mode in (torch.no_grad, torch.enable_grad):
        with mode(), nothing(backend_of_nothing):
            ours(x), plain(theirs, x)
            alone, ledger = best((lambda: plain(theirs, x), lambda: ours(x)), rounds, CALLS // 4)
        found[mode.__name__] = {"torch.compile": alone, "hotloop": ledger, "difference": ledger - alone}
    return found


@contextlib.contextmanager
def nothing(compiler):
    """Put a compiler of no work in aot_eager's place, so that only the calling is measured."""
    before, ladder_backend.backends.aot_eager = ladder_backend.backends.aot_eager, lambda: compiler
    try:
        yield
    finally:
        ladder_backend.backends.aot_eager = before


def main():
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else ROUNDS
    torch.set_num_threads(1)
    found = {"torch": torch.__version__, "python": platform.python_version(), "machine": processor()}
    found["microseconds"] = {"graph": graph(rounds), "call": call(rounds)}
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
