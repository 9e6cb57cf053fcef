"""What the programs of several processes share: where they meet, what they compare, what they tell.

Each program runs as ``python PROGRAM FOLDER RANK PORT [SCENARIO...]``, in a process for each of two ranks, and prints
JSON: of the scenarios that are named, or of all.
They meet by gloo on the CPU, whose emulation captures; with ``PEERS_BACKEND=nccl`` each has a GPU, which captures.
"""

import contextlib
import gc
import json
import logging
import os
import sys
import warnings
from unittest import mock

import torch
from torch import distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hotloop.measure import Timing
from hotloop.step.policy.agreed_auto import AgreedAuto
from hotloop.testing import captured_step_emulation

warnings.simplefilter("ignore")
FOLDER, RANK, PORT, SCENARIOS = sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4:]
BACKEND = os.environ.get("PEERS_BACKEND", "gloo")
DEVICE = "cpu" if BACKEND == "gloo" else "cuda"
CAPTURES = captured_step_emulation if BACKEND == "gloo" else contextlib.nullcontext
os.environ |= {
    "RANK": str(RANK),
    "LOCAL_RANK": str(RANK),
    "WORLD_SIZE": "2",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "0",
    "MASTER_ADDR": "localhost",
    "MASTER_PORT": PORT,
    "TORCHELASTIC_RUN_ID": "none",
}


class Net(nn.Module):
    """A net with all that a step changes beside parameters: buffers and random streams."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.drop = nn.Linear(6, 10), nn.BatchNorm1d(10), nn.Dropout(0.25)
        self.second = nn.Linear(10, 3)

    def forward(self, x):
        return self.second(self.drop(self.norm(self.first(x)).relu()))


def batches(count, rows=6):
    """Return this process's batches, the same each time."""
    draws = torch.Generator().manual_seed(RANK)
    return [(torch.randn(rows, 6, generator=draws), torch.randint(3, (rows,), generator=draws)) for _ in range(count)]


class Lines(logging.Handler):
    """The lines of hotloop's log."""

    def __init__(self):
        super().__init__(logging.WARNING)
        self.lines = []

    def emit(self, record):
        self.lines.append(record.getMessage())


@contextlib.contextmanager
def paced():
    """Let `auto` hear that captured steps take half of eager's time, so that its verdict does not hang on the machine."""
    pace, real = {"eager": 100.0, "eager+graph": 50.0}, AgreedAuto.timed

    def timed(self, ran, timing):
        seconds = pace[ran.tier] if ran.kind == "run" else timing.seconds
        return real(self, ran, Timing(seconds, seconds))

    with mock.patch.object(AgreedAuto, "timed", timed):
        yield


@contextlib.contextmanager
def listening():
    """Return the lines that are logged in the block."""
    handler, log = Lines(), logging.getLogger("hotloop")
    log.addHandler(handler)
    try:
        yield handler.lines
    finally:
        log.removeHandler(handler)


def same(one, other):
    """Return whether two trainings came to the same numbers."""
    pairs = zip(one, other, strict=True)
    return all(torch.allclose(torch.as_tensor(a), torch.as_tensor(b), rtol=1e-5, atol=1e-6) for a, b in pairs)


def state_of(module):
    """Return copies of a module's parameters, and of the buffers that all processes share."""
    values = {name: getattr(value, "to_local", value.clone)() for name, value in module.state_dict().items()}
    return [value.clone() for name, value in values.items() if RANK == 0 or "running" not in name]


def shards_of(optimizer):
    """Return copies of an optimizer's state, of which each process holds its own shards."""
    held = [value for state in optimizer.state.values() for value in state.values()]
    return [getattr(value, "to_local", value.clone)().clone() for value in held]


def told_of(eager, ours, ran, run, log):
    """Return what a test looks at.

    Args:
        eager: the numbers of the framework's own run.
        ours: those of the run with a loop.
        ran: what each step ran in.
        run: the tier that was asked for.
        log: hotloop's warnings.
    """
    tier = "eager+graph" if run == "auto" else run
    replays = [number for number, one in enumerate(ran) if one == (tier, "run")]
    exact = all(torch.equal(torch.as_tensor(a), torch.as_tensor(b)) for a, b in zip(eager, ours, strict=True))
    return {"same": same(eager, ours), "exact": exact, "replays": replays, "log": log}


@contextlib.contextmanager
def streams_noted(module):
    """Return whether each wrapper of the block was made on the stream of its own that a module of ours takes for it."""
    made, within, init, before = [], [False], DistributedDataParallel.__init__, module.own_stream

    @contextlib.contextmanager
    def own_stream(device):
        within.append(True)
        with before(device):
            yield
        within.pop()

    def noted(wrapper, *args, **settings):
        made.append(within[-1])
        init(wrapper, *args, **settings)

    module.own_stream, DistributedDataParallel.__init__ = own_stream, noted
    try:
        yield made
    finally:
        module.own_stream, DistributedDataParallel.__init__ = before, init


def tell(scenarios):
    """Run the scenarios that were asked for, and print what they tell."""
    torch.set_num_threads(1)
    told = {}
    for name in SCENARIOS or scenarios:
        told[name] = scenarios[name]()
        gc.collect()
    print(json.dumps(told), flush=True)
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
