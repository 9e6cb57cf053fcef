"""The program of the background child: it compiles what the parent will compile, so that the parent finds it cached.

`hotloop.cache.BackgroundCompile` starts it with one JSON argument: the numbers of two inherited files (the request to
read, the report to write) and the share of the GPU's memory that it may take.
"""

from __future__ import annotations

import json
import os
import pickle
import select
import signal
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from hotloop.cache.ambient import apply_process_settings, caches_compiles
from hotloop.compiling.control import compile as compile_in_place
from hotloop.compiling.control import status
from hotloop.errors import HotloopError
from hotloop.step.workload import load_factory

if TYPE_CHECKING:
    from collections.abc import Mapping

_WATCH_SECONDS = 1.0
_REASON_LENGTH = 500


def main(argument: Mapping[str, Any]) -> None:
    """Compile what the request says, and write the facts, or ``failed`` with the reason, into the report as JSON."""
    _die_with_parent()
    for number in (argument["request"], argument["report"]):
        os.set_inheritable(number, False)
    with os.fdopen(argument["request"], "rb") as file:
        request = pickle.load(file)  # noqa: S301 - made by the parent process, in a file without a name
    try:
        facts = _compile(request, argument["memory"])
    except Exception as error:  # noqa: BLE001 - whatever it is, the parent goes on and reports it
        reason = str(error).strip().partition("\n")[0] or "no message"
        unable = not isinstance(error, HotloopError | torch.OutOfMemoryError)
        facts = {"failed": f"{type(error).__name__}: {reason}"[:_REASON_LENGTH], "unable": unable}
    os.write(argument["report"], json.dumps(facts).encode() + b"\n")
    os.killpg(0, signal.SIGKILL)  # the compile workers too, without running what the user's code does at exit


def _die_with_parent() -> None:
    """Kill this process when the parent closes its end of standard input, or is no longer the parent.

    A parent may be killed while a fork of it (a data loader's worker) still holds the pipe open: hence the second.
    """
    parent, lifeline = os.getppid(), os.dup(0)
    with Path(os.devnull).open("rb") as nothing:  # compile workers and the user's code get an empty input
        os.dup2(nothing.fileno(), 0)

    def watch() -> None:
        while os.getppid() == parent:
            if select.select([lifeline], [], [], _WATCH_SECONDS)[0] and not os.read(lifeline, 1):
                break
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="hotloop-parent", daemon=True).start()


def _compile(request: Mapping[str, Any], memory: float) -> dict[str, Any]:
    """Compile what the request names, and return the facts."""
    apply_process_settings(request["process"])
    if off := caches_compiles():
        return {"failed": off}
    if torch.cuda.is_available():
        torch.cuda.set_per_process_memory_fraction(memory)
    models = compile_step(request["factory"], request["settings"])
    parts = [part for model in models.values() for part in status(model).components.values()]
    causes = list(dict.fromkeys(cause.reason[:_REASON_LENGTH] for part in parts for cause in part.causes))
    if all(part.running != part.requested for part in parts):  # on a lower rung, or eager
        return {"failed": "; ".join(causes) or "nothing was compiled"}
    return {
        "compile_seconds": sum(part.compile_seconds for part in parts),
        "graphs": sum(part.compiles for part in parts),
        "cache_misses": sum(part.cache_misses for part in parts),
        "state": "compiled" if all(part.state == "compiled" for part in parts) else "partial",
        "causes": causes,
    }


def compile_step(factory: str, settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """Build the workload, compile its models and run its first step; return the models."""
    workload = load_factory(factory)()
    batch = next(workload.endless())  # before the compile: the run prepares its batches in eager as well
    models = workload.models()
    for model in models.values():
        compile_in_place(model, **settings)
    workload.run(batch)
    return models


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
