"""Gets one way ready in a process of its own: nothing is compiled, no library is set up, and every cache is empty.

Run as ``python -m hotloop.prove.bench.child WAY FACTORY``; its last line is one JSON object.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import tempfile
from pathlib import Path

from hotloop.errors import ConfigError
from hotloop.prove.bench.way import NotRunError, Ready, start
from hotloop.prove.doctor.gathering import ask
from hotloop.step.workload import load_factory

INSIDE = "HOTLOOP_BENCH"
"""Set in the child's environment, so that a file which benches when it is imported does not do so there."""
LIMIT_S = 1800.0
"""After so many seconds a way is given up: autotuning a large model takes many minutes."""


def run_cold(way: str, factory: str) -> Ready:
    """Get a way ready in a new process, whose compile caches are empty.

    Args:
        way: by name.
        factory: the name of the function that makes the workload.

    Raises:
        NotRunError: the way does not run as asked there, or the process ended without an answer.
    """
    with tempfile.TemporaryDirectory(prefix="hotloop-bench-", ignore_cleanup_errors=True) as caches:
        environment = {
            **os.environ,
            "TORCHINDUCTOR_CACHE_DIR": caches,
            "TRITON_CACHE_DIR": str(Path(caches, "triton")),
            "PYTHONPATH": os.pathsep.join(str(Path(place).absolute()) for place in sys.path),
            INSIDE: "1",
        }
        arguments = ["-m", "hotloop.prove.bench.child", way, factory]
        found, error = ask(arguments, limit_s=LIMIT_S, environment=environment)
    if reason := error or found.get("reason"):
        raise NotRunError(reason)
    return Ready(**found)


def main(way: str, factory: str) -> None:
    """Get the way ready, and print its figures or the reason why there are none."""
    try:
        running, ready = start(way, load_factory(factory))
        running.close()
        report = dataclasses.asdict(ready)
    except Exception as error:  # noqa: BLE001 - whatever the user's file or a compiler raises is the reason
        own = isinstance(error, NotRunError | ConfigError)
        report = {"reason": str(error) if own else f"{type(error).__name__}: {error}"}
    print(json.dumps(report), flush=True)  # noqa: T201 - the answer
    os._exit(0)  # waits for nothing of the user's, which may print more


if __name__ == "__main__":
    main(*sys.argv[1:])
