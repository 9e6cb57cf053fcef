"""Follows a run, and resumes it where the cluster loses its node or its head, as preempted machines are lost."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from hotloop.errors import ConfigError, DataError
from hotloop.remote import following, runs, submitting
from hotloop.remote.client import Client, UnknownJobError, UnreachableError
from hotloop.remote.locating import NowhereError, SilentError
from hotloop.remote.submitting import AnswerLostError

if TYPE_CHECKING:
    from collections.abc import Callable

    from hotloop.remote.runs import RemoteRun

_LOOK_SECONDS, _LEAVE_SECONDS = 1.0, 60.0
"""How often, and for how long, the nodes are looked at: Ray may end a job before it counts the job's node as lost."""
_ASK_SECONDS, _HEAD_SECONDS, _JOIN_SECONDS = 5.0, 3600.0, 300.0
"""How often, and for how long, a head is waited for that does not answer; and the node of the run, once a head does."""
_SILENT = 3
"""How often a head may answer, and then tell nothing of the run's log."""


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
    _look_first(run, say)
    rest, silent, allowed = following.Rest(write), 0, retries
    while True:
        try:
            ended = following.print_log(run, rest, follow=True)
            if ended != "failed" or not retries or not _has_lost_its_node(run):
                return ended
            lost, by_storage_after = f"The node of {run.name} has left the cluster", 0.0
        except UnknownJobError:
            if not retries and runs.find(run.name).number == run.number:
                raise UnknownJobError(
                    f"the head of {run.name} was started anew, and --retries {allowed} is used up: go on by "
                    f"hotloop submit resume {run.name}"
                ) from None
            lost, by_storage_after = f"The head of {run.name} was started anew", _JOIN_SECONDS
        except (ConfigError, DataError) as error:
            silent, rest.heard = 0 if rest.heard else silent + 1, False
            if silent > _SILENT:
                raise
            _wait_for_head(run, error, say)
            continue
        if runs.find(run.name).number == run.number:
            say(f"{lost}. The run is being resumed, which takes a minute. After this, {retries - 1} of {allowed} left")
            run = _resumed(run, retries, by_storage_after, say)
            retries -= 1
        else:
            say(f"{lost}. Another command has resumed the run")
            run = runs.find(run.name)
        rest = following.Rest(write)


def _look_first(run: RemoteRun, say: Callable[[str], None]) -> None:
    """Wait until the cluster answers, and see that it knows the run's job.

    Raises:
        ConfigError: as of `_wait_for_head`.
        UnknownJobError: it does not know the job: nobody here has seen how the run ended, and it may be finished.
    """
    while True:
        try:
            Client(run.address).job(run.submission)
        except UnknownJobError:
            raise UnknownJobError(
                f"the cluster does not know the job of {run.name}: its head was started anew since. --retries resumes "
                f"what this command has seen running alone: hotloop submit resume {run.name} goes on with the run, "
                f"hotloop submit fetch {run.name} takes what the disk has"
            ) from None
        except (ConfigError, DataError) as error:
            _wait_for_head(run, error, say)
        else:
            return
        time.sleep(_ASK_SECONDS)


def _wait_for_head(run: RemoteRun, error: ConfigError | DataError, say: Callable[[str], None]) -> None:
    """Wait until a cluster answers again, and say what is in the way whenever that changes.

    Raises:
        UnreachableError: it does not within an hour.
        ConfigError: it answers, and is no cluster for this machine: another version of Ray, say.
    """
    said = str(error.__cause__ if isinstance(error.__cause__, DataError) else error)
    say(
        f"{said}\nThe run may be lost. Waiting up to {_HEAD_SECONDS / 60:.0f} minutes for the cluster; a run that it "
        f"does not know any more is resumed then. Ctrl-C ends the waiting; later: hotloop submit resume {run.name}"
    )
    until = time.monotonic() + _HEAD_SECONDS
    while True:
        try:
            Client(run.address)
        except UnreachableError as now:
            if time.monotonic() >= until:
                raise
            if str(now) != said:
                said = str(now)
                say(said)
        else:
            return
        time.sleep(_ASK_SECONDS)


def _resumed(run: RemoteRun, retries: int, by_storage_after: float, say: Callable[[str], None]) -> RemoteRun:
    """Resume a run, and return it; or what another process has resumed meanwhile.

    The node that has the run may join the cluster, and answer, some time after the head was started. Its storage has an
    older checkpoint, and is taken once the node was waited for, ``by_storage_after`` seconds.

    Raises:
        ConfigError: it cannot be resumed.
        DataError: the cluster does not answer.
    """
    began = time.monotonic()
    while (known := runs.find(run.name)).number == run.number:
        waited = time.monotonic() - began
        try:
            return submitting.resume(run, retries, say, from_storage=waited >= by_storage_after)
        except AnswerLostError:
            continue  # the run is known by its new job, which may have begun
        except (NowhereError, SilentError, UnreachableError, DataError):
            if waited >= _JOIN_SECONDS:
                raise
        time.sleep(_ASK_SECONDS)
    return known


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
