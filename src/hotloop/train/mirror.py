"""``run.storage``: after each save, a run copies its folder to another folder or a URL, to be resumed anywhere.

::

    STORAGE/<folder's name>/000002-<random>/.taken         marks the generation as taken by a process
    STORAGE/<folder's name>/000002-<random>/...            the files of the run's folder
    STORAGE/<folder's name>/000002-<random>/stored.json    says that all files were sent, and how often

A generation is the folder of one process in the storage. Each process that resumes the run begins a generation and
writes to no other. Readers take the newest complete generation, and its process deletes the older ones.

So a process whose run was resumed elsewhere, say while its network was down, cannot harm the copy. Nobody reads its
generation any more, and its next save ends it.

A reader always finds a run that can be resumed. Every file is complete, and a checkpoint is sent after the record of
its steps.
"""

from __future__ import annotations

import functools
import json
import logging
import re
import secrets
import tempfile
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, NamedTuple

from hotloop import places
from hotloop.errors import ConfigError, describe
from hotloop.files import read, whole
from hotloop.train import checkpoint
from hotloop.train.turn import LOCK

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence


_log = logging.getLogger("hotloop")
SETTING = "run.storage"
STORED = "stored.json"
_TAKEN = ".taken"
GENERATION = re.compile(r"\d{6}-[0-9a-f]{16}")
_NOT_THERE = (FileNotFoundError, NotADirectoryError)
_LOOKS = 3
"""How often `Mirror.fetch` tries while another process keeps replacing the copy."""


class StorageError(Exception):
    """A storage cannot be read, written or deleted. The message names the URL and the reason."""


class Version(NamedTuple):
    """How new a copy, or a run's folder on this machine, is. The greater of two versions is the newer.

    Attributes:
        generation: the generation that the files were sent to or fetched from; empty if there is none.
        saves: how many times its process had sent them.
    """

    generation: str = ""
    saves: int = 0


def of(storage: str | None, folder: Path, study: Path | None = None) -> Mirror | None:
    """Return the mirror of a run's folder; None without a storage, or if the folder is the copy itself.

    Args:
        storage: the value of ``run.storage``.
        folder: the run's.
        study: the folder of the search or cross-validation that the run is part of. A folder in it is copied below the
            study's name.
    """
    if storage is None:
        return None
    inside = folder.relative_to(study.parent) if study and folder.is_relative_to(study) else Path(folder.name)
    url = f"{storage.rstrip('/')}/{PurePosixPath(inside)}"
    return None if Path(url).resolve() == folder.resolve() else Mirror(url, folder)


def bring(stored: Mirror | None, say: Callable[[str], None], *, ended: bool = True) -> None:
    """Fetch what another machine has stored of a run. A failure is only said: the copy can be fetched later.

    Args:
        stored: the mirror of the run's folder; None does nothing.
        say: prints a line.
        ended: whether the run came to its end, so that a missing copy is worth a line.
    """
    try:
        if stored and not stored.fetch() and ended:
            say(f"a node has stored nothing at {stored.url}: name a place that all nodes reach")
    except StorageError as error:
        say(str(error))


class Mirror:
    """Sends a run's folder to its copy, and fetches it from there.

    Args:
        url: where the copy is.
        folder: the run's folder on this machine.
    """

    def __init__(self, url: str, folder: Path) -> None:
        self.url, self.folder = url, folder
        self._line = places.Line()  # one for all: a write that hangs and comes through late would replace a newer file
        self._sent: dict[str, tuple[int, int]] = {}
        self._at, self._cleared, self._warned = Version(), False, False

    @functools.cached_property
    def place(self) -> places.Place:
        """The place of the copy. The first use connects to it."""
        return places.Place(self.url, self._line)

    def stored(self) -> Version | None:
        """Return the version of the newest complete generation; None if there is none.

        Raises:
            StorageError: the place cannot be read.
        """
        try:
            seen: list[str] = []
            while (there := self._generations()) != seen:  # look again: a new generation may have replaced those listed
                if found := next(filter(None, map(self._version, reversed(there))), None):
                    return found
                seen = there
        except Exception as error:  # each protocol has errors of its own
            raise self._failed("read", error) from error
        return None

    def push(self, names: Sequence[str] | None = None) -> None:
        """Send the files that have changed since the last push, checkpoints last.

        Args:
            names: the files to send; None sends all.

        Raises:
            ConfigError: another process has resumed the run.
            StorageError: the place cannot be written.
        """
        try:
            there = self._generations()
            if not self._at.generation:
                before = max([version_of(self.folder).generation, *there])
                self._at = Version(f"{int(before[:6] or 0) + 1:06d}-{secrets.token_hex(8)}")
            lost = bool(there) and there[-1] > self._at.generation
            if not lost:
                self._send(names, known=self._at.generation in there)
                self._clear(there)
        except Exception as error:  # each protocol has errors of its own
            raise self._failed("written", error) from error
        if lost:
            raise ConfigError(
                f"{SETTING}: another process has gone on with the run at {self.url}, so this one ends: look there"
            )

    def add(self, name: str) -> None:
        """Send one file into the generation that the folder already has, if it has one.

        Raises:
            ConfigError: another process has resumed the run.
            StorageError: the place cannot be written.
        """
        self._at = version_of(self.folder)
        self.push((name,))

    def take(self) -> bool:
        """Fetch the copy if it is newer than the folder on this machine, and return whether there is a copy.

        Raises:
            StorageError: the place cannot be read, or the folder cannot be written.
        """
        there = self.stored()
        if there and there > version_of(self.folder):  # also than a folder that a kill left half fetched
            self.fetch()
        return there is not None

    def fetch(self) -> int:
        """Fetch all files, checkpoints first, and return how many there are. Files on this machine are replaced.

        Raises:
            StorageError: the place cannot be read, or the folder cannot be written.
        """
        try:
            for look in range(_LOOKS):
                try:
                    return self._fetch()
                except FileNotFoundError:  # deleted, since there is a newer generation
                    if look == _LOOKS - 1:
                        raise
        except Exception as error:  # each protocol has errors of its own
            raise self._failed("read", error) from error
        return 0

    def remove(self, inside: str = "") -> None:
        """Delete the copy, or a folder in it. A folder that does not exist is no error.

        Args:
            inside: the folder's path in the run's folder; empty deletes the whole copy.

        Raises:
            StorageError: the folder cannot be deleted.
        """
        try:
            for one in self._generations() if inside else ("",):
                self._remove(f"{self.place.root}/{one}/{inside}".rstrip("/"))
        except Exception as error:  # each protocol has errors of its own
            raise self._failed("deleted", error, inside) from error
        self._sent = {name: known for name, known in self._sent.items() if not name.startswith(inside)}

    def _failed(self, what: str, error: Exception, inside: str = "") -> StorageError:
        return StorageError(f"{self.url}{inside and '/'}{inside} cannot be {what}: {describe(error)}")

    def _ask(self, ask: Callable[[], Any], seconds: float | None = None) -> Any:
        return self._line.within(seconds or places.ANSWER_SECONDS, ask)

    def _generations(self) -> list[str]:
        """Return the names of all generations, the oldest first. The newest may still lack files."""
        files = self.place.files
        files.invalidate_cache()
        try:
            found = self._ask(lambda: files.ls(self.place.root, detail=False))
        except _NOT_THERE:
            return []
        return sorted(one for name in found if GENERATION.fullmatch(one := PurePosixPath(name).name))

    def _version(self, generation: str) -> Version | None:
        """Return the version of a generation; None if it is not complete."""
        name = PurePosixPath(self.place.root, generation)
        try:
            text = self._ask(lambda: self.place.files.cat_file(str(name / STORED)))
        except _NOT_THERE:
            return None
        return Version(name.name, int(json.loads(text)["saves"]))

    def _send(self, names: Sequence[str] | None, *, known: bool) -> None:
        root = f"{self.place.root}/{self._at.generation}"
        if not known:
            self._sent.clear()  # somebody may have deleted the generation
            with tempfile.NamedTemporaryFile(prefix="hotloop-") as empty:
                self.place.put(Path(empty.name), f"{root}/{_TAKEN}")
            _note(self.folder, self._at)
        files = self._files() if names is None else [self.folder / one for one in names]
        self._at = Version(self._at.generation, self._at.saves + 1)
        for path in sorted((one for one in files if one.is_file()), key=self._order):
            name, about = path.relative_to(self.folder).as_posix(), path.stat()
            facts = (about.st_size, about.st_mtime_ns)
            if self._sent.get(name) != facts:
                self.place.put(path, f"{root}/{name}")
                self._sent[name] = facts
        _note(self.folder, self._at)
        self.place.put(self.folder / STORED, f"{root}/{STORED}")

    def _clear(self, there: Sequence[str]) -> None:
        """Delete the older generations. A failure is logged once, and the next save tries again."""
        if self._cleared:
            return
        try:
            for one in there:
                if one < self._at.generation:
                    self._remove(f"{self.place.root}/{one}/{STORED}")  # first: readers then leave this generation alone
                    self._remove(f"{self.place.root}/{one}")
            self._cleared = True
        except Exception as error:  # noqa: BLE001 - all of this run is there
            if not self._warned:
                _log.warning("%s; nothing reads it any more", self._failed("deleted", error, one))
            self._warned = True

    def _remove(self, path: str) -> None:
        self.place.files.invalidate_cache()
        if self._ask(lambda: self.place.files.exists(path)):
            self._ask(lambda: self.place.files.rm(path, recursive=True), places.MOVE_SECONDS)

    def _fetch(self) -> int:
        there = self.stored()
        self.place.files.invalidate_cache()
        found = self._ask(lambda: self.place.files.find(self.place.root, detail=True))
        by_name = {name.removeprefix(f"{self.place.root}/"): one for name, one in found.items()}
        newest = _newest(by_name)
        # Versions are read before the files: files of a later save only make the folder newer than its version says.
        versions = {folder: self._version(str(one)) or Version() for folder, one in newest.items()}
        if there and versions.get(PurePosixPath(), Version()) < there:
            raise FileNotFoundError("another process has replaced the copy since it was listed")
        paths = {self.folder / name: by_name[there] for name, there in _files(by_name, newest.values()).items()}
        safe = [one for one in paths if one.resolve().is_relative_to(self.folder.resolve())]
        if not safe:
            return 0
        if not (self.folder / STORED).is_file():  # marks the folder: after a kill it is no other run of that name
            _note(self.folder, Version())
        for path in sorted(safe, key=self._order, reverse=True):
            if path.suffix == ".db" and (log := path.with_name(f"{path.name}-wal")) not in paths:
                log.unlink(missing_ok=True)  # of an older file, which SQLite would read into this one
            with whole(path, durable=False, shared=True) as file:
                self.place.get(paths[path]["name"], Path(file.name), int(paths[path].get("size") or 0))
        if any(self._version(str(one)) is None for one in newest.values()):
            raise FileNotFoundError("another process has replaced the copy since it was read")
        for folder, version in sorted(versions.items(), reverse=True):  # the runs in a study's folder before the study
            _note(self.folder / folder, version)
        return len(safe)

    def _files(self) -> list[Path]:
        own = (LOCK, STORED, ".")
        return [one for one in self.folder.rglob("*") if not one.name.startswith(own) and not one.is_symlink()]

    def _order(self, path: Path) -> tuple[bool, bool, str]:
        """Return a key that sorts files as they are sent: other files, checkpoints, the last checkpoint."""
        return path.parent.name == checkpoint.FOLDER, path.name == checkpoint.LAST, str(path)


def _newest(names: Iterable[str]) -> dict[PurePosixPath, PurePosixPath]:
    """Return the newest complete generation of each folder, by the folder."""
    ended = [path.parent for path in map(PurePosixPath, names) if path.name == STORED]
    return {one.parent: one for one in sorted(ended) if GENERATION.fullmatch(one.name)}


def _files(names: Iterable[str], generations: Iterable[PurePosixPath]) -> dict[str, str]:
    """Return the names of the files in these generations, by the path that each has in the run's folder."""
    found, wanted = {}, set(generations)
    for name in names:
        path = PurePosixPath(name)
        if path.name != STORED and not path.name.startswith(".") and not path.name.endswith(".part"):
            for one in wanted.intersection(path.parents):
                found[str(one.parent / path.relative_to(one))] = name
    return found


def version_of(folder: Path) -> Version:
    """Return the version of a folder on this machine; the lowest if it was never copied, or only fetched in part."""
    try:
        found = json.loads(read(folder / STORED))
        return Version(str(found["generation"]), int(found["saves"]))
    except (OSError, ValueError, KeyError, TypeError):
        return Version()


def _note(folder: Path, version: Version) -> None:
    with whole(folder / STORED, durable=False, shared=True) as file:
        file.write(json.dumps(version._asdict()).encode())
