"""Runs the server: its socket, the address that it prints, and the browser that it opens."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import os
import platform
import socket
import sys
import tempfile
import webbrowser
from pathlib import Path
from typing import TYPE_CHECKING

import uvicorn

from hotloop.errors import ConfigError
from hotloop.ui.app import application
from hotloop.ui.security import Access

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

USUAL_PORT = 8765
_PAGE = '<!doctype html><meta http-equiv="refresh" content="0; url={url}"><a href="{url}">hotloop</a>'


def serve(  # noqa: PLR0913, PLR0917 - the options of the command
    root: Path, host: str, port: int | None, known: bool, browser: bool, say: Callable[[str], None]
) -> None:
    """Serve a runs folder until Ctrl-C.

    Args:
        root: the runs folder.
        host: the address to listen on.
        port: to listen on; None takes the usual one, or a free one where that is taken.
        known: whether the user knows what another address than this machine's own means.
        browser: whether to open a browser where there is one.
        say: prints a line.

    Raises:
        ConfigError: an address that others reach without ``known``, or that cannot be listened on.
    """
    if root.exists() and not root.is_dir():
        raise ConfigError(f"{root}: expected a folder with runs; it is a file")
    check_host(host, known=known)
    with contextlib.closing(_socket(host, port)) as listening:
        number = listening.getsockname()[1]
        names = frozenset() if is_local(host) else frozenset({host, platform.node().lower(), socket.getfqdn().lower()})
        base = f"http://{f'[{host}]' if ':' in host else host}:{number}/?token="

        def renewed(token: str) -> None:
            with contextlib.suppress(OSError):  # a terminal that was closed shows nothing, and the page goes on
                say(f"That address was used, and is good once. The next browser opens {base}{token}")

        access = Access(names, renewed)
        url = base + access.token
        say(f"hotloop shows {root} at {url}")
        say("Whoever opens this address first can start programs as you. Ctrl-C ends the page; runs go on.")
        server = uvicorn.Server(
            uvicorn.Config(
                application(root, access), log_level="warning", access_log=False, timeout_graceful_shutdown=2,
                server_header=False,
            )
        )  # fmt: skip
        logging.getLogger("uvicorn.error").addFilter(_is_no_end)
        with _opened(url) if browser and _has_browser() else contextlib.nullcontext():
            server.run(sockets=[listening])


def _is_no_end(record: logging.LogRecord) -> bool:
    """Return whether a line of the log is no news of an answer that Ctrl-C has cut off: that is what it is for."""
    error = record.exc_info[1] if record.exc_info else None
    return not isinstance(error, asyncio.CancelledError) and "graceful shutdown" not in record.getMessage()


def is_local(host: str) -> bool:
    """Return whether an address is this machine's own, which no other machine reaches."""
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"


def check_host(host: str, *, known: bool) -> None:
    """Refuse an address that other machines reach, unless the user knows what that means.

    Raises:
        ConfigError: it is such an address.
    """
    if not is_local(host) and not known:
        raise ConfigError(
            f"--host {host}: other machines reach this address, without encryption: whoever reads the token on the way "
            "can start programs as you. From another machine use `ssh -L 8765:127.0.0.1:8765 MACHINE` and no --host; "
            "or add --i-know"
        )


def _socket(host: str, port: int | None) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    tried = [USUAL_PORT, 0] if port is None else [port]
    for number in tried:
        found = socket.socket(family, socket.SOCK_STREAM)
        if os.name != "nt":  # where it would let two servers share a port
            found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            found.bind((host, number))
            found.listen(128)
        except (OSError, OverflowError) as error:
            found.close()
            if number == tried[-1]:
                raise ConfigError(f"--host {host} --port {number} cannot be used: {error}. Name another") from error
        else:
            return found
    raise AssertionError("one of the ports was used or refused")


def _has_browser() -> bool:
    """Return whether there is a screen for a browser: without one, a browser for text would take the terminal."""
    return sys.platform != "linux" or any(os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY"))


@contextlib.contextmanager
def _opened(url: str) -> Iterator[None]:
    """Open a browser by a file that only its owner reads: everybody sees commands, and the addresses in them."""
    with tempfile.TemporaryDirectory(prefix="hotloop-ui-") as folder:
        page = Path(folder) / "open.html"
        page.write_text(_PAGE.format(url=url), encoding="utf-8")
        page.chmod(0o600)
        webbrowser.open(page.as_uri())
        yield
