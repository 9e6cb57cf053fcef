"""From an exception of the compiler to stage, message, place and remedy, in the user's terms."""

from __future__ import annotations

import dataclasses
import linecache
import subprocess
from typing import TYPE_CHECKING

from hotloop import events as ev
from hotloop._torch.graphs import last_user_frame, user_line
from hotloop.errors import describe, message_of

if TYPE_CHECKING:
    from torch import fx

    from hotloop.presets import Preset

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
"""Names of torch's and Triton's exceptions that a compiler of kernels raises, after the graph was lowered."""
_HINTS: dict[str, str] = {
    "InvalidCxxCompiler": "install a C++ compiler (g++), or set CXX to one that works",
    "CppCompileError": "check that the C++ compiler works (CXX), and that it is recent enough",
    "TritonMissing": "install triton, or use a preset that does without it",
    "GPUTooOldForTriton": "this GPU is too old for Triton: use aot_eager or none",
    "OutOfResources": "the kernel needs more shared memory than the GPU has: try preset default",
    "OutOfMemoryError": "memory ran out while compiling: a smaller batch, preset default, or fewer components",
}


@dataclasses.dataclass(frozen=True)
class Failure:
    """A failure to compile a graph: its stage, reason, place in the user's code, and what to try.

    ``systemic``: any other graph will fail as well (no compiler, say).
    """

    stage: ev.Stage
    reason: str
    file: str | None
    line: int | None
    source: str
    hint: str
    systemic: bool

    def strict_message(self, preset: str) -> str:
        """Return the message of the error that ``strict`` raises for a preset that failed."""
        at = f" at {self.file}:{self.line}: {self.source}" if self.file else ""
        return f"preset {preset} failed ({self.stage}){at}: {self.reason}. {self.hint}"

    def fallback(self, component: str, failed: Preset, to: Preset) -> ev.Fallback:
        """Return the event of a graph that failed on one preset and runs on another."""
        return ev.Fallback(
            component=component or None,
            scope="graph",
            from_preset=failed.name,
            to_preset=to.name,
            stage=self.stage,
            reason=self.reason,
            file=self.file,
            line=self.line,
            hint=self.hint,
        )


def failure_of(error: BaseException, graph: fx.GraphModule | None, *, hung: str = "") -> Failure:
    """Explain a failure while a graph was compiled. ``hung`` says which compiler hung, and was ended, before it."""
    chain = chain_of(error)
    names = [type(link).__name__ for link in chain]
    lowered = bool(hung) or any(name in _COMPILE_STAGE for name in names)
    if hung:
        hint = "run the compiler (CXX) by hand; if it needs longer, raise HOTLOOP_COMPILE_TIMEOUT (0: no limit)"
    elif any(isinstance(link, subprocess.CalledProcessError) and link.returncode < 0 for link in chain):
        hint = "a signal ended it, as Ctrl-C and a job's time limit do to a whole group of processes: start again"
    elif "No space left on device" in describe(chain[-1]):
        hint = "make room on the disk, or set TMPDIR to a folder that has some"
    elif known := next((name for name in names if name in _HINTS), None):
        hint = _HINTS[known]
    else:
        another = "try another preset, default first," if lowered else "try another preset,"
        hint = f"{another} or leave this component out"
    place = last_user_frame(message_of(error)) or (user_line(graph) if graph is not None else None)
    file, line = place or (None, None)
    return Failure(
        stage="compile" if lowered else "lower",
        reason=hung or describe(chain[-1]),
        file=file,
        line=line,
        source=linecache.getline(file, line).strip() if file and line else "",
        hint=hint,
        systemic=any(name in ("InvalidCxxCompiler", "TritonMissing", "GPUTooOldForTriton") for name in names),
    )


def chain_of(error: BaseException) -> list[BaseException]:
    """Return the exception and the exceptions that it wraps, the root cause last."""
    chain = [error]
    while len(chain) < 10:  # noqa: PLR2004 - a cycle in __cause__ must not hang a run
        inner = getattr(chain[-1], "inner_exception", None) or chain[-1].__cause__
        if not isinstance(inner, BaseException) or inner in chain:
            break
        chain.append(inner)
    return chain
