"""Follows a run on a cluster: prints what it prints, and waits for the end of a run that was asked to stop."""

from __future__ import annotations

import re
import time
from typing import TYPE_CHECKING

from hotloop.errors import DataError
from hotloop.remote.client import OVER, Client
from hotloop.remote.submitting import STOP_SECONDS

if TYPE_CHECKING:
    from collections.abc import Callable

    from hotloop.remote.runs import RemoteRun

_TRIES, _PAUSE_SECONDS = 10, 3.0
"""How often a broken connection is made anew before the command gives up."""
_OF_RAY = re.compile(r"[\d-]{10} [\d:,]{12}\tINFO \w+\.py:\d+ -- |Running entrypoint for job hotloop-")
_END_SECONDS = STOP_SECONDS + 30.0
"""How long a run that was asked to stop is looked at: then Ray has killed it."""


def print_log(run: RemoteRun, write: Callable[[str], None], *, follow: bool) -> str:
    """Print what a run has printed, and return how it is doing.

    Args:
        run: the run.
        write: called with what a reader should see.
        follow: go on until the run is over.

    Raises:
        ConfigError: nobody answers at the cluster's address.
        DataError: the connection broke, and could not be made anew.
        UnknownJobError: the cluster does not know the run's job.
    """
    client, failures, said = Client(run.address), 0, 0
    while True:
        at = 0
        try:
            for text in client.follow(run.submission) if follow else [client.logs(run.submission)]:
                new = text[max(0, said - at) :]  # who asks for a log anew gets its first line again
                write("".join(line for line in new.splitlines(True) if not _OF_RAY.match(line)))
                at += len(text)
                said, failures = max(said, at), 0
            status = client.status(run.submission)
            if not follow or status in OVER.values():
                return status
        except DataError:
            failures += 1
            if not follow or failures > _TRIES:
                raise
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
    while (status := client.status(run.submission)) not in OVER.values() and time.monotonic() < until:
        time.sleep(1.0)
    return ran, status
