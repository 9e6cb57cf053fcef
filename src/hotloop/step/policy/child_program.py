"""The program of the background child: it compiles what the parent will compile, so that the parent finds it cached.

`hotloop.cache.BackgroundCompile` starts it with one JSON argument: the numbers of two inherited files (the request to
read, the report to write) and the share of each GPU's memory that it may take.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import threading
import time
import types
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from hotloop.cache import Request
from hotloop.cache.ambient import apply_process_settings, caches_compiles
from hotloop.cache.portable import build, unpack
from hotloop.compiling.control import compile as compile_in_place
from hotloop.compiling.control import status
from hotloop.errors import HotloopError
from hotloop.step.workload import load_factory

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_WATCH_SECONDS = 1.0
_REASON_LENGTH = 500


def main(argument: Mapping[str, Any]) -> None:
    """Compile what the request says, and write the facts, or ``failed`` with the reason, into the report as JSON."""
    begun = time.monotonic() - argument["asked"]
    _die_with_parent()
    sys.modules["__main__"] = types.ModuleType("__main__")  # for what the request brings of the parent's main script
    for number in (argument["request"], argument["report"]):
        os.set_inheritable(number, False)
    with os.fdopen(argument["request"], "rb") as file:
        text = file.read()
    try:
        facts = _compile(Request.loads(text), argument["memory"])
    except Exception as error:  # noqa: BLE001 - whatever it is, the parent goes on and reports it
        reason = str(error).strip().partition("\n")[0] or "no message"
        unable = not isinstance(error, HotloopError | torch.OutOfMemoryError)
        facts = {"failed": f"{type(error).__name__}: {reason}"[:_REASON_LENGTH], "unable": unable}
    else:
        if "failed" not in facts:
            facts |= {"seconds": time.monotonic() - argument["asked"], "begun_seconds": begun}
            facts["built_seconds"] -= argument["asked"]
    os.write(argument["report"], json.dumps(facts).encode() + b"\n")
    os.killpg(0, signal.SIGKILL)  # the compile workers too, without running what the user's code does at exit


def _die_with_parent() -> None:
    """Kill this process's group when the parent closes its end of standard input, or is no longer the parent.

    A parent may be killed while a fork of it (a data loader's worker) still holds the pipe open: hence the second.
    """
    parent, lifeline = os.getppid(), os.dup(0)
    with Path(os.devnull).open("rb") as nothing:  # compile workers and the user's code get an empty input
        os.dup2(nothing.fileno(), 0)

    def watch() -> None:
        while os.getppid() == parent:
            if select.select([lifeline], [], [], _WATCH_SECONDS)[0] and not os.read(lifeline, 1):
                break
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=watch, name="hotloop-parent", daemon=True).start()


def _compile(request: Request, memory: Mapping[str, float]) -> dict[str, Any]:
    apply_process_settings(request.process)
    if off := caches_compiles():
        return {"failed": off}
    for index, share in memory.items():
        torch.cuda.set_per_process_memory_fraction(share, int(index))
    compiled, built = _run_workload(request) if request.factory else _run_calls(request)
    facts = _facts(compiled, memory)
    return facts if "failed" in facts else {**facts, "built_seconds": built}


def _run_calls(request: Request) -> tuple[dict[str, Any], float]:
    """Rebuild the components, compiled, and run the recorded calls forward and then backward.

    Returns:
        the components by name, and when they were built.
    """
    tensors = build(request.tensors)
    modules: dict[str, Any] = {name: unpack(pickled, tensors) for name, pickled in request.modules.items()}
    for module in modules.values():
        compile_in_place(module, **request.settings)
    built = time.monotonic()
    losses: list[torch.Tensor] = []
    for call in request.calls:
        module = modules[call.component]
        args, kwargs = unpack(call.arguments, tensors)
        with call.modes.on(module):
            output = module(*args, **kwargs)
        differentiable = (tensor for tensor in _tensors_in(output) if tensor.requires_grad)
        losses += [tensor.real.sum() if tensor.is_complex() else tensor.sum() for tensor in differentiable]
    if losses:
        torch.autograd.backward(losses)
    return modules, built


def _run_workload(request: Request) -> tuple[dict[str, Any], float]:
    """Build the workload, compile its models and run its first step; return these, and when they were built."""
    workload = load_factory(request.factory)()
    models = workload.models()
    batch = next(workload.endless())  # before the compile: the run prepares its batches in eager as well
    for model in models.values():
        compile_in_place(model, **request.settings)
    built = time.monotonic()
    workload.run(batch)
    return dict(models), built


def _facts(compiled: Mapping[str, Any], memory: Mapping[str, float]) -> dict[str, Any]:
    """Say what hotloop itself observed of the compiles."""
    parts = [part for model in compiled.values() for part in status(model).components.values()]
    causes = list(dict.fromkeys(cause.reason[:_REASON_LENGTH] for part in parts for cause in part.causes))
    if all(part.running != part.requested for part in parts):  # on a lower rung, or eager
        return {"failed": "; ".join(causes) or "nothing was compiled"}
    return {
        "compile_seconds": sum(part.compile_seconds for part in parts),
        "graphs": sum(part.compiles for part in parts),
        "cache_hits": sum(part.cache_hits for part in parts),
        "cache_misses": sum(part.cache_misses for part in parts),
        "state": "compiled" if all(part.state == "compiled" for part in parts) else "partial",
        "causes": causes,
        "peak_bytes": sum(torch.cuda.max_memory_reserved(int(index)) for index in memory),
    }


def _tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors of a nested output; a model's own output class is searched by its attributes."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors_in(item)
    elif isinstance(value, list | tuple | set | frozenset):
        for item in value:
            yield from _tensors_in(item)
    elif hasattr(value, "__dict__"):
        yield from _tensors_in(vars(value))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
