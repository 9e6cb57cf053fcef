"""A run of a step that can be undone: everything the step may change is copied first, and put back."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

import torch

from hotloop.step.obstacle import CandidateFailedError
from hotloop.step.state.snapshot import Snapshot

if TYPE_CHECKING:
    from hotloop.step.state.program import Program

_T = TypeVar("_T")
Ready = Callable[[Exception | None], None]
"""Called before the step runs, with the error that kept the copies from being made. Raises if the step must not run."""


def alone(error: Exception | None) -> None:
    """Let a single process run its step if its copies were made.

    Raises:
        CandidateFailedError: the copies were not made.
    """
    if error is not None:
        raise CandidateFailedError(began=False) from error


def copied(make: Callable[[], _T], ready: Ready) -> _T:
    """Make the copies that a run needs, and ask ``ready`` whether the run may begin."""
    try:
        made = make()
    except Exception as error:
        ready(error)
        raise AssertionError("nothing runs without the copies that undo it") from error
    ready(None)
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
    except Exception as error:
        undo(program, before, error)
        raise CandidateFailedError from error
    except BaseException:
        with contextlib.suppress(CandidateFailedError):
            undo(program, before)
        raise
    return made, before


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
