"""Two processes that compile in place: run as ``python rendezvous_program.py FOLDER RANK SCENARIO...``; prints JSON.

Collectives time out after 4 s, and the backend of rank 1 sleeps for longer at every compile.
"""

import contextlib
import datetime as dt
import gc
import json
import os
import sys
import time
import warnings

import torch
import torch._dynamo  # what is imported later, one process waits for in the other, impatiently
from torch import distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import hotloop
import hotloop.compiling.control
from hotloop._torch import backends

warnings.simplefilter("ignore")
# Public since torch 2.14.
set_timeout = getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout
TIMEOUT = dt.timedelta(seconds=4)
FOLDER, RANK, SCENARIOS = sys.argv[1], int(sys.argv[2]), sys.argv[3:]


class Net(nn.Module):
    def __init__(self, breaks):
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(6, 10), nn.BatchNorm1d(10), nn.Linear(10, 3)
        self.breaks = breaks

    def forward(self, x):
        x = self.norm(self.first(x)).relu()
        if self.breaks:
            torch._dynamo.graph_break()
        return self.second(x)


def wrapped(kind):
    torch.manual_seed(0)
    model = Net(kind == "breaks")
    if kind == "fsdp2":
        for part in (model.first, model.second):
            fully_shard(part, mesh=dist.init_device_mesh("cpu", (2,)))
        return fully_shard(model)
    return DistributedDataParallel(model, broadcast_buffers=kind != "nobuffers")


def batches(steps, short):
    draws = torch.Generator().manual_seed(RANK)
    for step in range(steps):
        size = 4 if RANK == 1 and step in short else 6
        yield torch.randn(size, 6, generator=draws), torch.randint(3, (size,), generator=draws)


def train(kind, preset, short=(), steps=8, *, before=lambda step: None, only=None, **settings):
    """Train; gives losses and parameters, what each step ran as, and the status."""
    model = wrapped(kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.125)
    if preset and only in (None, RANK):
        hotloop.compile(model, preset, **settings)
    losses, calls = [], []
    for number, (x, y) in enumerate(batches(steps, short)):
        before(number)
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
        if preset:
            told = next(iter(hotloop.status(model).components.values()))
            calls.append([told.compiles, told.frames_eager])
    full = [one.full_tensor() if hasattr(one, "full_tensor") else one for one in model.parameters()]
    status = hotloop.status(model)
    del model, optimizer
    gc.collect()
    return [*losses, *(one.detach().clone() for one in full)], calls, status


@contextlib.contextmanager
def sleeps(seconds):
    real, times = backends.aot_eager, []

    def slow(graph, inputs):
        times.append(time.perf_counter())
        if RANK == 1:
            time.sleep(seconds)
        return real()(graph, inputs)

    backends.aot_eager = lambda: slow
    try:
        yield times
    finally:
        backends.aot_eager = real


def compared(kind, *, seconds=4.5, **settings):
    """Train eagerly, and compiled, where compiles are slow; gives whether they agree, and how it went."""
    eager, _, _ = train(kind, None, settings.get("short", ()), settings.get("steps", 8))
    torch.compiler.reset()
    dist.barrier()
    with sleeps(seconds) as times:
        ours, calls, status = train(kind, "aot_eager", **settings)
    component = next(iter(status.components.values()))
    no_longer_patient()
    dist.barrier()
    return {
        "same": all(torch.allclose(*pair, rtol=1e-5, atol=1e-6) for pair in zip(ours, eager, strict=True)),
        "compiles": len(times),
        "calls": calls,
        "state": component.state,
        "causes": [cause.reason for cause in component.causes],
        "timeout": timeout().total_seconds(),
    }


def timeout():
    return dist.group.WORLD._get_backend(torch.device("cpu")).options._timeout


def no_longer_patient():
    """Wait until nothing is patient in this process, as it is for a while after the last compile."""
    until = time.monotonic() + 60
    while timeout() != TIMEOUT and time.monotonic() < until:
        time.sleep(0.02)


def late(step):
    if RANK == 1 and step == 0:
        time.sleep(0.5)


def behind(step):
    """The others are patient no more, and the one process waits in a collective as the other comes to its short batch."""
    if step == 3:
        no_longer_patient()
        dist.barrier()
        time.sleep(1.5 * RANK)


def regrouped():
    """The group is destroyed right after a compile, and another takes its place."""
    train("ddp", "aot_eager", steps=3)
    dist.barrier()
    dist.destroy_process_group()
    gc.collect()
    started = dt.timedelta(seconds=60)
    dist.init_process_group("gloo", f"file://{FOLDER}/again", rank=RANK, world_size=2, timeout=started)
    dist.barrier()
    set_timeout(TIMEOUT)
    return compared("ddp", seconds=6.0)


def lost():
    """The process that compiles ends all of a sudden, while the other waits for it."""
    real = backends.aot_eager

    def dies(graph, inputs):
        if RANK == 1:
            time.sleep(5)
            os._exit(3)
        return real()(graph, inputs)

    backends.aot_eager = lambda: dies
    began = time.perf_counter()
    try:
        train("ddp", "aot_eager")
    except RuntimeError as error:
        return {"raised": str(error), "seconds": time.perf_counter() - began}
    return {}


RUNS = {
    "sleep": lambda: compared("ddp", seconds=6.0),
    "nobuffers": lambda: compared("nobuffers"),
    "breaks": lambda: compared("breaks", short=(3, 5), before=behind),
    "fullgraph": lambda: compared("ddp", short=(3, 5), before=behind, fullgraph=True),
    "fsdp2": lambda: compared("fsdp2", short=(3, 5), before=behind),
    "late": lambda: compared("ddp", before=late),
    "short": lambda: compared("ddp", short=(3, 5), before=behind),
    "alone": lambda: compared("ddp", only=1),
    "lost": lost,
    "regrouped": regrouped,
}


def main():
    started = dt.timedelta(seconds=60)  # it counts for the start of the other process as well
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{os.environ['PORT']}", rank=RANK, world_size=2, timeout=started)
    dist.barrier()
    set_timeout(TIMEOUT)
    told = {}
    for name in SCENARIOS:
        told[name] = RUNS[name]()
        print(name, told[name], file=sys.stderr, flush=True)
    print(json.dumps(told), flush=True)
    if "lost" in SCENARIOS:
        os._exit(0)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
