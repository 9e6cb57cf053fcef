"""Two processes that train together: run as ``python peers_program.py FOLDER RANK SCENARIO...``; prints JSON.

They meet by gloo on the CPU; with ``PEERS_BACKEND=nccl`` each has a GPU.
"""

import contextlib
import datetime as dt
import gc
import json
import os
import sys
import time
import warnings
from pathlib import Path

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import hotloop
from hotloop._torch import backends
from hotloop.testing import planted_failure

warnings.simplefilter("ignore")
# Public since torch 2.14.
set_timeout = getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout
TIMEOUT, PATIENT = 3.0, dt.timedelta(seconds=30)
FOLDER, RANK, SCENARIOS = sys.argv[1], int(sys.argv[2]), sys.argv[3:]
BACKEND = os.environ.get("PEERS_BACKEND", "gloo")
DEVICE = torch.device("cpu") if BACKEND == "gloo" else torch.device("cuda", RANK)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.drop = nn.Linear(6, 10), nn.BatchNorm1d(10), nn.Dropout(0.25)
        self.second = nn.Linear(10, 3)

    def forward(self, x):
        return self.second(self.drop(self.norm(self.first(x)).relu()))


def batches(steps, short=None):
    draws = torch.Generator().manual_seed(RANK)
    for step in range(steps):
        size = 4 if step == short else 6
        x, y = torch.randn(size, 6, generator=draws), torch.randint(3, (size,), generator=draws)
        yield x.to(DEVICE), y.to(DEVICE)


def wrapped(kind):
    torch.manual_seed(0)
    model = Net().to(DEVICE)
    if kind == "fsdp1":
        model, policy = nn.Sequential(model, nn.Linear(3, 3)), ModuleWrapPolicy({Net})
        return FullyShardedDataParallel(model, auto_wrap_policy=policy, use_orig_params=True, device_id=DEVICE)
    if kind != "fsdp2":  # without buffers to send, a step's first collective is in its backward
        return DistributedDataParallel(model, broadcast_buffers=kind in ("ddp", "resume"))
    for part in (model.first, model.second):
        fully_shard(part, mesh=dist.init_device_mesh(DEVICE.type, (2,)))
    return fully_shard(model)


def train(kind, run=None, steps=14, short=None, *, save=None, resume=None, in_place=True, changes=None):
    """Train; gives the parameters, the losses, and the loop's status. Saves after each step, goes on from there."""
    model = wrapped(kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.125, momentum=0.5)
    begun, random = goes_on(model, optimizer, resume) if resume else (0, None)
    if (
        run and kind.startswith("fsdp") and in_place
    ):  # a loop leaves sharded parameters alone: they are compiled in place
        hotloop.compile(model, run)
    loop = hotloop.Loop(model, optimizer, run=run) if run else None

    def train_step(x, y):
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    step = loop.step(train_step) if loop else train_step
    torch.manual_seed(RANK)
    if random is not None:
        (torch.cuda if DEVICE.type == "cuda" else torch).set_rng_state(random)
    losses = []
    for number, (x, y) in enumerate(batches(steps, short)):
        if changes == number and RANK == 1:
            model.module.drop.p = 0.5  # torch compiles other code for it, in this process alone
        if number >= begun:
            losses.append(float(step(x, y)))
            if save:
                saves(model, optimizer, number + 1, save)
    left = {name: full(value).cpu() for name, value in model.state_dict().items()}
    if kind in (
        "ddp",
        "resume",
    ):  # buffers are sent by rank 0 at the start of a forward, so those of others lag behind it
        left = {name: value for name, value in left.items() if RANK == 0 or "running" not in name}
    told = loop.status() if loop else None
    compiled = hotloop.status(model) if run else None
    if loop:
        loop.close()
    step = loop = None
    gc.collect()
    dist.barrier()
    return left, losses, told, compiled


def saves(model, optimizer, steps, path):
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "steps": steps}
    random = (torch.cuda if DEVICE.type == "cuda" else torch).get_rng_state()
    torch.save({**state, "random": random}, f"{path}-{RANK}.new")
    Path(f"{path}-{RANK}.new").replace(f"{path}-{RANK}.pt")


def goes_on(model, optimizer, path):
    state = torch.load(f"{path}-{RANK}.pt", weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return state["steps"], state["random"]


def full(value):
    return (value.full_tensor() if hasattr(value, "full_tensor") else value).detach().clone()


def same(ours, eager):
    parameters = all(torch.allclose(ours[0][name], eager[0][name], rtol=1e-5, atol=1e-6) for name in eager[0])
    return parameters and torch.allclose(torch.tensor(ours[1]), torch.tensor(eager[1]), rtol=1e-5, atol=1e-6)


@contextlib.contextmanager
def slow_backend(seconds):
    real = backends.aot_eager()

    def slow(graph, inputs):
        time.sleep(seconds)
        return real(graph, inputs)

    before, backends.aot_eager = backends.aot_eager, lambda: slow
    try:
        yield
    finally:
        backends.aot_eager = before


@contextlib.contextmanager
def impatient(wanted):
    """Collectives time out as soon as a user of short timeouts has them: all processes are here by then."""
    dist.barrier()
    if wanted:
        set_timeout(dt.timedelta(seconds=TIMEOUT))
    yield
    if wanted:
        assert dist.group.WORLD._get_backend(DEVICE).options._timeout == dt.timedelta(seconds=TIMEOUT)
        set_timeout(PATIENT)


def scenario(name):
    kind, _, what = name.partition("-")
    steps, short, changes, within = 14, None, None, contextlib.nullcontext()
    if what in ("forward compile", "backward compile") and RANK == 1:
        within = planted_failure(what)
    elif what == "forward run":
        steps = 40
        within = planted_failure(what, after=6) if RANK == 1 else within
    elif what == "backward run" and RANK == 1:
        within = planted_failure(what, after=6)
    elif what == "sleep" and RANK == 1:
        within = slow_backend(5.0)
    elif what == "anew":
        steps, changes = 72, 20
    elif what == "short":
        short = 8 if RANK == 1 else None
    elif what == "short-first":
        short = 0 if RANK == 1 else None
    eager = train(kind, steps=steps, short=short, changes=changes)
    torch.compiler.reset()
    kept = {
        "backward run": {"save": f"{FOLDER}/kept"},
        "resume": {"resume": os.environ.get("KEPT")},
        "loop": {"in_place": False},
    }.get(what, {})
    with within as planted, impatient(what in ("sleep", "short")):
        ours = train(kind, "aot_eager", steps=steps, short=short, changes=changes, **kept)
    if what == "resume":
        left = len(ours[1])
        return {"same": same(ours, (eager[0], eager[1][-left:])), "left": left}
    fired = planted.fired if hasattr(planted, "fired") else None
    tiers = {one.name: one.steps for one in ours[2].tiers}
    return {
        "same": same(ours, eager),
        "tier": ours[2].tier,
        "tiers": tiers,
        "fired": fired,
        "status": str(ours[2]) + str(ours[3]),
        "again": [one for one in ours[2].decisions if "is proven again" in one],
        "in_place": [[one.state, one.compiles, one.graph_breaks] for one in ours[3].components.values()],
    }


def meet():
    if DEVICE.type == "cuda":
        torch.cuda.set_device(DEVICE)
    dist.init_process_group(BACKEND, f"file://{FOLDER}/store", rank=RANK, world_size=2, timeout=PATIENT)


def main():
    meet()
    told = {}
    for name in SCENARIOS:
        try:
            told[name] = scenario(name)
        except Exception as error:
            told[name] = {"raised": type(error).__name__, "message": str(error)}
            print(json.dumps(told), flush=True)
            raise
    print(json.dumps(told), flush=True)
    gc.collect()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
