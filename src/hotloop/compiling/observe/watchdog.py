"""Ends compilers that hang, so that their compile fails and the run goes on; only where there is a /proc (Linux).

A compiler is judged with all processes that it started: it hangs if they used next to no processor time for as long as
`limit` says. Judged are compilers that this process started, known by their name or by a thread of Inductor's or
Triton's that waits for them, and the workers of Inductor's pool while they have jobs.
No other process is ever ended, and nothing is raised into a thread. So a compile that hangs within Python is not ended,
but told with its place; and a compiler that computes for ever is waited for.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import os
import re
import signal
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from hotloop._torch.backends import compilers_awaited, cpp_compilers, working_pool
from hotloop.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Collection

_log = logging.getLogger("hotloop")
_LOOKS = 10
"""Looks without progress after which a compiler hangs. Looks are counted, as a clock goes on while a laptop sleeps."""
_LEAST_SHARE = 0.001
"""The share of a processor that is progress: timers of idle workers and shells that wait in a loop use less."""
_GRACE_SECONDS = 1.0
"""A compiler that is asked to end has so long to remove its unfinished files, before it is killed."""
_SHOWN = 6
"""Frames that are told of a compile that hangs within Python, the innermost ones."""
_COMPILER = re.compile(r"(.*-)?(g\+\+|c\+\+|gcc|cc|clang|clang\+\+|nvcc|ptxas|s?ccache|distcc)(-.*)?")


@dataclasses.dataclass(frozen=True)
class Process:
    """A process as /proc shows it.

    ``ticks`` of processor time include its children that have ended; ``command`` is read for this process's own.
    """

    name: str
    state: str
    parent: int
    ticks: int
    started: int = 0
    command: str = ""


def limit() -> float:
    """Return the seconds without progress after which a compiler hangs; infinite where the setting is 0.

    Raises:
        ConfigError: the setting is no such number.
    """
    text = os.environ.get("HOTLOOP_COMPILE_TIMEOUT", "").strip() or "600"
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not seconds >= 0:
        raise ConfigError(f"HOTLOOP_COMPILE_TIMEOUT={text}: expected seconds, e.g. 600; 0 waits for ever")
    return seconds or math.inf


class Watchdog:
    """Watches the compilers of one compile from a thread of its own, until `stop`."""

    _newest: ClassVar[Watchdog | None] = None
    """Watches alone: another one would hurry the compilers of this one's compile, and keep the news of their end."""

    def __init__(self, seconds: float, component: str = "") -> None:
        self._component, self._thread, self._alone = component, threading.get_ident(), 0
        self._seconds, self._patience, self._over = seconds, _LOOKS, threading.Event()
        named = [*cpp_compilers(), os.environ.get("CXX", ""), os.environ.get("CC", "")]
        self._chosen = [name.strip() for name in named if name.strip()]
        self._seen: dict[int, tuple[int, int]] = {}
        """By compiler: its processor time when it last made progress, and the looks since."""
        self._news: list[str] = []

    def start(self) -> None:
        """Begin to watch, where there is something to see."""
        Watchdog._newest = self
        if self._seconds < math.inf and Path("/proc/self/stat").exists():
            threading.Thread(target=self._watch, name="hotloop-watchdog", daemon=True).start()

    def stop(self) -> None:
        """Stop watching. If a compiler hung, stop once none runs: torch's threads go on with compiles that waited.

        From the next compile on, its watchdog watches those too.
        """
        self._over.set()

    def news(self) -> str:
        """Return what hung since the last call; empty where nothing did."""
        news, self._news = self._news, []
        return news[0] if news else ""

    def _watch(self) -> None:
        while not self._over.wait(self._seconds / _LOOKS):
            self._look()
            self._alone = 0 if self._seen else self._alone + 1
            if self._alone == _LOOKS:
                self._tell_place()
        while self._patience < _LOOKS and self._seen:
            time.sleep(self._seconds / _LOOKS)
            if self is not Watchdog._newest:
                return
            self._look()

    def _look(self) -> None:
        pool = working_pool()
        for root, hanging in self.hanging(processes(), pool, compilers_awaited()).items():
            name = "Inductor's pool of compile workers" if root == pool else hanging[root].name
            said = f"{name} hung: no processor time for {self._seconds:g} s (HOTLOOP_COMPILE_TIMEOUT)"
            _log.warning("%s; it is ended (process %d)", said, root)
            self._news.append(said)
            # Those that waited for it need not wait as long, or the run would wait that long for each.
            self._patience = 1
            _end(hanging)

    def _tell_place(self) -> None:
        """Say where in Python a compile is that takes long, and has no compiler to wait for."""
        frame = sys._current_frames().get(self._thread)  # noqa: SLF001 - Python documents it
        stack = traceback.extract_stack(frame)[: -_SHOWN - 1 : -1] if frame is not None else []
        _log.warning(
            "%s: a compile has taken %g s (HOTLOOP_COMPILE_TIMEOUT) without a compiler at work, and is waited for; it "
            "is at %s. If it stays there, leave the component out, or run with HOTLOOP_DISABLE=1",
            self._component,
            self._seconds,
            ", called from ".join(f"{place.filename}:{place.lineno} ({place.name})" for place in stack) or "its end",
        )

    def hanging(
        self, found: dict[int, Process], pool: int | None, awaited: Collection[int] = ()
    ) -> dict[int, dict[int, Process]]:
        """Return the compilers that hang, after one more look at all processes.

        Args:
            found: all processes.
            pool: the process that Inductor's compile workers descend from, while they have jobs.
            awaited: processes that Inductor waits for, whatever their names are.

        A compiler comes with all that it started. Inductor's pool is judged as one, since a worker without a job is
        idle by right; it starts new workers for those that were ended.
        """
        before, self._seen = self._seen, {}
        hanging = {}
        for root, process in found.items():
            # "Z": it has ended, and nobody has asked for its exit code.
            compiles = root in awaited or self._is_compiler(process)
            if process.parent != os.getpid() or process.state == "Z" or not (root == pool or compiles):
                continue
            members = [root]
            for member in members:  # which grows meanwhile
                members += [pid for pid, other in found.items() if other.parent == member]
            ticks = sum(found[pid].ticks for pid in members)
            since, looks = before.get(root, (ticks, -1))
            used = abs(ticks - since) / os.sysconf("SC_CLK_TCK")
            if used > _LEAST_SHARE * self._seconds or any(found[pid].state in "Tt" for pid in members):  # or stopped
                since, looks = ticks, -1
            self._seen[root] = since, looks + 1
            if looks + 1 >= self._patience:
                hanging[root] = {pid: found[pid] for pid in members if pid != pool}
        return hanging

    def _is_compiler(self, process: Process) -> bool:
        command = f" {process.command} "
        return bool(_COMPILER.fullmatch(process.name)) or any(f" {chosen} " in command for chosen in self._chosen)


def processes() -> dict[int, Process]:
    """Return all processes that this process can see, by number."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # the process has just ended
            start, _, end = path.read_text(errors="replace").rpartition(")")
            state, parent, *fields = end.split()
            ours = int(parent) == os.getpid()
            command = path.with_name("cmdline").read_text(errors="replace") if ours else ""
            name = start.partition("(")[2]
            # Linux cuts the name to 15 characters. The whole is in the command, for a script as its second word.
            words = [Path(word).name for word in command.split("\0")[:2]]
            found[int(path.parent.name)] = Process(
                name=next((word for word in words if word.startswith(name)), name),
                state=state,
                parent=int(parent),
                ticks=sum(map(int, fields[9:13])),
                started=int(fields[17]),
                command=command.replace("\0", " "),
            )
    return found


def _end(hanging: dict[int, Process]) -> None:
    """End processes, politely first; a number that another process has got meanwhile is left alone."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        found = processes()
        for pid, process in hanging.items():
            if pid in found and found[pid].started == process.started:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
        time.sleep(_GRACE_SECONDS)
