"""A run of a step that can be undone: what the step may change is copied first, and put back."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

import torch

from hotloop.step.obstacle import CandidateFailedError
from hotloop.step.state.snapshot import Snapshot
from hotloop.step.state.undo import BufferTables

if TYPE_CHECKING:
    from hotloop.step.state.program import Program

_Made = TypeVar("_Made")


Ready = Callable[[Exception | None], None]
"""Called before the step runs, with what kept the copies for it from being made: raises where it must not run."""


def alone(error: Exception | None) -> None:
    """Let a step run where its copies were made, as one process does.

    Raises:
        CandidateFailedError: they were not.
    """
    if error is not None:
        raise CandidateFailedError(began=False) from error


def _copied(make: Callable[[], _Made], ready: Ready) -> _Made:
    """Make the copies that a run needs beside it, and hear whether it may begin."""
    try:
        made = make()
    except Exception as error:
        ready(error)
        raise AssertionError("nothing runs without the copies that undo it") from error
    ready(None)
    return made


class _Before(Snapshot):
    """What a step found, with the tensors that its buffers were."""

    def __init__(self, program: Program) -> None:
        with program.holdings.still():
            super().__init__(program.holdings, [program.device], rng_usage=program.rng_usage)
            self._buffers = BufferTables(program.holdings)

    def restore(self) -> None:
        super().restore()
        self._buffers.restore()

    def exchange(self) -> None:
        super().exchange()
        self._buffers.restore()


def before_a_run(program: Program, ready: Ready = alone) -> Snapshot:
    """Copy what a step may change.

    Raises:
        CandidateFailedError: there is no memory for that.
    """
    return _copied(functools.partial(_Before, program), ready)


def undone_if_it_fails(program: Program, run: Callable[[], _Made], ready: Ready = alone) -> tuple[_Made, Snapshot]:
    """Run something that eager would not; where it raises, the step has not begun. Gives what was there before, too.

    Also an interrupt undoes it, and passes: a capture on a GPU has executed nothing, but has left its gradients.

    Raises:
        CandidateFailedError: it raised.
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
    """Put back what there was before a run.

    Args:
        program: what the run has changed.
        before: what there was.
        failed: what the run has raised.

    Raises:
        CandidateFailedError: that cannot be done. Its cause is what the run has raised, if it has.
    """
    try:
        wait_for(program.device)  # what was launched on another stream must not write after what is put back
        before.restore()
    except Exception as error:  # noqa: BLE001 - a lost GPU is no place to put anything back to
        raise CandidateFailedError(undone=False) from (failed or error)


def wait_for(device: torch.device) -> None:
    """Wait until a device has done what it was given; a CPU has."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
