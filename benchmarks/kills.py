"""Kill runs, cross-validations and searches at random moments, and see what is lost: ``python -m benchmarks.kills``.

usage: python -m benchmarks.kills [--kills 100] [--trials 60] [--what own | search,folds,kfold,nested]
       [--out FILE]

Each is left alone first. Then the same is killed at random moments and started again by the command that goes on with
it, until it is done, and what it came to is compared: parameters, optimizers, the loss of each step, validations,
trials, bit by bit.

``own`` kills a program of one's own (`benchmarks.killed_program`), its kills shared among ``hotloop train`` with four
loaders, ``hotloop kfold`` and ``hotloop hpo``. The others are of the recipe ``criteria``, with so many kills each:
``search`` itself, ``folds`` with a cross-validation in each trial, ``kfold``,
and ``nested``, which searches in each fold. A search is killed as a whole, its first process alone, or one worker; its
one worker draws by how many trials began. `benchmarks.kills_runs` has runs and cross-validations.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime as dt
import importlib.metadata
import json
import os
import platform
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.kills_runs import STOPPED, Killed, compare_runs, environment, outcomes, runs, scratch

if TYPE_CHECKING:
    import random
    from collections.abc import Iterator

ROOT = Path(__file__).parents[1]
sys.path += [str(ROOT / "tests" / "train"), str(ROOT / "tests" / "search")]
OWN = {
    ("train", "plain"): 15, ("train", "plain-worker"): 7, ("train", "stateful"): 15, ("train", "stateful-worker"): 8,
    ("kfold", "stateful"): 25, ("hpo", "plain"): 30,
}  # fmt: skip
"""Of a hundred kills of an own program, those of each row, by what is killed and the program's loader."""


def command(killed: Killed, folder: Path, study: str, given: argparse.Namespace) -> list[str]:
    """Return the command that begins a search, or goes on with it."""
    own = ["training.num_epochs=6"]
    if killed.loader:
        own = ["training.num_epochs=20", "training.checkpoint_every_steps=50", "hpo.keep_checkpoints=best"]
    elif killed.what == "folds":
        own += ["kfold.n_splits=3"]
    own += [] if killed.loader else ["hpo.space.training.batch_size.choices=[3,4]"]
    return [
        sys.executable, "-m", "hotloop", "hpo", *killed.arguments(folder), *own, f"hpo.name={study}",
        f"hpo.folder={folder / study}", f"hpo.n_trials={given.trials}", "hpo.workers=1", "hpo.sampler=random",
        "hpo.pruner=none", "hpo.heartbeat_seconds=5", "hpo.metric=loss", "hpo.direction=minimize",
    ]  # fmt: skip


def children(pid: int) -> list[int]:
    with contextlib.suppress(OSError):
        return [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []


def under_way(log: Path, process: subprocess.Popen[bytes]) -> bool:
    """Wait for a trial to begin: a search that is killed before that has nothing to lose."""
    begun = log.read_bytes().count(b" began ")
    while process.poll() is None:
        if log.read_bytes().count(b" began ") > begun:
            return True
        time.sleep(0.05)
    return False


def die(process: subprocess.Popen[bytes], chance: random.Random) -> str:
    """Kill the search as a whole, its first process alone, or one worker; or ask the first process to stop."""
    workers = children(process.pid)
    kind = chance.choice(["all", "all", "supervisor", "worker", "SIGTERM"])
    chosen = [process.pid, *workers] if kind == "all" else [process.pid]
    if kind == "worker" and workers:
        chosen = [chance.choice(workers)]
    for pid in chosen:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM if kind == "SIGTERM" else signal.SIGKILL)
    return kind if kind != "worker" or workers else "supervisor"


def campaign(killed: Killed, given: argparse.Namespace) -> dict[str, object]:
    """Run the campaign on a search; return its row."""
    wrong = Counter[str]()
    with scratch(wrong) as folder:
        return _campaign(killed, folder, given, wrong)


def _campaign(killed: Killed, folder: Path, given: argparse.Namespace, wrong: Counter[str]) -> dict[str, object]:
    from hotloop.train.search import document

    chance, kinds, done_before = killed.chance, [], {}
    loads = [os.getloadavg()[0]]
    with (folder / "undisturbed.txt").open("wb") as log:
        done = subprocess.run(
            command(killed, folder, "undisturbed", given),
            env=environment(), stdout=log, stderr=log, check=False,
        )  # fmt: skip
    assert done.returncode == 0, (folder / "undisturbed.txt").read_text()[-3000:]
    alone = document.refresh(folder / "undisturbed")[0]["trials"]
    log = (folder / "log.txt").open("ab")
    began = time.monotonic()
    starts = 0
    while True:
        starts += 1
        process = subprocess.Popen(command(killed, folder, "killed", given), env=environment(), stdout=log, stderr=log)
        while len(kinds) < killed.kills and under_way(folder / "log.txt", process):
            try:
                process.wait(chance.uniform(0.0, 6.0))
                break
            except subprocess.TimeoutExpired:
                kinds.append(die(process, chance))
                print(f"{killed} {len(kinds)}: {kinds[-1]}", file=sys.stderr, flush=True)
            if kinds[-1] != "worker":
                break
        code = process.wait()
        loads.append(os.getloadavg()[0])
        with contextlib.suppress(Exception):
            now = outcomes(document.refresh(folder / "killed")[0]["trials"])
            wrong["lost"] += sum(now.get(number) != outcome for number, outcome in done_before.items())
            done_before = now
        if code == 0:
            break
        assert code in STOPPED, f"exit code {code}: {(folder / 'log.txt').read_text()[-2000:]}"
    found = document.refresh(folder / "killed")[0]["trials"]
    complete = [one["number"] for one in found if one["state"] == "complete"]
    ours, expected = outcomes(found), outcomes(alone)
    wrong["twice"] = len(complete) - len(set(complete))
    wrong["missing"] = given.trials - len(set(complete))
    equal = sum(ours.get(number) == one for number, one in expected.items())
    wrong["other"] = given.trials - equal
    kept: Counter[str] = Counter()
    if killed.loader:
        for one in found:
            if one["state"] == "complete":
                theirs = next(each for each in alone if (each["number"], each["state"]) == (one["number"], "complete"))
                compare_runs(folder_of(folder / "killed", one), folder_of(folder / "undisturbed", theirs), kept)
        wrong["checkpoints"] = kept["checkpoints"] - kept["checkpoints_equal"]
        wrong.update(
            {name: kept[name] for name in kept if name.endswith(("missing", "_twice", "undisturbed", "_rate"))}
        )
    return {
        "what": str(killed),
        "trials": given.trials,
        "kills": len(kinds),
        "killed": dict(sorted(Counter(kinds).items())),
        "begun": starts,
        "seconds": round(time.monotonic() - began, 1),
        "attempts": len(found),
        "states": dict(Counter(one["state"] for one in found)),
        "finished_trials_lost": wrong["lost"],
        "trials_done_twice": wrong["twice"],
        "trials_missing": wrong["missing"],
        "trials_equal_to_undisturbed": equal,
        **kept,
        "moments": "0 to 6 s after a trial has begun",
        "load_of_the_machine": [round(min(loads), 2), round(max(loads), 2)],
    }


def folder_of(study: Path, attempt: dict[str, object]) -> Path:
    """Return the folder of an attempt of a study's document."""
    from hotloop.train.search.study import trial_folder

    return trial_folder(study, int(str(attempt["number"])))


def rows(what: str, given: argparse.Namespace) -> Iterator[dict[str, object]]:
    """Run the campaigns of a row of the command line."""
    if what == "own":
        for (kind, loader), share in OWN.items():
            killed = Killed(kind, round(given.kills * share / 100), loader, given.seed)
            yield campaign(killed, given) if kind == "hpo" else runs(killed)
    elif what in ("kfold", "nested"):
        yield runs(Killed(what, given.kills, None, given.seed))
    else:
        yield campaign(Killed(what, given.kills, None, given.seed), given)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100, help="kills for each row; those of own are shared among its")
    parser.add_argument("--trials", type=int, default=60, help="of each search")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--what", default="own")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    packages = ("torch", "torchdata", "optuna", "hotloop")
    result = {
        "what": "runs, cross-validations and searches killed at random moments, against the same undisturbed",
        "date": dt.datetime.now(dt.UTC).date().isoformat(),
        "command": "python -m benchmarks.kills "
        + " ".join(one for one in sys.argv[1:] if not one.endswith(".json") and one != "--out"),
        "hardware": f"{os.cpu_count()} CPU cores",
        "versions": {
            "python": platform.python_version(),
            **{name: importlib.metadata.version(name) for name in packages},
        },
        "rows": [],
    }
    for what in given.what.split(","):
        for row in rows(what, given):
            result["rows"].append(row)
            print(json.dumps(row, indent=2), flush=True)
            if given.out:
                given.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
