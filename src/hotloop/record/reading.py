"""Reads a run record back: its lines, which are ahead of its document after a kill, or the document."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from hotloop.errors import RecordError
from hotloop.files import open_regular
from hotloop.record.format import DOCUMENT, LINES, SCHEMA, empty
from hotloop.record.schema import are_objects

LONGEST = 2**26
"""Bytes of a line that is read: a file without line ends would fill the memory."""
LARGEST = 2**30
"""Bytes of a record that a page reads: a run of a million steps has 200 MB, and a sparse file may claim any size."""


def load(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read a run record from its folder, its ``record.json`` or its ``record.jsonl``; a torn last line is left out.

    Raises:
        RecordError: nothing is there, it is no run record, or its schema is newer than this version reads.
    """
    path = Path(path)
    file = next((file for file in (path, path / LINES, path / DOCUMENT) if file.is_file()), None)
    if file is None:
        raise RecordError(
            f"no run record at {path}: expected a folder with {LINES} or {DOCUMENT}, or one of these files; "
            "`hotloop train` makes one in runs/RECIPE/DATE, Loop(record=FOLDER) in FOLDER"
        )
    try:
        document = _load_lines(file) if file.suffix == ".jsonl" else SCHEMA.load(file)
    except OSError as error:
        raise RecordError(f"{file} cannot be read: {error}") from error
    _check(document, file)
    return document


def load_ranks(folder: Path) -> dict[int, dict[str, Any]]:
    """Read the run records of all processes but the first, which lie in folders inside of its own, by rank.

    Raises:
        RecordError: as for `load`.
    """
    ranks = [(int(name), path) for path in folder.glob("rank-*") if (name := path.name.removeprefix("rank-")).isdigit()]
    begun = [(rank, path) for rank, path in sorted(ranks) if (path / LINES).is_file() or (path / DOCUMENT).is_file()]
    return {rank: load(path) for rank, path in begun}


def _load_lines(path: Path) -> dict[str, Any]:
    document = empty()
    with open_regular(path) as lines:
        unread = sum(not _take(document, text) for text in iter(lambda: lines.readline(LONGEST), b""))
    return _counted(document, unread, path)


def _take(document: dict[str, Any], text: bytes) -> bool:
    """Put what a line says into the document; return whether it could be read."""
    try:
        line = json.loads(text.decode("utf-8", "replace"))
        if "append" in line:
            # Interned keys: a million steps would otherwise hold five million copies of five words.
            entry = {sys.intern(key): value for key, value in line["entry"].items()}
            document[line["append"]].append(entry)
        elif "update" in line:
            document[line["update"]].update(line["values"])
        else:
            for section, kept in line.get("cut", {}).items():
                del document[section][kept:]
            document.update(line["set"])
        document["updated"] = line["time"]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return False  # a kill leaves at most one torn line a start; the count is shown, not hidden
    return True


def _counted(document: dict[str, Any], unread: int, path: Path) -> dict[str, Any]:
    if document.get("created") is None:
        raise RecordError(f"{path} holds no line of a run record")
    if unread:
        document["unread_lines"] = unread
    return document


class Follower:
    """Reads the record of a run that goes on: each look reads the lines that are new, and no others.

    Not safe for several threads at once.

    Args:
        folder: of the run.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        self._file: tuple[int, int] | None = None
        self._read, self._unread, self._document = 0, 0, empty()

    def look(self) -> dict[str, Any]:
        """Return the document as it is now. It is the same object each time, and grows.

        Raises:
            RecordError: as `load`.
        """
        path = self.folder / LINES
        if not path.is_file():
            self._file = None
            return load(self.folder)
        try:
            with open_regular(path) as lines:
                found = os.fstat(lines.fileno())
                _check_size(found.st_size)
                if self._file != (found.st_dev, found.st_ino) or found.st_size < self._read:
                    self._file = (found.st_dev, found.st_ino)
                    self._read, self._unread, self._document = 0, 0, empty()
                lines.seek(self._read)
                for text in iter(lambda: lines.readline(LONGEST), b""):
                    if not text.endswith(b"\n") and len(text) < LONGEST:  # it is being written
                        break
                    self._read += len(text)
                    self._unread += not _take(self._document, text)
        except OSError as error:
            raise RecordError(f"{path} cannot be read: {error}") from error
        document = _counted(self._document, self._unread, path)
        _check(document, path)
        return document


def _check_size(size: int) -> None:
    if size > LARGEST:
        raise OSError(f"it has {size:,} bytes, and a page reads {LARGEST:,} at most")


def _check(document: dict[str, Any], path: Path) -> None:
    SCHEMA.check(document, path)
    if not are_objects(list(document["components"].values())):
        raise RecordError(f"{path} is no {SCHEMA.name}: components missing or of another type")
