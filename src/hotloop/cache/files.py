"""Files that are believed: written by this user alone, whole or not at all, and read only where that is so."""

from __future__ import annotations

import contextlib
import os
import stat
import struct
import tempfile
from pathlib import Path

_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_ELF64 = struct.Struct("<4sBB34xQ10xHH2x")
"""A library's header, 64 bytes: magic, class, byte order, then of its table of sections place, entry size and count."""


def default_folder() -> Path | None:
    """Give hotloop's folder: ``$HOTLOOP_CACHE_DIR``, else ``$XDG_CACHE_HOME/hotloop``, else ``~/.cache/hotloop``.

    None where ``$HOTLOOP_CACHE_DIR`` is empty: then nothing is kept.

    Raises:
        RuntimeError: this user has no home.
    """
    own = os.environ.get("HOTLOOP_CACHE_DIR")
    if own is not None:
        return Path(own) if own else None
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    # The XDG specification has relative paths ignored.
    return base / "hotloop" if base.is_absolute() else Path.home() / ".cache" / "hotloop"


def read_own(path: Path, limit: int) -> bytes:
    """Read a file that only this user can have written.

    Args:
        path: of the file.
        limit: in bytes; a larger one is none of ours.

    Raises:
        OSError: it cannot be read, or another user may have written it.
    """
    # Not through a link, and not waiting for the other end of a pipe that somebody put there.
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0))
    with os.fdopen(descriptor, "rb") as file:
        facts = os.fstat(descriptor)
        if not stat.S_ISREG(facts.st_mode):
            raise OSError("it is no regular file")
        _refuse_others(facts)
        if facts.st_size > limit:
            raise OSError(f"it has {facts.st_size} bytes, expected {limit} at most")
        return file.read(limit)


def is_own(path: Path, size: int) -> bool:
    """Tell whether a regular file of so many bytes is there that only this user can have written."""
    try:
        facts = path.lstat()
        _refuse_others(facts)
    except OSError:
        return False
    return stat.S_ISREG(facts.st_mode) and facts.st_size == size


def is_whole_library(library: bytes) -> bool:
    """Tell whether a library has its table of sections, which linkers write at its end; a cut one has not.

    That is of ELF, with 64 bits and the lowest byte first. In other formats nothing is known, and they are taken.
    """
    if len(library) < _ELF64.size or not library.strip(b"\0"):
        return False
    found, bits, order, table, size, count = _ELF64.unpack_from(library)
    if found != b"\x7fELF" or (bits, order) != (2, 1):
        return True
    return bool(count > 0 and table > 0 and table + size * count <= len(library))


def replace(path: Path, content: bytes) -> None:
    """Write a file whole or not at all: a reader sees the old one or the new one, whenever this process is killed."""
    descriptor, part = tempfile.mkstemp(suffix=".part", prefix=f"{path.name[:16]}-", dir=path.parent)  # mode 0600
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
        Path(part).replace(path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            Path(part).unlink()
        raise


def check_folder(folder: Path) -> None:
    """Refuse a folder that another user may have put something into.

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
    """Make a folder for this user alone, or check the one that is there.

    Raises:
        OSError: it cannot be made, or another user may write to it.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    check_folder(folder)


def _refuse_others(facts: os.stat_result) -> None:
    if hasattr(os, "getuid") and (facts.st_uid != os.getuid() or facts.st_mode & _OTHERS_WRITE):
        raise PermissionError("another user owns it or may write to it")
