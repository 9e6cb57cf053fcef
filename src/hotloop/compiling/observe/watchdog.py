"""Ends compilers that hang, so that their compile fails and the run goes on; only where there is a /proc (Linux).

A compiler is a process that this process or its workers started, known by its name. It hangs if it runs for longer
than ``HOTLOOP_COMPILE_TIMEOUT`` seconds. A compile that hangs within Python is not ended.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import re
import signal
import threading
import time
from pathlib import Path

from hotloop.errors import ConfigError

_log = logging.getLogger("hotloop")
_LOOKS = 10
"""Looks in a timeout."""
_NAME = 15
"""The letters of a process's name that Linux keeps."""
_COMPILER = re.compile(r"(.*-)?(g\+\+|c\+\+|gcc|cc|cc1plus|clang|clang\+\+|nvcc|cicc|ptxas)(-.*)?")


def limit() -> float:
    """Return the seconds after which a compiler hangs; infinite where the setting is 0.

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
    """Watches compilers from a thread for each compile, from `start` to `stop`, and until those it saw have ended."""

    def __init__(self) -> None:
        self._over = threading.Event()
        self._news: list[str] = []

    def start(self) -> None:
        """Begin to watch, where there is something to see."""
        self.stop()
        self._over, seconds = threading.Event(), limit()
        if seconds < math.inf and Path("/proc/self/stat").exists():
            watch = threading.Thread(target=self._watch, args=(self._over, seconds), name="hotloop-watchdog")
            watch.daemon = True
            watch.start()

    def stop(self) -> None:
        """Stop watching once no compiler runs."""
        self._over.set()

    def news(self) -> str:
        """Return which compiler hung since the last call; empty where none did."""
        news, self._news = self._news, []
        return news[0] if news else ""

    def _watch(self, over: threading.Event, seconds: float) -> None:
        seen: dict[int, float] = {}
        while not over.wait(seconds / _LOOKS) or seen:
            if over.is_set():
                time.sleep(seconds / _LOOKS)
            now, running = time.monotonic(), compilers()
            seen = {process: seen.get(process, now) for process in running}
            for process, since in seen.items():
                if now - since >= seconds:
                    self._end(process, *running[process], seconds)

    def _end(self, process: int, name: str, family: list[int], seconds: float) -> None:
        said = f"{name} hung: it ran for {seconds:g} s (HOTLOOP_COMPILE_TIMEOUT)"
        _log.warning("%s; it is ended (process %d)", said, process)
        self._news.append(said)
        for member in family:
            with contextlib.suppress(ProcessLookupError):
                os.kill(member, signal.SIGKILL)


def compilers() -> dict[int, tuple[str, list[int]]]:
    """Return the compilers that descend from this process: by number the name, and it with all that it started."""
    names: dict[int, str] = {}
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # the process has just ended
            start, _, end = path.read_text(errors="replace").rpartition(")")
            state, parent = end.split()[:2]
            if state not in "ZTt":  # ended, or stopped by its user
                names[int(path.parent.name)] = start.partition("(")[2]
                children.setdefault(int(parent), []).append(int(path.parent.name))

    def family(process: int) -> list[int]:
        return [process, *(member for child in children.get(process, ()) for member in family(child))]

    chosen = os.environ.get("CXX", "").split()[:1]
    own = {Path(program).name[:_NAME] for program in chosen}
    return {
        process: (names[process], family(process))
        for process in family(os.getpid())[1:]
        if _COMPILER.fullmatch(names[process]) or names[process] in own
    }
