"""Places that keep files: a folder, or any URL that fsspec knows. Files there are whole, and what hangs is left."""

from __future__ import annotations

import contextlib
import re
import shutil
import threading
import time
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from hotloop.errors import ConfigError
from hotloop.record import whole

if TYPE_CHECKING:
    from collections.abc import Callable

_T = TypeVar("_T")
ANSWER_SECONDS, MOVE_SECONDS = 60.0, 900.0
"""A place that lists nothing in the first time hangs, and so does one that moves no file in the second."""
_LEAST_BYTES_A_SECOND = 2**20
_PASSWORD = re.compile(r"(?<=://)[^/?#@:]*:(?!\d*(?:/|$)).*@")
"""Of a URL, ``user:password@``; the password may have a slash. ``host:22/path@2`` has none."""


def check_url(url: str, setting: str, nothing: str) -> str:
    """Refuse what can be no place, before anything is asked of it, and return its protocol.

    Args:
        url: a folder or a URL.
        setting: that names it.
        nothing: what null does.

    Raises:
        ConfigError: the URL is empty, has a password, or has a protocol that fsspec does not know or whose package is
            missing.
    """
    import fsspec  # type: ignore[import-untyped]  # noqa: PLC0415 - asked only where a place is named

    if not url.strip():
        raise ConfigError(f"{setting} is empty: expected a folder, or a URL that fsspec knows; null {nothing}")
    if _PASSWORD.search(url):
        raise ConfigError(
            f"{setting}={_PASSWORD.sub('***@', url)}: expected no password, which logs and records would show: give "
            "it in the environment (FSSPEC_SFTP_PASSWORD for sftp://), or where the protocol's package looks for it"
        )
    protocol: str = fsspec.core.split_protocol(url)[0] or "file"
    try:
        fsspec.get_filesystem_class(protocol)
    except (ImportError, ValueError) as error:
        raise ConfigError(f"{setting}={url}: expected a folder, or a URL that fsspec knows: {error}") from error
    return protocol


class Line:
    """Asks one thing at a time: what did not answer in time may still be done, and then over what is asked for next."""

    def __init__(self) -> None:
        self._last: threading.Thread | None = None
        self._until = 0.0

    def within(self, seconds: float, ask: Callable[..., _T], *of: Any) -> _T:
        """Ask; raise `TimeoutError` where it has not answered in time, or what was asked before has not by now."""
        if self._last is not None:
            self._last.join(max(0.0, self._until - time.monotonic()))
            if self._last.is_alive():
                raise TimeoutError("no answer yet to what was asked before")
        answers: list[tuple[Any, BaseException | None]] = []

        def asks() -> None:
            try:
                answers.append((ask(*of), None))
            except BaseException as error:  # noqa: BLE001 - raised below
                answers.append((None, error))

        self._until = time.monotonic() + seconds
        self._last = threading.Thread(target=asks, name="hotloop-place", daemon=True)
        self._last.start()
        self._last.join(seconds)
        if not answers:
            raise TimeoutError(f"no answer in {seconds:,.0f} s")
        answer, error = answers[0]
        if error is not None:
            raise error
        return answer  # type: ignore[no-any-return]


def within(seconds: float, ask: Callable[..., _T], *of: Any) -> _T:
    """Ask a place; raise `TimeoutError` where it has not answered in time. What hangs ends with the process."""
    return Line().within(seconds, ask, *of)


class Place:
    """A folder, or a URL such as ``s3://bucket/folder``, that is reached. The package of its protocol is installed.

    Args:
        url: of the place.
        line: asks it; None asks each thing by itself.

    Attributes:
        files: the file system, as fsspec has it.
        root: the place's path there.
        is_folder: whether it is a folder of this machine.

    Raises:
        Exception: of the protocol's own; the place cannot be reached.
    """

    def __init__(self, url: str, line: Line | None = None) -> None:
        import fsspec  # noqa: PLC0415 - comes with torch

        self._within = line.within if line else within
        files, root = self._within(ANSWER_SECONDS, fsspec.url_to_fs, url)  # protocols such as sftp:// connect here
        self.files: Any = files
        self.root = str(root).rstrip("/")
        self.is_folder = "file" in ((files.protocol,) if isinstance(files.protocol, str) else files.protocol)

    def put(self, source: Path, target: str) -> None:
        """Write a file whole or not at all."""
        self._within(_seconds(source.stat().st_size), self._put, source, target)

    def get(self, source: str, target: Path, size: int = 0) -> None:
        """Read a file of some size."""
        self._within(_seconds(size), self.files.get_file, source, str(target))

    def _put(self, source: Path, target: str) -> None:
        if self.is_folder:
            # Whom the folder's permissions let in may use what is there: that is what it is for.
            with source.open("rb") as content, whole(Path(target), durable=False, shared=True) as file:
                shutil.copyfileobj(content, file)
            return
        if self.files.async_impl:  # a store of objects has no folders, and an object is there once it was sent
            self.files.put_file(str(source), target)
            return
        folder = target.rpartition("/")[0]
        self.files.makedirs(folder, exist_ok=True)
        part = f"{folder}/{uuid.uuid4().hex}.part"  # a file server shows what has arrived so far
        try:
            self.files.put_file(str(source), part)
            self.files.mv(part, target)
        except BaseException:  # an interrupt as well
            with contextlib.suppress(Exception):  # what was raised first tells more
                self.files.rm_file(part)
            raise


def _seconds(size: int) -> float:
    return max(MOVE_SECONDS, size / _LEAST_BYTES_A_SECOND)
