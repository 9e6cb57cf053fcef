"""A child process that fills Inductor's cache while this process trains on.

The child is a new process that shares no CUDA context, lock or thread with this one. It runs at low priority with fewer
compile workers than cores and a bounded share of the GPU's free memory, and it dies with its parent: its standard input
is a pipe that closes when the parent ends. Request, log and report are temporary files without names.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
import weakref
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Literal, Self

import torch

from hotloop import host
from hotloop.cache.ambient import process_settings

if TYPE_CHECKING:
    from collections.abc import Mapping

NICENESS = 10
"""Added to the child's niceness: it, its workers and (on Linux) their reads and writes give way to the training."""
INSIDE = "HOTLOOP_BACKGROUND"
"""Set in the child's environment, so that a workload that makes a Loop there does not start a child of its own."""
_MOST_WORKERS = 16
_LOG_BYTES = 2000
"""Of the end of the child's log, from which the last lines are quoted."""
_BOOT = (
    "import json, os, runpy, sys; given = json.loads(sys.argv[1]); os.nice(given['nice']); "
    "sys.path[:] = given['path']; runpy.run_module(given['program'], run_name='__main__')"
)
"""Lowers the child's priority before it imports torch, and imports from the same places as this process."""


class BackgroundUnavailableError(Exception):
    """A background compile is not possible; the message is the reason, for people."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Done:
    """The outcome of a child that filled the cache.

    Args:
        seconds: wall-clock time since the child was started.
        compile_seconds: seconds of it that its compiles took.
        graphs: frames that it compiled.
        cache_misses: graphs that were in no cache yet.
        state: as in `hotloop.status`: ``compiled`` or ``partial``.
        causes: why the state is not better.
    """

    seconds: float
    compile_seconds: float
    graphs: int
    cache_misses: int
    state: str
    causes: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Failed:
    """The outcome of a child that failed, was stopped, or took too long; ``reason`` is for people.

    ``unable`` says that the program's own code raised in the child, which says nothing of the compile.
    """

    reason: str
    unable: bool = False


Outcome = Literal["running"] | Done | Failed


class BackgroundCompile:
    """A child that compiles the first step of a workload. Make it with `start`; call `poll` as often as you like."""

    def __init__(self, process: subprocess.Popen[bytes], log: IO[bytes], report: IO[bytes], limit: float) -> None:
        self._process, self._log, self._report, self._limit = process, log, report, limit
        self._began = time.monotonic()
        self._outcome: Outcome = "running"
        self._end = weakref.finalize(self, _end, process, (log, report), os.getpid())  # also at exit

    @classmethod
    def start(
        cls,
        factory: str,
        settings: Mapping[str, Any],
        *,
        peak_bytes: int = 0,
        limit_seconds: float = 1800.0,
        program: str = "hotloop.step.policy.child_program",
    ) -> Self:
        """Start a child, and return at once (about 10 ms).

        Args:
            factory: ``module:function`` or ``file.py:function``, which returns a `hotloop.Workload`.
            settings: the keyword arguments of `hotloop.compile`.
            peak_bytes: GPU memory that an eager step needs.
            limit_seconds: seconds after which the child is stopped and has failed.
            program: the module that runs as the child.

        Raises:
            BackgroundUnavailableError: no child can run here; the message says why.
        """
        if os.name != "posix":
            raise BackgroundUnavailableError(f"it needs a POSIX system, and this is {sys.platform}")
        if os.environ.get(INSIDE):
            raise BackgroundUnavailableError("this process is itself compiling for another process")
        if factory.startswith("__main__:"):
            raise BackgroundUnavailableError(f"workload {factory!r}: expected a module that can be imported by name")
        given = {
            "nice": NICENESS,
            "path": [str(Path(place).absolute()) for place in sys.path],  # an empty entry means here
            "program": program,
            "memory": _memory_share(peak_bytes),
        }
        try:
            request = pickle.dumps({"factory": factory, "settings": settings, "process": process_settings()})
        except Exception as error:
            raise BackgroundUnavailableError(f"the settings cannot be pickled: {error}") from error
        with contextlib.ExitStack() as files:
            try:
                log, report, source = (files.enter_context(tempfile.TemporaryFile()) for _ in range(3))
                source.write(request)
                source.seek(0)  # flushes as well
                inherited = {"request": source.fileno(), "report": report.fileno()}
                process = subprocess.Popen(  # noqa: S603 - our own interpreter and program
                    host.python("-P", "-c", _BOOT, json.dumps({**given, **inherited})),
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=log,
                    pass_fds=tuple(inherited.values()),
                    start_new_session=True,  # Ctrl-C goes to the training alone
                    env=_environment(),
                )
            except OSError as error:
                raise BackgroundUnavailableError(f"the child process cannot be started: {error}") from error
            source.close()
            files.pop_all()  # the log and the report live as long as the child
        return cls(process, log, report, limit_seconds)

    @property
    def pid(self) -> int:
        """The child's process number."""
        return self._process.pid

    def poll(self) -> Outcome:
        """Return the outcome so far, within microseconds; once it is not ``running``, it stays the same."""
        if self._outcome != "running":
            return self._outcome
        if self._process.poll() is not None:
            self._settle(self._result())
        elif time.monotonic() - self._began > self._limit:
            self._settle(Failed(f"it took longer than {self._limit:g} s{self._log_tail()}"))
        return self._outcome

    def stop(self) -> None:
        """Kill the child and wait until it is gone. Calling it again does nothing."""
        if self.poll() == "running":
            self._settle(Failed("stopped"))

    def _settle(self, outcome: Done | Failed) -> None:
        self._outcome = outcome
        self._end()

    def _result(self) -> Done | Failed:
        """Read the report of a child that has ended."""
        code = self._process.returncode
        text = os.pread(self._report.fileno(), os.fstat(self._report.fileno()).st_size, 0)
        if text.endswith(b"}\n"):  # else the child was killed while it wrote
            facts = json.loads(text)
            if "failed" in facts:
                return Failed(facts["failed"], facts.get("unable", False))
            seconds = time.monotonic() - self._began
            return Done(seconds=seconds, **{**facts, "causes": tuple(facts["causes"])})
        if code < 0:
            name = signal.Signals(-code).name
            hint = "; the machine may be out of memory" if name == "SIGKILL" else ""
            return Failed(f"the child was killed by {name}{hint}{self._log_tail()}")
        return Failed(f"the child ended with code {code} and no report{self._log_tail()}")

    def _log_tail(self) -> str:
        """Return the last four lines of the child's log, to be added to a reason."""
        size = os.fstat(self._log.fileno()).st_size
        text = os.pread(self._log.fileno(), _LOG_BYTES, max(0, size - _LOG_BYTES)).decode("utf-8", "replace")
        lines = [stripped for line in text.splitlines() if (stripped := line.strip())]
        return f": {' | '.join(lines[-4:])}" if lines else ""


def _end(process: subprocess.Popen[bytes], files: tuple[IO[bytes], ...], owner: int) -> None:
    """Kill the child, if it still runs. A process that was forked from the owner does nothing.

    Its compile workers notice and end. A C++ compiler that is at work goes on for its last seconds: killed, it would
    leave half a library in the cache.
    """
    if os.getpid() != owner:
        return
    if process.poll() is None:
        process.kill()
        process.wait()
    for file in (process.stdin, *files):
        if file is not None:
            file.close()


def _environment() -> Mapping[str, str]:
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    workers = max(1, min(_MOST_WORKERS, cpus * 3 // 4))
    given = os.environ.get("TORCHINDUCTOR_COMPILE_THREADS", "")
    if given.isdecimal():
        workers = min(workers, int(given))
    kept = {name: value for name, value in os.environ.items() if name != "HOTLOOP_DISABLE"}
    return {**kept, INSIDE: "1", "TORCHINDUCTOR_COMPILE_THREADS": str(workers)}


def _memory_share(need: int) -> float:
    """Return the share of the GPU's memory that the child may take; 1 where there is no GPU.

    Raises:
        BackgroundUnavailableError: the step does not fit into the free memory.
    """
    if not torch.cuda.is_available():
        return 1.0
    context = 2**30  # for the child's CUDA context and kernels, which torch's limit does not count
    free, total = torch.cuda.mem_get_info()
    reserved = torch.cuda.max_memory_reserved()
    # This process may need again what it has needed before, though torch's allocator has given it back meanwhile.
    room = free - (reserved - torch.cuda.memory_reserved() + total // 20) - context
    if need > room:
        raise BackgroundUnavailableError(
            f"a second copy of the step needs {need / 2**30:.1f} GiB, and {max(room, 0) / 2**30:.1f} GiB can be "
            f"spared beside the {reserved / 2**30:.1f} GiB that this process has needed, proofs included"
        )
    return min(room, max(2 * need, context)) / total
