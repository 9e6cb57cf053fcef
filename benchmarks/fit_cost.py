"""What a step of `hotloop train` costs beside the same step in a bare loop, with a logger.

usage: OMP_NUM_THREADS=1 python benchmarks/fit_cost.py [BLOCKS] [STEPS]

A program of one's own learns random sequences by `hotloop train` and in a loop of a few lines, which reads the loss
after each step as a trainer does. Whole runs of both alternate, and the step itself notes when it begins. So all counts
that is between two steps: batches, the record, the CSV logger every ten steps, checkpoints every 100 steps or none.

The step is a small one, of about a millisecond, so that the cost is a large share of it and shows above the machine's
noise. The cost is the least CPU time of a step in any block, less that of the bare loop. Goal: at most 2% of a step,
which steps of `goal_ms` and more reach.
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
import tempfile
import time
from pathlib import Path

import torch
from ledger import processor
from torch import nn
from torch.nn import functional

import hotloop
from hotloop import recipes
from hotloop.train import start

BLOCKS, STEPS = 7, 600
WARM_UP = 20
GOAL = 0.02
BEGAN: list[float] = []
"""When each step of the run began, by the process's clock."""


def make() -> hotloop.Workload:
    """Return the program."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(256, 4), nn.Linear(4, 256))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    rows = torch.randint(256, (16384, 65))
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(rows), batch_size=8, shuffle=True)

    def step(tokens):
        BEGAN.append(time.process_time())
        loss = functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return hotloop.Workload(model, optimizer, step, loader)


def bare(steps: int) -> None:
    """Train in a loop of a few lines."""
    program, done = make(), 0
    while done < steps:
        for batch in program.batches:
            program.run(batch).item()
            done += 1
            if done == steps:
                break


def trained(steps: int, every: str) -> None:
    """Train by `hotloop train`, with a checkpoint every so many steps."""
    given = [f"recipe={__file__}:make", f"training.max_steps={steps}", f"training.checkpoint_every_steps={every}"]
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        begun = start.prepare([*given, f"run.folder={folder}/run", "run.logger=csv", "run.log_every=10"])
        recipes.load(begun.settings.recipe.name).train(begun)


def milliseconds(run, *given) -> float:
    """Return the CPU time of a step: from the start of one to the start of the next, the mean of the run."""
    BEGAN.clear()
    run(*given)
    began = BEGAN or sys.modules[Path(__file__).stem].BEGAN  # a run reads this file anew
    return 1000 * (began[-1] - began[WARM_UP]) / (len(began) - 1 - WARM_UP)


def main() -> None:
    """Alternate the ways, and print what each costs as JSON."""
    given = [int(one) for one in sys.argv[1:]]
    blocks, steps = (*given, *(BLOCKS, STEPS)[len(given) :])
    ways = {"bare": (bare,), "no checkpoints": (trained, "null"), "checkpoints every 100 steps": (trained, "100")}
    found: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(blocks):
        for name, (run, *more) in ways.items():
            found[name].append(milliseconds(run, steps, *more))
    least = {name: min(times) for name, times in found.items()}
    document = {
        "date": time.strftime("%Y-%m-%d"),
        "processor": processor(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "blocks": blocks,
        "steps": steps,
        "bare_ms": round(least["bare"], 3),
        "cost_ms": {name: round(least[name] - least["bare"], 3) for name in list(ways)[1:]},
        "goal_ms": {name: round((least[name] - least["bare"]) / GOAL, 1) for name in list(ways)[1:]},
        "all_ms": {name: [round(one, 3) for one in times] for name, times in found.items()},
    }
    print(json.dumps(document, indent=1))


if __name__ == "__main__":
    main()
