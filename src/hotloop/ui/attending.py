"""Submits a run to a cluster and follows it: ``python -m hotloop.ui.attending FOLDER ADDRESS VERB [SETTING=VALUE]...``.

What the run writes and prints arrives in the folder while it runs, so that the page shows it like a run of this
machine. This process may be killed: the run goes on, and another one follows it later. It stops the run only where the
page asks for that.
"""

from __future__ import annotations

import codecs
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from hotloop import files
from hotloop.errors import DataError, HotloopError
from hotloop.record.process import started
from hotloop.remote import fetch, following, runs, submitting
from hotloop.remote.client import Client
from hotloop.remote.locating import NowhereError
from hotloop.ui import processes

if TYPE_CHECKING:
    from hotloop.remote.runs import RemoteRun

LEAST_SECONDS, MOST_SECONDS = 2.0, 60.0
"""How often is fetched; where the cluster does not answer, more and more rarely."""
_SHARE = 0.1
"""The share of time spent fetching: a long record is fetched less often."""
_ENDED_WELL = "finished"


def main(folder: Path, address: str, command: list[str]) -> int:
    """Submit a run or go on with the one of this folder, follow it to its end, and return an exit code."""
    try:
        run = runs.of_folder(folder)
        run = _again(run) if run else _submitted(folder, address, command)
    except HotloopError as error:
        _say(f"hotloop: {error}")
        return 2
    status = Attendant(run, folder).follow()
    _say(f"{run.name} is {status}")
    return 0 if status == _ENDED_WELL else 1


def _submitted(folder: Path, address: str, command: list[str]) -> RemoteRun:
    run = submitting.submit(submitting.Request(address, command, folder=folder), _say)
    assert run is not None  # only a dry run gives none
    _say(f"Submitted: {run.name}. In a terminal: hotloop submit logs -f {run.name}")
    return run


def _again(run: RemoteRun) -> RemoteRun:
    """Return the run, resumed where it is over before its end."""
    status = fetch.status_of(run)
    if status not in fetch.ENDED or status == _ENDED_WELL:
        return run
    try:
        return submitting.resume(run, 0, _say)
    except NowhereError:
        if run.sent:
            raise
    runs.forget(run.name)  # this process was killed before the cluster had the run
    return _submitted(Path(run.folder), run.address, list(run.command))


class Attendant:
    """Follows a run.

    Args:
        run: on the cluster.
        folder: here.
    """

    def __init__(self, run: RemoteRun, folder: Path) -> None:
        self._run, self._folder = run, folder
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._printed, self._trouble, self._asked = 0, "", False
        self._process = processes.Process(os.getpid(), started(os.getpid()))

    def follow(self) -> str:
        """Fetch what is new until the run is over; return how it ended."""
        pause = LEAST_SECONDS
        while True:
            began = time.monotonic()
            try:
                if not runs.is_known(self._run.name):  # `hotloop runs rm --forget` has deleted it, and its folder
                    return fetch.LOST
                self._stop_if_asked()
                status = fetch.fetch(self._run, "none", _say).status
                self._print_log()
                if status in fetch.ENDED:
                    for one in ("best", "last"):
                        fetch.fetch(self._run, one, _say)
                    return status
                pause, self._trouble = max(LEAST_SECONDS, (time.monotonic() - began) / _SHARE), ""
            except HotloopError as error:
                pause = min(MOST_SECONDS, 2 * pause)
                self._tell(error)
            self._wait(pause)

    def _wait(self, seconds: float) -> None:
        """Wait, but no longer than until the page asks for a stop."""
        until = time.monotonic() + seconds
        while time.monotonic() < until and (self._asked or not self._is_asked):
            time.sleep(min(LEAST_SECONDS, max(0.0, until - time.monotonic())))

    @property
    def _is_asked(self) -> bool:
        return processes.asked_to_stop(self._folder, self._process)

    def _stop_if_asked(self) -> None:
        if not self._asked and self._is_asked:
            Client(self._run.address).stop(self._run.submission)
            self._asked = True
            _say("It was asked to stop: it has a minute to save a checkpoint")

    def _print_log(self) -> None:
        try:
            with files.open_regular(self._folder / fetch.LOG) as file:
                if file.seek(0, os.SEEK_END) < self._printed:  # of a new job: the run was resumed
                    self._printed = 0
                file.seek(self._printed)
                new = file.read()
        except FileNotFoundError:
            return
        _write(following.shown(self._decoder.decode(new)))
        self._printed += len(new)

    def _tell(self, error: HotloopError) -> None:
        """Say what is in the way once, however long it lasts; before its first files a run has none to fetch."""
        if isinstance(error, DataError) and not (self._folder / fetch.LOG).exists():
            return
        if str(error) != self._trouble:
            self._trouble = str(error)
            _say(f"hotloop: {error}. The run goes on there; this is tried again")


def _say(line: str) -> None:
    _write(f"{line}\n")


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2], sys.argv[3:]))
