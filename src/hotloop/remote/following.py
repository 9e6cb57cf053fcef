"""Prints what a run on a cluster prints; a connection that breaks is made anew."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from hotloop.errors import DataError
from hotloop.remote import signed
from hotloop.remote.client import OVER, WORDS, Client

if TYPE_CHECKING:
    from collections.abc import Callable

    from hotloop.remote.runs import RemoteRun

_TRIES, _PAUSE_SECONDS = 10, 3.0
"""How often a broken connection is made anew before the command gives up."""


def print_log(run: RemoteRun, write: Callable[[str], None], *, follow: bool) -> str:
    """Print what a run has printed, and return how it is doing.

    Args:
        run: the run.
        write: called with text.
        follow: go on until the run is over.

    Raises:
        ConfigError: nobody answers at the cluster's address.
        DataError: the connection broke, and could not be made anew.
    """
    client, printed, failures = Client(run.address), 0, 0
    while True:
        try:
            at = 0
            for text in client.follow(run.submission) if follow else [client.logs(run.submission)]:
                write(_shown(text[max(0, printed - at) :]))  # a new connection begins with the first line
                at += len(text)
                printed, failures = max(printed, at), 0
            status = str(client.job(run.submission).status)
            if status in OVER or not follow:
                return WORDS[status]
        except DataError as error:
            failures += 1
            if not follow or failures > _TRIES:
                raise DataError(
                    f"{error}. The run goes on without this command: hotloop submit logs -f {run.name}"
                ) from error
        time.sleep(_PAUSE_SECONDS)


def _shown(text: str) -> str:
    return "".join(line for line in text.splitlines(True) if not signed.is_signed(line))
