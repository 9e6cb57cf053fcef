"""What a shared cache saves: the first compiled step on a machine that has compiled nothing, with it and without.

usage: OMP_NUM_THREADS=1 python benchmarks/shared_cache.py [ROUNDS] [cpu|cuda] [small|base] > FILE

Each way is a process of its own with empty caches. ``cold`` compiles, and gives what it compiled to a share. ``shared``
takes from the share: its seconds are those of taking and of the first step together. Both import torch's compiler
in them, which no cache saves: ``imports`` says for how long. Rounds alternate, and each has a share of its own.
"""

from __future__ import annotations

import datetime as dt
import importlib
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from torch import nn

import hotloop
from hotloop.cache import shared_cache, shared_compiles

ROUNDS = 5


SIZES = {"small": (4, 128, 4), "base": (12, 768, 12)}
"""Layers, width and heads of the transformer; ``base`` is as large as XLM-R base, without its embeddings."""


def program(device: str, size: str) -> tuple[nn.Module, torch.Tensor]:
    """Return a transformer, and a batch of 8 times 64 vectors."""
    torch.manual_seed(0)
    layers, width, heads = SIZES[size]
    layer = nn.TransformerEncoderLayer(width, heads, 4 * width, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False).to(device)
    return model, torch.randn(8, 64, width, device=device)


def first_step(share: str, device: str, size: str) -> dict[str, float]:
    """Return the seconds of taking from the share, of importing the compiler, and of the first compiled step."""
    model, x = program(device, size)
    model(x).square().mean().backward()  # the libraries are loaded and set up
    model.zero_grad()
    began = time.monotonic()
    with shared_cache(share, lambda line: print(line, file=sys.stderr)), shared_compiles(model):
        taken = time.monotonic()
        importlib.import_module("torch._inductor.compile_fx")
        imported = time.monotonic()
        hotloop.compile(model, "default")
        loss = model(x).square().mean()
        loss.backward()
        value = loss.item()
        ended = time.monotonic()
    return {"take": taken - began, "imports": imported - taken, "step": ended - imported, "loss": value}


def fresh(share: Path, device: str, size: str) -> dict[str, float]:
    """Run one first step in a process with caches of its own."""
    with tempfile.TemporaryDirectory() as home:
        place = {"HOTLOOP_CACHE_DIR": f"{home}/hotloop", "TRITON_CACHE_DIR": f"{home}/triton", "TMPDIR": home}
        command = [sys.executable, __file__, "first", str(share), device, size]
        done = subprocess.run(command, env={**os.environ, **place}, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout)


def main() -> None:
    """Measure, and print the document."""
    if sys.argv[1:2] == ["first"]:
        print(json.dumps(first_step(*sys.argv[2:5])))
        return
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else ROUNDS
    device = sys.argv[2] if len(sys.argv) > 2 else "cpu"
    size = sys.argv[3] if len(sys.argv) > 3 else "small"
    found: dict[str, list[float]] = {"cold": [], "shared": [], "imports": []}
    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as share:
            cold, shared = fresh(Path(share), device, size), fresh(Path(share), device, size)
        assert shared["loss"] == cold["loss"]
        found["cold"].append(round(cold["imports"] + cold["step"], 3))
        found["shared"].append(round(shared["take"] + shared["imports"] + shared["step"], 3))
        found["imports"].append(round(shared["imports"], 3))
    document = {
        "date": dt.datetime.now(dt.UTC).date().isoformat(),
        "hardware": torch.cuda.get_device_name() if device == "cuda" else platform.processor() or platform.machine(),
        "versions": {"python": platform.python_version(), "torch": torch.__version__, "hotloop": hotloop.__version__},
        "settings": {"rounds": rounds, "device": device, "size": size, "threads": torch.get_num_threads()},
        "seconds": found,
        "ratio": round(statistics.median(found["shared"]) / statistics.median(found["cold"]), 3),
    }
    print(json.dumps(document, indent=1))


if __name__ == "__main__":
    main()
