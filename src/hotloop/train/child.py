"""A worker as a process of its own, which is given work and tells of it in lines of JSON.

What it is told comes by its stdin, since a command line is for everybody to see, and what it tells goes to its stdout.
Everything else that it prints goes to its log. It stops as by Ctrl-C when its stdin ends: whoever started it is dead.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

from hotloop import host
from hotloop.files import open_append

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path
    from typing import TextIO

DONE, REPLACE, INTERRUPTED = 0, 4, 130
"""Exit codes: nothing is left; this process cannot go on and another one can; somebody interrupted."""
_AGAIN_SECONDS = 60.0
"""After which an orphan is asked to stop again, which ends it at once: long enough for a last validation."""


class WorkerLostError(Exception):
    """A worker on another machine was lost with what it was at; the message says how."""


def started(module: str, log: Path, environment: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
    """Start a module as a process in a group of its own, so that Ctrl-C reaches it through us alone."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with open_append(log) as errors:
        return subprocess.Popen(  # noqa: S603 - this very program
            host.python("-m", module),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            encoding="utf-8",
            start_new_session=True,
            env={**os.environ, **(environment or {})},
        )


class Child:
    """A worker that this process started.

    Args:
        module: runs in it.
        log: has what it prints.
        environment: what it has beside this process's.
    """

    def __init__(self, module: str, log: Path, environment: Mapping[str, str] | None = None) -> None:
        self.log, self._process = log, started(module, log, environment)

    def send(self, what: Mapping[str, Any] | None) -> None:
        """Hand over work, or an answer; None says that there is no more."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # it is dead; `hear` says so
            self._process.stdin.write(json.dumps(what) + "\n")
            self._process.stdin.flush()

    def hear(self) -> dict[str, Any] | None:
        """Return what it tells next; None once it has ended."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            with contextlib.suppress(ValueError):  # a kill can cut a line in two
                found: dict[str, Any] = json.loads(line)
                return found
        self._process.wait()
        return None

    def interrupt(self) -> None:
        """Ask it to stop, as Ctrl-C does."""
        with contextlib.suppress(OSError):
            self._process.send_signal(signal.SIGINT)

    def end(self) -> str:
        """End it, if it has not ended, and say how it ended."""
        with contextlib.suppress(OSError):
            self._process.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(OSError):
                pipe.close() if pipe else None
        return how(self._process.wait())


class Parent:
    """Whoever started this process."""

    def __init__(self) -> None:
        self._events, self._heard = events(), queue.SimpleQueue[Any]()
        # A program that was started in the background ignores Ctrl-C, and so would its children.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        if hasattr(signal, "pthread_sigmask"):  # Ray's processes hold SIGINT back, and so would theirs
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGTERM})
        threading.Thread(target=self._listen, name="parent", daemon=True).start()

    def hear(self) -> dict[str, Any] | None:
        """Return what it says next; None where there is no more work."""
        found: dict[str, Any] | None = self._heard.get()
        return found

    def tell(self, **what: Any) -> None:
        """Send a message."""
        with contextlib.suppress(OSError, ValueError):  # it is gone, and this process stops
            self._events.write(json.dumps(what) + "\n")
            self._events.flush()

    def _listen(self) -> None:
        for line in sys.stdin:
            self._heard.put(json.loads(line))
        self._heard.put(None)
        interrupt_again()


def events() -> TextIO:
    """Keep stdout for what is told: what recipes and libraries print goes where stderr goes."""
    sys.stdout.flush()
    kept = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return kept


def interrupt_again() -> None:
    """Stop this process as by Ctrl-C, whatever swallows a signal: it is not to outlive whoever started it."""
    while True:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(_AGAIN_SECONDS)


def how(code: int) -> str:
    """Say how a process ended."""
    if code >= 0:
        return f"exit code {code}"
    with contextlib.suppress(ValueError):
        return signal.Signals(-code).name
    return f"signal {-code}"
