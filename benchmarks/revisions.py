"""Two revisions of hotloop side by side: what a step, its audit, its proofs and its replays cost in each.

usage: python benchmarks/revisions.py OLD NEW [--device cpu] [--rounds 3] [--models mlp bert xlmr unet]
       [--out benchmarks/results/DATE-DEVICE-revisions.json]

OLD and NEW are checkouts. Each round runs a process of either in turn, so that both meet the same machine.
A process trains one model in one way: with a plain loop, under `run="eager"`, under a settled `auto`, and captured
(on a CPU with the stand-in for captures). Times are of whole steps on the host clock, with the
device idle before and after; of
each kind of step (plain, audit, proof, capture) the median. The tables give milliseconds, and NEW / OLD.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import datetime as dt
import json
import os
import pathlib
import platform
import statistics
import subprocess
import sys
import time

WAYS = ("plain", "eager", "auto", "eager+graph")
STEPS = {"mlp": 3_000, "bert": 120, "xlmr": 60, "unet": 40}


def program(name, device):
    """Make model, optimizer and step function of a workload, and a function that draws a batch."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    if name == "mlp":
        model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8)).to(device)
        batch = lambda: (torch.randn(16, 32, device=device), torch.randint(8, (16,), device=device))  # noqa: E731
        loss_of = lambda x, y: nn.functional.cross_entropy(model(x), y)  # noqa: E731
    elif name in ("bert", "xlmr"):
        from transformers import BertConfig, BertForSequenceClassification

        size = {} if name == "xlmr" else {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
        vocabulary = 250_002 if name == "xlmr" else 1_000
        config = BertConfig(vocab_size=vocabulary, num_hidden_layers=12, num_labels=1, **size)
        model = BertForSequenceClassification(config).to(device)
        shape = (16, 256) if name == "xlmr" else (4, 32)
        batch = lambda: (  # noqa: E731
            torch.randint(vocabulary, shape, device=device),
            torch.randn(shape[0], 1, device=device),
        )
        loss_of = lambda x, y: model(input_ids=x, labels=y).loss  # noqa: E731
    else:
        from diffusers import UNet2DConditionModel

        model = UNet2DConditionModel(sample_size=64, cross_attention_dim=768).to(device)
        batch = lambda: (  # noqa: E731
            torch.randn(8, 4, 64, 64, device=device),
            torch.randint(1_000, (8,), device=device),
            torch.randn(8, 77, 768, device=device),
        )
        loss_of = lambda x, t, c: nn.functional.mse_loss(model(x, t, c).sample, x)  # noqa: E731
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    autocast = torch.autocast(device, torch.bfloat16) if device == "cuda" else contextlib.nullcontext()

    def step(*arguments):
        with autocast:
            loss = loss_of(*arguments)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return model, optimizer, step, batch


def child(name, way, device):
    """Train a workload in one way, and print what its steps took, by kind, as JSON."""
    import torch

    import hotloop
    from hotloop.testing import captured_step_emulation

    wait = torch.cuda.synchronize if device == "cuda" else (lambda: None)
    captured = way in ("auto", "eager+graph") and device == "cpu" and way != "auto"
    took = collections.defaultdict(list)
    with captured_step_emulation() if captured else contextlib.nullcontext():
        model, optimizer, step, batch = program(name, device)
        loop = None
        if way != "plain":
            loop = hotloop.Loop(model, optimizer, run=way, total_steps=100_000, sentinel=0)
            step = loop.step(step)
        batches = [batch() for _ in range(8)]
        for number in range(STEPS[name]):
            wait()
            began = time.perf_counter()
            step(*batches[number % 8])
            wait()
            seconds = time.perf_counter() - began
            kind = "run" if loop is None else loop.last_ran()[1]
            if kind != "run" or number >= STEPS[name] // 2:
                took[kind].append(seconds)
        status = loop.status() if loop is not None else None
        if loop is not None:
            loop.close()
    found = {kind: {"median_ms": 1e3 * statistics.median(times), "steps": len(times)} for kind, times in took.items()}
    print(json.dumps({"kinds": found, "tier": status.tier if status else "plain"}))


def measure(tree, name, way, device):
    """Run a child on a checkout's code."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(pathlib.Path(tree).resolve() / "src"),
        "OMP_NUM_THREADS": "1" if device == "cpu" else os.environ.get("OMP_NUM_THREADS", "8"),
        "HOTLOOP_CACHE_DIR": str(pathlib.Path(tree).resolve() / ".cache-revisions"),
    }
    command = [sys.executable, __file__, "--child", name, way, device]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        return {"error": done.stderr.strip().splitlines()[-1] if done.stderr.strip() else "no output"}
    return json.loads(done.stdout.strip().splitlines()[-1])


def main():
    """Measure both checkouts in turns and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trees", nargs="*")
    parser.add_argument("--child", nargs=3)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--models", nargs="*", default=["mlp", "bert"])
    parser.add_argument("--out")
    options = parser.parse_args()
    if options.child:
        child(*options.child)
        return
    import torch

    old, new = options.trees
    rows = []
    for name in options.models:
        for way in WAYS:
            rounds = [
                {"old": measure(old, name, way, options.device), "new": measure(new, name, way, options.device)}
                for _ in range(options.rounds)
            ]
            kinds = dict.fromkeys(kind for one in rounds for side in one.values() for kind in side.get("kinds", {}))
            for kind in kinds:
                pairs = [
                    (one["old"]["kinds"][kind]["median_ms"], one["new"]["kinds"][kind]["median_ms"])
                    for one in rounds
                    if all(kind in side.get("kinds", {}) for side in one.values())
                ]
                if pairs:
                    before, after = (statistics.median(values) for values in zip(*pairs, strict=True))
                    ratio = statistics.median(after / before for before, after in pairs)
                    rows.append([name, way, kind, before, after, ratio])
                    print(f"{name:6} {way:12} {kind:9} {before:10.3f} {after:10.3f} ms  {ratio:6.3f}", flush=True)
            for one in rounds:
                for side, result in one.items():
                    if "error" in result:
                        print(f"{name:6} {way:12} {side}: {result['error']}", flush=True)
    if options.out:
        where = torch.cuda.get_device_name() if options.device == "cuda" else f"{os.cpu_count()} CPU cores"
        document = {
            "date": dt.datetime.now(dt.UTC).date().isoformat(),
            "command": "python benchmarks/revisions.py OLD NEW",
            "hardware": where,
            "versions": {"python": platform.python_version(), "torch": torch.__version__},
            "rounds": options.rounds,
            "columns": ["model", "way", "kind of step", "old ms", "new ms", "new / old"],
            "rows": rows,
        }
        pathlib.Path(options.out).write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
