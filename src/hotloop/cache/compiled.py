"""The store of compiled code: what torch's compile caches wrote in one process, kept for the next.

::

    compiled/objects/<sha-256>          the content of one file
    compiled/manifests/<sha-256>.json   the files of one batch with their checksums, and what they fit to
    compiled/uses/<manifest>            a byte for each time that a process took it up

A file of a cache is code that will run, so it is believed only where this user alone can have written it and its
checksum is the manifest's; a manifest's own name is the checksum of what it says. Whatever else is there is a miss.
Objects are written before the manifest that names them, each whole or not at all, so a process that is killed leaves
nothing that is taken for an entry.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import logging
import os
import re
import time
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, Self

from hotloop.cache import files, probes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from types import TracebackType

SCHEMA_VERSION = 1
MAX_FILE_BYTES = 2**30
MAX_BYTES = 8 * 2**30
"""Of all objects; the manifests that were unused for longest go first."""
MOST_TAKEN_BYTES = 2**30
"""Of what a process takes up without being told for which model."""
UNUSED_DAYS = 60.0
"""After which an entry is stale."""
_MAX_MANIFEST_BYTES = 16 * 2**20
_TORN_AFTER = 3600.0
_DIGEST = re.compile(r"[0-9a-f]{64}")
_PATH = re.compile(r"[A-Za-z0-9_.+=,@-]+(/[A-Za-z0-9_.+=,@-]+)*")
CHILDREN = "children"
"""The folder in which children have theirs."""
_LEFT_OUT = ("triton", "locks", "tmp", CHILDREN)
"""Folders of torch's cache that are not kept. Triton's files hold absolute paths; Inductor bundles them in its entries,
and writes them anew where those are taken up."""

_log = logging.getLogger("hotloop")


@dataclasses.dataclass(frozen=True)
class File:
    """One file of a compile cache: its path in torch's folder, the checksum of its content, and its bytes."""

    path: str
    digest: str
    size: int


@dataclasses.dataclass(frozen=True)
class Manifest:
    """What one process compiled.

    Args:
        fits: versions and hardware that it fits to, by name (`hotloop.cache.keys.fits`).
        models: the names of the models it was compiled for, by fingerprint.
        made: when, in seconds since 1970.
        files: what torch's caches wrote.
    """

    fits: Mapping[str, str]
    models: Mapping[str, str]
    made: float
    files: tuple[File, ...]

    def dumps(self) -> bytes:
        """Give the manifest as bytes, of which `name_of` gives its name."""
        document = {
            "schema": SCHEMA_VERSION,
            "fits": dict(self.fits),
            "models": dict(self.models),
            "made": self.made,
            "files": [[one.path, one.digest, one.size] for one in self.files],
        }
        return json.dumps(document, sort_keys=True).encode("ascii")

    @classmethod
    def loads(cls, text: bytes) -> Self:
        """Read a manifest.

        Raises:
            ValueError: it is none of ours, or names files that cannot be.
        """
        document = json.loads(text)
        if not isinstance(document, dict) or document.get("schema") != SCHEMA_VERSION:
            raise ValueError(f"no manifest of schema {SCHEMA_VERSION}")
        fits, models, made = (document.get(name) for name in ("fits", "models", "made"))
        if not isinstance(made, int | float):
            raise ValueError("a manifest without its date")  # noqa: TRY004 - a file that says nonsense, as below
        rows = document.get("files")
        if not isinstance(rows, list):
            raise ValueError("a manifest without files")  # noqa: TRY004
        return cls(_text(fits), _text(models), float(made), tuple(_file(row) for row in rows))

    def differences(self, here: Mapping[str, str]) -> list[str]:
        """Name what of versions and hardware is not as it is here, each with both values."""
        return [
            f"{name} {self.fits.get(name, 'unknown')} (here {here[name]})"
            for name in here
            if self.fits.get(name) != here[name]
        ]


def name_of(text: bytes) -> str:
    """Give the checksum of a content, by which it is named."""
    return hashlib.sha256(text).hexdigest()


def _text(value: Any) -> dict[str, str]:
    if isinstance(value, dict) and all(isinstance(one, str) for pair in value.items() for one in pair):
        return value
    raise ValueError("a manifest without versions, hardware or models")


def _file(row: Any) -> File:
    if not isinstance(row, list) or len(row) != len(dataclasses.fields(File)):
        raise ValueError("a manifest with a file that has no path, checksum and size")
    path, digest, size = row
    inside = isinstance(path, str) and _PATH.fullmatch(path) and ".." not in PurePosixPath(path).parts
    if not inside or not isinstance(digest, str) or not _DIGEST.fullmatch(digest):
        raise ValueError(f"a manifest with a file that cannot be: {path!r}")
    if type(size) is not int or not 0 <= size <= MAX_FILE_BYTES:
        raise ValueError(f"a manifest with a file of {size!r} bytes")
    return File(path, digest, size)


@dataclasses.dataclass(frozen=True)
class Entry:
    """A manifest that is kept: its name, uses so far, the last one in seconds since 1970."""

    name: str
    manifest: Manifest
    uses: int
    used: float

    @property
    def size(self) -> int:
        """Bytes of its files."""
        return sum(one.size for one in self.manifest.files)

    def stale(self, here: Mapping[str, str]) -> str:
        """Say why it will hardly be used any more; empty where it may be."""
        if differs := self.manifest.differences(here):
            return f"made for {', '.join(differs)}"
        days = (time.time() - self.used) / 86_400
        return f"unused for {days:.0f} days" if days > UNUSED_DAYS else ""


class CompiledStore:
    """The store in one folder. Every method is safe in several processes at once, whatever the folder holds.

    Args:
        folder: it is made when something is put.
        say: hears of trouble; unset is one warning on the log, for the first.
    """

    def __init__(self, folder: Path, say: Callable[[str], None] | None = None) -> None:
        self.folder = folder
        self._say = say or self._say_once
        self._said = False

    def entries(self) -> list[Entry]:
        """Give what is kept and can be believed, the most recently used first."""
        found = []
        for path in self._manifests():
            with self._a_miss(path):
                text = files.read_own(path, _MAX_MANIFEST_BYTES)
                if name_of(text) != path.stem:
                    raise ValueError("its checksum is not its name")
                uses, used = self._uses(path)
                found.append(Entry(path.stem, Manifest.loads(text), uses, used))
        return sorted(found, key=lambda one: one.used, reverse=True)

    def read(self, file: File) -> bytes | None:
        """Give the content of a file; None where it is missing or is not what it was, which is said."""
        path = self._objects / file.digest
        with self._a_miss(path):
            content = files.read_own(path, MAX_FILE_BYTES)
            if name_of(content) != file.digest:
                with contextlib.suppress(OSError):
                    path.unlink()  # so that the next process that compiles it can put it right
                raise ValueError("its checksum is another one")
            return content
        return None

    def take_up(self, place: Path, here: Mapping[str, str], model: str | None = None) -> set[str]:
        """Copy files that fit here into a folder for torch, checked; gives the paths of those that were copied.

        What is there already stays as it is: this process may have loaded it, and a library that changes under its
        process crashes it. A file that cannot be written is said, and is compiled anew.

        Args:
            place: the folder.
            here: versions and hardware (`hotloop.cache.keys.fits`).
            model: the fingerprint of the model whose code is wanted; None takes what was used last.
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
                self._used(entry.name)
        return done

    def _copy(self, file: File, target: Path) -> bool:
        """Copy a file whole or not at all; tells whether it is there."""
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
        """Keep a batch of files; gives the manifest's name.

        Raises:
            OSError: the folder cannot be written, or others may write to it.
        """
        for folder in (self.folder, self._objects, self.folder / "manifests", self.folder / "uses"):
            files.make_folder(folder)
        for file in manifest.files:
            path = self._objects / file.digest
            if not files.is_own(path, file.size):  # one that is never believed would be in the way for ever
                data = content(file)
                if name_of(data) != file.digest:
                    raise OSError(f"{file.path} is not what the manifest says any more")
                files.replace(path, data)
        text = manifest.dumps()
        name = name_of(text)
        files.replace(self.folder / "manifests" / f"{name}.json", text)
        self._prune()
        return name

    def clear(self, doomed: Callable[[Entry], bool]) -> list[Entry]:
        """Remove entries, and every object that no entry names any more; gives the entries that went."""
        gone = [entry for entry in self.entries() if doomed(entry)]
        for entry in gone:
            self._forget(entry)
        self._sweep()
        return gone

    @property
    def _objects(self) -> Path:
        return self.folder / "objects"

    def _manifests(self) -> list[Path]:
        """List the manifests, if the folders are this user's own."""
        place = self.folder / "manifests"
        with self._a_miss(self.folder):
            for folder in (self.folder, place, self._objects):
                files.check_folder(folder)
            return [path for path in sorted(place.glob("*.json")) if _DIGEST.fullmatch(path.stem)]
        return []

    def _uses(self, manifest: Path) -> tuple[int, float]:
        made = manifest.stat().st_mtime
        try:
            facts = (self.folder / "uses" / manifest.stem).stat()
        except OSError:
            return 0, made
        return facts.st_size, max(made, facts.st_mtime)

    def _used(self, name: str) -> None:
        """Count a use: one byte, which needs no lock."""
        with contextlib.suppress(OSError), (self.folder / "uses" / name).open("ab") as file:  # read-only: not counted
            file.write(b".")

    def _forget(self, entry: Entry) -> None:
        for path in (self.folder / "manifests" / f"{entry.name}.json", self.folder / "uses" / entry.name):
            path.unlink(missing_ok=True)

    def _prune(self) -> None:
        """Keep the store within its size."""
        taken: set[str] = set()
        total, over = 0, False
        for entry in self.entries():
            total += sum(one.size for one in entry.manifest.files if one.digest not in taken)
            taken |= {one.digest for one in entry.manifest.files}
            if total > MAX_BYTES:
                self._forget(entry)
                over = True
        if over:
            self._sweep()

    def _sweep(self) -> None:
        """Remove objects that no manifest names; young ones may belong to a manifest that is about to be written."""
        named = {one.digest for entry in self.entries() for one in entry.manifest.files}
        for path in (*self._objects.glob("*"), *(self.folder / "manifests").glob("*.part")):
            with contextlib.suppress(FileNotFoundError):
                if path.name not in named and time.time() - path.stat().st_mtime > _TORN_AFTER:
                    path.unlink()

    def _a_miss(self, path: Path) -> _Miss:
        return _Miss(path, self._say)

    def _say_once(self, line: str) -> None:
        if not self._said:
            self._said = True
            _log.warning("%s. What is missing is compiled anew.", line)


class _Miss:
    """Takes trouble with a file for a miss: one that is not there is none, anything else is said."""

    def __init__(self, path: Path, say: Callable[[str], None]) -> None:
        self._path, self._say = path, say

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if not isinstance(error, OSError | ValueError | RecursionError):
            return False
        if not isinstance(error, FileNotFoundError):
            self._say(f"compiled code kept in {self._path} is not used: {error}")
        return True


def files_in(place: Path, known: Iterable[str]) -> list[tuple[File, Path]]:
    """List what torch has written into its cache folder since, without what is not kept, with checksums."""
    before, found, asking = set(known), [], []
    for path in sorted(place.rglob("*")):
        inside = path.relative_to(place)
        name = inside.as_posix()
        if (
            name in before
            or inside.parts[0] in _LEFT_OUT
            or not _PATH.fullmatch(name)
            or path.suffix in (".lock", ".tmp", ".part")
        ):
            continue
        with contextlib.suppress(OSError):  # torch's own temporary files come and go
            if path.is_file() and not path.is_symlink() and path.stat().st_size <= MAX_FILE_BYTES:
                content = path.read_bytes()
                if path.suffix == ".so" and not files.is_whole_library(content):
                    continue
                if path.suffix == ".so" and probes.is_probe(content):
                    asking.append(path)
                found.append((File(name, name_of(content), len(content)), path))
    doubtful = set(asking) - probes.loadable(asking)
    return [(file, path) for file, path in found if path not in doubtful]


def remove_tree(place: Path, *, but: str | None = None) -> None:
    """Remove a folder of torch's, whatever is in it, but files with a suffix; what cannot be removed stays."""
    for root, folders, names in os.walk(place, topdown=False):
        for name in names:
            if but is not None and name.endswith(but):
                continue
            with contextlib.suppress(OSError):
                Path(root, name).unlink()
        for name in folders:
            with contextlib.suppress(OSError):
                Path(root, name).rmdir()
    with contextlib.suppress(OSError):
        place.rmdir()
