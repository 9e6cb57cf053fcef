"""Brings back what a run on a cluster has made so far: its folder, and the code that it compiled."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import shutil
import tempfile
import time
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, BinaryIO, Literal

from hotloop.errors import ConfigError, DataError, HotloopError
from hotloop.files import whole
from hotloop.record import LINES
from hotloop.remote import listed, locating, runs, signed, there
from hotloop.remote.client import OVER, WORDS, Client, MissingFileError, UnknownJobError
from hotloop.report.runs import FETCHED
from hotloop.report.text import size
from hotloop.train.turn import folder_held

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from hotloop.remote.runs import RemoteRun

Checkpoints = Literal["best", "last", "all", "none"]
LOG = listed.LOG
LOST, UNREACHABLE = "lost", "unreachable"
"""Of a run that the cluster no longer knows, since its head was started anew; of one whose cluster does not answer."""
ENDED = frozenset({*OVER.values(), LOST})
_ROUNDS = 3
"""How often a file is read that changes while it is read."""
_MOST_LOG = 2**26
"""Bytes of a log that are fetched: its beginning."""


@dataclasses.dataclass(frozen=True)
class Fetched:
    """What came back.

    Args:
        status: of the run: ``waiting``, ``running``, ``finished``, ``failed``, ``stopped`` or ``lost``.
        folder: that it is in.
        files: that were read this time.
        size: their bytes.
        changing: files that changed each time that they were read; the next fetch takes them.
        state: what the job says of itself: ``attempts``, and ``code`` once the run has ended.
    """

    status: str
    folder: Path
    files: tuple[str, ...]
    size: int
    changing: tuple[str, ...]
    state: Mapping[str, Any]


def fetch(run: RemoteRun, checkpoints: Checkpoints, say: Callable[[str], None]) -> Fetched:
    """Fetch what is new of a run, also while it runs. What comes must be signed by the run's key.

    Args:
        run: the run.
        checkpoints: which of its checkpoints come as well.
        say: called with what a person should know.

    Raises:
        ConfigError: the cluster does not answer or knows nothing of the run, or its folder here is not what was
            fetched: a process trains there, or has trained there.
        DataError: what comes is not signed by the run's key.
    """
    with runs.held(run.name), folder_held(Path(run.folder)):
        client = _connected(run)
        status, node = _located(client, run, say)
        if node is None:
            note(run, status, say)
            return Fetched(status, Path(run.folder), (), 0, (), {})
        reader = _Reader(client, node, run)
        if status in OVER.values() and "ended" not in reader.index()[1]:  # its job was killed, and could not list them
            try:
                locating.shown(client, run, node)
            except HotloopError as error:
                say(f"{error}. What the run listed last is fetched")
        reader.take_log()
        with tempfile.TemporaryDirectory(prefix="hotloop-fetch-") as made:
            for _ in range(_ROUNDS):
                files, state = reader.index()
                wanted = {one: files[one] for one in _wanted(files, checkpoints)}
                _check_records(run, wanted)
                reader.check_room(wanted)
                left = [one for one, entry in wanted.items() if not reader.take(one, entry, Path(made))]
                if not left:
                    break
            _merge(Path(made, listed.COMPILED), say)
        note(run, status, say)
        return Fetched(status, Path(run.folder), tuple(reader.taken), reader.size, tuple(left), state)


def status_of(run: RemoteRun) -> str:
    """Return how a run is doing, by its cluster's word; ``unreachable`` where that does not answer."""
    return statuses([run])[0]


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
        return WORDS[str(client.job(run.submission).status)] if client else UNREACHABLE
    except UnknownJobError:
        return LOST
    except DataError:
        return UNREACHABLE


def note(run: RemoteRun, status: str, say: Callable[[str], None]) -> None:
    """Write into a run's folder how it is doing on its cluster, for lists that ask no cluster."""
    known = {"run": run.name, "address": run.address, "status": status, "fetched": time.time()}
    try:
        with _writing(Path(run.folder, FETCHED)) as file:
            file.write(json.dumps(known).encode())
    except ConfigError as error:  # what was fetched is there all the same
        say(str(error))


@contextlib.contextmanager
def _writing(target: Path) -> Iterator[BinaryIO]:
    try:
        with whole(target, durable=False, shared=True) as file:
            yield file
    except OSError as error:
        raise ConfigError(f"{target} cannot be written: {error}; free the disk, and fetch again") from error


class _Reader:
    """Reads the files of a run through its cluster."""

    def __init__(self, client: Client, node: str, run: RemoteRun) -> None:
        self._client, self._node, self._run = client, node, run
        self.taken: list[str] = []
        self.size = 0

    def index(self) -> tuple[dict[str, tuple[int, str]], dict[str, Any]]:
        """Return the run's own list of its files, and what its job says of itself; empty before the run has begun.

        Raises:
            DataError: it is not signed by the run's key, or cannot be a list of ours.
        """
        found = bytearray()
        try:
            for block in self._blocks(listed.INDEX):
                found += block
                if len(found) > listed.MOST_BYTES:
                    raise DataError(f"the list of run {self._run.name} has more than {size(listed.MOST_BYTES)}")
        except MissingFileError:
            return {}, {}
        if not found:  # Ray may send nothing of a file that is not there
            return {}, {}
        try:
            document = signed.loads(self._run.key, found.decode(errors="replace"))
        except DataError as error:
            raise DataError(
                f"what {self._run.address} has of run {self._run.name} is not signed by the run's key: somebody else "
                "wrote it; nothing is taken"
            ) from error
        return listed.checked(self._run.name, document)

    def take_log(self) -> None:
        """Read what the job has printed, from the node that it runs on; after a loss of the head it is not there."""
        left = _MOST_LOG
        with contextlib.suppress(MissingFileError):
            blocks = self._client.read(self._node, f"job-driver-{self._run.submission}.log")
            with _writing(Path(self._run.folder, LOG)) as file:
                for block in blocks:
                    file.write(block[:left])
                    left -= len(block)
                    if left <= 0:
                        break

    def check_room(self, wanted: Mapping[str, tuple[int, str]]) -> None:
        """Refuse what the disk here has no room for.

        Raises:
            ConfigError: saying how much is needed.
        """
        needed = sum(length for name, (length, _) in wanted.items() if not self._target(name, Path()).is_file())
        free = shutil.disk_usage(self._run.folder).free
        if needed > free:
            raise ConfigError(
                f"{self._run.folder}: what is to be fetched has {size(needed)}, and its disk {size(free)}: free the "
                "disk, or fetch fewer files by --checkpoints none"
            )

    def take(self, name: str, entry: tuple[int, str], made: Path) -> bool:
        """Read a file, unless it is here; return False where it is another one than the index says."""
        length, digest = entry
        target = self._target(name, made)
        if target.is_file() and target.stat().st_size == length and _digest(target) == digest:
            return True
        read, found = 0, hashlib.sha256()
        if target.suffix == ".db":  # SQLite would read the log of an older file into this one
            target.with_name(f"{target.name}-wal").unlink(missing_ok=True)
        try:
            with _writing(target) as file:
                for block in self._blocks(name):
                    part = block[: length - read]  # a record grows: its beginning is what was signed
                    file.write(part)
                    found.update(part)
                    read += len(part)
                    if read == length:
                        break
                _check(same=found.hexdigest() == digest)
        except (_ChangedError, MissingFileError):
            return False
        self.taken.append(name)
        self.size += length
        return True

    def _target(self, name: str, made: Path) -> Path:
        first, *rest = PurePosixPath(name).parts
        return (Path(self._run.folder) if first == self._run.name else made / first).joinpath(*rest)

    def _blocks(self, name: str) -> Iterator[bytes]:
        return self._client.read(self._node, f"{there.link_name(self._run.name)}/{name}")


class _ChangedError(Exception):
    """A file is another one than the index says: it was replaced meanwhile, or somebody changed it."""


def _check(*, same: bool) -> None:
    if not same:
        raise _ChangedError


def _connected(run: RemoteRun) -> Client:
    try:
        return Client(run.address)
    except ConfigError as error:
        raise ConfigError(
            f"{error}. What was fetched of {run.name} before is in {run.folder}. Once the cluster answers, the same "
            "command fetches what it has, and `hotloop submit resume` goes on where the run was cut off"
        ) from error


def _located(client: Client, run: RemoteRun, say: Callable[[str], None]) -> tuple[str, str | None]:
    """Return how a run is doing, and the node that has its files; None where it has not begun."""
    try:
        found = client.job(run.submission)
    except UnknownJobError:
        say(f"The cluster at {run.address} does not know {run.name}: its head was started anew, or is another one")
        return LOST, _found(client, run)
    status = WORDS[str(found.status)]
    node = found.driver_node_id
    if node is None and found.message:
        say(f"{run.name} is {status}: {found.message.strip()[-1000:]}")
    if node and status in OVER.values() and node not in {one.name for one in client.nodes()}:
        say(f"The node of {run.name} has left the cluster")
        return status, _found(client, run)
    return status, node


def _found(client: Client, run: RemoteRun) -> str:
    """Let the node that has a run show it again, and return that node."""
    node = locating.node_of(client, run)
    locating.shown(client, run, node)
    return node


def _check_records(run: RemoteRun, wanted: Mapping[str, tuple[int, str]]) -> None:
    """Refuse a folder whose records are not what was fetched before, and write down what they will be now.

    Raises:
        ConfigError: a run has gone on in the folder here.
    """
    folder, known, records = Path(run.folder), runs.written(run.name), {}
    for name, (_, digest) in wanted.items():
        inside = PurePosixPath(name).relative_to(run.name) if name.endswith(f"/{LINES}") else None
        if inside is None:
            continue
        path, were = folder / inside, known.get(name, [])
        here = [_digest(path)] if path.is_file() else []
        if here and here[0] not in (*were, digest):
            raise _gone_on(run, path)
        records[name] = [*here, digest]
    for path in folder.rglob(LINES):  # of a fold or trial that only this machine has run
        name = str(PurePosixPath(run.name, path.relative_to(folder).as_posix()))
        if wanted and name not in records and name not in known:
            raise _gone_on(run, path)
    if records != known:
        runs.keep_written(run.name, records)


def _gone_on(run: RemoteRun, path: Path) -> ConfigError:
    return ConfigError(
        f"{path} is not what was fetched of {run.name}: the run has gone on here. To fetch it from {run.address} as "
        f"well, move the folder {run.folder} elsewhere first"
    )


def _wanted(names: Iterable[str], checkpoints: Checkpoints) -> list[str]:
    """Return the files that are fetched: not all checkpoints, and no compiled code that is here already."""
    paths = [PurePosixPath(one) for one in names]
    new = {one.stem for one in paths if one.parts[0] == listed.COMPILED and one.suffix == ".zip"} - _kept()
    return [str(one) for one in paths if (new if one.parts[0] == listed.COMPILED else _is_wanted(one, checkpoints))]


def _is_wanted(path: PurePosixPath, checkpoints: Checkpoints) -> bool:
    if path.parent.name != "checkpoints" or path.suffix != ".pt" or checkpoints == "all":
        return True
    return path.name == f"{checkpoints}.pt"


def _kept() -> set[str]:
    from hotloop.cache.compiled import compiled_store  # noqa: PLC0415 - loads torch

    store = compiled_store()
    return set() if store is None else {one.name for one in store.entries()}


def _merge(folder: Path, say: Callable[[str], None]) -> None:
    """Take compiled code that came back into the local cache, by checksum."""
    from hotloop.cache.compiled import compiled_store  # noqa: PLC0415 - loads torch
    from hotloop.cache.share import Share  # noqa: PLC0415

    store = compiled_store()
    if folder.is_dir() and store is not None:
        try:
            say(f"Compiled code from there: {Share(str(folder)).pull(store)}")
        except OSError as error:
            raise ConfigError(f"compiled code cannot be kept in {store.folder}: {error}; free the disk") from error


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
