"""Follows a run on a cluster: prints what it prints, and waits for the end of a run that was asked to stop."""

from __future__ import annotations

import contextlib
import re
import time
from typing import TYPE_CHECKING

from hotloop.errors import DataError
from hotloop.remote import signed
from hotloop.remote.client import OVER, WORDS, Client
from hotloop.remote.jobs import STOP_SECONDS

if TYPE_CHECKING:
    from collections.abc import Callable

    from hotloop.remote.runs import RemoteRun

_TRIES, _PAUSE_SECONDS = 10, 3.0
"""How often a broken connection is made anew before the command gives up."""
_OF_RAY = re.compile(r"[\d-]{10} [\d:,]{12}\tINFO \w+\.py:\d+ -- |Running entrypoint for job hotloop-")
_LOOK_SECONDS, _END_SECONDS = 1.0, STOP_SECONDS + 30.0
"""How often a run that was asked to stop is looked at, and for how long: then Ray has killed it."""


class Rest:
    """Writes what a log says beyond what it said before: who asks for a log anew gets its first line again.

    Args:
        write: called with what a reader should see.

    Attributes:
        heard: the log has told something since it was asked for, old or new.
    """

    def __init__(self, write: Callable[[str], None]) -> None:
        self._write, self._said, self._at, self.heard = write, 0, 0, False

    def begin(self) -> None:
        """Begin with the log's first line."""
        self._at = 0

    def tell(self, text: str) -> None:
        """Take more of the log, and write what is new."""
        self._write(shown(text[max(0, self._said - self._at) :]))
        self._at += len(text)
        self._said, self.heard = max(self._said, self._at), True


def print_log(run: RemoteRun, rest: Rest, *, follow: bool) -> str:
    """Print what a run has printed, and return how it is doing.

    Args:
        run: the run.
        rest: writes its log.
        follow: go on until the run is over.

    Raises:
        ConfigError: nobody answers at the cluster's address.
        DataError: the connection broke, and could not be made anew.
        UnknownJobError: the cluster does not know the run's job.
    """
    client, failures = Client(run.address), 0
    while True:
        try:
            rest.begin()
            for text in client.follow(run.submission) if follow else [client.logs(run.submission)]:
                rest.tell(text)
                failures = 0
            status = str(client.job(run.submission).status)
            if status in OVER or not follow:
                return WORDS[status]
        except DataError as error:
            failures += 1
            # Of a job that it does not know, a new head refuses the log with a number alone.
            with contextlib.suppress(DataError):
                client.job(run.submission)
            if not follow or failures > _TRIES:
                raise DataError(
                    f"{error}. The run goes on without this command: hotloop submit logs -f {run.name}"
                ) from error
        time.sleep(_PAUSE_SECONDS)


def stop(run: RemoteRun, say: Callable[[str], None]) -> tuple[bool, str]:
    """Ask a run to stop and wait until it has ended; return whether it ran, and how it is doing then.

    Args:
        run: the run.
        say: called once the run was asked.

    Raises:
        ConfigError: nobody answers at the cluster's address.
        DataError: the cluster did not take the question, or does not answer any more.
    """
    client = Client(run.address)
    ran = client.stop(run.submission)
    if ran:
        say(f"{run.name} was asked to stop: it has {STOP_SECONDS} s to save a checkpoint")
    until = time.monotonic() + _END_SECONDS
    while True:
        try:
            status = str(client.job(run.submission).status)
            if status in OVER or time.monotonic() >= until:
                return ran, WORDS[status]
        except DataError as error:
            if time.monotonic() >= until:
                told = f"Whether {run.name} has stopped, hotloop submit status {run.name} says"
                raise DataError(f"{error}. {told}") from error
        time.sleep(_LOOK_SECONDS)


def shown(text: str) -> str:
    """Return what of a log is for a reader: not the answers that jobs sign, and not what Ray says of its own work."""
    return "".join(line for line in text.splitlines(True) if not signed.is_signed(line) and not _OF_RAY.match(line))
