"""Fabric in two processes, whose steps a loop captures; see `captured_ranks`."""

import contextlib

import torch
from captured_ranks import BACKEND, CAPTURES, DEVICE, FOLDER, Net, batches, listening, state_of, tell, told_of
from lightning.fabric import Fabric
from lightning.fabric.strategies import DDPStrategy, ModelParallelStrategy
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

from hotloop.integrations.fabric import loop as fabric_loop

STEPS = 40


def momentum(parameters):
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def adamw(parameters):
    """Make AdamW, which has a kernel for shards; its rates are float32: equal to the bit."""
    return torch.optim.AdamW(parameters, lr=2**-6, fused=True)


def train(run, *, every=1, parts=1, resumes=False, strategy=None, by=momentum, **settings):
    """Train; validate, log and save on the way, as programs do.

    Args:
        run: a tier.
        every: calls for each update.
        parts: backwards in a call, of which the last one reduces.
        resumes: go on from half-way.
        strategy: makes Fabric's; None for DDP.
        by: makes the optimizer.
        settings: of DDP.
    """
    fabric = Fabric(
        accelerator=DEVICE,
        devices=2,
        strategy=strategy() if strategy else DDPStrategy(process_group_backend=BACKEND, **settings),
    )
    fabric.launch()
    fabric.seed_everything(1, verbose=False)
    model = fabric.setup_module(Net())
    optimizer = fabric.setup_optimizers(by(model.parameters()))
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 10, 0.5)
    loop = fabric_loop(fabric, model, optimizer, run=run, total_steps=STEPS, sentinel=0)

    @loop.step
    def step(x, y, update):
        for part in range(parts):
            within = fabric.no_backward_sync(model, enabled=part < parts - 1) if parts > 1 else contextlib.nullcontext()
            with within:
                loss = F.cross_entropy(model(x[part::parts]), y[part::parts])
                fabric.backward(loss)
        if update:
            fabric.clip_gradients(model, optimizer, clip_val=0.5)
            optimizer.step()
            optimizer.zero_grad()
        return loss.detach()

    half = f"{FOLDER}/half-{run}{'-sharded' if strategy else ''}"  # of another kind than DDP's, which all would replace
    data, told, ran, begin = batches(STEPS * every), [], [], 0
    held = fabric.to_device(batches(1)[0])
    if resumes:
        rest = fabric.load(half, {"model": model, "optimizer": optimizer})
        loop.load_state_dict(rest["loop"])
        begin = rest["step"]
        schedule.load_state_dict(rest["schedule"])
    for number in range(begin, len(data)):
        if number == len(data) // 2 and not resumes:
            saved = {"model": model, "optimizer": optimizer, "loop": loop.state_dict(), "step": number}
            fabric.save(half, {**saved, "schedule": schedule.state_dict()})
        update = (number + 1) % every == 0
        around = contextlib.nullcontext() if parts > 1 else fabric.no_backward_sync(model, enabled=not update)
        with around:
            loss = step(*map(fabric.to_device, data[number]), update)
        ran.append(loop.last_ran())
        told.append(float(fabric.all_reduce(loss)))
        if update:
            schedule.step()
        if number % 16 == 15:
            model.eval()
            with torch.no_grad():
                told.append(float(fabric.all_reduce(F.cross_entropy(model(held[0]), held[1]))))
            model.train()
    status = loop.status()
    loop.close()
    return [*told, *state_of(model)], ran, status


def beside_eager(run="eager+graph", **how):
    eager, *_ = train("eager", **how)
    with CAPTURES(), listening() as log:
        ours, ran, status = train(run, **how)
    return {**told_of(eager, ours, ran, run, log), "tier": status.tier}


def sharded(net, mesh):
    return fully_shard(net, mesh=mesh["data_parallel"])


def two():
    return ModelParallelStrategy(sharded, data_parallel_size=2, tensor_parallel_size=1, process_group_backend=BACKEND)


tell(
    {
        "plain": beside_eager,
        "resumed": lambda: beside_eager(resumes=True),
        "accumulated": lambda: beside_eager(every=2),
        "unused": lambda: beside_eager(find_unused_parameters=True),
        "sharded": lambda: beside_eager(strategy=two, by=adamw),
        "sharded, in parts": lambda: beside_eager(strategy=two, by=adamw, parts=2),
        "compiled by shards": lambda: beside_eager("aot_eager", strategy=two, by=adamw),
        "sharded, resumed": lambda: beside_eager(strategy=two, by=adamw, resumes=True),
        "sharded, momentum": lambda: beside_eager(strategy=two),
    }
)
