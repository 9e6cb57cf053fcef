"""One at a time: a file, or a run's folder, that one process has at once; its death gives it back."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import sqlite3
import time
from pathlib import Path
from typing import TYPE_CHECKING

from filelock import BaseFileLock, FileLock, SoftFileLock, Timeout

from hotloop.errors import ConfigError
from hotloop.files import cannot, guard, read, whole
from hotloop.record import this_process

if TYPE_CHECKING:
    from collections.abc import Iterator

LOCK = "run.lock"
"""In a run's folder: locked by the process that trains there. It belongs to filelock, which may write into it."""
HOLDER = f"{LOCK}.json"
"""Beside the lock: the number and the machine of the process that has it, and since when."""
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


_held: dict[Path, tuple[BaseFileLock, os.stat_result]] = {}
"""The lock that this process has of each run's folder, and its file: a folder that is made anew has another there."""


@contextlib.contextmanager
def folder_held(folder: Path, seconds: float = 0) -> Iterator[None]:
    """Be the only process that trains in a folder, which is made where it is not there. A process may enter it twice.

    Another one that is about to stop is waited for as long as ``seconds`` say.

    The system unlocks what a dead process had locked, so a killed run keeps nobody out. On a file system without
    such locks (flock), filelock takes over the lock of a process of this machine that is dead.

    Raises:
        ConfigError: another process trains there, or the folder cannot be written.
    """
    try:
        lock = _lock(folder, seconds)
    except Timeout:
        raise ConfigError(
            f"run.folder={folder}: {_holder(folder)} trains there. Wait for it, or stop it first"
        ) from None
    except OSError as error:
        raise cannot_write(folder, error) from error
    guard(folder)
    try:
        yield
    finally:
        lock.release()
        if not lock.is_locked:
            _held.pop(folder, None)


def hold_again(folder: Path) -> None:
    """Lock a folder again that was removed or moved since `folder_held` locked it.

    Raises:
        ConfigError: another process trains there by now.
        OSError: it cannot be made or locked; it is tried again by the next call.
    """
    if folder not in _held:
        return
    lock, file = _held[folder]
    with contextlib.suppress(FileNotFoundError):
        if os.path.samestat(Path(lock.lock_file).stat(), file):
            return
    times = lock.lock_counter
    lock.release(force=True)
    try:
        for _ in range(max(times, 1)):
            _lock(folder)
    except Timeout:
        raise ConfigError(
            f"run.folder={folder} was removed while the run went on, and {_holder(folder)} trains there now, "
            "so this run ends. Begin it anew with another run.folder"
        ) from None


def _lock(folder: Path, seconds: float = 0) -> BaseFileLock:
    """Lock a folder, write down who has, and return the lock; raise Timeout where another process has it."""
    folder.mkdir(parents=True, exist_ok=True)
    lock: BaseFileLock = FileLock(folder / LOCK, is_singleton=True, thread_local=False)
    try:
        lock.acquire(timeout=seconds)
    except OSError as error:
        if error.errno not in (errno.ENOTSUP, errno.EOPNOTSUPP):  # what ENOSYS means, filelock knows
            raise
        # Another file: the one above is there by now, and the existence of this one is the lock.
        lock = SoftFileLock(folder / f"{LOCK}.soft", is_singleton=True, thread_local=False)
        lock.acquire(timeout=seconds)
    # A full disk: it is locked, though nobody can read by whom.
    with contextlib.suppress(OSError), whole(folder / HOLDER, durable=False) as file:
        file.write(json.dumps({**this_process(), "since": time.time()}).encode())
    _held[folder] = lock, Path(lock.lock_file).stat()
    return lock


def cannot_write(folder: Path, error: OSError) -> ConfigError:
    """Put into words that a run's folder cannot be written."""
    return ConfigError(
        f"run.folder={folder} cannot be written: "
        + cannot(error, "Make room, change its permissions, or name another run.folder")
    )


def _holder(folder: Path) -> str:
    """Name the process that trains in a folder, as far as it could write that down."""
    try:
        told = json.loads(read(folder / HOLDER))
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(told["since"]))
        return f"process {told['pid']} on {told['host']}, since {since},"
    except (OSError, ValueError, TypeError, KeyError):
        return "another process"
