"""What a step of `hotloop train` costs beside the same step in a bare loop, with a logger.

usage: OMP_NUM_THREADS=1 python benchmarks/fit_cost.py [BLOCKS] [STEPS]

A transformer encoder learns random sequences, as a program of one's own and in a loop of a few lines that reads the
loss after each step, as a trainer does that shows it. Whole runs of both alternate, and the program's step itself notes
when it begins, so that everything between two steps counts: batches, the record, the CSV logger, checkpoints every 100
steps. The ratio is the median over the blocks, with its 95% interval, of wall time and of the process's CPU time, which
other work on the machine changes less. Goal: 1.02.
"""

from __future__ import annotations

import json
import statistics
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
from hotloop.measure import ratio_interval
from hotloop.train import start

BLOCKS, STEPS = 11, 320
WARM_UP = 20
BEGAN: list[tuple[float, float]] = []
"""When each step of the run began, by the wall's clock and by the process's."""


def make() -> hotloop.Workload:
    """Return the program: some 10 ms a step on one core."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(64, 4, 256, batch_first=True)
    model = nn.Sequential(nn.Embedding(256, 64), nn.TransformerEncoder(layer, 2), nn.Linear(64, 256))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    rows = torch.randint(256, (4096, 65))
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(rows), batch_size=8, shuffle=True)

    def step(tokens):
        BEGAN.append((time.perf_counter(), time.process_time()))
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


def trained(steps: int, folder: Path) -> None:
    """Train by `hotloop train`."""
    given = [f"recipe={__file__}:make", f"training.max_steps={steps}", "training.num_epochs=1000"]
    begun = start.prepare([*given, f"run.folder={folder}", "run.logger=csv", "run.log_every=10"])
    recipe = recipes.load(begun.settings.recipe.name)
    recipe.train(begun)


def seconds(run, *given) -> list[float]:
    """Return the seconds of a step, by both clocks: from one start to the next, the mean of the run."""
    BEGAN.clear()
    run(*given)
    began = BEGAN or sys.modules[Path(__file__).stem].BEGAN  # a run reads this file anew
    many = len(began) - 1 - WARM_UP
    return [(last - first) / many for first, last in zip(began[WARM_UP], began[-1], strict=True)]


def main() -> None:
    """Alternate both, and print the ratio as JSON."""
    given = [int(one) for one in sys.argv[1:]]
    blocks, steps = (*given, *(BLOCKS, STEPS)[len(given) :])
    ours, theirs = [], []
    with tempfile.TemporaryDirectory() as folder:
        for block in range(blocks + 1):
            theirs.append(seconds(bare, steps))
            ours.append(seconds(trained, steps, Path(folder, str(block))))
    found = {
        "date": time.strftime("%Y-%m-%d"),
        "processor": processor(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "blocks": blocks,
        "steps": steps,
        "logger": "csv",
    }
    for place, clock in enumerate(("wall", "cpu")):
        # The first run of each pays for what is imported.
        one, other = ([both[place] for both in measured[1:]] for measured in (ours, theirs))
        found[clock] = {
            "bare_ms": round(1000 * statistics.median(other), 3),
            "train_ms": round(1000 * statistics.median(one), 3),
            "ratio": round(statistics.median(x / y for x, y in zip(one, other, strict=True)), 4),
            "interval": [round(end, 4) for end in ratio_interval(one, other)],
        }
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
