"""Files in folders that others may have filled: read if they are regular and small enough, written without following.

A run's folder may come from an archive, a colleague or a cluster. A pipe or a device in it would hold a reader for
ever, and a link would lead a writer to another file.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import stat
import string
import time
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, cast

if TYPE_CHECKING:
    from collections.abc import Iterator

SMALL = 2**22
"""The most bytes of a small file that is read, such as a file of settings."""
PIPE_SECONDS = 60.0
"""How long a pipe is read before it is given up: a command that writes settings is done by then."""
_LEFT_SECONDS = 60.0
"""The age from which an unfinished file is one that a kill has left: its writer would have written since."""
_SUFFIX = 8
_NO_LINK = getattr(os, "O_NOFOLLOW", 0)
_PLAIN = getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
_guarded: set[Path] = set()
"""The folders of the runs that this process works on."""
_cleaned: set[Path] = set()
"""The files beside which this process has removed what kills have left."""


class NotRegularError(OSError):
    """A file that is a link, a pipe, a folder or a device where a regular one is expected."""


def guard(folder: Path) -> None:
    """Refuse links from now on among the folders between this one, a run's, and each file in it.

    The folder itself, and those above it, may be links.
    """
    _guarded.add(Path(os.path.abspath(folder)))  # noqa: PTH100 - resolve() would follow the links


def check_folders(path: Path) -> None:
    """Refuse a path that leads out of a run by a link among its folders.

    Raises:
        NotRegularError: naming the link.
    """
    above = Path(os.path.abspath(path)).parents  # noqa: PTH100 - as above
    for root in _guarded.intersection(above):
        for folder in above[: above.index(root)]:
            if folder.is_symlink():
                raise NotRegularError(f"{folder} is a link to another folder: remove it")


def cannot(error: OSError, remedy: str = "Make room, or change its permissions") -> str:
    """Put into words why a file cannot be written, and what to do: neither room nor permissions help with a link."""
    if isinstance(error, NotRegularError):
        return str(error)
    if error.errno == errno.ELOOP:
        return f"{error.filename} is a link: remove it"
    return f"{error}. {remedy}"


def open_regular(path: Path, *, change: bool = False, links: bool = False) -> BinaryIO:
    """Open a regular file that is there; anything else is refused at once.

    Args:
        path: of the file.
        change: whether to open it for writing as well.
        links: whether the file may be a link to a regular file; the folders above it always may.

    Raises:
        OSError: it cannot be opened, or is no regular file.
    """
    flags = (os.O_RDWR if change else os.O_RDONLY) | (0 if links else _NO_LINK)
    return os.fdopen(_regular(path, flags), "rb+" if change else "rb")


def open_append(path: Path, mode: int = 0o666) -> BinaryIO:
    """Open a regular file at its end, and create it where it is missing; what is written is not buffered.

    Raises:
        OSError: it cannot be opened, or is no regular file.
    """
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | _NO_LINK
    return cast("BinaryIO", os.fdopen(_regular(path, flags, mode), "ab", 0))


def read(path: Path, limit: int = SMALL, *, links: bool = False) -> bytes:
    """Read a regular file that has a limited size.

    Args:
        path: of the file.
        limit: the most bytes that it may have.
        links: whether the file may be a link to a regular file.

    Raises:
        OSError: it cannot be read, is no regular file, or is larger.
    """
    with open_regular(path, links=links) as file:
        return content(file, limit)


def read_pipe(path: Path, limit: int = SMALL) -> bytes:
    """Read all that comes through a pipe, ``<(command)`` or ``/dev/stdin``, which gives it once.

    Raises:
        OSError: it cannot be read, more than the limit comes, or its end does not come within `PIPE_SECONDS`.
    """
    until, found = time.monotonic() + PIPE_SECONDS, b""
    descriptor = os.open(path, os.O_RDONLY | _PLAIN)
    with os.fdopen(descriptor, "rb", 0) as pipe:
        while len(found) <= limit:
            part = pipe.read(2**16)  # None: nothing for now; empty: nobody writes any more, or not yet
            if part:
                found += part
            elif part is not None and found:
                return found
            elif time.monotonic() > until:
                raise OSError(f"it is a pipe, and its end did not come within {PIPE_SECONDS:.0f} s")
            else:
                time.sleep(0.01)
    raise OSError(f"more than {limit:,} bytes come through it")


def content(file: BinaryIO, limit: int) -> bytes:
    """Read all of a file that `open_regular` has opened.

    Raises:
        OSError: it cannot be read, or has more bytes than the limit.
    """
    size = os.fstat(file.fileno()).st_size
    # A sparse file may claim any size without having it on disk, and a file may grow while it is read.
    found = file.read(limit + 1) if size <= limit else b""
    if max(size, len(found)) > limit:
        raise OSError(f"it has {max(size, len(found)):,} bytes, expected {limit:,} at most")
    return found


@contextlib.contextmanager
def whole(path: Path, *, durable: bool = True, shared: bool = False, mode: int = 0o666) -> Iterator[BinaryIO]:
    """Write a file, and its folder, so that the file is always a whole one: the former or the new.

    A link in the file's place is replaced; the file that it leads to stays as it is.

    Args:
        path: of the file.
        durable: wait for the disk, so that this holds after a power cut as well.
        shared: other processes or threads may write the file at the same time. Where none does, the first writing of
            this process removes what a kill has left of an earlier one.
        mode: permissions of the file, of which the system takes those away that its umask names.

    Raises:
        OSError: it cannot be written; the former stays.
    """
    check_folders(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    if not shared:
        _remove_parts(path)
    suffix = "".join(secrets.choice(string.ascii_lowercase) for _ in range(_SUFFIX))
    part = path.with_name(f".{path.name}.{suffix}.part")  # nobody can put a link where none knows the name
    try:
        # Its ``name`` is the path, by which other libraries write it.
        with open(part, "xb", opener=lambda name, flags: os.open(name, flags | _NO_LINK, mode)) as file:
            yield file
            if durable:
                file.flush()
                os.fsync(file.fileno())
        part.replace(path)
    finally:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)


def too_long(error: OSError) -> str:
    """Put into words that a system has refused a name for its length."""
    name = str(error.filename)
    return f"the name {name[:40]}... has {len(name):,} characters, which is too long for a file: give a shorter one"


def _remove_parts(path: Path) -> None:
    """Remove what kills have left of a file, once: to list a folder of many files takes longer than to write one."""
    if path in _cleaned:
        return
    _cleaned.add(path)
    left = re.compile(rf"\.{re.escape(path.name)}\.[a-z]{{{_SUFFIX}}}\.part")
    for other in [one for one in path.parent.iterdir() if left.fullmatch(one.name)]:
        with contextlib.suppress(OSError):  # a folder of that name is nobody's unfinished file
            if time.time() - other.lstat().st_mtime > _LEFT_SECONDS:
                other.unlink()


def _regular(path: Path, flags: int, mode: int = 0o666) -> int:
    check_folders(path)
    try:
        descriptor = os.open(path, flags | _PLAIN, mode)  # without O_NONBLOCK, a pipe waits for its other end
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO, errno.EISDIR):
            raise _not_regular(path, follow=not flags & _NO_LINK) from error
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise _not_regular(path, follow=not flags & _NO_LINK)
    return descriptor


def _not_regular(path: Path, *, follow: bool) -> NotRegularError:
    kinds = {stat.S_IFLNK: "link", stat.S_IFIFO: "pipe", stat.S_IFDIR: "folder", stat.S_IFSOCK: "socket"}
    try:
        kind = kinds.get(stat.S_IFMT(path.stat(follow_symlinks=follow).st_mode), "device")
    except OSError:  # a link that leads in a circle, or a file that has gone since
        kind = "link"
    return NotRegularError(f"it is no regular file, but a {kind}")
