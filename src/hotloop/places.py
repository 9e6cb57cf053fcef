"""Places that keep files: a folder, or any URL that fsspec knows.

A reader of a place sees complete files only. A place that does not answer in time raises `TimeoutError`.
"""

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
from hotloop.files import whole

if TYPE_CHECKING:
    from collections.abc import Callable

_T = TypeVar("_T")
ANSWER_SECONDS, MOVE_SECONDS = 60.0, 900.0
"""Time limits: for an answer such as a listing, and at least for copying or deleting files."""
_LEAST_BYTES_A_SECOND = 2**20
_PASSWORD = re.compile(r"(?<=://)[^/?#@:]*:(?!\d*(?:/|$)).*@")
"""Finds ``user:password@`` in a URL. The password may contain a slash; ``host:22/path@2`` has no password."""


def check_url(url: str, setting: str, nothing: str) -> str:
    """Check the value of a setting that names a place, without connecting to it, and return its protocol.

    Args:
        url: the value, a folder or a URL.
        setting: the setting's name.
        nothing: what null does, for the message.

    Raises:
        ConfigError: the value is empty or has a password, or fsspec lacks the protocol or its package.
    """
    import fsspec  # type: ignore[import-untyped]  # noqa: PLC0415 - needed only if a setting names a place

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
    """Calls a place one call at a time, each with a time limit.

    A call that ran out of time may still finish. Later calls wait for it, or it could overwrite what they have written.
    """

    def __init__(self) -> None:
        self._last: threading.Thread | None = None
        self._until = 0.0

    def within(self, seconds: float, ask: Callable[..., _T], *of: Any) -> _T:
        """Call a function in a thread, and return its result.

        Raises:
            TimeoutError: the function has not returned in time, or the call before it still runs.
        """
        if self._last is not None:
            self._last.join(max(0.0, self._until - time.monotonic()))
            if self._last.is_alive():
                raise TimeoutError("no answer yet to what was asked before")
        answers: list[tuple[Any, BaseException | None]] = []

        def asks() -> None:
            try:
                answers.append((ask(*of), None))
            except BaseException as error:  # noqa: BLE001 - raised in the calling thread, below
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
    """Call a function in a thread of its own, and return its result. A call that hangs ends with the process.

    Raises:
        TimeoutError: the function has not returned in time.
    """
    return Line().within(seconds, ask, *of)


class Place:
    """A folder, or a URL such as ``s3://bucket/folder``, that this process is connected to.

    Args:
        url: the folder or URL, which `check_url` has accepted.
        line: makes all calls, one at a time; None makes each call by itself.

    Attributes:
        files: fsspec's file system.
        root: the place's path in the file system.
        is_folder: whether the place is a folder on this machine.

    Raises:
        Exception: the place cannot be reached. Each protocol has exceptions of its own.
    """

    def __init__(self, url: str, line: Line | None = None) -> None:
        import fsspec  # noqa: PLC0415 - comes with torch

        self._within = line.within if line else within
        files, root = self._within(ANSWER_SECONDS, fsspec.url_to_fs, url)  # protocols such as sftp:// connect here
        self.files: Any = files
        self.root = str(root).rstrip("/")
        self.is_folder = "file" in ((files.protocol,) if isinstance(files.protocol, str) else files.protocol)

    def put(self, source: Path, target: str) -> None:
        """Copy a file to the place. Its readers see the complete file or none."""
        self._within(_seconds(source.stat().st_size), self._put, source, target)

    def get(self, source: str, target: Path, size: int = 0) -> None:
        """Copy a file from the place. The time limit grows with its size in bytes."""
        self._within(_seconds(size), self.files.get_file, source, str(target))

    def _put(self, source: Path, target: str) -> None:
        if self.is_folder:
            # The file gets the folder's permissions: whoever may enter the folder may use its files.
            with source.open("rb") as content, whole(Path(target), durable=False, shared=True) as file:
                shutil.copyfileobj(content, file)
            return
        if self.files.async_impl:  # an object store: it has no folders, and shows an object once it is complete
            self.files.put_file(str(source), target)
            return
        folder = target.rpartition("/")[0]
        self.files.makedirs(folder, exist_ok=True)
        part = f"{folder}/{uuid.uuid4().hex}.part"  # a file server shows incomplete files
        try:
            self.files.put_file(str(source), part)
            self.files.mv(part, target)
        except BaseException:  # KeyboardInterrupt as well
            with contextlib.suppress(Exception):  # the first exception says more
                self.files.rm_file(part)
            raise


def _seconds(size: int) -> float:
    return max(MOVE_SECONDS, size / _LEAST_BYTES_A_SECOND)
