"""A child process that fills Inductor's compile cache while this process trains on.

The child is a new process (no fork: no CUDA context, lock or thread is inherited). It runs at low priority with fewer
compile workers than cores and a bounded share of the GPU's free memory, and dies with its parent. It leaves no files:
the request, its log and its report are nameless temporary files, and its standard input is a pipe that closes when the
parent ends.
Where the process shares its compiles, the child writes into a folder of its own. Its files are taken over only once it
is done, since a child that is killed leaves half a library where a linker was at work.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import weakref
from pathlib import Path
from typing import IO, TYPE_CHECKING, Literal, Self

import torch

from hotloop import host
from hotloop.cache.portable import BackgroundUnavailableError
from hotloop.cache.process_folder import VARIABLE, child_folder

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hotloop.cache.process_folder import ChildFolder
    from hotloop.cache.request import Request

NICENESS = 10
"""Added to the child's niceness: it, its workers and (on Linux) their reads and writes give way to the training."""
INSIDE = "HOTLOOP_BACKGROUND"
"""Set in the child's environment, so that a workload that makes a Loop there does not start a child of its own."""
_MOST_WORKERS = 16
"""The most compile workers; at most three quarters of the cores have one. They give way to the training. Each piece of
a model waits for its kernels, and a compile in the foreground has a worker a core."""
_LOG_BYTES = 4 * 2**20
_LOOK_SECONDS = 1.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Done:
    """The outcome of a child that filled the cache. Seconds are wall-clock time, from when the child was asked for.

    ``begun_seconds`` of them passed until its own program began, which is Python and torch being imported, and
    ``built_seconds`` until it had built what it compiles. ``compile_seconds`` is what its compiles took in all.
    ``state`` is that of `hotloop.status` (``compiled`` or ``partial``), ``causes`` why it is no better; ``graphs``
    counts compiled frames, ``cache_misses`` what was compiled anew. ``peak_bytes`` is the child's GPU memory.
    """

    seconds: float
    begun_seconds: float
    built_seconds: float
    compile_seconds: float
    graphs: int
    cache_hits: int
    cache_misses: int
    state: str
    causes: tuple[str, ...]
    peak_bytes: int


@dataclasses.dataclass(frozen=True)
class Failed:
    """The outcome of a child that failed, was stopped, or took too long; ``reason`` is for people.

    ``unable`` says that the program's own code raised in the child. It runs here, so that says nothing of the compile.
    """

    reason: str
    unable: bool = False


Outcome = Literal["running"] | Done | Failed


class BackgroundCompile:
    """A child that compiles what a request describes. Make it with `start`; call `poll` as often as you like."""

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        log: IO[bytes],
        report: IO[bytes],
        limit: float,
        folder: ChildFolder | None = None,
    ) -> None:
        self._process, self._log, self._report, self._limit, self._folder = process, log, report, limit, folder
        self._began = self._looked = time.monotonic()
        self._outcome: Outcome = "running"
        self._end = weakref.finalize(self, _end, process, (log, report), folder, os.getpid())  # also at exit

    @classmethod
    def start(
        cls, request: Request, *, limit_seconds: float = 1800.0, program: str = "hotloop.step.policy.child_program"
    ) -> Self:
        """Start a child, and return at once (about 10 ms).

        Args:
            request: what to compile.
            limit_seconds: seconds after which the child is stopped and has failed.
            program: the module that runs as the child.

        Raises:
            BackgroundUnavailableError: no child can run here; the message says why.
        """
        if os.name != "posix":
            raise BackgroundUnavailableError(f"it needs a POSIX system, and this is {sys.platform}")
        if os.environ.get(INSIDE):
            raise BackgroundUnavailableError("this process is itself compiling for another process")
        limits = _memory_limits(request)
        text = request.dumps()
        path = [str(Path(place).absolute()) for place in sys.path]  # an empty entry means here
        given = {"nice": NICENESS, "path": path, "program": program}
        # The child lowers its priority before it imports torch, and imports from the same places as this process.
        boot = (
            "import json, os, runpy, sys; given = json.loads(sys.argv[1]); os.nice(given['nice']); "
            "sys.path[:] = given['path']; runpy.run_module(given['program'], run_name='__main__')"
        )
        with contextlib.ExitStack() as files:
            try:
                log, report, source = (files.enter_context(tempfile.TemporaryFile()) for _ in range(3))
                source.write(text)
                source.seek(0)  # flushes as well
                if (folder := child_folder()) is not None:
                    files.callback(folder.remove)
                # The child reads the same clock, so that its seconds hold what it took to start.
                given["asked"] = time.monotonic()
                inherited = {"request": source.fileno(), "report": report.fileno()}
                process = subprocess.Popen(  # noqa: S603 - our own interpreter and program
                    host.python(*_flags(), "-c", boot, json.dumps({**given, **inherited, "memory": limits})),
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=log,
                    pass_fds=tuple(inherited.values()),
                    start_new_session=True,  # Ctrl-C goes to the training alone; the whole group is killed at the end
                    env=_environment(folder),
                )
            except OSError as error:
                raise BackgroundUnavailableError(f"the child process cannot be started: {error}") from error
            source.close()
            files.pop_all()  # the folder, the log and the report live as long as the child
        return cls(process, log, report, limit_seconds, folder)

    @property
    def pid(self) -> int:
        """The child's process number, which is its group's number as well."""
        return self._process.pid

    def poll(self) -> Outcome:
        """Return the outcome so far, within microseconds; once it is not ``running``, it stays the same."""
        if self._outcome != "running":
            return self._outcome
        if self._process.poll() is not None:
            self._settle(self._result())
        elif time.monotonic() - self._looked > _LOOK_SECONDS:
            self._look()
        return self._outcome

    def stop(self) -> None:
        """Kill the child and everything it started, and wait until it is gone. Calling it again does nothing."""
        if self.poll() == "running":
            self._settle(Failed("stopped"))

    def _look(self) -> None:
        """Check, once a second, whether the child is over its time, and whether its log grows without end."""
        self._looked = time.monotonic()
        if self._looked - self._began > self._limit:
            self._settle(Failed(f"it took longer than {self._limit:g} s{self._log_tail()}"))
        elif os.fstat(self._log.fileno()).st_blocks * 512 > _LOG_BYTES:
            os.ftruncate(self._log.fileno(), 0)  # the child writes on at its place, and the part before takes no room

    def _settle(self, outcome: Done | Failed) -> None:
        self._outcome = outcome
        if self._folder is not None and isinstance(outcome, Done):
            self._folder.take_over()
        self._end()

    def _result(self) -> Done | Failed:
        """Read the report of a child that has ended."""
        code = self._process.returncode
        text = os.pread(self._report.fileno(), os.fstat(self._report.fileno()).st_size, 0)
        if text.endswith(b"}\n"):  # else the child was killed while it wrote
            facts = json.loads(text)
            if "failed" in facts:
                return Failed(facts["failed"], facts.get("unable", False))
            return Done(**{**facts, "causes": tuple(facts["causes"])})
        if code < 0:
            name = signal.Signals(-code).name
            hint = "; the machine may be out of memory" if name == "SIGKILL" else ""
            return Failed(f"the child was killed by {name}{hint}{self._log_tail()}")
        return Failed(f"the child ended with code {code} and no report{self._log_tail()}")

    def _log_tail(self) -> str:
        """Return the last four lines of the child's log, to be added to a reason."""
        size, most = os.fstat(self._log.fileno()).st_size, 2000
        text = os.pread(self._log.fileno(), most, max(0, size - most)).decode("utf-8", "replace")
        lines = [stripped for line in text.splitlines() if (stripped := line.strip("\0 \t"))]
        return f": {' | '.join(lines[-4:])}" if lines else ""


def _end(
    process: subprocess.Popen[bytes], files: tuple[IO[bytes], ...], folder: ChildFolder | None, owner: int
) -> None:
    """Kill the child's whole group, if it still runs. A process that was forked from the owner does nothing."""
    if os.getpid() != owner:
        return
    if process.poll() is None:  # not reaped yet, so the number still belongs to the child
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    for file in (process.stdin, *files):
        if file is not None:
            file.close()
    if folder is not None:
        folder.remove()


def _flags() -> list[str]:
    """Return this interpreter's flags that decide what code means and where it is found."""
    flags = sys.flags
    optimised = ["-" + "O" * flags.optimize] if flags.optimize else []
    found = {"-I": flags.isolated, "-E": flags.ignore_environment, "-s": flags.no_user_site, "-S": flags.no_site}
    return [*optimised, *(flag for flag, on in found.items() if on), "-P"]


def _environment(folder: ChildFolder | None) -> Mapping[str, str]:
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    workers = max(1, min(_MOST_WORKERS, cpus * 3 // 4))
    given = os.environ.get("TORCHINDUCTOR_COMPILE_THREADS", "")
    if given.isdecimal():
        workers = min(workers, int(given))
    kept = {name: value for name, value in os.environ.items() if name != "HOTLOOP_DISABLE"}
    if folder is not None:
        kept[VARIABLE] = str(folder.place)
    return {**kept, INSIDE: "1", "TORCHINDUCTOR_COMPILE_THREADS": str(workers)}


def _memory_limits(request: Request) -> dict[str, float]:
    """Return the share of each GPU's memory that the child may take, by device index.

    Raises:
        BackgroundUnavailableError: the step does not fit into the free memory.
    """
    used = {storage.device for storage in request.tensors.storages if storage.device.startswith("cuda")}
    if request.factory and torch.cuda.is_available():
        used.add(f"cuda:{torch.cuda.current_device()}")
    context = 2**30  # for the child's CUDA context and kernels, which torch's limit does not count
    shares = {}
    for name in sorted(used):
        free, total = torch.cuda.mem_get_info(name)
        reserved = torch.cuda.max_memory_reserved(name)
        # This process may need again what it has needed before, though torch's allocator has given it back meanwhile.
        room = free - (reserved - torch.cuda.memory_reserved(name) + total // 20) - context
        need = request.peak_bytes if request.peak_bytes is not None else torch.cuda.max_memory_allocated(name)
        need = max(need, 2 * request.tensors.bytes_on(name))  # at least the gradients come on top
        if need > room:
            raise BackgroundUnavailableError(
                f"a second copy of the step needs {need / 2**30:.1f} GiB on {name}, and {max(room, 0) / 2**30:.1f} GiB "
                f"can be spared beside the {reserved / 2**30:.1f} GiB that this process has needed, proofs included"
            )
        shares[str(torch.device(name).index or 0)] = min(room, max(2 * need, context)) / total
    return shares
