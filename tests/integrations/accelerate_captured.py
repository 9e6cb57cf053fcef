"""Accelerate in two processes, whose steps a loop captures; see `captured_ranks`."""

import contextlib

import torch
from accelerate import Accelerator, DistributedDataParallelKwargs
from captured_ranks import CAPTURES, DEVICE, FOLDER, Net, batches, listening, state_of, streams_noted, tell, told_of
from torch.nn import functional as F

import hotloop
from hotloop.integrations import accelerate

STEPS = 40


def train(run, *, every=1, resumes=False, **wrap):
    """Train; validate, log and save on the way, as programs do."""
    accelerator = Accelerator(cpu=DEVICE == "cpu", kwargs_handlers=[DistributedDataParallelKwargs(**wrap)])
    torch.manual_seed(1)
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    model, optimizer = accelerate.prepare(accelerator, net, optimizer, preset="none")
    accelerator.register_for_checkpointing(schedule)
    loop = hotloop.Loop(model, optimizer, run=run, total_steps=STEPS)

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
    folder = f"{FOLDER}/half-{run}"
    if resumes:
        accelerator.load_state(folder)
        begin = len(data) // 2
    for number in range(begin, len(data)):
        if number == len(data) // 2 and not resumes:
            accelerator.save_state(folder)
        update = (number + 1) % every == 0
        with contextlib.nullcontext() if update else accelerator.no_sync(model):
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
    numbers = [*told, *state_of(model)]
    accelerator.free_memory()
    return numbers, ran, status


def beside_eager(run="eager+graph", **how):
    eager, *_ = train("eager", **how)
    with CAPTURES(), listening() as log, streams_noted(accelerate) as streams:
        ours, ran, status = train(run, **how)
    return {**told_of(eager, ours, ran, run, log), "tier": status.tier, "streams": streams}


tell(
    {
        "plain": beside_eager,
        "resumed": lambda: beside_eager(resumes=True),
        "accumulated": lambda: beside_eager(every=2),
        "unused": lambda: beside_eager(find_unused_parameters=True),
    }
)
