"""``run.storage``: a copy of a run's folder at a folder or a URL, made after each save, for it to go on elsewhere.

::

    STORAGE/<folder's name>/000002-<random>/.taken         the second process that has the run, which writes here alone
    STORAGE/<folder's name>/000002-<random>/...            the files of the run's folder
    STORAGE/<folder's name>/000002-<random>/stored.json    all was sent, and how often

Each process that goes on with a run has a folder of its own there, a generation. Readers take the newest into which all
was sent; what is older is deleted then. So a process that has lost its run, and may live on behind a broken network,
writes where nobody reads, and ends with its next save.

What a reader finds is always a run that can go on: files are whole, and a checkpoint comes behind the record that it
counts on.
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
from hotloop.errors import ConfigError, TrainingFailedError, describe
from hotloop.record import whole
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
"""How often a copy is fetched that another process replaces by its own meanwhile."""


class StorageError(Exception):
    """A storage cannot be read or written; the message says which, and why."""


class Version(NamedTuple):
    """Which state of a run a copy, or a folder here, has: the greater one is the newer.

    Attributes:
        generation: of the copy that it was sent to, or taken from.
        saves: how often it was sent there.
    """

    generation: str = ""
    saves: int = 0


def of(storage: str | None, folder: Path, study: Path | None = None) -> Mirror | None:
    """Return the mirror of a run's folder; None without a storage. A folder in a study's lies in the study's copy."""
    if storage is None:
        return None
    inside = folder.relative_to(study.parent) if study and folder.is_relative_to(study) else Path(folder.name)
    url = f"{storage.rstrip('/')}/{PurePosixPath(inside)}"
    return None if Path(url).resolve() == folder.resolve() else Mirror(url, folder)  # resumed at the place itself


def bring(stored: Mirror | None, say: Callable[[str], None], *, ended: bool = True) -> None:
    """Take what another machine has stored of a run; say where that fails, since it can be fetched later.

    Args:
        stored: the mirror of the run's folder; None takes nothing.
        say: is given a line.
        ended: the run has ended by itself, so that something should be there.
    """
    try:
        if stored and not stored.fetch() and ended:
            say(f"a node has stored nothing at {stored.url}: name a place that all nodes reach")
    except StorageError as error:
        say(str(error))


class Mirror:
    """The copy of a folder.

    Args:
        url: of the copy.
        folder: here.
    """

    def __init__(self, url: str, folder: Path) -> None:
        self.url, self.folder = url, folder
        self._line = places.Line()  # a file that comes late, after its time was up, would replace a newer one
        self._sent: dict[str, tuple[int, int]] = {}
        self._at, self._cleared, self._warned = Version(), False, False

    @functools.cached_property
    def place(self) -> places.Place:
        """The place, once it is reached."""
        return places.Place(self.url, self._line)

    def stored(self) -> Version | None:
        """Return what is there; None where nothing is, or not all of it yet.

        Raises:
            StorageError: it cannot be read.
        """
        try:
            seen: list[str] = []
            while (there := self._generations()) != seen:  # again, where a newer one replaced what was looked at
                if found := next(filter(None, map(self._version, reversed(there))), None):
                    return found
                seen = there
        except Exception as error:  # each protocol has errors of its own
            raise self._failed("read", error) from error
        return None

    def push(self, names: Sequence[str] | None = None) -> None:
        """Send what has changed since the last time, checkpoints last.

        Args:
            names: of the files that are sent; None sends all.

        Raises:
            ConfigError: another process goes on with the run by now.
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
        """Send a file beside what a run of this process, if there was one in the folder, has sent.

        Raises:
            ConfigError: another process goes on with the run by now.
            StorageError: the place cannot be written.
        """
        self._at = version_of(self.folder)
        self.push((name,))

    def take(self) -> bool:
        """Take all files where the copy is newer than the folder here, and return whether there is a copy.

        Raises:
            StorageError: the place cannot be read, or the folder here not be written.
        """
        there = self.stored()
        if there and there > version_of(self.folder):  # so it is too where a kill left the half of a copy here
            self.fetch()
        return there is not None

    def fetch(self) -> int:
        """Take all files, checkpoints first, and return how many there are; those here are replaced.

        Raises:
            StorageError: the place cannot be read, or the folder here not be written.
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
        """Delete the copy, or a folder inside of it; one that is not there is no error.

        Raises:
            StorageError: it cannot be deleted.
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
        """Return the names of what is there, the oldest first; that of a process may not have all files yet."""
        files = self.place.files
        files.invalidate_cache()
        try:
            found = self._ask(lambda: files.ls(self.place.root, detail=False))
        except _NOT_THERE:
            return []
        return sorted(one for name in found if GENERATION.fullmatch(one := PurePosixPath(name).name))

    def _version(self, generation: str) -> Version | None:
        """Return the state of a generation; None where not all of it was sent."""
        name = PurePosixPath(self.place.root, generation)
        try:
            text = self._ask(lambda: self.place.files.cat_file(str(name / STORED)))
        except _NOT_THERE:
            return None
        return Version(name.name, int(json.loads(text)["saves"]))

    def _send(self, names: Sequence[str] | None, *, known: bool) -> None:
        root = f"{self.place.root}/{self._at.generation}"
        if not known:
            self._sent.clear()  # of a generation that somebody has deleted
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
        """Delete what is older; where that fails, say so once: the next save tries again."""
        if self._cleared:
            return
        try:
            for one in there:
                if one < self._at.generation:
                    self._remove(f"{self.place.root}/{one}/{STORED}")  # first, for whoever reads the others just now
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
        # Asked for before the files, so that no state is taken for newer than it is.
        versions = {folder: self._version(str(one)) or Version() for folder, one in newest.items()}
        if there and versions.get(PurePosixPath(), Version()) < there:
            raise FileNotFoundError("another process has replaced the copy since it was listed")
        paths = {self.folder / name: by_name[there] for name, there in _files(by_name, newest.values()).items()}
        safe = [one for one in paths if one.resolve().is_relative_to(self.folder.resolve())]
        if not safe:
            return 0
        if not (self.folder / STORED).is_file():  # a kill from here on is no other run of that name
            _note(self.folder, Version())
        for path in sorted(safe, key=self._order, reverse=True):
            with whole(path, durable=False, shared=True) as file:
                self.place.get(paths[path]["name"], Path(file.name), int(paths[path].get("size") or 0))
        if any(self._version(str(one)) is None for one in newest.values()):
            raise FileNotFoundError("another process has replaced the copy since it was read")
        for folder, version in sorted(versions.items(), reverse=True):  # what is within is there before what it is in
            _note(self.folder / folder, version)
        return len(safe)

    def _files(self) -> list[Path]:
        own = (LOCK, STORED, ".")
        return [one for one in self.folder.rglob("*") if not one.name.startswith(own) and not one.is_symlink()]

    def _order(self, path: Path) -> tuple[bool, bool, str]:
        """A checkpoint counts on the record, and the last one on the best one."""
        return path.parent.name == checkpoint.FOLDER, path.name == checkpoint.LAST, str(path)


def _newest(names: Iterable[str]) -> dict[PurePosixPath, PurePosixPath]:
    """Return, by folder, the newest generation of it into which all was sent."""
    ended = [path.parent for path in map(PurePosixPath, names) if path.name == STORED]
    return {one.parent: one for one in sorted(ended) if GENERATION.fullmatch(one.name)}


def _files(names: Iterable[str], generations: Iterable[PurePosixPath]) -> dict[str, str]:
    """Return the names of files in generations by those that they have here."""
    found, wanted = {}, set(generations)
    for name in names:
        path = PurePosixPath(name)
        if path.name != STORED and not path.name.startswith(".") and not path.name.endswith(".part"):
            for one in wanted.intersection(path.parents):
                found[str(one.parent / path.relative_to(one))] = name
    return found


class Kept:
    """A mirror while a run goes on: a storage that fails is told once, and ends no run before its end.

    A storage may take long to fail. So the second try comes a save later, and each next one after twice as many.

    Args:
        mirror: of the run; None keeps nothing.
    """

    def __init__(self, mirror: Mirror | None) -> None:
        self.mirror, self.problem = mirror, ""
        self._pause, self._left = 1, 0

    def push(self, say: Callable[[str], None], names: Sequence[str] | None = None) -> None:
        """Send what has changed, at a save; some saves after a failure send nothing.

        Args:
            say: prints a line.
            names: of the files that are sent; None sends all.

        Raises:
            ConfigError: another process goes on with the run.
        """
        if self._left:
            self._left -= 1
            return
        is_known = bool(self.problem)
        if not self._send(say, names) and not is_known:
            say(f"{self.problem}; the run goes on, and tries again after 1, 2, 4, ... saves and at its end")

    def push_last(self, say: Callable[[str], None], names: Sequence[str] | None = None) -> None:
        """Send what has changed at the end of a run which a failure does not end otherwise; takes what `push` takes.

        Raises:
            ConfigError: another process goes on with the run.
        """
        if not self._send(say, names):
            say(f"{self.problem}; the copy there lacks what came last")

    def close(self, say: Callable[[str], None]) -> None:
        """Send what has changed at the end of a run.

        Raises:
            ConfigError: another process goes on with the run.
            TrainingFailedError: it cannot be sent; the message says what sends it later.
        """
        if not self._send(say) and self.mirror:
            raise TrainingFailedError(
                f"the run is over and kept in {self.mirror.folder}, and not all of it is at its {SETTING}: "
                f"{self.problem}. Once that can be written, run.resume={self.mirror.folder} sends what is missing"
            )

    def _send(self, say: Callable[[str], None], names: Sequence[str] | None = None) -> bool:
        """Return whether the mirror was sent; else `problem` says why not."""
        if self.mirror is None:
            return True
        try:
            self.mirror.push(names)
        except StorageError as error:
            self.problem = str(error)
            self._left, self._pause = self._pause, 2 * self._pause
            return False
        if self.problem:
            say(f"{self.mirror.url} has all again")
        self.problem, self._pause = "", 1
        return True


def version_of(folder: Path) -> Version:
    """Return the state of a folder here; the least of one that no copy is of, or that half of a copy is in."""
    try:
        found = json.loads((folder / STORED).read_text(encoding="utf-8"))
        return Version(str(found["generation"]), int(found["saves"]))
    except (OSError, ValueError, KeyError, TypeError):
        return Version()


def _note(folder: Path, version: Version) -> None:
    with whole(folder / STORED, durable=False, shared=True) as file:
        file.write(json.dumps(version._asdict()).encode())
