"""Many trials of a toy objective through the whole machinery: ``python -m benchmarks.search_scale [--trials 2000]``.

Workers as processes, SQLite, heartbeats, pruning and documents as in any search; the objective itself costs nothing, so
the seconds are the machinery's own.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime as dt
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
OBJECTIVES = ROOT / "tests" / "search"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=2000)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--sampler", default="tpe")
    parser.add_argument("--folder", type=Path, help="where the study is kept; unset is nowhere")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    os.environ["PYTHONPATH"] = os.pathsep.join([str(OBJECTIVES), os.environ.get("PYTHONPATH", "")])
    import torch

    from hotloop.measure import machine
    from hotloop.train import configure
    from hotloop.train.search import supervise
    from hotloop.train.search.told import TrialEnded

    ended: list[tuple[float, TrialEnded]] = []

    def tell(what: object) -> None:
        if isinstance(what, TrialEnded):
            ended.append((time.monotonic(), what))
            if len(ended) % 100 == 0:
                print(f"{len(ended)} trials", file=sys.stderr, flush=True)

    with contextlib.ExitStack() as stack:
        folder = given.folder or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="hotloop-scale-")))
        settings = configure.load(
            [
                f"hpo.folder={folder}/study", f"hpo.n_trials={given.trials}", f"hpo.workers={given.workers}",
                f"hpo.sampler={given.sampler}", "hpo.pruner=median",
            ]
        )  # fmt: skip
        load_before, began = os.getloadavg(), time.monotonic()
        found = supervise.search(settings, tell, "search_objectives:quadratic").document
        seconds = time.monotonic() - began
        size = sum(path.stat().st_size for path in Path(folder).rglob("*") if path.is_file())
    states = [one["state"] for one in found["trials"]]
    moments = [began, *(moment for moment, _ in ended)]
    quarters = [moments[at : at + given.trials // 4 + 1] for at in range(0, given.trials, given.trials // 4)]
    parts = [ended[at : at + given.trials // 4] for at in range(0, given.trials, given.trials // 4)]
    result = {
        "what": "a search of a toy objective through the whole machinery",
        "date": dt.datetime.now(dt.UTC).date().isoformat(),
        "command": "python -m benchmarks.search_scale " + " ".join(sys.argv[1:]),
        "hardware": machine.describe(torch.device("cpu")),
        "trials": given.trials,
        "workers": given.workers,
        "sampler": given.sampler,
        "seconds": round(seconds, 1),
        "states": {state: states.count(state) for state in sorted(set(states))},
        "numbers_each_once": sorted(one["number"] for one in found["trials"]) == list(range(given.trials)),
        "seconds_a_trial_by_quarter": [
            round(statistics.median(one.seconds for _, one in part), 4) for part in parts if part
        ],
        "trials_a_second_by_quarter": [
            round((len(part) - 1) / (part[-1] - part[0]), 2) for part in quarters if len(part) > 1
        ],
        "seconds_after_the_last_trial": round(began + seconds - moments[-1], 1),
        "megabytes": round(size / 2**20, 2),
        "load_of_the_machine": {"before": load_before, "after": os.getloadavg()},
    }
    print(json.dumps(result, indent=2))
    if given.out:
        given.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
