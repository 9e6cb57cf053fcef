"""Cross-validations killed at random moments: what ``python -m benchmarks.kills --what kfold,nested`` runs.

A cross-validation of tiny runs is left alone first, its checkpoints every few steps; then the same is killed with
SIGKILL and resumed until it is done, and again in another folder until there were kills enough. A quarter of the kills
is within 8 s of a start, mostly before a step; the others are 0 to 5 s after a step. A nested one searches in each fold
(TPE, SQLite).
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator

SPLITS = 4


def command(folder: Path, study: Path, nested: bool) -> list[str]:
    """Return the command that starts the cross-validation, or resumes it if it was begun."""
    from training_fixtures import overrides

    start = [sys.executable, "-m", "hotloop", "kfold"]
    if (study / "kfold.json").is_file():
        return [*start, f"run.resume={study}"]
    chosen = [one for one in overrides(folder) if not one.startswith(("run.folder=", "training.num_epochs="))]
    inner = [
        "kfold.inner_trials=6", "kfold.inner_splits=2", "hpo.startup_trials=2", "hpo.pruner=none", "hpo.metric=loss",
        "hpo.direction=minimize", "hpo.space.training.batch_size.choices=[3,4]", "training.num_epochs=6",
    ]  # fmt: skip
    return [
        *start, *chosen, f"kfold.n_splits={SPLITS}", "training.checkpoint_every_steps=20", f"run.folder={study}",
        *(inner if nested else ["training.num_epochs=30", "training.early_stopping_patience=null"]),
    ]  # fmt: skip


def folds_of(study: Path) -> dict[int, Any]:
    """Return the metrics of each finished fold, and the settings that an inner search chose."""
    with contextlib.suppress(OSError, ValueError):
        document = json.loads((study / "kfold.json").read_text())
        kept = ("best", "last", "best_step", "step", "chosen")
        return {
            one["fold"]: {name: one.get(name) for name in kept}
            for one in document["folds"]
            if one["status"] == "finished"
        }
    return {}


def same_weights(one: Path, other: Path) -> bool:
    """Compare the weights of a fold's best checkpoint, bit by bit."""
    import torch

    from hotloop.train import checkpoint

    ours, theirs = (checkpoint.weights(checkpoint.load(at / "checkpoints" / "best.pt")) for at in (one, other))
    held, other = (
        {(model, key): one for model in found for key, one in found[model].items()} for found in (ours, theirs)
    )
    return held.keys() == other.keys() and all(torch.equal(held[name], other[name]) for name in held)


def inner_trials(fold: Path) -> list[dict[str, Any]]:
    """Return the attempts of a fold's inner search."""
    found = fold / "search" / "study.json"
    trials: list[dict[str, Any]] = json.loads(found.read_text())["trials"] if found.is_file() else []
    return trials


def outcomes(attempts: list[dict[str, Any]]) -> dict[int, Any]:
    """Return the values and the objective of each trial."""
    return {one["number"]: [one["values"], one["value"]] for one in attempts if one["state"] == "complete"}


def moment(log: Path, process: subprocess.Popen[bytes], chance: random.Random) -> str | None:
    """Wait for the moment of a kill; None where the process ended before."""
    early = chance.random() < 0.25
    begun = log.read_bytes().count(b"\nstep ")
    while not early and process.poll() is None and log.read_bytes().count(b"\nstep ") == begun:
        time.sleep(0.02)
    try:
        process.wait(chance.uniform(0.0, 8.0 if early else 5.0))
    except subprocess.TimeoutExpired:
        return "after a start" if early else "after a step"
    return None


def disturbed(folder: Path, number: int, nested: bool, left: int, chance: random.Random) -> dict[str, Any]:
    """Run one cross-validation to its end, killed at most so often on its way."""
    study, log = folder / f"killed-{number}", folder / f"killed-{number}.txt"
    before: dict[int, Any] = {}
    found: dict[str, Any] = {"moments": [], "lost": 0, "study": study}
    with log.open("ab") as file:
        while True:
            process = subprocess.Popen(command(folder, study, nested), env=environment(), stdout=file, stderr=file)
            if len(found["moments"]) < left and (when := moment(log, process, chance)):
                process.kill()
                found["moments"].append(when)
                print(f"{len(found['moments'])}: {when}", file=sys.stderr, flush=True)
            code = process.wait()
            now = folds_of(study)
            found["lost"] += sum(now.get(fold) != outcome for fold, outcome in before.items())
            before = now
            if code == 0:
                return found
            assert code == -signal.SIGKILL, f"exit code {code}: {log.read_text()[-2000:]}"


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "HOTLOOP_CACHE_DIR": ""}


def judged(study: Path, undisturbed: Path) -> dict[str, int]:
    """Compare a cross-validation that was killed with the undisturbed one."""
    from hotloop import record

    found = dict.fromkeys(
        ("folds", "folds_equal", "weights_equal", "steps", "steps_missing", "steps_run_again", "steps_of_another_loss",
         "trials", "trials_equal", "trials_twice"), 0
    )  # fmt: skip
    ours, theirs = folds_of(study), folds_of(undisturbed)
    for fold, expected in theirs.items():
        mine, other = study / f"fold-{fold}", undisturbed / f"fold-{fold}"
        steps = [(one["step"], one["loss"]) for one in record.load(mine)["steps"]]
        planned = {(one["step"], one["loss"]) for one in record.load(other)["steps"]}
        attempts, wanted = inner_trials(mine), outcomes(inner_trials(other))
        complete = [one["number"] for one in attempts if one["state"] == "complete"]
        found["folds"] += 1
        found["folds_equal"] += ours.get(fold) == expected
        found["weights_equal"] += same_weights(mine, other)
        found["steps"] += len(planned)
        found["steps_missing"] += len(planned - set(steps))
        found["steps_run_again"] += len(steps) - len({step for step, _ in steps})  # those behind a checkpoint
        found["steps_of_another_loss"] += len(set(steps) - planned)
        found["trials"] += len(wanted)
        found["trials_equal"] += sum(outcomes(attempts).get(number) == one for number, one in wanted.items())
        found["trials_twice"] += len(complete) - len(set(complete))
    return found


def cross_validations(what: str, given: argparse.Namespace) -> Iterator[dict[str, object]]:
    """Run the campaign; return its row."""
    nested, chance, loads = what == "nested", random.Random(f"{what} {given.seed}"), [os.getloadavg()[0]]
    with tempfile.TemporaryDirectory(prefix="hotloop-kills-") as scratch:
        folder = Path(scratch)
        undisturbed = folder / "undisturbed"
        began = time.monotonic()
        done = subprocess.run(
            command(folder, undisturbed, nested), env=environment(), capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
        alone, began = time.monotonic() - began, time.monotonic()
        rounds: list[dict[str, Any]] = []
        moments: list[str] = []
        while len(moments) < given.kills:
            rounds.append(disturbed(folder, len(rounds), nested, given.kills - len(moments), chance))
            moments += rounds[-1]["moments"]
            loads.append(os.getloadavg()[0])
        sums: dict[str, int] = {}
        for one in rounds:
            for name, value in judged(one["study"], undisturbed).items():
                sums[name] = sums.get(name, 0) + value
        trials = {f"inner_{name}": sums.pop(name) for name in ("trials", "trials_equal", "trials_twice")}
        yield {
            "what": f"a cross-validation in {SPLITS} folds" + (", a search of 6 trials in each" if nested else ""),
            "storage": "sqlite, of each inner search" if nested else "none",
            "kills": len(moments),
            "killed": {kind: moments.count(kind) for kind in sorted(set(moments))},
            "cross_validations": len(rounds),
            "seconds": round(time.monotonic() - began, 1),
            "seconds_undisturbed": round(alone, 1),
            "finished_folds_lost": sum(one["lost"] for one in rounds),
            **sums,
            **(trials if nested else {}),
            "load_of_the_machine": [round(min(loads), 2), round(max(loads), 2)],
        }
