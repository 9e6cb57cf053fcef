"""Follows a run, and resumes it where the cluster loses its node or its head, as preempted machines are lost."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, TypeVar

from hotloop.errors import ConfigError, DataError
from hotloop.remote import following, submitting
from hotloop.remote.client import Client, UnknownJobError

if TYPE_CHECKING:
    from collections.abc import Callable

    from hotloop.remote.runs import RemoteRun

_T = TypeVar("_T")
_LOOK_SECONDS, _LEAVE_SECONDS = 1.0, 60.0
"""How often, and for how long, the nodes are looked at: Ray may end a job before it counts the job's node as lost."""
_ASK_SECONDS, _HEAD_SECONDS, _JOIN_SECONDS = 5.0, 3600.0, 300.0
"""How often, and for how long, a head is waited for that does not answer; and the node of the run, once a head does."""
_SILENT = 3
"""How often a head may answer, and then tell nothing of the run's log."""


class _Rest:
    """Passes on what a log says beyond what was passed on before: who asks for a log anew gets its first line again.

    Args:
        write: called with text.

    Attributes:
        grew: something was passed on since the log was begun.
    """

    def __init__(self, write: Callable[[str], None]) -> None:
        self._write, self._said, self._at, self.grew = write, 0, 0, False

    def begin(self, *, anew: bool) -> None:
        """Begin a log with its first line: that of another job, where ``anew``."""
        self._at, self._said, self.grew = 0, 0 if anew else self._said, False

    def __call__(self, text: str) -> None:
        rest = text[max(0, self._said - self._at) :]
        self._at += len(text)
        self._said = max(self._said, self._at)
        self.grew |= bool(rest)
        self._write(rest)


def watch(run: RemoteRun, write: Callable[[str], None], say: Callable[[str], None], retries: int) -> str:
    """Print what a run prints until it is over, and return how it ended.

    A head that does not answer is waited for, for an hour. A head that was started anew knows no run: the run is
    resumed on the node that has it.

    Args:
        run: the run.
        write: called with what the run prints.
        say: called with what a person should know.
        retries: how often the run is resumed after a loss of its node or head. There may be no other end of a run that
            brings its node down by its memory. A job that is resumed starts its run again as often as are left.

    Raises:
        ConfigError: nobody answers at the cluster's address, at first or any more; or no node and no ``run.storage``
            has the run.
        DataError: the cluster answers, and tells nothing of the log; or its answer was lost as the run was resumed.
        UnknownJobError: the head was started anew before, or no resumption is left.
    """
    Client(run.address).job(run.submission)  # of a run that a new head never knew, nobody here saw how it ended
    rest, silent = _Rest(write), 0
    while True:
        try:
            ended = following.print_log(run, rest, follow=True)
            if ended != "failed" or not retries or not _has_lost_its_node(run):
                return ended
            lost = f"The node of {run.name} has left the cluster"
        except UnknownJobError:
            if not retries:
                raise
            lost = f"The head of {run.name} was started anew"
        except (ConfigError, DataError) as error:
            silent = 0 if rest.grew else silent + 1
            if silent > _SILENT:
                raise
            _wait_for_head(run, error, say)
            rest.begin(anew=False)
            continue
        say(f"{lost}. The run is resumed; times left after this: {retries - 1}")
        run = _resume(run, retries, say)
        retries -= 1
        rest.begin(anew=True)


def _wait_for_head(run: RemoteRun, error: ConfigError | DataError, say: Callable[[str], None]) -> None:
    """Wait until a cluster answers again.

    Raises:
        ConfigError: it does not within an hour.
    """
    say(f"{error}\nIt is waited for, for {_HEAD_SECONDS / 60:.0f} minutes. Ctrl-C ends the waiting, not the run")
    _until(_HEAD_SECONDS, lambda: Client(run.address))


def _resume(run: RemoteRun, retries: int, say: Callable[[str], None]) -> RemoteRun:
    """Resume a run; the node that has it may join the cluster, and answer, some time after the head was started.

    Raises:
        ConfigError: it cannot be resumed.
        DataError: the cluster's answer was lost.
    """
    return _until(_JOIN_SECONDS, lambda: submitting.resume(run, retries, say))


def _until(seconds: float, ask: Callable[[], _T]) -> _T:
    """Ask until there is an answer; raise the last error after so many seconds."""
    until = time.monotonic() + seconds
    while True:
        try:
            return ask()
        except ConfigError:
            if time.monotonic() >= until:
                raise
        time.sleep(_ASK_SECONDS)


def _has_lost_its_node(run: RemoteRun) -> bool:
    """Return whether the node of a failed run has left the cluster; a job that ended by itself has an exit code."""
    client = Client(run.address)
    until = time.monotonic() + _LEAVE_SECONDS
    while True:
        job = client.job(run.submission)
        if not job.driver_node_id or job.driver_exit_code is not None:
            return False
        if job.driver_node_id not in {one.name for one in client.nodes()}:
            return True
        if time.monotonic() >= until:
            return False
        time.sleep(_LOOK_SECONDS)
