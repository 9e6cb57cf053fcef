"""From an exception of the compiler to stage, message, place and remedy, in the user's terms."""

from __future__ import annotations

import dataclasses
import linecache
import pathlib
import signal
import subprocess
from typing import TYPE_CHECKING

from hotloop._torch.graphs import last_user_frame, user_line

if TYPE_CHECKING:
    from torch import fx

    from hotloop.events import Stage

_COMPILE_STAGE = (
    "InvalidCxxCompiler",
    "CppCompileError",
    "CompilationError",
    "CompileTimeAssertionFailure",
    "OutOfResources",
    "PTXASError",
    "SubprocException",
    "TritonMissing",
    "NoTritonConfigsError",
)
_SYSTEMIC = ("InvalidCxxCompiler", "TritonMissing", "GPUTooOldForTriton")
_HINTS: dict[str, str] = {
    "InvalidCxxCompiler": "install a C++ compiler (g++), or set CXX to one that works",
    "CppCompileError": "check that the C++ compiler works (CXX), and that it is recent enough",
    "TritonMissing": "install triton, or use a preset that does without it",
    "GPUTooOldForTriton": "this GPU is too old for Triton: use aot_eager or none",
    "OutOfResources": "the kernel needs more shared memory than the GPU has: try preset default",
    "OutOfMemoryError": "memory ran out while compiling: a smaller batch, preset default, or fewer components",
}
_ENDED = "a signal ended it, as Ctrl-C and a job's time limit do to a whole group of processes: start again"
_STAGE_HINTS: dict[Stage, str] = {
    "trace": "leave it eager, or rewrite the line so that it can be traced",
    "lower": "try another preset, or leave this component out",
    "compile": "try another preset, default first, or leave this component out",
    "run": "rerun with HOTLOOP_DISABLE=1 to see whether eager fails as well",
}


@dataclasses.dataclass(frozen=True)
class Failure:
    """What went wrong, where, and what to try."""

    stage: Stage
    reason: str
    file: str | None
    line: int | None
    source: str
    hint: str
    systemic: bool


def failure_of(error: BaseException, graph: fx.GraphModule | None) -> Failure:
    """Explain a failure while a graph was compiled."""
    chain = chain_of(error)
    names = [type(link).__name__ for link in chain]
    stage: Stage = "compile" if any(name in _COMPILE_STAGE for name in names) else "lower"
    known = next((name for name in names if name in _HINTS), None)
    ended = any(isinstance(link, subprocess.CalledProcessError) and link.returncode < 0 for link in chain)
    place = last_user_frame(text_of(error)) or (user_line(graph) if graph is not None else None)
    file, line = place or (None, None)
    return Failure(
        stage=stage,
        reason=describe(chain[-1]),
        file=file,
        line=line,
        source=linecache.getline(file, line).strip() if file and line else "",
        hint=_ENDED if ended else _HINTS[known] if known else _STAGE_HINTS[stage],
        systemic=any(name in _SYSTEMIC for name in names),
    )


def run_hint() -> str:
    """Give what to try when compiled code failed while it ran."""
    return _STAGE_HINTS["run"]


def describe(error: BaseException) -> str:
    """Give class and first telling line of torch's own message; of a program that failed, its name.

    Without the full stop at its end: what it is put into goes on, or ends with one.
    """
    if isinstance(error, subprocess.CalledProcessError):
        command = error.cmd if isinstance(error.cmd, str) else str(next(iter(error.cmd), ""))
        program = pathlib.Path(command.split()[0]).name if command.split() else "a program"
        if error.returncode >= 0:
            return f"{program} ended with exit code {error.returncode}"
        known = {one.value: one.name for one in signal.Signals}
        return f"{program} was ended by {known.get(-error.returncode, f'signal {-error.returncode}')}"
    lines = [line.strip() for line in text_of(error).splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    said = lines[0] if lines[0].endswith("..") else lines[0].removesuffix(".")
    return f"{type(error).__name__}: {said}"


def text_of(error: BaseException) -> str:
    """Give an exception's message; none where it cannot be printed, as its own ``__str__`` may raise anything."""
    try:
        return str(error)
    except Exception:  # noqa: BLE001 - see above
        return ""


def chain_of(error: BaseException) -> list[BaseException]:
    """Give the exception and what it wraps, the root cause last."""
    chain = [error]
    while len(chain) < 10:  # noqa: PLR2004 - a cycle in __cause__ must not hang a run
        inner = getattr(chain[-1], "inner_exception", None) or chain[-1].__cause__
        if not isinstance(inner, BaseException) or inner in chain:
            break
        chain.append(inner)
    return chain
