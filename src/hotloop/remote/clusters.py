"""The clusters that the user named: their addresses, in this user's own folder. No other cluster is ever spoken to."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import ssl
import urllib.parse
from pathlib import Path

from hotloop.cache import files
from hotloop.errors import ConfigError
from hotloop.places import within

_MOST_BYTES = 2**20
_HOST = re.compile(r"\w[\w.-]*|[0-9a-f:.]+(%\w+)?")
_PROBE_SECONDS = 5.0


def state_folder() -> Path:
    """Return the folder of what is known of clusters and remote runs; only this user may read it.

    Raises:
        ConfigError: it cannot be made, or others may write to it.
    """
    base = Path(os.environ.get("XDG_STATE_HOME", ""))
    try:
        folder = (base if base.is_absolute() else Path.home() / ".local" / "state") / "hotloop" / "remote"
        files.make_folder(folder)
    except (OSError, RuntimeError) as error:
        raise ConfigError(
            f"remote runs are remembered in ~/.local/state/hotloop/remote, which cannot be used: {error}. "
            "Set XDG_STATE_HOME to a folder of your own"
        ) from error
    return folder


def known() -> list[str]:
    """Return the addresses that were used, the newest last."""
    try:
        found = json.loads(files.read_own(state_folder() / "clusters.json", _MOST_BYTES))
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as error:
        raise ConfigError(f"{state_folder() / 'clusters.json'} cannot be read: {error}. Delete it") from error
    return [normal(str(one)) for one in found]


def add(address: str) -> None:
    """Remember a cluster."""
    kept = [one for one in known() if one != normal(address)]
    _write([*kept, normal(address)])


def remove(address: str) -> None:
    """Forget a cluster."""
    _write([one for one in known() if one != normal(address)])


def chosen(address: str | None) -> str:
    """Return the address that is meant: the one that is named, or the only one that is known.

    Raises:
        ConfigError: none or several are known and none is named, or the name is no address.
    """
    if address is not None:
        return normal(address)
    found = known()
    if len(found) == 1:
        return found[0]
    several = f"several clusters are known ({', '.join(found)})" if found else "no cluster is known"
    raise ConfigError(f"{several}: name one, such as --address http://HEAD:8265")


def normal(address: str) -> str:
    """Return an address in its one form, ``http://HOST:PORT``.

    Raises:
        ConfigError: it is none.
    """
    expected = "expected the address of a Ray head's dashboard, such as http://HEAD:8265"
    if "@" in address:
        raise ConfigError(f"--address with a name or a password, which would be kept and shown: {expected}")
    try:
        parts = urllib.parse.urlsplit(address if "://" in address else f"http://{address}")
        port = (443 if parts.scheme == "https" else 8265) if parts.port is None else parts.port
        host = parts.hostname or ""
        host.encode("idna")  # as every connection does, which would fail
    except ValueError as error:
        raise ConfigError(f"--address {address}: {error}; {expected}") from error
    rest = parts.path.strip("/") or parts.query or parts.fragment
    if parts.scheme not in ("http", "https") or not _HOST.fullmatch(host) or rest or not port:
        raise ConfigError(f"--address {address}: {expected}")
    host = f"[{host}]" if ":" in host else host
    return f"{parts.scheme}://{host}:{port}"


def problem(address: str) -> str:
    """Ask a cluster for its version of Ray; return what is in the way, empty where it answers as a dashboard does."""
    try:
        within(_PROBE_SECONDS, _ask_version, address)
    except ssl.SSLError as error:
        return (
            f"no connection with TLS comes about there ({error}). If it has no TLS, add it with http:// in place of "
            "https://; if it has, let this machine trust its certificate"
        )
    except OSError as error:
        return (
            f"nobody answers there now ({error}). Start Ray there by `ray start --head`, or open a tunnel to it by "
            "`ssh -L 8265:127.0.0.1:8265 HEAD` and add http://127.0.0.1:8265"
        )
    except (http.client.HTTPException, ValueError, KeyError, TypeError, RecursionError):
        return "what answers there is no Ray dashboard; it is at port 8265 of a head, unless that was started otherwise"
    return ""


def _ask_version(address: str) -> None:
    parts = urllib.parse.urlsplit(address)
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    connection = kind(parts.hostname or "", parts.port, timeout=_PROBE_SECONDS)
    with contextlib.closing(connection):
        connection.request("GET", "/api/version")
        with connection.getresponse() as answer:
            if answer.status not in (401, 403):  # it asks for its token
                json.loads(answer.read(_MOST_BYTES))["ray_version"]


def _write(addresses: list[str]) -> None:
    try:
        files.replace(state_folder() / "clusters.json", json.dumps(addresses).encode())
    except OSError as error:
        raise ConfigError(f"{state_folder() / 'clusters.json'} cannot be written: {error}") from error
