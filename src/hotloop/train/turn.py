"""One process at a time trains in a run's folder; its death gives the folder back."""

from __future__ import annotations

import contextlib
import json
import sqlite3
import time
from typing import TYPE_CHECKING

from filelock import FileLock, Timeout

from hotloop.errors import ConfigError
from hotloop.files import cannot, guard, whole
from hotloop.record import this_process

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

LOCK = "run.lock"
"""In a run's folder: locked by the process that trains there."""
HOLDER = f"{LOCK}.json"
"""Beside the lock: the number and the machine of the process that has it, and since when."""
LOCKED_SECONDS = 60


@contextlib.contextmanager
def turn(path: Path, seconds: float = LOCKED_SECONDS) -> Iterator[None]:
    """Hold a file alone, by SQLite's own locks.

    Raises:
        sqlite3.Error: nobody gave it back for so many seconds, or the file cannot be made.
    """
    with contextlib.closing(sqlite3.connect(path, timeout=seconds, isolation_level=None)) as lock:
        lock.execute("BEGIN EXCLUSIVE")
        yield


@contextlib.contextmanager
def folder_held(folder: Path, seconds: float = 0) -> Iterator[None]:
    """Lock a run's folder, which is made where it is missing. A process may enter it twice.

    Args:
        folder: the run's.
        seconds: how long to wait for a process that is about to stop.

    Raises:
        ConfigError: another process trains there, or the folder cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder / LOCK, is_singleton=True, thread_local=False)
        lock.acquire(timeout=seconds)
    except Timeout:
        raise ConfigError(f"run.folder={folder}: another process trains there. Wait for it, or stop it first") from None
    except OSError as error:
        raise cannot_write(folder, error) from error
    guard(folder)
    with contextlib.suppress(OSError), whole(folder / HOLDER, durable=False) as file:
        file.write(json.dumps({**this_process(), "since": time.time()}).encode())
    try:
        yield
    finally:
        lock.release()


def cannot_write(folder: Path, error: OSError) -> ConfigError:
    """Build the error of a run's folder that cannot be written."""
    remedy = "Make room, change its permissions, or name another run.folder"
    return ConfigError(f"run.folder={folder} cannot be written: {cannot(error, remedy)}")
