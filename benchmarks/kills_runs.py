"""Runs and cross-validations killed at random moments: rows of ``python -m benchmarks.kills``.

One is left alone first; then the same is killed and resumed until it is done, and again in another folder until there
were kills enough. Three of four kills are SIGKILL, the fourth is SIGTERM. A quarter of them is within 8 s of a start,
mostly before a step; the others are 0 to 5 s after a step.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

PROGRAM = Path(__file__).with_name("killed_program.py")
SPLITS = 4
STOPPED = (-signal.SIGKILL, -signal.SIGTERM, 130)
"""Exit codes of a process that was killed, or asked to stop: before it heard of signals, or at a step's end."""


@dataclasses.dataclass(frozen=True)
class Killed:
    """What is killed, by how many kills.

    Args:
        what: ``train``, ``kfold``, ``nested`` (a search in each fold) or ``hpo``.
        kills: how many.
        loader: of the program `benchmarks.killed_program`; None is the recipe ``criteria``.
        seed: of the moments.
    """

    what: str
    kills: int
    loader: str | None
    seed: int

    def __str__(self) -> str:
        whose = f"own program, {self.loader} loader" if self.loader else "recipe criteria"
        return f"{self.what} ({whose})"

    @property
    def chance(self) -> random.Random:
        """What draws the moments."""
        return random.Random(f"{self.what} {self.loader} {self.seed}")

    def arguments(self, folder: Path) -> list[str]:
        """Return what trains: a program, or the recipe with a tiny encoder and a tiny CSV in ``folder``."""
        if self.loader:
            return [f"{PROGRAM}:make", f"program.loader={self.loader}"]
        from training_fixtures import overrides

        return [one for one in overrides(folder) if not one.startswith(("run.folder=", "training.num_epochs="))]


def command(killed: Killed, folder: Path, study: Path) -> list[str]:
    """Return the command that starts a run or a cross-validation, or resumes it if it was begun."""
    start = [sys.executable, "-m", "hotloop", "train" if killed.what == "train" else "kfold"]
    if (study / ("settings.yaml" if killed.what == "train" else "kfold.json")).is_file():
        return [*start, f"run.resume={study}"]
    if killed.loader:
        # As many steps as take some ten seconds; a worker process is begun in each epoch.
        epochs = 60 if killed.loader.endswith("worker") else 140
        own = [f"training.num_epochs={epochs if killed.what == 'train' else 60}", "training.checkpoint_every_steps=9"]
        own += ["recipe.goal=max:accuracy"]
    elif killed.what == "nested":
        own = [
            "kfold.inner_trials=6", "kfold.inner_splits=2", "hpo.startup_trials=2", "hpo.pruner=none",
            "hpo.metric=loss", "hpo.direction=minimize", "hpo.space.training.batch_size.choices=[3,4]",
            "training.num_epochs=6", "training.checkpoint_every_steps=20",
        ]  # fmt: skip
    else:
        own = ["training.num_epochs=30", "training.checkpoint_every_steps=20"]
    own += [] if killed.what == "nested" else ["training.early_stopping_patience=null"]
    own += [] if killed.what == "train" else [f"kfold.n_splits={SPLITS}"]
    return [*start, *killed.arguments(folder), *own, f"run.folder={study}"]


def folds_of(study: Path) -> dict[int, Any]:
    """Return the metrics of each finished fold, and the settings that an inner search chose; empty of a single run."""
    with contextlib.suppress(OSError, ValueError):
        document = json.loads((study / "kfold.json").read_text())
        kept = ("best", "last", "best_step", "step", "chosen")
        return {
            one["fold"]: {name: one.get(name) for name in kept}
            for one in document["folds"]
            if one["status"] == "finished"
        }
    return {}


def inner_trials(fold: Path) -> list[dict[str, Any]]:
    """Return the attempts of a fold's inner search."""
    found = fold / "search" / "study.json"
    trials: list[dict[str, Any]] = json.loads(found.read_text())["trials"] if found.is_file() else []
    return trials


def outcomes(attempts: list[dict[str, Any]]) -> dict[int, Any]:
    """Return the values and the objective of each trial."""
    return {one["number"]: [one["values"], one["value"]] for one in attempts if one["state"] == "complete"}


def same(one: Any, other: Any) -> bool:
    """Compare what two checkpoints hold, tensors bit by bit."""
    import torch

    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        # Bytes, since two NaNs are the same here.
        raw = [each.detach().contiguous().view(-1).view(torch.uint8) for each in (one, other)]
        return one.dtype == other.dtype and one.shape == other.shape and torch.equal(*raw)
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return type(one) is type(other) and one == other


def compare_runs(ours: Path, theirs: Path, found: Counter[str]) -> None:
    """Count what of a run that was killed is as in the undisturbed one: its record, and what its checkpoints hold."""
    from hotloop import record
    from hotloop.train import checkpoint

    mine, other = record.load(ours), record.load(theirs)
    steps, planned = ([(e["step"], e["loss"], e.get("learning_rate")) for e in r["steps"]] for r in (mine, other))
    numbers = {step for step, *_ in steps}
    found["runs"] += 1
    found["steps"] += len(planned)
    found["steps_missing"] += len({step for step, *_ in planned} - numbers)
    found["steps_twice"] += len(steps) - len(numbers)
    found["steps_of_another_loss_or_rate"] += len(set(steps) - set(planned))
    found["validations"] += len(other["metrics"])
    found["validations_not_as_undisturbed"] += mine["metrics"] != other["metrics"]
    found["starts"] += mine["starts"]
    found["steps_left_out_and_run_again"] += sum(one.get("steps", 0) for one in mine.get("cuts", ()))
    for name in (checkpoint.LAST, checkpoint.BEST):
        paths = [each / checkpoint.FOLDER / name for each in (ours, theirs)]
        found["checkpoints"] += paths[1].is_file()
        if paths[0].is_file() != paths[1].is_file():
            continue
        if paths[1].is_file():
            # The settings name the folder, and a loop's state has times.
            held = [{k: v for k, v in checkpoint.load(p).items() if k not in ("settings", "loop")} for p in paths]
            found["checkpoints_equal"] += same(*held)
            found["weights_equal"] += same(*(one["model"] for one in held))


def judged(study: Path, undisturbed: Path) -> Counter[str]:
    """Compare what was killed with the same undisturbed."""
    found: Counter[str] = Counter()
    ours, theirs = folds_of(study), folds_of(undisturbed)
    if not theirs:
        compare_runs(study, undisturbed, found)
    for fold, expected in theirs.items():
        mine, other = study / f"fold-{fold}", undisturbed / f"fold-{fold}"
        compare_runs(mine, other, found)
        attempts, wanted = inner_trials(mine), outcomes(inner_trials(other))
        complete = [one["number"] for one in attempts if one["state"] == "complete"]
        found["folds"] += 1
        found["folds_equal"] += ours.get(fold) == expected
        if wanted:
            found["inner_trials"] += len(wanted)
            found["inner_trials_equal"] += sum(outcomes(attempts).get(number) == one for number, one in wanted.items())
            found["inner_trials_twice"] += len(complete) - len(set(complete))
    return found


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


def disturbed(killed: Killed, folder: Path, number: int, left: int, chance: random.Random) -> dict[str, Any]:
    """Run to the end, killed at most ``left`` times on the way."""
    study, log = folder / f"killed-{number}", folder / f"killed-{number}.txt"
    before: dict[int, Any] = {}
    moments: list[str] = []
    lost = 0
    with log.open("ab") as file:
        while True:
            process = subprocess.Popen(command(killed, folder, study), env=environment(), stdout=file, stderr=file)
            if len(moments) < left and (when := moment(log, process, chance)):
                kind = signal.SIGTERM if chance.random() < 0.25 else signal.SIGKILL
                process.send_signal(kind)
                moments.append(f"{kind.name} {when}")
                print(f"{killed} {number}, {len(moments)}: {moments[-1]}", file=sys.stderr, flush=True)
            code = process.wait()
            now = folds_of(study)
            lost += sum(now.get(fold) != outcome for fold, outcome in before.items())
            before = now
            if code == 0:
                return {"moments": moments, "lost": lost, "study": study}
            assert code in STOPPED, f"exit code {code}: {log.read_text()[-2000:]}"


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "HOTLOOP_CACHE_DIR": ""}


@contextlib.contextmanager
def scratch(keep: Mapping[str, int]) -> Iterator[Path]:
    """Make a folder, which is deleted unless ``keep`` says that something in it is wrong."""
    folder = Path(tempfile.mkdtemp(prefix="hotloop-kills-"))
    yield folder
    if any(keep.values()):
        print(f"kept: {folder}", file=sys.stderr, flush=True)
    else:
        import shutil

        shutil.rmtree(folder)


def runs(killed: Killed) -> dict[str, object]:
    """Run the campaign on a run or a cross-validation; return its row."""
    chance, loads, wrong = killed.chance, [os.getloadavg()[0]], Counter[str]()
    with scratch(wrong) as folder:
        undisturbed = folder / "undisturbed"
        began = time.monotonic()
        done = subprocess.run(
            command(killed, folder, undisturbed), env=environment(), capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
        alone, began = time.monotonic() - began, time.monotonic()
        rounds: list[dict[str, Any]] = []
        moments: list[str] = []
        sums: Counter[str] = Counter()
        while len(moments) < killed.kills:
            rounds.append(disturbed(killed, folder, len(rounds), killed.kills - len(moments), chance))
            moments += rounds[-1]["moments"]
            sums.update(judged(rounds[-1]["study"], undisturbed))
            loads.append(os.getloadavg()[0])
        wrong["lost"] = sum(one["lost"] for one in rounds)
        wrong.update({name: sums[name] for name in sums if name.endswith(("missing", "twice", "undisturbed", "_rate"))})
        for whole in ("checkpoints", "folds", "inner_trials"):
            wrong[whole] = sums[whole] - sums[f"{whole}_equal"]
        return {
            "what": str(killed),
            "kills": len(moments),
            "killed": dict(sorted(Counter(moments).items())),
            "begun": len(rounds),
            "seconds": round(time.monotonic() - began, 1),
            "seconds_undisturbed": round(alone, 1),
            **({"finished_folds_lost": wrong["lost"]} if killed.what != "train" else {}),
            **sums,
            "load_of_the_machine": [round(min(loads), 2), round(max(loads), 2)],
        }
