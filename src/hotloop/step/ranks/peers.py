"""The other processes of a run: what they agree on before they change how steps run, and how they end together.

Every process makes the same collectives in the same order, or all of them wait for ever. So whatever makes a process
run a step twice (a proof), or wait long before its next collective (a compile), is agreed in a step that all take part
in; and a step that has begun a collective is never repeated by one process alone.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import enum
import itertools
from typing import Any

import torch
from torch import distributed

from hotloop._torch.collectives import AGREED, collectives_begun, groups, patience, store, timeout_of
from hotloop.errors import StepLostError, describe
from hotloop.step.obstacle import CandidateFailedError

VOTE_SECONDS = 300.0
"""How long a vote waits, at most, for a process that is out of batches, or at something else."""
_LOST = "hotloop/lost"
_UNANSWERED = "hotloop/unanswered"
_VOTES = "hotloop/votes"
_SLOW = "Timed out waiting"
"""What gloo says of a collective that nobody else began in time."""
_ENDS = ("Connection closed by peer", "Connection reset by peer", "NCCL communicator was aborted", _SLOW)
"""What a collective raises when another process has gone."""
_meetings = itertools.count()
"""Numbers the meetings: all processes meet equally often, so a number is the same in all of them."""
_LOOK_SECONDS = 2.0


class Vote(enum.IntEnum):
    """What one process says of an agreed step; the lowest of all is done by all."""

    NEVER = 0
    NOT_NOW = 1
    YES = 2


_OUTCOMES = tuple(str(int(vote)) for vote in Vote)


class Peers:
    """The processes of this run, this one among them."""

    def __init__(self) -> None:
        self.rank, self.size = distributed.get_rank(), distributed.get_world_size()
        self._group: Any = None
        self._meeting = self._votes = 0
        self.unanswered = ""
        """Why there are no votes any more, where a process did not take part in one."""
        self._broken = ""
        """Why the next vote is not answered: this process gave up waiting in one that the others went through."""

    def meet(self) -> None:
        """Make the group that votes are taken in: all processes have to, at the same place, or those that do wait."""
        # On the CPU whatever the run's backend is, and with a patience of its own: it carries one number now and then.
        # With half of the user's own: a process that is out of batches may wait for the others in a collective of the
        # run (DDP's Join does), and has to be there still when they go on without votes.
        theirs = timeout_of(distributed.group.WORLD)
        seconds = min(VOTE_SECONDS, theirs.total_seconds() / 2 if theirs is not None else VOTE_SECONDS)
        self._meeting = next(_meetings)
        self._group = distributed.new_group(backend="gloo", timeout=dt.timedelta(seconds=seconds))

    def agree(self, vote: Vote) -> Vote:
        """Return the lowest vote of all processes; each has to ask in the same step.

        Where a process takes no part in time, the outcome is `Vote.NEVER` in all others, and `unanswered` says why. A
        process may give up waiting just as the last one votes, so that others have an outcome. What the first process
        writes into the store counts for all.

        Raises:
            StepLostError: a process has ended meanwhile.
        """
        if self.unanswered:
            return Vote.NEVER
        self._votes += 1
        lowest, why = torch.tensor([int(vote)]), self._broken
        if not why:
            waited = timeout_of(self._group)
            try:
                distributed.all_reduce(lowest, distributed.ReduceOp.MIN, group=self._group)
            except RuntimeError as error:
                why = self._not_answered(error, waited)
                if not why:
                    raise StepLostError(self._ended(error)) from error
        settled = self._settled(why or str(int(lowest)))
        if settled not in _OUTCOMES:
            self.unanswered = settled
            return Vote.NEVER
        self._broken = why
        return Vote(int(settled))

    def ready(self, error: Exception | None) -> None:
        """Begin a run of a proof in all processes, or in none because one had no memory for the copies beside it.

        Args:
            error: what kept this process from making its copies; None where it made them.

        Raises:
            CandidateFailedError: no process begins.
        """
        if self.agree(Vote.YES if error is None else Vote.NEVER) is Vote.YES:
            return
        cause = error or MemoryError(self.unanswered or "another process has no memory for the copies of a proof")
        raise CandidateFailedError(began=False) from cause

    def stays(self, *, stays: bool) -> bool:
        """Return whether a rehearsed step stays in any process: then it stays in all, whose collectives would wait."""
        return self.agree(Vote.NOT_NOW if stays else Vote.YES) is not Vote.YES

    def _settled(self, ours: str) -> str:
        """Return the outcome of a vote that counts in all processes: what the first of them has written down."""
        key = f"{_VOTES}/{self._meeting}"
        try:
            found = store().compare_set(f"{key}/{self._votes}", "", ours)
            if ours in _OUTCOMES and self.rank == 0:  # all have begun this vote, so nobody reads the one before
                store().delete_key(f"{key}/{self._votes - 1}")
        except RuntimeError as error:
            raise StepLostError(self._ended(error)) from error
        return str(found.decode())

    def _not_answered(self, error: Exception, waited: dt.timedelta | None) -> str:
        """Say why a vote was not answered in time, here or in a process that left before; empty where it was not so."""
        if _SLOW in str(error):
            seconds = waited.total_seconds() if waited is not None else VOTE_SECONDS
            why = f"rank {self.rank} waited {seconds:g} s for another process to reach the same step"
            with contextlib.suppress(Exception):  # the others then find it out by waiting themselves
                store().set(self._unanswered, why)
            return why
        with contextlib.suppress(Exception):  # nobody waited: a process has ended
            store().wait([self._unanswered], dt.timedelta(seconds=_LOOK_SECONDS))
            return str(store().get(self._unanswered).decode())
        return ""

    def begun(self) -> int:
        """Count the collectives of the run that this process has begun so far."""
        return collectives_begun([group for group in groups() if group is not self._group])

    def patient(self) -> contextlib.AbstractContextManager[None]:
        """Let the run's collectives, and votes, wait for a process that compiles, while the block runs."""
        return patience.held(AGREED)

    @property
    def _unanswered(self) -> str:
        return f"{_UNANSWERED}/{self._meeting}"

    @property
    def _lost(self) -> str:
        """Where a process of this meeting says why it ends; another loop, later, has a meeting of its own."""
        return f"{_LOST}/{self._meeting}"

    def lost(self, error: Exception, where: str, *, ours: bool) -> Exception:
        """Return the exception to raise for a step that failed after a collective: no process may repeat it alone.

        Args:
            error: what the step raised.
            where: tier and step.
            ours: compiled code of this process failed; else it is the user's own error, or another process's end.
        """
        if ours:
            why = f"rank {self.rank}: {describe(error.__cause__ or error)} {where}"
            with contextlib.suppress(Exception):  # the others then say no more than that a process has ended
                store().set(self._lost, why)
            return StepLostError(
                f"{why}, after the step's first collective: the other processes are in it, and it cannot be repeated. "
                "All of them end; start again from the last checkpoint, with run='eager'"
            )
        chain = [str(cause) for cause in (error, error.__cause__, error.__context__) if cause is not None]
        another_ended = any(words in text for text in chain for words in _ENDS)
        return StepLostError(self._ended(error)) if another_ended else error

    def _ended(self, error: Exception) -> str:
        told = ""
        with contextlib.suppress(Exception):  # it was kept by a process that has ended itself
            store().wait([self._lost], dt.timedelta(seconds=_LOOK_SECONDS))
            told = store().get(self._lost).decode()
        told = told or f"another process has ended or does not answer ({describe(error)})"
        return f"{told}: all processes end; start again from the last checkpoint"

    def close(self) -> None:
        """Leave the group that votes were taken in."""
        group, self._group = self._group, None
        if group is not None and distributed.is_initialized():
            with contextlib.suppress(Exception):  # one that votes later then goes on eager; else it takes it for an end
                if not self.unanswered:
                    store().set(self._unanswered, f"rank {self.rank} has closed its loop")
            distributed.destroy_process_group(group)


def peers_of_this_run() -> Peers | None:
    """Return the other processes; None where there are none."""
    if not distributed.is_available() or not distributed.is_initialized() or distributed.get_world_size() < 2:  # noqa: PLR2004
        return None
    return Peers()
