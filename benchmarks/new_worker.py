"""How soon the first compiled step of a new worker is done: with an empty cache, and with what earlier ones kept.

usage: python benchmarks/new_worker.py [--rounds 2] [--device cpu] [--preset inductor] [--small]
       [--out benchmarks/results/DATE-DEVICE-new-worker.json]

Each way is a new process; ways go by turns. ``cold``: nothing is kept yet. ``kept``: the store holds what the cold
process before it compiled, and torch's own temporary folder is that one's too, as on one machine (compiled code is not
there, but the precompiled header is that torch makes for C++). ``bundle``: the store holds what a bundle brought,
exported from that one, and torch's folder is empty, as on another machine. ``eager``: not compiled. Timed from the
model being there to the end of the first step (forward, backward, optimizer), and of two more, so that what is left of
preparation would show. The store's own time (checking and copying) is part of it.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).parents[1]
WAYS = ("eager", "cold", "kept", "bundle")


def child(options):
    """Run the first steps of a worker; print their seconds."""
    import torch
    from transformers import BertConfig, BertModel

    import hotloop
    from hotloop.cache import shared_compiles

    torch.manual_seed(0)
    layers, width = (2, 64) if options.small else (6, 384)
    config = BertConfig(
        hidden_size=width, num_hidden_layers=layers, num_attention_heads=width // 32, intermediate_size=4 * width
    )
    model = BertModel(config, add_pooling_layer=False).to(options.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    ids = torch.randint(0, 30_000, (8, 32), device=options.device)
    losses, seconds = [], []
    began = time.perf_counter()
    with shared_compiles(model):
        if options.child != "eager":
            hotloop.compile(model, options.preset)
        for _ in range(3):
            loss = model(ids).last_hidden_state.square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            seconds.append(time.perf_counter() - began)
    found = hotloop.status(model).components
    parts = {name: (one.running, one.state, one.cache_hits, one.cache_misses) for name, one in found.items()}
    print(json.dumps({"seconds": seconds, "losses": losses, "status": parts, "torch": torch.__version__}))


def run(way, folder, options):
    """Run one worker in a process of its own, its store in a folder."""
    command = [sys.executable, __file__, "--child", way, "--device", options.device, "--preset", options.preset]
    place = folder.with_name(f"{folder.name}-tmp")  # where torch's own folder is made
    place.mkdir(exist_ok=True)
    environment = {**os.environ, "HOTLOOP_CACHE_DIR": str(folder), "TMPDIR": str(place)}
    environment.pop("TORCHINDUCTOR_CACHE_DIR", None)
    small = ["--small"] if options.small else []
    done = subprocess.run([*command, *small], env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


def cache(folder, *arguments):
    """Run ``hotloop cache`` on a store."""
    environment = {**os.environ, "HOTLOOP_CACHE_DIR": str(folder)}
    command = [sys.executable, "-m", "hotloop", "cache", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout


def main():
    """Measure, by turns, and write the document."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--preset", default="inductor")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--child", choices=WAYS)
    parser.add_argument("--out", type=pathlib.Path)
    options = parser.parse_args()
    if options.child:
        child(options)
        return
    from ledger import processor

    rows = []
    for number in range(options.rounds):
        with tempfile.TemporaryDirectory() as scratch:
            first, second, bundle = (pathlib.Path(scratch, name) for name in ("first", "second", "bundle.zip"))
            for way in WAYS:
                if way == "bundle":
                    cache(first, "export", str(bundle))
                    cache(second, "import", str(bundle))
                load = os.getloadavg()[0]  # of the minute before: a worker that shares its cores is slower by that
                row = {"round": number, "way": way, "load_before": round(load, 2)}
                row |= run(way, second if way == "bundle" else first, options)
                print(json.dumps(row), flush=True)
                rows.append(row)
            kept = json.loads(cache(first, "--json"))["bytes"]
    first = {way: statistics.median(row["seconds"][0] for row in rows if row["way"] == way) for way in WAYS}
    document = {
        "date": dt.datetime.now(tz=dt.UTC).date().isoformat(),
        "command": "python benchmarks/new_worker.py",
        "machine": processor() if options.device == "cpu" else _gpu(),
        "torch": rows[0]["torch"],
        "threads": os.environ.get("OMP_NUM_THREADS", "torch's own"),
        "model": "BERT 2 layers of 64, 8x32 tokens" if options.small else "BERT 6 layers of 384, 8x32 tokens, float32",
        "preset": options.preset,
        "store_bytes": kept,
        "first_step_seconds": first,
        "cold_over_kept": first["cold"] / first["kept"],
        "cold_over_bundle": first["cold"] / first["bundle"],
        "rows": rows,
    }
    print(json.dumps({name: document[name] for name in ("first_step_seconds", "cold_over_kept", "cold_over_bundle")}))
    if options.out:
        options.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def _gpu():
    import torch

    return torch.cuda.get_device_name()


if __name__ == "__main__":
    main()
