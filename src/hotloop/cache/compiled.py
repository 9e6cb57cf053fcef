"""The store of compiled code: what torch's compile caches wrote in one process, kept for the next.

::

    compiled/objects/<sha-256>          the content of one file
    compiled/manifests/<sha-256>.json   the files of one batch with their checksums, and what they fit to
    compiled/uses/<manifest>            a byte for each time that a process loaded it

A file of a cache is code that will run. So it is trusted only where this user alone can have written it, and where its
checksum is the manifest's; the name of a manifest is the checksum of its text. Anything else there is a miss. Objects
are written before the manifest that names them, each whole or not at all, so that a process that is killed leaves
nothing that looks like an entry.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import re
import time
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, Self

from hotloop.cache import files
from hotloop.files import open_append

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

SCHEMA_VERSION = 1
MAX_FILE_BYTES = 2**30
MAX_BYTES = 8 * 2**30
"""Of all objects; the manifests that were unused for longest go first."""
MAX_MANIFEST_BYTES = 16 * 2**20
MOST_TAKEN_BYTES = 2**30
"""Of what a process loads where no model is named."""
CHILDREN = "children"
"""The folder in which child processes have their folders."""
_TORN_AFTER = 3600.0
"""Seconds after which an object without a manifest was left by a killed process."""
_DIGEST = re.compile(r"[0-9a-f]{64}")


@dataclasses.dataclass(frozen=True)
class File:
    """One file of a compile cache: its path in torch's folder, the checksum of its content, and its bytes."""

    path: str
    digest: str
    size: int

    @classmethod
    def from_row(cls, row: Any) -> Self:
        """Read a row of a manifest.

        Raises:
            ValueError: it describes no file that can be.
        """
        if not isinstance(row, list) or len(row) != len(dataclasses.fields(cls)):
            raise ValueError("a manifest with a file that has no path, checksum and size")
        path, digest, size = row
        if not is_file_path(path) or not isinstance(digest, str) or not _DIGEST.fullmatch(digest):
            raise ValueError(f"a manifest with a file that cannot be: {path!r}")
        if type(size) is not int or not 0 <= size <= MAX_FILE_BYTES:
            raise ValueError(f"a manifest with a file of {size!r} bytes")
        return cls(path, digest, size)


def is_file_path(path: Any) -> bool:
    """Return whether a value is a relative path of plain names that stays inside its folder."""
    plain = r"[A-Za-z0-9_.+=,@-]+(/[A-Za-z0-9_.+=,@-]+)*"
    return isinstance(path, str) and bool(re.fullmatch(plain, path)) and ".." not in PurePosixPath(path).parts


def sha256_of(text: bytes) -> str:
    """Return the checksum of a content, by which it is named."""
    return hashlib.sha256(text).hexdigest()


@dataclasses.dataclass(frozen=True)
class Manifest:
    """The files that one process compiled.

    Args:
        fits: versions and hardware that they fit to, by name (`hotloop.cache.keys.fits`).
        models: the names of the models they were compiled for, by fingerprint.
        made: when, in seconds since 1970.
        files: the files that torch's caches wrote.
    """

    fits: Mapping[str, str]
    models: Mapping[str, str]
    made: float
    files: tuple[File, ...]

    def dumps(self) -> bytes:
        """Return the manifest as bytes, whose `sha256_of` is its name."""
        document = {
            "schema": SCHEMA_VERSION,
            "fits": dict(self.fits),
            "models": dict(self.models),
            "made": self.made,
            "files": [[file.path, file.digest, file.size] for file in self.files],
        }
        return json.dumps(document, sort_keys=True).encode("ascii")

    @classmethod
    def loads(cls, text: bytes) -> Self:
        """Read a manifest.

        Raises:
            ValueError: it is no manifest of hotloop's, or names files that cannot be.
        """
        document = json.loads(text)
        if not isinstance(document, dict) or document.get("schema") != SCHEMA_VERSION:
            raise ValueError(f"no manifest of schema {SCHEMA_VERSION}")
        made, rows = document.get("made"), document.get("files")
        if not isinstance(made, int | float):
            raise ValueError("a manifest without its date")  # noqa: TRY004 - a file that says nonsense, as below
        if not isinstance(rows, list):
            raise ValueError("a manifest without files")  # noqa: TRY004
        tables = {}
        for name in ("fits", "models"):
            table = document.get(name)
            if not isinstance(table, dict) or not all(isinstance(text, str) for pair in table.items() for text in pair):
                raise ValueError("a manifest without versions, hardware or models")
            tables[name] = table
        return cls(tables["fits"], tables["models"], float(made), tuple(File.from_row(row) for row in rows))

    def differences(self, here: Mapping[str, str]) -> list[str]:
        """Name the versions and hardware that are others here, each with both values."""
        return [
            f"{name} {self.fits.get(name, 'unknown')} (here {here[name]})"
            for name in here
            if self.fits.get(name) != here[name]
        ]

    @property
    def size(self) -> int:
        """Bytes of its files."""
        return sum(file.size for file in self.files)


@dataclasses.dataclass(frozen=True)
class Entry:
    """A manifest that is kept: its name, how often it was used, and when last, in seconds since 1970."""

    name: str
    manifest: Manifest
    uses: int
    used: float

    @property
    def size(self) -> int:
        """Bytes of its files."""
        return self.manifest.size

    def stale(self, here: Mapping[str, str]) -> str:
        """Return why the entry will hardly be used any more; empty where it may be."""
        if differs := self.manifest.differences(here):
            return f"made for {', '.join(differs)}"
        days = (time.time() - self.used) / 86_400
        unused_days = 60.0
        return f"unused for {days:.0f} days" if days > unused_days else ""


class CompiledStore:
    """The store in one folder. Every method is safe in several processes at once, whatever the folder holds.

    Args:
        folder: it is made when something is put.
        say: called with a line for each trouble; unset logs a warning for the first trouble.
    """

    def __init__(self, folder: Path, say: Callable[[str], None] | None = None) -> None:
        self.folder = folder
        self._say = say or files.WarnOnce("What is missing is compiled anew.")
        self._objects, self._manifests, self._uses = (folder / name for name in ("objects", "manifests", "uses"))

    def entries(self) -> list[Entry]:
        """Return the entries that can be trusted, the most recently used first."""
        try:
            for folder in (self.folder, self._manifests, self._objects):
                files.check_folder(folder)
        except OSError as error:
            self._miss(self.folder, error)
            return []
        found = []
        for path in sorted(self._manifests.glob("*.json")):
            if not _DIGEST.fullmatch(path.stem):
                continue
            try:
                found.append(self._entry(path))
            except (OSError, ValueError, RecursionError) as error:
                self._miss(path, error)
        return sorted(found, key=lambda entry: entry.used, reverse=True)

    def read(self, file: File) -> bytes | None:
        """Return the content of a file; None where it is missing, or has another checksum, which is said."""
        path = self._objects / file.digest
        try:
            content = files.read_own(path, MAX_FILE_BYTES)
        except OSError as error:
            self._miss(path, error)
            return None
        if sha256_of(content) == file.digest:
            return content
        with contextlib.suppress(OSError):
            path.unlink()  # so that the next process that compiles it can put it right
        self._miss(path, ValueError("its checksum is another one"))
        return None

    def load_into(self, place: Path, here: Mapping[str, str], model: str | None = None) -> set[str]:
        """Copy files that fit here into a folder for torch, checked; return the paths of the copies.

        A file that is there already stays as it is: this process may have loaded it, and a library that changes under
        its process crashes the process. A file that cannot be written is said, and is compiled anew.

        Args:
            place: the folder.
            here: versions and hardware (`hotloop.cache.keys.fits`).
            model: the fingerprint of the model whose code is wanted; None loads the most recently used entries.
        """
        done: set[str] = set()
        room = MOST_TAKEN_BYTES
        for entry in self.entries():
            if entry.manifest.differences(here) or (model is not None and model not in entry.manifest.models):
                continue
            if model is None and (room := room - entry.size) < 0:
                break
            before = len(done)
            for file in entry.manifest.files:
                target = place / file.path
                if not os.path.lexists(target) and self._copy(file, target):
                    done.add(file.path)
            if len(done) > before:
                # A use is one byte, which needs no lock; in a folder that is read-only it is not counted.
                with contextlib.suppress(OSError), open_append(self._uses / entry.name) as uses:
                    uses.write(b".")
        return done

    def _copy(self, file: File, target: Path) -> bool:
        """Copy a file whole or not at all; return whether it is there."""
        content = self.read(file)
        if content is None:
            return False
        try:
            target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            files.replace(target, content)
            target.chmod(0o700 if target.suffix == ".so" else 0o600)
        except OSError as error:
            self._say(f"compiled code cannot be taken up into {target.parent}: {error}")
            return False
        return True

    def put(self, manifest: Manifest, content: Callable[[File], bytes]) -> str:
        """Keep a batch of files; return the manifest's name.

        Raises:
            OSError: the folder cannot be written, or others may write to it.
        """
        for folder in (self.folder, self._objects, self._manifests, self._uses):
            files.make_folder(folder)
        for file in manifest.files:
            path = self._objects / file.digest
            if not files.is_own(path, file.size):  # a file that is never trusted would be in the way for ever
                data = content(file)
                if sha256_of(data) != file.digest:
                    raise OSError(f"{file.path} is not what the manifest says any more")
                files.replace(path, data)
        text = manifest.dumps()
        name = sha256_of(text)
        files.replace(self._manifests / f"{name}.json", text)
        self._prune()
        return name

    def clear(self, doomed: Callable[[Entry], bool]) -> list[Entry]:
        """Remove entries, and every object that no entry names any more; return the entries that were removed."""
        gone = [entry for entry in self.entries() if doomed(entry)]
        for entry in gone:
            self._forget(entry)
        self._sweep()
        return gone

    def _entry(self, path: Path) -> Entry:
        text = files.read_own(path, MAX_MANIFEST_BYTES)
        if sha256_of(text) != path.stem:
            raise ValueError("its checksum is not its name")
        manifest, made = Manifest.loads(text), path.stat().st_mtime
        try:
            uses = (self._uses / path.stem).stat()
        except OSError:
            return Entry(path.stem, manifest, 0, made)
        return Entry(path.stem, manifest, uses.st_size, max(made, uses.st_mtime))

    def _forget(self, entry: Entry) -> None:
        for path in (self._manifests / f"{entry.name}.json", self._uses / entry.name):
            path.unlink(missing_ok=True)

    def _prune(self) -> None:
        """Keep the store within its size."""
        taken: set[str] = set()
        total, over = 0, False
        for entry in self.entries():
            total += sum(file.size for file in entry.manifest.files if file.digest not in taken)
            taken |= {file.digest for file in entry.manifest.files}
            if total > MAX_BYTES:
                self._forget(entry)
                over = True
        if over:
            self._sweep()

    def _sweep(self) -> None:
        """Remove objects that no manifest names; the manifest of a young object may be about to be written."""
        named = {file.digest for entry in self.entries() for file in entry.manifest.files}
        for path in (*self._objects.glob("*"), *self._manifests.glob("*.part")):
            with contextlib.suppress(FileNotFoundError):
                if path.name not in named and time.time() - path.stat().st_mtime > _TORN_AFTER:
                    path.unlink()

    def _miss(self, path: Path, error: Exception) -> None:
        """Say why a file is not used, unless it is not there."""
        if not isinstance(error, FileNotFoundError):
            self._say(f"compiled code kept in {path} is not used: {error}")
