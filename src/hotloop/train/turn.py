"""One at a time: a file that one process has at once, whoever dies with it."""

from __future__ import annotations

import contextlib
import sqlite3
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

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
