"""A run that all processes take at once, and that all of them undo where it fails in one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hotloop.step.obstacle import CandidateFailedError
from hotloop.step.ranks.votes import About

if TYPE_CHECKING:
    from hotloop.step.ranks.votes import Peers

_ANOTHER = "another process has no memory for its copies, cannot capture the step, or fails in it"


class Together:
    """What `state.trial_run.Alone` decides for one process, decided by all: each vote is taken by all, in one order."""

    def __init__(self, peers: Peers) -> None:
        self._peers = peers

    def copies(self, error: Exception | None) -> None:
        """Begin a run in all processes, or in none.

        Args:
            error: what kept this process from making its copies; None where it made them.

        Raises:
            CandidateFailedError: no process begins.
        """
        self._all(About.COPIES, error)
        self._peers.run_begins()

    def recorded(self, error: Exception | None) -> None:
        """Execute what was recorded in all processes, or in none; ``error`` is what kept this one from recording it.

        Raises:
            CandidateFailedError: no process executes it.
        """
        self._all(About.RECORDED, error)

    def ran(self, error: Exception | None) -> None:
        """Go on after a run, or have all undo theirs; ``error`` is what this process's run has raised.

        Raises:
            CandidateFailedError: all undo it. Or, with ``began``, this process did not come to the collectives that the
                others wait in, so that nobody can go on.
        """
        if error is not None and not self._peers.made_all():
            raise CandidateFailedError from error
        self._all(About.RAN, error)

    def _all(self, about: About, error: Exception | None) -> None:
        found = self._peers.lowest(about, error is None)
        if found is None or not found[0]:
            self._peers.elsewhere = error is None
            raise CandidateFailedError(began=False) from (error or RuntimeError(self._peers.unanswered or _ANOTHER))
