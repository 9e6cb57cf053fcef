"""The queue of a runs folder: one file for each run that waits, so that servers may come, go and be several.

Whoever starts a run from the queue holds its lock, so that no run is started twice. A runs folder may come from a
stranger, and an entry is a command: so each entry is signed with a key of this user that no runs folder holds.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hmac
import json
import os
import secrets
import sqlite3
import subprocess
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard

from hotloop import files, host, record
from hotloop.errors import ConfigError
from hotloop.report import runs
from hotloop.train.turn import LOCK, turn
from hotloop.ui import processes
from hotloop.ui.places import Places, tail

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

FOLDER = ".hotloop-ui/queue"
"""Below the runs folder: hidden, so that no run is looked for in it."""
LOG = "launcher-log.txt"
_KEY_BYTES = 32
_STRANGE = "it was not queued by you on this machine. Remove it, and queue it anew if you want it"


@dataclasses.dataclass(frozen=True)
class Entry:
    """A run that waits.

    Args:
        file: the name of its file, which is its place in the queue.
        name: of the run, below the runs folder.
        arguments: of hotloop.
        directory: in which it was queued: settings may name files from there.
        problem: why it is never started; empty where nothing is wrong.
    """

    file: str
    name: str
    arguments: tuple[str, ...] = ()
    directory: str = ""
    problem: str = ""


class Queue:
    """The runs that wait below one folder.

    Args:
        places: the runs folder.
    """

    def __init__(self, places: Places) -> None:
        self._places, self._folder = places, places.root / FOLDER
        self._launcher: subprocess.Popen[bytes] | None = None
        self._working: Path | None = None
        self.problem = ""
        """Why the last look started nothing although it should have; empty where nothing is wrong."""

    def add(self, folder: Path, arguments: Sequence[str]) -> None:
        """Let a run wait. Its folder is made now, so that nobody else takes its name.

        Raises:
            ConfigError: the folder is there already, or cannot be made.
        """
        name, here = self._places.name(folder), str(Path.cwd())
        told = {"name": name, "directory": here, "arguments": [*arguments]}
        told["signature"] = _signature(folder, here, arguments)
        file = self._folder / f"{time.time_ns():020d}-{secrets.token_hex(4)}.json"
        try:
            folder.mkdir(parents=True)
            with files.whole(file) as opened:
                opened.write(record.to_json(told).encode())
        except FileExistsError:
            raise ConfigError(f"{name} is there already. Queue it again, or choose another name") from None
        except OSError as error:
            raise ConfigError(f"{folder} cannot be queued: {files.cannot(error)}") from error

    def entries(self) -> list[Entry]:
        """Return what waits, in its order."""
        try:
            names = sorted(one.name for one in os.scandir(self._folder) if one.name.endswith(".json"))
        except FileNotFoundError:
            return []
        return [self._read(one) for one in names if not one.startswith(".")]

    def remove(self, file: str) -> None:
        """Take a run out of the queue.

        Raises:
            LookupError: it does not wait, or does not wait any more.
        """
        with self._locked():
            entry = next((one for one in self.entries() if one.file == file), None)
            if entry is None:
                raise LookupError(file)
            (self._folder / entry.file).unlink()
        if entry.name:
            with contextlib.suppress(OSError):  # it holds something by now
                (self._places.root / entry.name).rmdir()

    def look(self) -> None:
        """Start the next run where none trains here; what cannot be done is kept in ``problem``."""
        if self._launcher is not None and self._launcher.poll() is None:
            return
        try:
            if self._launcher is not None:
                self.problem, self._launcher = tail(self._folder / LOG, 2000).strip(), None
            if all(one.problem for one in self.entries()):
                return
            if self._working is None or not works_here(self._working):
                self._working = next(working(self._places), None)
            if self._working is None:
                self._launch()
        except (OSError, ConfigError) as error:
            self.problem = str(error)

    def take(self) -> Entry | None:
        """Make this process the run that is next, and return its entry; None where it is no run's turn.

        A process that dies before the entry is removed leaves it in the queue; behind that, the run is its own.
        """
        with self._locked():
            entry = next((one for one in self.entries() if not one.problem), None)
            if entry is None or next(working(self._places), None) is not None:
                return None
            folder = self._places.root / entry.name
            processes.note(folder, os.getpid(), entry.arguments)
            (self._folder / entry.file).unlink()
            return entry

    def _launch(self) -> None:
        """Start a process that takes the next run and becomes it: neither Ctrl-C nor the end of this one ends it."""
        with processes.open_log(self._folder / LOG, 0o600) as log:
            log.truncate(0)
            self._launcher = subprocess.Popen(  # noqa: S603 - our own module, without a shell
                host.python("-m", "hotloop.ui.queue_launcher", str(self._places.root)),
                stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
                env={**os.environ, "PYTHONUNBUFFERED": "1"},
            )  # fmt: skip
        # A process that nobody waits for stays in the system's table, and would seem to run.
        threading.Thread(target=self._launcher.wait, daemon=True).start()

    def _read(self, file: str) -> Entry:
        told = processes.read(self._folder / file)
        name, directory, arguments = (told.get(key) for key in ("name", "directory", "arguments"))
        if not isinstance(name, str) or not isinstance(directory, str) or not _texts(arguments):
            return Entry(file, "", problem="it cannot be read. Remove it")
        entry = Entry(file, name, tuple(arguments), directory)
        try:
            folder = self._places.inside(name)
        except LookupError:
            return dataclasses.replace(entry, name="", problem=_STRANGE)
        signed = _signature(folder, directory, arguments)
        if not hmac.compare_digest(str(told.get("signature")).encode(), signed.encode()):
            return dataclasses.replace(entry, problem=_STRANGE)
        if runs.kind_of(folder) != runs.UNKNOWN:
            return dataclasses.replace(entry, problem="its folder holds a run by now. Remove it")
        return entry

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Be the only process that takes something out of the queue.

        Raises:
            ConfigError: another process has been at it for very long, or the folder cannot be written.
        """
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with turn(self._folder / "lock"):
                yield
        except sqlite3.Error as error:
            raise ConfigError(f"the queue {self._folder} cannot be locked: {error}. Try again") from error


def working(places: Places) -> Iterator[Path]:
    """Yield the folders of runs that this machine works at now."""
    for one in places.all():
        inner = [] if (one.path / record.LINES).exists() else one.path.glob(f"*/{LOCK}.json")
        for path in (one.path, *(lock.parent for lock in inner)):
            if works_here(path):
                yield path


def works_here(folder: Path) -> bool:
    """Return whether this machine works at a run: not where a process follows one of a cluster."""
    process = processes.find(folder)
    return process is not None and process.here


def _texts(value: Any) -> TypeGuard[list[str]]:
    return isinstance(value, list) and all(isinstance(one, str) for one in value)


def _signature(folder: Path, directory: str, arguments: Sequence[str]) -> str:
    told = json.dumps([str(folder), directory, *arguments])  # in ASCII
    return hmac.new(_key(), told.encode(), "sha256").hexdigest()


def _key() -> bytes:
    """Return this user's key, which is made once.

    Raises:
        ConfigError: it can be neither read nor made.
    """
    base = Path(os.environ.get("XDG_STATE_HOME", ""))
    folder = (base if base.is_absolute() else Path.home() / ".local" / "state") / "hotloop"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with turn(folder / "queue.lock"):
            path = folder / "queue.key"
            found = path.read_bytes() if path.is_file() else b""
            if len(found) != _KEY_BYTES:  # there is none, or a full disk cut it
                found = secrets.token_bytes(_KEY_BYTES)
                path.unlink(missing_ok=True)
                with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                    file.write(found)
            return found
    except (OSError, sqlite3.Error) as error:
        raise ConfigError(f"{folder} cannot be written: {error}. The key of the queue is kept there") from error
