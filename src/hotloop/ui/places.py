"""The runs folder of a server: which runs are in it, and which files may be shown; nothing outside of it."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pathlib
import threading
import time
from typing import TYPE_CHECKING

from hotloop import files
from hotloop.record import DOCUMENT, LINES
from hotloop.report import folds, runs, study

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

START, LOG, STOP = "ui-start.json", "ui-log.txt", "ui-stop.json"
"""What a server writes into the folder of a run that it started: the process, what it prints, and a wish to stop."""
SAMPLES = "samples"
_PICTURES = {".png": "image/png", ".jpg": "image/jpeg", ".jpeg": "image/jpeg", ".webp": "image/webp"}
_LARGEST_PICTURE = 2**26
_WATCHED = (
    LINES, DOCUMENT, folds.DOCUMENT, study.DOCUMENT, runs.SETTINGS, START, STOP, LOG, SAMPLES, "checkpoints",
    "run.lock.json", ".",
)  # fmt: skip
"""Of the folder itself the time tells of what is made in it beside these, such as an export."""
_DEEPEST, _LONGEST = 6, 1000
_FRESH_SECONDS = 2.0
"""How old a look at the folder may be."""


@dataclasses.dataclass(frozen=True)
class Place:
    """A folder with a run, a cross-validation or a search: its name below the runs folder, and when it last changed."""

    name: str
    path: Path
    changed: float


class Places:
    """The runs below one folder.

    Args:
        root: the runs folder, which may not be there yet.
    """

    def __init__(self, root: Path) -> None:
        self.root = root.resolve()
        self._lock = threading.Lock()
        self._again = 0.0
        self._found: list[Place] = []

    def all(self) -> list[Place]:
        """Return every run, the last changed first. Links are not followed."""
        with self._lock:
            if time.monotonic() >= self._again:
                self._found = sorted(self._below(self.root, _DEEPEST), key=lambda one: one.changed, reverse=True)
                self._again = time.monotonic() + _FRESH_SECONDS
            return self._found

    def forget(self) -> None:
        """Look anew at the next question: a run was made or deleted."""
        with self._lock:
            self._again = 0.0

    def find(self, name: str) -> Path:
        """Return the folder of a run by its name.

        Raises:
            LookupError: there is no run of this name below the runs folder.
        """
        path = self.inside(name)
        with contextlib.suppress(OSError):  # a name may be too long for any file
            if is_run(path):
                return path
        raise LookupError(name)

    def inside(self, name: str) -> Path:
        """Return the path of a name below the runs folder, whether something is there or not.

        Raises:
            LookupError: it leads elsewhere.
        """
        parts = name.split("/")
        if not name or len(name) > _LONGEST or "\0" in name or any(part in ("", ".", "..") for part in parts):
            raise LookupError(name)
        path = self.root.joinpath(*parts)
        if path.resolve() != path:  # a link anywhere in it leads elsewhere
            raise LookupError(name)
        return path

    def name(self, path: Path) -> str:
        """Return the name of a run by its folder."""
        return path.relative_to(self.root).as_posix()

    def _below(self, folder: Path, deepest: int) -> Iterator[Place]:
        try:
            with os.scandir(folder) as entries:
                names = [one.name for one in entries if one.is_dir(follow_symlinks=False)]
        except OSError:
            return
        for path in (folder / name for name in names if not name.startswith(".")):
            if is_run(path):
                yield Place(self.name(path), path, max(time_ for time_, _ in signature(path)))
            elif deepest:
                yield from self._below(path, deepest - 1)


def is_run(folder: Path) -> bool:
    """Return whether a folder holds a run, a cross-validation or a search, or one that a server has just started."""
    return (folder / START).is_file() or runs.kind_of(folder) != runs.UNKNOWN


def signature(folder: Path) -> tuple[tuple[float, int], ...]:
    """Return when each file that a page shows was last changed, and its size: it differs where there is news."""
    found = []
    for path in (folder / name for name in _WATCHED):
        try:
            known = path.lstat()
            found.append((known.st_mtime, known.st_size))
        except OSError:
            found.append((0.0, 0))
    return tuple(found)


def samples(folder: Path) -> list[str]:
    """Return the names of the pictures among a run's samples, the newest first."""
    try:
        names = [one.name for one in os.scandir(folder / SAMPLES) if one.is_file(follow_symlinks=False)]
    except OSError:
        return []
    return sorted((name for name in names if _kind(name)), reverse=True)


def picture(folder: Path, name: str) -> tuple[bytes, str]:
    """Return a sample and its type.

    Raises:
        LookupError: the run has no such picture.
    """
    if name not in samples(folder):
        raise LookupError(name)
    try:
        return files.read(folder / SAMPLES / name, _LARGEST_PICTURE), _kind(name)
    except OSError as error:
        raise LookupError(name) from error


def tail(path: Path, most: int = 30_000) -> str:
    """Return the end of a text file; empty where there is none, or where it is no plain file."""
    try:
        with files.open_regular(path) as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - most))
            return file.read(most).decode("utf-8", "replace")
    except OSError:
        return ""


def _kind(name: str) -> str:
    return _PICTURES.get(pathlib.PurePath(name).suffix.lower(), "")
