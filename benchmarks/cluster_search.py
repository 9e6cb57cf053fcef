"""What a trial costs on a Ray cluster beside one on this machine, and trials an hour by workers.

usage: OMP_NUM_THREADS=1 python benchmarks/cluster_search.py [TRIALS] [ROUNDS] > FILE

Trials wait for half a second and report three times, as a trial does whose work is on a device. They run by
`hpo.engine=local` and by `hpo.engine=ray`, with one worker, two and four, by turns. The cluster is on this machine: a
head without CPUs and four nodes. A search whose trials differ from the first one's is refused.

The time of a trial is the median between the ends of two trials of one worker, so that what starts a worker, and its
first trial, are not in it; those are in `whole_seconds`. The cost of the engine is the difference between the engines
with one worker. Goal: at most 0.3 s.
"""

from __future__ import annotations

import collections
import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
TRIALS, ROUNDS, GOAL, WAITS = 30, 3, 0.3, 0.5
PROGRAM = [f"{HERE / 'search_cost.py'}:make", "recipe.goal=max:accuracy"]


def waits(asked: Any) -> float:
    """Be a trial of half a second, whose result is its rate."""
    for step in range(1, 4):
        time.sleep(WAITS / 3)
        asked.report(step, asked.values["program.lr"] * step / 3)
    return float(asked.values["program.lr"])


def searched(engine: str, workers: int, trials: int, address: str) -> dict[str, Any]:
    """Search once, and return its times and the values of its trials."""
    from hotloop.train import configure
    from hotloop.train.search import supervise
    from hotloop.train.search.told import TrialEnded

    ends: dict[int, list[float]] = collections.defaultdict(list)

    def tell(what: Any) -> None:
        if isinstance(what, TrialEnded):
            ends[what.worker].append(time.monotonic())

    with tempfile.TemporaryDirectory() as folder:
        chosen = [
            *PROGRAM, f"hpo.folder={folder}/study", "hpo.sampler=random", "hpo.pruner=none",
            f"hpo.n_trials={trials}", f"hpo.engine={engine}", f"hpo.workers={workers}",
        ]  # fmt: skip
        chosen += [f"engine.address={address}"] if engine == "ray" else []
        began = time.monotonic()
        ended = supervise.search(configure.load_search(chosen), tell, "cluster_search:waits")
        whole = time.monotonic() - began
    found = {one["number"]: one["values"] for one in ended.document["trials"]}
    between = [later - one for each in ends.values() for one, later in itertools.pairwise(each[1:])]
    return {"seconds": statistics.median(between), "whole_seconds": whole, "values": found}


def measured(trials: int, rounds: int) -> dict[str, Any]:
    """Search by turns, and return the document."""
    import ray
    import torch
    from ledger import processor
    from ray.cluster_utils import Cluster

    runs: dict[str, list[dict[str, Any]]] = collections.defaultdict(list)
    first: dict[int, Any] = {}
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    try:
        for _ in range(4):
            cluster.add_node(num_cpus=1)
        for _, workers, engine in itertools.product(range(rounds), (1, 2, 4), ("local", "ray")):
            found = searched(engine, workers, trials, cluster.address)
            values = found.pop("values")
            first = first or values
            if first != values:
                raise SystemExit(f"{engine}, {workers} workers: other trials than the first search's")
            runs[f"{engine}, {workers} worker{'s' * (workers > 1)}"].append(found)
            print(engine, workers, found, file=sys.stderr)
    finally:
        cluster.shutdown()
    figures = {
        name: {
            "trial_seconds": round(statistics.median(one["seconds"] for one in each), 4),
            "trials_an_hour": round(3600 * int(name.split()[1]) / statistics.median(one["seconds"] for one in each)),
            "whole_seconds": round(statistics.median(one["whole_seconds"] for one in each), 2),
            "all_trial_seconds": [round(one["seconds"], 4) for one in each],
        }
        for name, each in runs.items()
    }
    cost = round(figures["ray, 1 worker"]["trial_seconds"] - figures["local, 1 worker"]["trial_seconds"], 4)
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "processor": processor(),
        "cores": os.cpu_count(),
        "load": round(os.getloadavg()[0], 1),
        "torch": torch.__version__,
        "ray": ray.__version__,
        "trials": trials,
        "rounds": rounds,
        "engine_seconds_a_trial": cost,
        "goal_seconds": GOAL,
        "goal_met": cost <= GOAL,
        "searches": figures,
    }


def main() -> None:
    """Measure, and print the document."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    os.environ["HOTLOOP_CACHE_DIR"] = ""
    known = [str(HERE), str(HERE.parent / "src"), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(one for one in known if one)
    trials, rounds = (int(one) for one in (*sys.argv[1:], *map(str, (TRIALS, ROUNDS)[len(sys.argv) - 1 :])))
    print(json.dumps(measured(trials, rounds), indent=1))


if __name__ == "__main__":
    main()
