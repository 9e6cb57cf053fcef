"""One at a time: a file, or a run's folder, that one process has at once; its death gives it back."""

from __future__ import annotations

import contextlib
import json
import sqlite3
import time
from typing import TYPE_CHECKING

from filelock import FileLock, Timeout

from hotloop.errors import ConfigError
from hotloop.record import this_process

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

LOCK = "run.lock"
"""In a run's folder: locked by the process that trains there, whose number and machine it holds."""
LOCKED_SECONDS = 60
"""How long anybody waits for a turn."""


@contextlib.contextmanager
def turn(path: Path, seconds: float = LOCKED_SECONDS) -> Iterator[None]:
    """Be the only one here who has this file: by SQLite's own locks, which every system has and a death ends.

    Raises:
        sqlite3.Error: nobody gave it back for so many seconds, or the file cannot be made.
    """
    with contextlib.closing(sqlite3.connect(path, timeout=seconds, isolation_level=None)) as lock:
        lock.execute("BEGIN EXCLUSIVE")
        yield


@contextlib.contextmanager
def folder_held(folder: Path) -> Iterator[None]:
    """Be the only process that trains in a folder, which is made where it is not there. A process may enter it twice.

    The system unlocks what a dead process had locked, so a killed run keeps nobody out.

    Raises:
        ConfigError: another process trains there, or the folder cannot be written.
    """
    lock = FileLock(folder / LOCK, is_singleton=True)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock.acquire(blocking=False)
    except Timeout:
        raise ConfigError(
            f"run.folder={folder}: {_holder(folder / LOCK)} trains there. Wait for it, or stop it first"
        ) from None
    except OSError as error:
        raise cannot_write(folder, error) from error
    try:
        with contextlib.suppress(OSError):  # a full disk: it is locked, though nobody can read by whom
            (folder / LOCK).write_text(json.dumps({**this_process(), "since": time.time()}), encoding="utf-8")
        yield
    finally:
        lock.release()


def cannot_write(folder: Path, error: OSError) -> ConfigError:
    """Put into words that a run's folder cannot be written."""
    return ConfigError(
        f"run.folder={folder} cannot be written: {error}. Make room, change its permissions, or name another run.folder"
    )


def _holder(path: Path) -> str:
    """Name the process that holds a lock, as far as the lock's file tells."""
    try:
        told = json.loads(path.read_text(encoding="utf-8"))
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(told["since"]))
        return f"process {told['pid']} on {told['host']}, since {since},"
    except (OSError, ValueError, TypeError, KeyError):
        return "another process"
