"""The remote runs that this user submitted: one small file each, with the key that signs what comes back."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
import secrets
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from filelock import FileLock, Timeout

from hotloop.cache import files
from hotloop.errors import ConfigError
from hotloop.files import cannot
from hotloop.remote.clusters import state_folder

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_NAME = re.compile(r"\d{8}-\d{6}-[0-9a-f]{4}")
_MOST_BYTES = 2**20
_HELD_SECONDS = 600.0
"""Which another process has to fetch or to resume a run."""
_PASSWORD = re.compile(r"(?<=://)[^/\s@]*:[^\s]*@")


@dataclasses.dataclass(frozen=True)
class RemoteRun:
    """A run on a cluster.

    Args:
        name: of the run, here and there.
        address: of the cluster.
        submission: the name of its Ray job.
        key: signs what comes back; only this machine and the job know it.
        command: the verb and the arguments, as they were typed.
        folder: here, into which results are fetched.
        created: seconds since the epoch.
        gpus: that the job takes of a node.
        pip: Ray's environment of the job; empty where the cluster's own is used.
        number: of its job: each that goes on with it has the next one.
        sent: the cluster has answered that it has the job.
        storage: where its folder is copied to; empty where it is not.
        root: the folder that travelled.
        include: what travelled of it although git did not track it.
    """

    name: str
    address: str
    submission: str
    key: str
    command: tuple[str, ...]
    folder: str
    created: float
    gpus: float = 0
    pip: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    number: int = 1
    sent: bool = False
    storage: str = ""
    root: str = ""
    include: tuple[str, ...] = ()

    @property
    def shown(self) -> list[str]:
        """The command as it may be shown: without the password of a URL."""
        return [_PASSWORD.sub("***@", one) for one in self.command]

    def to_dict(self) -> dict[str, Any]:
        """Return what may be shown of it: not the key, and no password."""
        return {name: value for name, value in vars(self).items() if name != "key"} | {"command": self.shown}


def new_name() -> str:
    """Return a name that no other run has."""
    return f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"


def keep(run: RemoteRun) -> None:
    """Write a run's file.

    Raises:
        ConfigError: it cannot be written.
    """
    path = _folder() / f"{run.name}.json"
    try:
        files.replace(path, json.dumps(dataclasses.asdict(run)).encode())
    except OSError as error:
        raise ConfigError(f"the remote run cannot be remembered: {path}: {error}") from error


def is_known(name: str) -> bool:
    """Return whether a run is remembered."""
    return (_folder() / f"{name}.json").is_file()


def forget(name: str) -> None:
    """Forget a run: it never began, or its cluster is gone."""
    (_folder() / f"{name}.json").unlink(missing_ok=True)


@contextlib.contextmanager
def held(name: str) -> Iterator[None]:
    """Be the only process of this user that fetches or resumes a run; wait for another one.

    Raises:
        ConfigError: the other one takes too long, or the lock cannot be made.
    """
    path = state_folder() / "fetched" / f"{name}.lock"
    try:
        files.make_folder(path.parent)
        lock = FileLock(path, mode=0o600)
        lock.acquire(timeout=_HELD_SECONDS)
    except Timeout:
        raise ConfigError(
            f"{name}: another process fetches or resumes it since {_HELD_SECONDS:.0f} s: end that one"
        ) from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be locked: {cannot(error)}") from error
    try:
        yield
    finally:
        lock.release()


def written(name: str) -> dict[str, list[str]]:
    """Return the checksums of the records that `hotloop.remote.fetch` wrote last, by their names."""
    path = state_folder() / "fetched" / f"{name}.json"
    try:
        found: dict[str, list[str]] = json.loads(files.read_own(path, _MOST_BYTES))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}. Delete it") from error
    return found


def keep_written(name: str, records: Mapping[str, list[str]]) -> None:
    """Write down the records that are fetched, before they are.

    Raises:
        ConfigError: the file cannot be written.
    """
    path = state_folder() / "fetched" / f"{name}.json"
    try:
        files.replace(path, json.dumps(records).encode())
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {cannot(error)}") from error


def known() -> list[RemoteRun]:
    """Return all runs, the newest first."""
    return [_read(path) for path in sorted(_folder().glob("*.json"), reverse=True)]


def of_folder(folder: Path) -> RemoteRun | None:
    """Return the newest run whose results are fetched into a folder; None where there is none."""
    return next((one for one in known() if Path(one.folder) == folder.absolute()), None)


def find(given: str | None) -> RemoteRun:
    """Return a run by its name or by its folder here; the newest where none is named.

    Raises:
        ConfigError: there is none.
    """
    if given is None:
        newest = next(iter(sorted(_folder().glob("*.json"), reverse=True)), None)
        if newest is None:
            raise ConfigError("no run was submitted from here: hotloop submit --address http://HEAD:8265 -- train ...")
        return _read(newest)
    if _NAME.fullmatch(given) and (path := _folder() / f"{given}.json").is_file():
        return _read(path)
    found = of_folder(Path(given))
    if found is None:
        raise ConfigError(f"{given} is no run that was submitted from here; `hotloop submit status` lists them")
    return found


def _folder() -> Path:
    return state_folder() / "runs"


def _read(path: Path) -> RemoteRun:
    try:
        found = json.loads(files.read_own(path, _MOST_BYTES))
        lists = {one: tuple(found.get(one, ())) for one in ("command", "include")}
        return RemoteRun(**{**found, **lists})
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ConfigError(f"{path} cannot be read: {error}. Delete it, if the run is of no interest") from error
