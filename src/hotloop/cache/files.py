"""Trusted files: written by this user alone, whole or not at all, and read only where no other user can write."""

from __future__ import annotations

import logging
import os
import stat
from pathlib import Path

from hotloop.files import content, open_regular, whole


def default_folder() -> Path | None:
    """Return hotloop's folder: ``$HOTLOOP_CACHE_DIR``, else ``$XDG_CACHE_HOME/hotloop``, else ``~/.cache/hotloop``.

    Return None where ``$HOTLOOP_CACHE_DIR`` is empty: then nothing is kept.

    Raises:
        RuntimeError: this user has no home folder.
    """
    own = os.environ.get("HOTLOOP_CACHE_DIR")
    if own is not None:
        return Path(own) if own else None
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    # The XDG specification says to ignore relative paths.
    return base / "hotloop" if base.is_absolute() else Path.home() / ".cache" / "hotloop"


def read_own(path: Path, limit: int) -> bytes:
    """Read a file that only this user can have written.

    Args:
        path: the file.
        limit: in bytes; hotloop writes no larger file there.

    Raises:
        OSError: it cannot be read, or another user may have written it.
    """
    with open_regular(path) as file:
        _refuse_others(os.fstat(file.fileno()))
        return content(file, limit)


def replace(path: Path, content: bytes) -> None:
    """Write a file whole or not at all, for this user alone to read: a reader sees the old or the new content."""
    with whole(path, durable=False, shared=True, mode=0o600) as file:
        file.write(content)


def check_folder(folder: Path) -> None:
    """Check that no other user may have put anything into a folder.

    Raises:
        FileNotFoundError: it is not there.
        OSError: it is no folder, a link, another user's, or others may write to it.
    """
    facts = folder.lstat()
    if not stat.S_ISDIR(facts.st_mode):
        raise OSError(f"{folder} is no folder")
    try:
        _refuse_others(facts)
    except PermissionError as error:
        raise PermissionError(f"{folder}: {error}") from None


def make_folder(folder: Path) -> None:
    """Make a folder for this user alone, or check the folder that is there.

    Raises:
        OSError: it cannot be made, or another user may write to it.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    check_folder(folder)


def _refuse_others(facts: os.stat_result) -> None:
    if hasattr(os, "getuid") and (facts.st_uid != os.getuid() or facts.st_mode & (stat.S_IWGRP | stat.S_IWOTH)):
        raise PermissionError("another user owns it or may write to it")


class WarnOnce:
    """A logger of the first trouble with a store; later troubles would add nothing.

    Args:
        ending: a sentence that says what the trouble means for the run.
    """

    def __init__(self, ending: str) -> None:
        self._ending, self._said = ending, False

    def __call__(self, line: str) -> None:
        """Log a line, if none was logged before."""
        if not self._said:
            self._said = True
            logging.getLogger("hotloop").warning("%s. %s", line, self._ending)
