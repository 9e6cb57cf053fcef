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


def print_log(run: RemoteRun, write: Callable[[str], None], *, follow: bool) -> str:
    """Print what a run has printed, and return how it is doing.

    Args:
        run: the run.
        write: called with text.
        follow: go on until the run is over.

    Raises:
        ConfigError: nobody answers at the cluster's address.
        DataError: the connection broke, and could not be made anew.
        UnknownJobError: the cluster does not know the run's job.
    """
    client, printed, failures = Client(run.address), 0, 0
    while True:
        try:
            at = 0
            for text in client.follow(run.submission) if follow else [client.logs(run.submission)]:
                write(shown(text[max(0, printed - at) :]))  # a new connection begins with the first line
                at += len(text)
                printed, failures = max(printed, at), 0
            status = str(client.job(run.submission).status)
            if status in OVER or not follow:
                return WORDS[status]
        except DataError as error:
            failures += 1
            with contextlib.suppress(
                DataError
            ):  # a new head refuses the log of a job that it does not know by a number
                status = str(client.job(run.submission).status)
                if status in OVER and failures > _TRIES // 2:  # the log went with its node
                    return WORDS[status]
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
