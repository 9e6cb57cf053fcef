"""What a search by `hotloop hpo` costs beside the same trials in a bare Optuna loop: wall and CPU time.

usage: OMP_NUM_THREADS=1 python benchmarks/search_cost.py [TRIALS] [ROUNDS] > FILE

A program of one's own reads handwritten digits: rate, width and dropout are searched by TPE, and the median pruner ends
trials by the accuracy after each of ten epochs, so that one takes about a second. The bare loop is what a user would
write instead: one process, a study in memory, no record, no checkpoint, nothing to go on with after a kill. Both draw
with the same seeds, so that both have the same trials; a round whose trials differ is refused.

Each is a process of its own, as a user starts it, timed with its imports. Rounds alternate. A ratio is that of the sums
over all rounds, since a machine that others use is slower in one round than in another: CPU time tells more there. The
document is printed after each round, so that the last one counts.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import torch
from torch import nn
from torch.nn import functional

import hotloop

if TYPE_CHECKING:
    from collections.abc import Iterator

TRIALS, ROUNDS = 200, 3
EPOCHS, SEED, STARTUP = 10, 42, 10
RATES, WIDTHS, DROPOUT = (1e-4, 3e-2), (896, 1280), (0.0, 0.5)


def make(
    lr: Annotated[float, hotloop.Search(log=RATES)] = 1e-3,
    width: Annotated[int, hotloop.Search(choices=WIDTHS)] = 896,
    dropout: Annotated[float, hotloop.Search(float=DROPOUT)] = 0.1,
) -> hotloop.Workload:
    """Return the program."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    x, y = torch.tensor(digits.data / 16, dtype=torch.float32), torch.tensor(digits.target)
    model = nn.Sequential(
        nn.Linear(64, width), nn.GELU(), nn.Dropout(dropout), nn.Linear(width, width), nn.GELU(), nn.Linear(width, 10)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    rows = torch.utils.data.TensorDataset(x[:1408], y[:1408])
    loader = torch.utils.data.DataLoader(rows, batch_size=128, shuffle=True)

    def step(images, labels):
        loss = functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    def metrics():
        model.eval()
        with torch.no_grad():
            return {"accuracy": (model(x[1408:]).argmax(1) == y[1408:]).float().mean()}

    return hotloop.Workload(model, optimizer, step, loader, metrics=metrics)


def bare(trials: int) -> list[list[float]]:
    """Search in a loop of a few lines, and return each trial's values and accuracies."""
    import numpy as np
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    study = optuna.create_study(direction="maximize", pruner=optuna.pruners.MedianPruner(n_startup_trials=STARTUP))
    for number in range(trials):
        seed = zlib.crc32(f"{SEED}/{number}".encode())  # as hotloop seeds each trial's draws
        study.sampler = optuna.samplers.TPESampler(seed=seed, n_startup_trials=STARTUP)
        trial = study.ask()
        values = (
            trial.suggest_float("lr", *RATES, log=True),
            trial.suggest_categorical("width", WIDTHS),
            trial.suggest_float("dropout", *DROPOUT),
        )
        torch.manual_seed(SEED)
        np.random.seed(SEED)  # noqa: NPY002 - as a run does
        program, best, pruned = make(*values), 0.0, False
        for epoch in range(EPOCHS):
            for model in program.models().values():
                model.train()
            for batch in program.batches:
                program.run(batch).item()
            accuracy = float(program.metrics()["accuracy"])
            best = max(best, accuracy)
            trial.report(accuracy, epoch + 1)
            if pruned := trial.should_prune():
                break
        study.tell(trial, None if pruned else best, state=optuna.trial.TrialState.PRUNED if pruned else None)
    return [[*each.params.values(), *each.intermediate_values.values()] for each in study.trials]


def searched(trials: int, folder: Path) -> list[list[float]]:
    """Return what `bare` does of the search that `hotloop hpo` left in a folder."""
    found = json.loads((folder / "study.json").read_text(encoding="utf-8"))["trials"]
    assert len(found) == trials
    return [[*each["values"].values(), *(value for _, value in each["reports"])] for each in found]


def timed(command: list[str]) -> tuple[float, float, str]:
    """Run a command and return its wall and CPU seconds, those of its own processes included, and what it printed."""
    before, began = os.times(), time.monotonic()
    printed = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    after = os.times()
    used = after.children_user + after.children_system - before.children_user - before.children_system
    return time.monotonic() - began, used, printed


def measured(trials: int, rounds: int) -> Iterator[dict[str, dict[str, list[float]]]]:
    """Alternate both ways, and yield wall and CPU seconds of the rounds so far."""
    found = {way: {"wall": [], "cpu": []} for way in ("bare", "hotloop hpo")}
    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as folder:
            study = Path(folder, "study")
            commands = {
                "bare": [sys.executable, __file__, "bare", str(trials)],
                "hotloop hpo": [
                    sys.executable, "-m", "hotloop.cli", "hpo", f"{__file__}:make", "hpo.metric=accuracy",
                    f"hpo.n_trials={trials}", f"training.num_epochs={EPOCHS}", f"hpo.folder={study}", "run.seed=42",
                    "training.early_stopping_patience=null", f"hpo.startup_trials={STARTUP}", "--quiet",
                ],
            }  # fmt: skip
            printed = {}
            for way, command in commands.items():
                wall, cpu, printed[way] = timed(command)
                found[way]["wall"].append(round(wall, 2))
                found[way]["cpu"].append(round(cpu, 2))
                print(f"{way}: {wall:.1f} s, {cpu:.1f} s of CPU", file=sys.stderr)
            if json.loads(printed["bare"]) != searched(trials, study):
                raise SystemExit("the two searches had other trials: their times cannot be compared")
        yield found


def main() -> None:
    """Alternate the ways, and print what each costs as JSON."""
    if "--help" in sys.argv:
        print(__doc__)
        return
    if sys.argv[1:2] == ["bare"]:
        print(json.dumps(bare(int(sys.argv[2]))))
        return
    given = [int(one) for one in sys.argv[1:]]
    trials, rounds = (*given, *(TRIALS, ROUNDS)[len(given) :])
    from ledger import processor

    load = os.getloadavg()
    for found in measured(trials, rounds):
        done = len(found["bare"]["wall"])
        total = {way: {kind: sum(each) for kind, each in times.items()} for way, times in found.items()}
        ours, theirs = total["hotloop hpo"], total["bare"]
        ratio = {kind: ours[kind] / theirs[kind] for kind in ("wall", "cpu")}
        document = {
            "date": time.strftime("%Y-%m-%d"),
            "processor": processor(),
            "cores": os.cpu_count(),
            "torch": torch.__version__,
            "threads": torch.get_num_threads(),
            "trials": trials,
            "rounds": done,
            "cpu_seconds_a_trial": round(theirs["cpu"] / trials / done, 2),
            "ratio": {kind: round(one, 3) for kind, one in ratio.items()},
            "cost_ms_a_trial": {k: round(1000 * (one - 1) * theirs[k] / trials / done, 1) for k, one in ratio.items()},
            "seconds": found,
            "load_of_the_machine": {"before": load, "after": os.getloadavg()},
        }
        print(json.dumps(document, indent=1), flush=True)


if __name__ == "__main__":
    main()
