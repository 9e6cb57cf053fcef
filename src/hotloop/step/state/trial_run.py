"""A run of a step that can be undone: everything the step may change is copied first, and put back."""

from __future__ import annotations

import contextlib
import functools
from typing import TYPE_CHECKING, Protocol, TypeVar

import torch

from hotloop.errors import StepLostError
from hotloop.step.obstacle import CandidateFailedError
from hotloop.step.state.snapshot import Snapshot

if TYPE_CHECKING:
    from collections.abc import Callable

    from hotloop.step.state.program import Program

_T = TypeVar("_T")


class Ready(Protocol):
    """Decides, at each point where a run may fail, whether it goes on; `ranks.together` does so for all processes."""

    def copies(self, error: Exception | None) -> None:
        """Raise if a run must not begin; ``error`` is what kept the copies from being made."""

    def recorded(self, error: Exception | None) -> None:
        """Raise if what was recorded must not be executed; ``error`` is what kept it from being recorded."""

    def ran(self, error: Exception | None) -> None:
        """Raise if a run has failed; ``error`` is what it raised."""


class Alone:
    """The decisions of a single process."""

    def copies(self, error: Exception | None) -> None:
        """Let the step run if its copies were made.

        Raises:
            CandidateFailedError: the copies were not made.
        """
        if error is not None:
            raise CandidateFailedError(began=False) from error

    def recorded(self, error: Exception | None) -> None:
        """Let what was recorded be executed; an error passes."""

    def ran(self, error: Exception | None) -> None:
        """Go on if the run went to its end.

        Raises:
            CandidateFailedError: it did not.
        """
        if error is not None:
            raise CandidateFailedError from error


alone = Alone()


def copied(make: Callable[[], _T], ready: Ready) -> _T:
    """Make the copies that a run needs, and ask ``ready`` whether the run may begin."""
    try:
        made = make()
    except Exception as error:
        ready.copies(error)
        raise AssertionError("nothing runs without the copies that undo it") from error
    ready.copies(None)
    return made


def before_a_run(program: Program, ready: Ready = alone) -> Snapshot:
    """Copy everything that a step may change.

    Raises:
        CandidateFailedError: there is no memory for the copies.
    """
    return copied(functools.partial(Snapshot, program), ready)


def undone_if_it_fails(program: Program, run: Callable[[], _T], ready: Ready = alone) -> tuple[_T, Snapshot]:
    """Run a candidate, and undo it if it raises; return its result, and the snapshot from before the run.

    An interrupt undoes the run as well, and passes on: a capture on a GPU has executed nothing, but left its gradients.

    Raises:
        CandidateFailedError: the candidate raised.
    """
    before = before_a_run(program, ready)
    try:
        made = run()
        wait_for(program.device)  # a kernel's failure belongs to the code that launched it
    except (CandidateFailedError, StepLostError):  # it was recorded, and is executed by no process
        undo(program, before)
        raise
    except Exception as error:
        _undo_together(program, before, ready, error)
        raise AssertionError("nothing goes on after a run that failed") from error
    except BaseException:
        with contextlib.suppress(CandidateFailedError):
            undo(program, before)
        raise
    _undo_together(program, before, ready, None)
    return made, before


def _undo_together(program: Program, before: Snapshot, ready: Ready, error: Exception | None) -> None:
    """Undo a run if it failed, here or in another process."""
    try:
        ready.ran(error)
    except Exception:
        undo(program, before, error)
        raise


def undo(program: Program, before: Snapshot, failed: Exception | None = None) -> None:
    """Put back the state from before a run.

    Args:
        program: the program that the run has changed.
        before: the snapshot from before the run.
        failed: the exception that the run has raised.

    Raises:
        CandidateFailedError: undoing failed. Its cause is the exception of the run, if there was one.
    """
    try:
        wait_for(program.device)  # work launched on another stream must not write after the values are put back
        before.restore()
    except Exception as error:  # noqa: BLE001 - nothing can be put back on a lost GPU
        raise CandidateFailedError(undone=False) from (failed or error)


def wait_for(device: torch.device) -> None:
    """Wait until a GPU has finished its work; a CPU always has."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
