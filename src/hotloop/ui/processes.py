"""Runs as processes of their own: they are started, found again and asked to stop by what is in their folders."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import platform
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hotloop import files, host, record
from hotloop.errors import ConfigError
from hotloop.record.process import started
from hotloop.train.turn import HOLDER
from hotloop.ui.places import LOG, START, STOP

if TYPE_CHECKING:
    from collections.abc import Sequence

_ENDING_SECONDS = 20.0
"""Which a command has to end by itself once it took too long."""


@dataclasses.dataclass(frozen=True)
class Process:
    """A process that works in a run's folder."""

    pid: int
    started: int | None

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain data, to be recognised by `find`."""
        return {"pid": self.pid, "host": platform.node(), "process_started": self.started}


def start(folder: Path, arguments: Sequence[str]) -> None:
    """Start hotloop for a run's folder, in a session of its own: neither Ctrl-C nor the end of this process ends it.

    Args:
        folder: of the run.
        arguments: of hotloop.

    Raises:
        ConfigError: the folder cannot be written.
    """
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with files.open_append(folder / LOG) as log:
            child = subprocess.Popen(  # noqa: S603 - our own program, without a shell
                host.python("-m", "hotloop", *arguments), stdin=subprocess.DEVNULL, stdout=log,
                stderr=subprocess.STDOUT, start_new_session=True, env=environment,
            )  # fmt: skip
        told = Process(child.pid, started(child.pid)).to_dict() | {"created": time.time(), "arguments": [*arguments]}
        with files.whole(folder / START, durable=False) as file:
            file.write(record.to_json(told).encode())
    except OSError as error:
        raise ConfigError(f"{folder} cannot be written: {files.cannot(error)}") from error
    # A process that nobody waits for stays in the system's table, and would seem to run.
    threading.Thread(target=child.wait, daemon=True).start()


def find(folder: Path) -> Process | None:
    """Return the process that works in a folder; None where there is none, or where it is another machine's."""
    for name in (HOLDER, START):
        told = read(folder / name)
        pid, began = told.get("pid"), told.get("process_started")
        if type(pid) is not int or pid <= 1 or told.get("host") != platform.node() or not _is_ours(pid):
            continue
        if started(pid) == began:
            return Process(pid, began)
    return None


def _is_ours(pid: int) -> bool:
    """Return whether a process lives and is hotloop's: what a folder says of its process may be anything."""
    try:
        os.kill(pid, 0)
    except (OSError, OverflowError):
        return False
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:  # the system does not say
        words = b""
    return pid != os.getpid() and (b"hotloop" in words or (not words and sys.platform != "linux"))


def stop(folder: Path, *, at_once: bool = False) -> None:
    """Ask a run to stop after its step; with ``at_once``, end one that was asked before.

    A second signal ends a run in the middle of its step, so a second press of the button must not send one.

    Raises:
        ConfigError: nothing works in the folder.
    """
    process = find(folder)
    if process is None:
        raise ConfigError(f"{folder.name}: nothing runs there now")
    if asked_to_stop(folder, process) and not at_once:
        return
    try:
        with files.whole(folder / STOP, durable=False) as file:
            file.write(json.dumps(process.to_dict()).encode())
    except OSError as error:
        raise ConfigError(f"{folder} cannot be written: {error}. Stop process {process.pid} by hand") from error
    os.kill(process.pid, signal.SIGTERM)


def asked_to_stop(folder: Path, process: Process | None) -> bool:
    """Return whether a process was asked to stop."""
    return process is not None and read(folder / STOP) == process.to_dict()


def read(path: Path) -> dict[str, Any]:
    """Read a small document; empty where it is none."""
    try:
        found = json.loads(files.read(path, 2**16))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def arguments_of(folder: Path) -> list[str]:
    """Return with which arguments a server started what is in a folder; to be shown, never to be run."""
    found = read(folder / START).get("arguments")
    return [str(one) for one in found] if isinstance(found, list) else []


def ask(arguments: Sequence[str], seconds: float = 300.0, module: str = "hotloop") -> tuple[int, str, str]:
    """Run a module of ours and return its exit code, what it printed, and what it printed on stderr.

    Raises:
        ConfigError: it takes longer than that.
    """
    with subprocess.Popen(  # noqa: S603 - our own program, without a shell
        host.python("-m", module, *arguments), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as child:  # fmt: skip
        try:
            out, err = child.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            child.terminate()  # it may have started something on a cluster, and ends that as well
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.communicate(timeout=_ENDING_SECONDS)
            child.kill()
            raise ConfigError(
                f"{module} {' '.join(arguments[:1])} took longer than {seconds:.0f} s, and was ended"
            ) from None
    return child.returncode, out.decode("utf-8", "replace"), err.decode("utf-8", "replace")
