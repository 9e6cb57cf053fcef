"""Brings back what a run on a cluster has made so far, over the dashboard's port."""

from __future__ import annotations

import contextlib
import hashlib
import json
import tempfile
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, BinaryIO, Literal, NamedTuple

from hotloop import files
from hotloop.errors import ConfigError, DataError
from hotloop.record import LINES
from hotloop.remote import there
from hotloop.remote.client import Client, MissingFileError, UnknownJobError
from hotloop.train.turn import folder_held

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from hotloop.remote.runs import RemoteRun

Checkpoints = Literal["best", "last", "all", "none"]
LOST, UNREACHABLE = "lost", "unreachable"
"""Of a run that the cluster no longer knows, since its head was started anew; of one whose cluster does not answer."""
_ROUNDS = 3
"""How often a file is read that changes while it is read."""
_MOST_INDEX = 2**24
"""Bytes of the list of a run's files: that of a hundred thousand."""


class Fetched(NamedTuple):
    """What came back.

    Args:
        status: of the run.
        files: that were read this time.
        size: their bytes.
        changing: files that changed each time that they were read; the next fetch takes them.
    """

    status: str
    files: list[str]
    size: int
    changing: list[str]


def fetch(run: RemoteRun, checkpoints: Checkpoints) -> Fetched:
    """Fetch what is new of a run into its folder here, also while it runs.

    Args:
        run: the run.
        checkpoints: which of its checkpoints come as well.

    Raises:
        ConfigError: the cluster does not answer, or the run has gone on in its folder here.
        DataError: what comes cannot be a run's.
        UnknownJobError: the cluster does not know the run's job.
    """
    folder = Path(run.folder)
    with folder_held(folder):
        client = Client(run.address)
        job, status = client.job(run.submission), client.status(run.submission)
        if not job.driver_node_id:  # it waits
            return Fetched(status, [], 0, [])
        reader = _Reader(client, job.driver_node_id, run)
        left: list[str] = []
        for _ in range(_ROUNDS):
            index = reader.index()
            left = [name for name in index if _is_wanted(name, checkpoints) and not reader.take(name, *index[name])]
            if not left:
                break
        return Fetched(status, reader.taken, reader.size, left)


def statuses(known: Sequence[RemoteRun]) -> list[str]:
    """Return how each of several runs is doing; a cluster that does not answer is asked once."""
    clients: dict[str, Client | None] = {}
    for address in {one.address for one in known}:
        clients[address] = None
        with contextlib.suppress(ConfigError):
            clients[address] = Client(address)
    return [_status(clients[one.address], one) for one in known]


def _status(client: Client | None, run: RemoteRun) -> str:
    try:
        return client.status(run.submission) if client else UNREACHABLE
    except UnknownJobError:
        return LOST
    except DataError:
        return UNREACHABLE


class _Reader:
    """Reads the files of a run through its cluster."""

    def __init__(self, client: Client, node: str, run: RemoteRun) -> None:
        self._client, self._node, self._run = client, node, run
        self.taken: list[str] = []
        self.size = 0

    def index(self) -> dict[str, tuple[int, str]]:
        """Return the size and the checksum of each file of the run; none before it has begun.

        Raises:
            DataError: the list is none, or names what cannot be a run's file.
        """
        found = bytearray()
        try:
            for block in self._blocks(there.INDEX):
                found += block
                if len(found) > _MOST_INDEX:
                    raise DataError(f"the list of run {self._run.name} has more than {_MOST_INDEX} bytes")
        except MissingFileError:
            return {}
        try:
            listed = {
                str(name): (int(size), str(digest)) for name, (size, digest) in json.loads(found or b"{}").items()
            }
        except (ValueError, TypeError, AttributeError) as error:
            raise DataError(f"the list of run {self._run.name} is none; nothing is taken") from error
        for name in listed:
            if not is_name(name):
                raise DataError(f"run {self._run.name} names a file that cannot be: {name[:300]!r}; nothing is taken")
        return listed

    def take(self, name: str, length: int, digest: str) -> bool:
        """Read a file, unless it is here; return False where it is another one than the list says."""
        target = Path(self._run.folder, name)
        if target.is_file() and target.stat().st_size == length and _digest(target) == digest:
            return True
        read, found = 0, hashlib.sha256()
        with tempfile.TemporaryFile() as made:
            try:
                for block in self._blocks(f"{self._run.name}/{name}"):
                    part = block[: length - read]  # a record grows: its beginning is what was listed
                    made.write(part)
                    found.update(part)
                    read += len(part)
                    if read == length:
                        break
            except MissingFileError:
                return False
            if found.hexdigest() != digest:
                return False
            self._keep(made, target)
        self.taken.append(name)
        self.size += length
        return True

    def _keep(self, made: BinaryIO, target: Path) -> None:
        """Put a file in its place, unless a run has gone on in the folder here."""
        if target.name == LINES and target.is_file():
            made.seek(0)
            with target.open("rb") as file:
                whole_lines = file.read().rpartition(b"\n")[0]
            if made.read(len(whole_lines)) != whole_lines:
                raise ConfigError(
                    f"{target} is not what was fetched of {self._run.name}: the run has gone on here. Move the folder "
                    f"{self._run.folder} elsewhere first"
                )
        if target.suffix == ".db":  # SQLite would read the log of an older file into this one
            target.with_name(f"{target.name}-wal").unlink(missing_ok=True)
        made.seek(0)
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            with files.whole(target, durable=False, shared=True) as file:
                while block := made.read(2**20):
                    file.write(block)
        except OSError as error:
            raise ConfigError(f"{target} cannot be written: {error}; free the disk, and fetch again") from error

    def _blocks(self, name: str) -> Iterator[bytes]:
        return self._client.read(self._node, f"{there.link_name(self._run.name)}/{name}")


def is_name(name: Any) -> bool:
    """Return whether a file of a run may have this path: it stays in the folder, and tells of no machine."""
    path = PurePosixPath(name)
    plain = name.isprintable() and "\\" not in name and not path.is_absolute() and ".." not in path.parts
    return bool(path.parts) and plain and not path.name.startswith(there.OWN)


def _is_wanted(name: str, checkpoints: Checkpoints) -> bool:
    path = PurePosixPath(name)
    if path.parent.name != "checkpoints" or path.suffix != ".pt" or checkpoints == "all":
        return True
    return path.name == f"{checkpoints}.pt"


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
