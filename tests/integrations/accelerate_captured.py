"""Accelerate in two processes, whose steps a loop captures; see `captured_ranks`."""

import contextlib

import torch
from accelerate import Accelerator, DistributedDataParallelKwargs, FullyShardedDataParallelPlugin
from accelerate.utils import GradientAccumulationPlugin
from captured_ranks import (
    CAPTURES,
    DEVICE,
    FOLDER,
    Net,
    batches,
    listening,
    paced,
    shards_of,
    state_of,
    streams_noted,
    tell,
    told_of,
)
from sharding_accelerators import as_accelerators
from torch.nn import functional as F

import hotloop
from hotloop.integrations import accelerate

STEPS = 40


def replicated(every, **wrap):
    return Accelerator(cpu=DEVICE == "cpu", kwargs_handlers=[DistributedDataParallelKwargs(**wrap)])


def sharded(every, *, each=False, **how):
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["Linear"],
        state_dict_type="SHARDED_STATE_DICT", **how,
    )  # fmt: skip
    accumulation = GradientAccumulationPlugin(every, sync_each_batch=each)
    return Accelerator(cpu=DEVICE == "cpu", fsdp_plugin=plugin, gradient_accumulation_plugin=accumulation)


def momentum(parameters):
    optimizer = torch.optim.SGD(parameters, lr=0.05, momentum=0.9)
    return optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)


def adamw(parameters):
    """Make AdamW, which has a kernel for shards, and rates that are float32: equal to the bit."""
    optimizer = torch.optim.AdamW(parameters, lr=2**-6, fused=True)
    return optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 10, 0.5)


def train(run, *, every=1, resumes=False, made=replicated, by=momentum, total=STEPS, **how):
    """Train; validate, log and save on the way, as programs do."""
    with as_accelerators() if made is sharded else contextlib.nullcontext():
        accelerator = made(every, **how)
    torch.manual_seed(1)
    net = Net()
    optimizer, schedule = by(net.parameters())
    model, optimizer = accelerate.prepare(accelerator, net, optimizer, preset="none")
    accelerator.register_for_checkpointing(schedule)
    loop = hotloop.Loop(model, optimizer, run=run, total_steps=total, sentinel=0)

    @loop.step
    def step(x, y, update):
        loss = F.cross_entropy(model(x), y)
        accelerator.backward(loss)
        if update:
            accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
        return loss.detach()

    data, told, ran, begin = batches(STEPS * every), [], [], 0
    held = [value.to(accelerator.device) for value in batches(1)[0]]
    folder = f"{FOLDER}/half-{run}-{made.__name__}"
    if resumes:
        accelerator.load_state(folder)
        begin = len(data) // 2
    for number in range(begin, len(data)):
        if number == len(data) // 2 and not resumes:
            accelerator.save_state(folder)
        update = (number + 1) % every == 0
        with contextlib.nullcontext() if update or how.get("each") else accelerator.no_sync(model):
            loss = step(*(value.to(accelerator.device) for value in data[number]), update)
        ran.append(loop.last_ran())
        told.append(float(accelerator.reduce(loss)))
        if update:
            schedule.step()
        if number % 16 == 15:
            model.eval()
            with torch.no_grad():
                told.append(float(accelerator.reduce(F.cross_entropy(model(held[0]), held[1]))))
            model.train()
    status = loop.status()
    loop.close()
    numbers = [*told, *state_of(model), *shards_of(optimizer)]
    accelerator.free_memory()
    return numbers, ran, status


def beside_eager(run="eager+graph", **how):
    eager, *_ = train("eager", **how)
    with CAPTURES(), paced(), listening() as log, streams_noted(accelerate) as streams:
        ours, ran, status = train(run, **how)
    return {**told_of(eager, ours, ran, run, log), "tier": status.tier, "streams": streams}


tell(
    {
        "plain": beside_eager,
        "resumed": lambda: beside_eager(resumes=True),
        "accumulated": lambda: beside_eager(every=2),
        "unused": lambda: beside_eager(find_unused_parameters=True),
        "sharded": lambda: beside_eager(made=sharded, by=adamw),
        "sharded, resumed": lambda: beside_eager(made=sharded, by=adamw, resumes=True),
    }
)
