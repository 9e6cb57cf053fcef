"""The other processes of a run: what they agree on before they change how steps run, and how they end together.

Every process makes the same collectives in the same order, or all of them wait for ever. So whatever makes a process
run a step twice (a proof), or wait long before its next collective (a compile), is agreed in a step that all take part
in; and a step that has begun a collective is never repeated by one process alone.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import enum
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed

from hotloop._torch.collectives import collectives_begun, groups, patient, store
from hotloop.errors import StepLostError
from hotloop.fallback.causes import describe

if TYPE_CHECKING:
    from collections.abc import Iterable

PATIENCE_SECONDS = 1800.0
"""How long the others wait for the slowest in an agreed step: the time of a long compile."""
_LOST = "hotloop/lost"
_LOOK_SECONDS = 2.0


class Vote(enum.IntEnum):
    """What one process says of an agreed step; the lowest of all is done by all."""

    NEVER = 0
    NOT_NOW = 1
    YES = 2


class Peers:
    """The processes of this run, this one among them. All of them have to make one at the same place."""

    def __init__(self) -> None:
        self.rank, self.size = distributed.get_rank(), distributed.get_world_size()
        self._watched = groups()
        # On the CPU whatever the run's backend is, and with a patience of its own: it carries one number now and then.
        timeout = dt.timedelta(seconds=PATIENCE_SECONDS)
        self._group: Any = distributed.new_group(backend="gloo", timeout=timeout)

    def agree(self, vote: Vote) -> Vote:
        """Give the lowest vote of all processes; each has to ask in the same step.

        Raises:
            StepLostError: a process has ended meanwhile.
        """
        found = torch.tensor([int(vote)])
        try:
            distributed.all_reduce(found, distributed.ReduceOp.MIN, group=self._group)
        except RuntimeError as error:
            raise StepLostError(self._ended(error)) from error
        return Vote(int(found))

    def begun(self) -> int:
        """Count the collectives of the run that this process has begun so far."""
        return collectives_begun(self._watched)

    def patient(self) -> contextlib.AbstractContextManager[None]:
        """Let the run's collectives wait for a process that compiles, while the block runs."""
        return patient(self._watched, PATIENCE_SECONDS)

    def lost(self, error: Exception, where: str, *, ours: bool) -> Exception:
        """Give what to raise for a step that failed after a collective: no process may repeat it alone.

        Args:
            error: what it raised.
            where: tier and step.
            ours: compiled code of this process failed; else it is the user's own error, or another process's end.
        """
        if ours:
            why = f"rank {self.rank}: {describe(error.__cause__ or error)} {where}"
            with contextlib.suppress(Exception):  # the others then say no more than that a process has ended
                store().set(_LOST, why)
            return StepLostError(
                f"{why}, after the step's first collective: the other processes are in it, and it cannot be repeated. "
                "All of them end; start again from the last checkpoint, with run='eager'"
            )
        return StepLostError(self._ended(error)) if _tells_of_an_end(error) else error

    def _ended(self, error: Exception) -> str:
        told = ""
        with contextlib.suppress(Exception):  # it was kept by a process that has ended itself
            store().wait([_LOST], dt.timedelta(seconds=_LOOK_SECONDS))
            told = store().get(_LOST).decode()
        told = told or f"another process has ended or does not answer ({describe(error)})"
        return f"{told}: all processes end; start again from the last checkpoint"

    def close(self) -> None:
        """Leave the group that votes were taken in."""
        group, self._group = self._group, None
        if group is not None and distributed.is_initialized():
            distributed.destroy_process_group(group)


def peers_of_this_run() -> Peers | None:
    """Give the other processes, where there are some."""
    if not distributed.is_available() or not distributed.is_initialized() or distributed.get_world_size() < 2:  # noqa: PLR2004
        return None
    return Peers()


def _tells_of_an_end(error: Exception) -> bool:
    """Tell whether an exception is what a collective raises when another process has gone."""
    seen: Iterable[BaseException] = [one for one in (error, error.__cause__, error.__context__) if one is not None]
    return any(words in str(one) for one in seen for words in _ENDS)


_ENDS = ("Connection closed by peer", "Connection reset by peer", "NCCL communicator was aborted", "Timed out waiting")
