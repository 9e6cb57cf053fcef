"""The smallest errors that ``hotloop.verify`` sees, by dtype and model, and the margin of correct compiles.

usage: python benchmarks/verify.py [--device cuda] [--models mlp convolutions gpt] [--tries 3]
       [--out benchmarks/results/DATE-DEVICE-verify.json]

Compiled code, and that alone, multiplies a gradient by 1 + excess: that of one operation in the middle of the model
(``one operation``), or that of the loss, and so all of them (``whole backward``). The excess is a buffer, so one
compile serves all of them. Excesses go by 1, 2, 5; the smallest seen is the least that was seen in every try, each from
another state of the training, as are all larger ones. A right compile has to pass every try.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import pathlib
import platform
import time

import torch
from ledger import processor
from noise import MODELS, Gelu
from torch import nn

import hotloop

MODES = {
    "cpu": ("float32", "bfloat16", "float16"),
    "cuda": ("float32", "tf32", "bfloat16", "float16"),
}
EXCESSES = [float(f"{figure}e{power}") for power in range(-7, 0) for figure in (1, 2, 5)]
FAULTS = ("one operation", "whole backward")
BETWEEN = 5
"""Eager steps from one try to the next."""


def wrong_gradient(values, excess):
    """Return the values as they are, with a gradient that is too large by an excess, in compiled code only."""
    if not torch.compiler.is_compiling():
        return values
    return values + excess.to(values.dtype) * (values - values.detach())


def middle(model):
    """Return the module whose output gets the wrong gradient of one operation."""
    found = [one for one in model.modules() if isinstance(one, Gelu | nn.BatchNorm2d)]
    return found[len(found) // 2]


def program(kind, mode, device):
    """Make a workload, and the excesses by fault."""
    torch.manual_seed(0)
    model = kind().to(device)
    excesses = {name: torch.zeros((), device=device) for name in FAULTS}
    for (name, excess), module in zip(excesses.items(), (middle(model), model), strict=True):
        module.register_buffer("wrong_by", excess, persistent=False)
        module.register_forward_hook(lambda module, _args, made: wrong_gradient(made, module.wrong_by))
        excesses[name] = module.wrong_by
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    amp = {"bfloat16": torch.bfloat16, "float16": torch.float16}.get(mode)
    draws = torch.Generator().manual_seed(0)

    def step(x, y):
        with torch.autocast(device, amp or torch.bfloat16, enabled=amp is not None):
            loss = model(x, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    def batches():
        while True:
            yield tuple(one.to(device) for one in kind.batch(draws))

    return hotloop.Workload(model, optimizer, step, batches), excesses


def advance(workload, steps):
    """Train on eagerly."""
    batches = workload.endless()
    for _ in range(steps):
        workload.run(next(batches))


def seen(workload, excess, value, options):
    """Return whether an excess is seen in every try; stop at the first miss."""
    excess.fill_(value)
    try:
        for _ in range(options.tries):
            advance(workload, BETWEEN)
            if hotloop.verify(workload, options.preset, search=False).passes:
                return False
        return True
    finally:
        excess.zero_()


def smallest(workload, excess, options):
    """Find the smallest excess that is seen, by bisection."""
    low, high = 0, len(EXCESSES)
    while low < high:
        place = (low + high) // 2
        if seen(workload, excess, EXCESSES[place], options):
            high = place
        else:
            low = place + 1
    return EXCESSES[low] if low < len(EXCESSES) else None


def measure(name, mode, options):
    """Return the row of one model and dtype."""
    began = time.perf_counter()
    torch.compiler.reset()
    if options.device == "cuda":
        torch.set_float32_matmul_precision("high" if mode == "tf32" else "highest")
    workload, excesses = program(MODELS[name], mode, options.device)
    right = []
    for _ in range(2 * options.tries):
        advance(workload, BETWEEN)
        right.append(hotloop.verify(workload, options.preset, search=False))
    row = {
        "model": name,
        "mode": mode,
        "compute_dtype": right[0].compute_dtype,
        "reference": right[0].reference,
        "right_compiles_pass": sum(one.passes for one in right),
        "of": len(right),
        "nearest_to_a_limit": round(max(one.worst[0].nearness for one in right), 3),
        "visible_by_limits": float(f"{right[-1].visible:.2g}"),
        "smallest_seen": {fault: smallest(workload, excesses[fault], options) for fault in FAULTS},
        "seconds": 0.0,
    }
    row["seconds"] = round(time.perf_counter() - began, 1)
    return row


def named(options):
    """Search for the region of a wrong operation, in float32."""
    torch.compiler.reset()
    workload, excesses = program(MODELS["gpt"], "float32", options.device)
    excesses["one operation"].fill_(1e-5)
    verdict = hotloop.verify(workload, options.preset)
    print(verdict, flush=True)
    return verdict.to_dict()


def main():
    """Measure, print a row each, and write the document."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu", choices=MODES)
    parser.add_argument("--models", nargs="+", default=["mlp", "convolutions", "gpt"], choices=MODELS)
    parser.add_argument("--modes", nargs="+")
    parser.add_argument("--tries", type=int, default=3)
    parser.add_argument("--preset", default="inductor")
    parser.add_argument("--out", type=pathlib.Path)
    options = parser.parse_args()
    rows = []
    for name in options.models:
        for mode in options.modes or MODES[options.device]:
            rows.append(measure(name, mode, options))
            print(json.dumps(rows[-1]), flush=True)
            write(rows, None, options)
    if "gpt" in options.models:
        write(rows, named(options), options)


def write(rows, search, options):
    """Write the results so far."""
    document = {
        "date": dt.datetime.now(tz=dt.UTC).date().isoformat(),
        "command": "python benchmarks/verify.py",
        "machine": torch.cuda.get_device_name() if options.device == "cuda" else processor(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "threads": torch.get_num_threads(),
        "preset": options.preset,
        "tries": options.tries,
        "steps": 3,
        "rows": rows,
        "search": search,
    }
    if options.out:
        options.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
