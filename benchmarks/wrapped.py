"""Compiling inside a strategy's wrapper or over it, under DDP, FSDP and FSDP2.

usage: torchrun --nproc-per-node 2 -m benchmarks.wrapped [--size gpu|cpu] [--blocks 8] [--steps 8] [--out FILE]

A GPT is set up by Fabric, bf16-mixed on GPUs, and stepped eager, compiled inside the wrapper, and over it, in blocks
that take turns. Prints the median milliseconds a step with its interval, and how many times as fast it is as eager's
blocks beside it. FSDP is for GPUs only; FSDP2 shards the model in place, so there is nothing to be over.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import pathlib
import time

import lightning
import torch
from lightning.fabric.strategies import FSDPStrategy, ModelParallelStrategy
from torch.distributed.fsdp import fully_shard

import hotloop
from benchmarks.suite import models
from hotloop.integrations.fabric import setup
from hotloop.measure import interval, ratio_interval
from hotloop.measure.machine import describe

SIZES = {"gpu": (50_304, 768, 12, 1024, 8), "cpu": (64, 32, 2, 16, 2)}
WARM = 5
PLACES = {"eager": None, "inside": False, "over": True}


def sharded(model, mesh):
    """Shard each block and then the whole, as FSDP2 wants it."""
    for block in model.blocks:
        fully_shard(block, mesh=mesh["data_parallel"])
    return fully_shard(model, mesh=mesh["data_parallel"])


def strategies(block):
    """Return the strategies by name, and the places that each has."""
    wrapped = FSDPStrategy(auto_wrap_policy={block}, use_orig_params=True)
    return {
        "ddp": (lambda: "ddp", [*PLACES]),
        "fsdp": (lambda: wrapped, [*PLACES]),
        "fsdp2": (lambda: ModelParallelStrategy(sharded, 2, 1), ["eager", "inside"]),
    }


def steps_of(fabric, model, size, place):
    """Set a copy of the model up; return a function that runs one step and waits for it."""
    words, _, _, length, number = SIZES[size]
    model = copy.deepcopy(model)
    reapply = PLACES[place]
    optimizer = None
    if isinstance(fabric.strategy, ModelParallelStrategy):  # the optimizer is made of what sharding made
        made = setup(fabric, model, preset=None if place == "eager" else "default", reapply=reapply)
        optimizer = fabric.setup_optimizers(torch.optim.AdamW(made.parameters(), lr=1e-4, fused=True))
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        preset = None if place == "eager" else "default"
        made, optimizer = setup(fabric, model, optimizer, preset=preset, reapply=reapply)
    texts = torch.randint(words, (number, length + 1), device=fabric.device)
    x, y = texts[:, :-1].contiguous(), texts[:, 1:].contiguous()

    def step():
        loss = made(x, y)
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step, made


def measured(name, make, places, options):
    """Time one strategy."""
    gpu = options.size == "gpu"
    fabric = lightning.Fabric(
        accelerator="cuda" if gpu else "cpu", devices=2, strategy=make(), precision="bf16-mixed" if gpu else "32-true"
    )
    fabric.launch()
    torch.manual_seed(0)
    words, width, depth, length, _ = SIZES[options.size]
    model = models.Gpt(words, width, layers=depth, heads=depth, length=length)
    found, calls = {}, {}
    for place in places:
        torch.manual_seed(1)
        calls[place], made = steps_of(fabric, model, options.size, place)
        found[place] = {"losses": [calls[place]() for _ in range(WARM)]}
        if place != "eager":
            (component,) = hotloop.status(made).components.values()
            found[place] |= {"running": component.running, "compiles": component.compiles, "state": component.state}
    blocks = {place: [] for place in places}
    for _ in range(options.blocks):
        for place in places:
            fabric.barrier()
            began = time.perf_counter()
            for _ in range(options.steps):
                calls[place]()
            blocks[place].append((time.perf_counter() - began) / options.steps)
    for place in places:
        low, high = interval(blocks[place])
        middle = sorted(blocks[place])[len(blocks[place]) // 2]
        found[place] |= {"ms": round(1000 * middle, 3), "ms_interval": [round(1000 * low, 3), round(1000 * high, 3)]}
        found[place]["of_eager"] = [round(one, 3) for one in ratio_interval(blocks["eager"], blocks[place])]
    if fabric.is_global_zero:
        print(json.dumps({name: found}), flush=True)
    return found


def main():
    """Measure each strategy; the first process writes the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="gpu")
    parser.add_argument("--blocks", type=int, default=8)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--out", type=pathlib.Path)
    options = parser.parse_args()
    found = {}
    for name, (make, places) in strategies(models.Block).items():
        if name == "fsdp" and options.size == "cpu":
            continue
        try:
            found[name] = measured(name, make, places, options)
        finally:
            gc.collect()
            torch.compiler.reset()
    if torch.distributed.get_rank() == 0 and options.out:
        device = torch.device(options.size.replace("gpu", "cuda"))
        settings = {name: value for name, value in vars(options).items() if name != "out"}
        document = {"machine": describe(device), "settings": settings, "strategies": found}
        options.out.write_text(json.dumps(document, indent=1) + "\n")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
