"""Follows a run, and resumes it where the cluster loses its node, as a preempted machine is lost."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from hotloop.remote import following, submitting
from hotloop.remote.client import Client

if TYPE_CHECKING:
    from collections.abc import Callable

    from hotloop.remote.runs import RemoteRun

_LOOK_SECONDS, _LEAVE_SECONDS = 1.0, 60.0
"""How often, and for how long, the nodes are looked at: Ray may end a job before it counts the job's node as lost."""


def watch(run: RemoteRun, write: Callable[[str], None], say: Callable[[str], None], retries: int) -> str:
    """Print what a run prints until it is over, and return how it ended.

    Args:
        run: the run.
        write: called with what the run prints.
        say: called with what a person should know.
        retries: how often the run is resumed after a loss of its node. There may be no other end of a run that brings
            its node down by its memory. A job that is resumed starts its run again as often as are left.

    Raises:
        ConfigError: nobody answers at the cluster's address, or no node and no ``run.storage`` has the run.
        DataError: the connection broke, and could not be made anew.
    """
    while True:
        ended = following.print_log(run, write, follow=True)
        if ended != "failed" or not retries or not _has_lost_its_node(run):
            return ended
        say(f"The node of {run.name} has left the cluster. The run is resumed; times left after this: {retries - 1}")
        run = submitting.resume(run, retries, say)
        retries -= 1


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
