"""What capturing brings recipe `focus` on a GPU: each network under CUDA graphs, the whole step (`auto`), and both.

usage: python benchmarks/focus_gpu.py [--steps 1000] [--ways eager networks step]
       [--out benchmarks/results/DATE-h200-focus.json] [settings of the recipe ...]

Each way is a run of the recipe, as `hotloop train` does it, in this process, one after the other. A step is counted
with what comes before it: the allocator's calls of the lens and the gist. Goal: a step in a third of eager's time,
losses within what two eager seeds differ by, no fault of lifetime.
"""

from __future__ import annotations

import argparse
import datetime as dt
import io
import json
import pathlib
import statistics
import tempfile

import torch
from rich.console import Console

from hotloop import record
from hotloop.recipes import focus
from hotloop.train import start

GRAPHS = [
    f"compile.components.{name}.{mode}=reduce-overhead"
    for name in focus.COMPONENTS
    for mode in ("training", "inference")
]
COMPILE = "training.optimization.use_torch_compile"
WAYS = {
    "eager": [],
    "another seed": ["run.seed=1"],
    "networks": [f"{COMPILE}=true", "compile.measure_eager_steps=0", *GRAPHS],
    "step": [f"{COMPILE}=auto"],
    "step and networks": [f"{COMPILE}=auto", *(one for one in GRAPHS if ".inference=" in one and ".model." not in one)],
}
LATE = 200


def run(way, options, folder):
    """Train one way; return the time of a late step, and the outcome of the run."""
    torch.compiler.reset()
    given = ["recipe=focus", "run.device=cuda", "training.num_epochs=50", f"training.max_steps={options.steps}"]
    begun = start.prepare([*given, f"run.folder={folder}", *options.settings, *WAYS[way]])
    outcome = focus.train(begun, Console(file=io.StringIO()))
    steps = record.load(folder)["steps"]
    late = steps[-min(LATE, len(steps) // 2) :]
    step, ready = (1000 * statistics.median(one[name] for one in late) for name in ("seconds", "ready_seconds"))
    return {
        "way": way,
        "step_ms": step,
        "before_it_ms": ready,
        "both_ms": step + ready,
        "total_seconds": sum(one["seconds"] + one["ready_seconds"] for one in steps),
        "late_loss": statistics.fmean(one["next_token"] for one in late),
        "metrics": outcome.best,
        "ran": {name: [one["running"], one["state"]] for name, one in outcome.components.items()},
        "causes": {name: one["causes"] for name, one in outcome.components.items()},
        "notes": [*outcome.notes, *outcome.remarks],
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--out", type=pathlib.Path)
    parser.add_argument("settings", nargs="*")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        rows = []
        for way in options.ways:
            rows.append(run(way, options, pathlib.Path(scratch, way.replace(" ", "-"))))
            print(json.dumps(rows[-1], indent=1), flush=True)
    eager = next((row["both_ms"] for row in rows if row["way"] == "eager"), None)
    for row in rows:
        row["times_eager"] = eager / row["both_ms"] if eager else None
    found = {
        "date": dt.datetime.now(dt.UTC).date().isoformat(),
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "steps": options.steps,
        "ways": rows,
    }
    if options.out:
        options.out.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps({row["way"]: [row["both_ms"], row["times_eager"]] for row in rows}, indent=1))


if __name__ == "__main__":
    main()
