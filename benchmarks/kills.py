"""Kill searches and cross-validations at random moments and see what is lost: ``python -m benchmarks.kills``.

usage: python -m benchmarks.kills [--kills 15] [--what search,folds,kfold,nested] [--storages sqlite,postgresql]
       [--out FILE]

``search``, for SQLite and for a PostgreSQL server of its own: an undisturbed search of tiny runs first, then the same
with a random sampler (which draws by a trial's number), which is killed with SIGKILL at random moments, the whole of it
or one of its workers, and started again by the same command until it is done. What it may lose is the running trials'
time. ``folds`` is the same with a cross-validation in each trial. ``kfold`` is a cross-validation that is killed and
resumed, ``nested`` one with a search in each fold; `benchmarks.kills_folds` has these two.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime as dt
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[1]
sys.path += [str(ROOT / "tests" / "train"), str(ROOT / "tests" / "search")]


def command(folder: Path, study: str, trials: int, storage: str | None, folds: int | None) -> list[str]:
    from training_fixtures import overrides

    chosen = [one for one in overrides(folder) if not one.startswith("run.folder=")]
    chosen += [f"kfold.n_splits={folds}"] if folds else []
    return [
        sys.executable, "-m", "hotloop", "hpo", *chosen, f"hpo.name={study}", f"hpo.folder={folder / study}",
        f"hpo.n_trials={trials}", "hpo.workers=2", "hpo.sampler=random", "hpo.pruner=none", "hpo.heartbeat_seconds=5",
        "hpo.space.training.batch_size.choices=[3,4]", "hpo.metric=loss", "hpo.direction=minimize",
        "training.num_epochs=6",
        *([f"hpo.storage='{storage}'"] if storage else []),
    ]  # fmt: skip


def outcomes(attempts: list[dict[str, object]]) -> dict[int, object]:
    """Return the values and the objective of each trial."""
    return {one["number"]: [one["values"], one["value"]] for one in attempts if one["state"] == "complete"}


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
    """Kill the search as a whole, its first process alone, or one worker."""
    workers = children(process.pid)
    kind = chance.choice(["all", "all", "supervisor", "worker"])
    chosen = [process.pid, *workers] if kind == "all" else [process.pid]
    if kind == "worker" and workers:
        chosen = [chance.choice(workers)]
    for pid in chosen:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return kind if kind != "worker" or workers else "supervisor"


def campaign(folder: Path, storage: str | None, folds: int | None, given: argparse.Namespace) -> dict[str, object]:
    from hotloop.train.search import document

    kills, trials = given.kills, given.trials
    chance, kinds, done_before, lost = random.Random(given.seed), [], {}, 0
    loads = [os.getloadavg()[0]]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HOTLOOP_CACHE_DIR": ""}
    undisturbed = folder / "undisturbed"
    with (folder / "undisturbed.txt").open("wb") as log:
        done = subprocess.run(
            command(folder, "undisturbed", trials, storage, folds), env=environment, stdout=log, stderr=log, check=False
        )
    assert done.returncode == 0, (folder / "undisturbed.txt").read_text()[-3000:]
    expected = outcomes(document.refresh(undisturbed)[0]["trials"])
    log = (folder / "log.txt").open("ab")
    killed = folder / "killed"
    began = time.monotonic()
    starts = 0
    while True:
        starts += 1
        process = subprocess.Popen(
            command(folder, "killed", trials, storage, folds), env=environment, stdout=log, stderr=log
        )
        while len(kinds) < kills and under_way(folder / "log.txt", process):
            try:
                process.wait(chance.uniform(0.0, 6.0))
                break
            except subprocess.TimeoutExpired:
                kinds.append(die(process, chance))
                print(f"{len(kinds)}: {kinds[-1]}", file=sys.stderr, flush=True)
            if kinds[-1] != "worker":
                break
        code = process.wait()
        loads.append(os.getloadavg()[0])
        with contextlib.suppress(Exception):
            now = outcomes(document.refresh(killed)[0]["trials"])
            lost += sum(now.get(number) != outcome for number, outcome in done_before.items())
            done_before = now
        if code == 0:
            break
        assert code == -signal.SIGKILL, f"exit code {code}: {(folder / 'log.txt').read_text()[-2000:]}"
    found = document.refresh(killed)[0]
    states: dict[str, int] = {}
    for one in found["trials"]:
        states[one["state"]] = states.get(one["state"], 0) + 1
    complete = [one["number"] for one in found["trials"] if one["state"] == "complete"]
    ours = outcomes(found["trials"])
    return {
        "what": f"a search, {folds} folds a trial" if folds else "a search",
        "storage": "postgresql" if storage else "sqlite",
        "trials": trials,
        "kills": len(kinds),
        "killed": {kind: kinds.count(kind) for kind in sorted(set(kinds))},
        "starts": starts,
        "seconds": round(time.monotonic() - began, 1),
        "attempts": len(found["trials"]),
        "states": states,
        "finished_trials_lost": lost,
        "trials_done_twice": len(complete) - len(set(complete)),
        "trials_missing": trials - len(set(complete)),
        "trials_equal_to_undisturbed": sum(ours.get(number) == one for number, one in expected.items()),
        "moments": "0 to 6 s after a trial has begun",
        "load_of_the_machine": [round(min(loads), 2), round(max(loads), 2)],
    }


def searches(what: str, given: argparse.Namespace) -> Iterator[dict[str, object]]:
    """Run the campaign of searches on each storage."""
    for kind in given.storages.split(","):
        with contextlib.ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="hotloop-kills-")))
            storage = None
            if kind == "postgresql":
                from search_server import served

                storage = stack.enter_context(served()).url
            yield campaign(folder, storage, 3 if what == "folds" else None, given)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=15, help="kills for each row")
    parser.add_argument("--trials", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--what", default="search,folds,kfold,nested")
    parser.add_argument("--storages", default="sqlite,postgresql")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    import torch

    from benchmarks.kills_folds import cross_validations
    from hotloop.measure import machine

    rows = []
    for what in given.what.split(","):
        found = cross_validations(what, given) if what in ("kfold", "nested") else searches(what, given)
        for row in found:
            rows.append(row)
            print(json.dumps(row, indent=2), flush=True)
    result = {
        "what": "searches and cross-validations killed with SIGKILL at random moments, against the same undisturbed",
        "date": dt.datetime.now(dt.UTC).date().isoformat(),
        "command": "python -m benchmarks.kills " + " ".join(sys.argv[1:]),
        "hardware": machine.describe(torch.device("cpu")),
        "rows": rows,
    }
    if given.out:
        given.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
