"""The clusters and remote runs that this user named: small files in this user's own folder."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import secrets
import time
import urllib.parse
from pathlib import Path
from typing import Any

from hotloop.cache import files
from hotloop.errors import ConfigError

_NAME = re.compile(r"\d{8}-\d{6}-[0-9a-f]{4}")
_MOST_BYTES = 2**20
_PASSWORD = re.compile(r"(?<=://)[^/\s@]*:[^\s]*@")


@dataclasses.dataclass(frozen=True)
class RemoteRun:
    """A run on a cluster.

    Args:
        name: of the run, here and there.
        address: of the cluster.
        command: the verb and the arguments, as they were typed.
        folder: here, into which results are fetched.
        root: the folder that travelled.
        gpus: that the job takes of a node.
        number: of its job: each that goes on with it has the next one.
        storage: the URL that its folder is copied to; empty where it is not.
        pip: the file of requirements that is installed for it; empty without one.
    """

    name: str
    address: str
    command: tuple[str, ...]
    folder: str
    root: str
    gpus: float = 0
    number: int = 1
    storage: str = ""
    pip: str = ""

    @property
    def submission(self) -> str:
        """The name of its Ray job."""
        return f"hotloop-{self.name}-{self.number}"

    def to_dict(self) -> dict[str, Any]:
        """Return what may be shown of it: no password."""
        return {**vars(self), "command": [_PASSWORD.sub("***@", one) for one in self.command]}


def new_name() -> str:
    """Return a name that no other run has."""
    return f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"


def state_folder() -> Path:
    """Return the folder of the remote runs; only this user may read it.

    Raises:
        ConfigError: it cannot be made, or others may write to it.
    """
    base = Path(os.environ.get("XDG_STATE_HOME", ""))
    folder = (base if base.is_absolute() else Path.home() / ".local" / "state") / "hotloop" / "remote"
    try:
        files.make_folder(folder)
    except OSError as error:
        raise ConfigError(
            f"remote runs are remembered in {folder}, which cannot be used: {error}. Set XDG_STATE_HOME to a folder of "
            "your own"
        ) from error
    return folder


def keep(run: RemoteRun) -> None:
    """Write a run's file.

    Raises:
        ConfigError: it cannot be written.
    """
    path = state_folder() / f"{run.name}.json"
    try:
        files.replace(path, json.dumps(dataclasses.asdict(run)).encode())
    except OSError as error:
        raise ConfigError(f"the remote run cannot be remembered: {path}: {error}") from error


def forget(name: str) -> None:
    """Forget a run: it never began, or its cluster is gone."""
    (state_folder() / f"{name}.json").unlink(missing_ok=True)


def known() -> list[RemoteRun]:
    """Return all runs, the newest first."""
    return [_read(path) for path in sorted(state_folder().glob("*.json"), reverse=True)]


def of_folder(folder: Path) -> RemoteRun | None:
    """Return the newest run whose results are fetched into a folder; None where there is none."""
    return next((one for one in known() if Path(one.folder) == folder.absolute()), None)


def find(given: str | None) -> RemoteRun:
    """Return a run by its name or by its folder here; the newest where none is named.

    Raises:
        ConfigError: there is none.
    """
    if given is None:
        found = next(iter(known()), None)
    elif _NAME.fullmatch(given):
        found = next((one for one in known() if one.name == given), None)
    else:
        found = of_folder(Path(given))
    if found is None:
        raise ConfigError(
            f"{given or 'no run'} was submitted from here; `hotloop submit status` lists the runs, and `hotloop submit "
            "--address http://HEAD:8265 -- train ...` begins one"
        )
    return found


def address(given: str | None) -> str:
    """Return the address that is meant, as ``http://HOST:PORT``: the one that is named, or that of the newest run.

    Raises:
        ConfigError: none is named or known, or the name is no address.
    """
    if given is None:
        newest = next(iter(known()), None)
        if newest is None:
            raise ConfigError("no cluster is known: name one, such as --address http://HEAD:8265")
        return newest.address
    expected = "expected the address of a Ray head's dashboard, such as http://HEAD:8265"
    if "@" in given:
        raise ConfigError(f"--address with a name or a password, which would be kept and shown: {expected}")
    try:
        parts = urllib.parse.urlsplit(given if "://" in given else f"http://{given}")
        port = (443 if parts.scheme == "https" else 8265) if parts.port is None else parts.port
    except ValueError as error:
        raise ConfigError(f"--address {given}: {error}; {expected}") from error
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.path.strip("/") or parts.query:
        raise ConfigError(f"--address {given}: {expected}")
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    return f"{parts.scheme}://{host}:{port}"


def _read(path: Path) -> RemoteRun:
    try:
        found = json.loads(files.read_own(path, _MOST_BYTES))
        return RemoteRun(**{**found, "command": tuple(found["command"])})
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ConfigError(f"{path} cannot be read: {error}. Delete it, if the run is of no interest") from error
