"""Compares what a step compiles itself with the same code uncompiled: no proof and no check of a tier can.

A program may compile a part of its step, as in ``torch.compile(optimizer.step)``. That code runs on both sides of each
comparison of a tier, so a fault of it would never show. The comparison here is made once, at a few early steps. Its
verdict changes nothing that runs: results stay those of the program as it was written, and a warning names the code.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import time
from typing import TYPE_CHECKING, Any

from hotloop._torch.own_compiles import uncompiled
from hotloop.compiling.control import paused
from hotloop.interrupts import uninterrupted
from hotloop.measure import Limits
from hotloop.step.capture.optimizers import counted_rounding
from hotloop.step.obstacle import CandidateFailedError
from hotloop.step.prove import proof
from hotloop.step.prove.outcomes import Outcome, over_steps
from hotloop.step.prove.reference_runs import ReferenceRuns, StepOutputs
from hotloop.step.prove.rounding_evidence import in_more_bits, roundings, with_roundings
from hotloop.step.ranks.threads import another_trains

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hotloop.step.audit.auditor import StepAuditor
    from hotloop.step.context import DecoratedStep
    from hotloop.step.rescue import Rescue
    from hotloop.step.state.program import Call

AFTER = 8
"""Steps after an audit has heard compiled functions, before they are compared: torch compiles code again for a number
that has changed, and a fault of the second or third code is as likely as one of the first."""
_LEAVE_OUT = (
    "leave torch.compile out there, or report it: this is a bug of the compiler's. It runs on both sides of hotloop's "
    "other comparisons, so that none of them shows this; the step goes on as it is written"
)


class _UncompiledRuns(ReferenceRuns):
    """The runs of a step with all that is compiled in it left uncompiled, also what the program compiled itself."""

    @contextlib.contextmanager
    def as_given(self) -> Iterator[None]:
        """Run the block uncompiled."""
        with super().as_given(), paused(self.context.compiled.models.values()), uncompiled():
            yield


class OwnCode:
    """The comparison of what a decorated step compiles itself.

    Args:
        step: the decorated step.
        auditor: rehearses the step before it is run more than once.
        rescue: explains a run that failed.
    """

    def __init__(self, step: DecoratedStep, auditor: StepAuditor, rescue: Rescue) -> None:
        self._step, self._context, self._auditor, self._rescue = step, step.context, auditor, rescue
        self._runs = _UncompiledRuns(step)
        self._waits, self._over = AFTER, False
        self._outcomes: list[Outcome] = []
        self._by_roundings = False

    def due(self) -> bool:
        """Count a step; return whether to compare it."""
        own, context = self._step.own_compiles, self._context
        if not own.functions or self._over or context.peers is not None:
            return False
        if own.draws:
            self._end(f"{own} draws random numbers, and compiled code may draw others: it is compared with nothing")
            return False
        self._waits -= 1
        return self._waits < 0 and self._step.not_repeatable is None and not another_trains(context)

    @uninterrupted
    def compare(self, call: Call) -> Any:
        """Run the step as it is and uncompiled, undo both, and run it as a real step; return its result."""
        step, began = self._step, time.perf_counter()
        run = functools.partial(step.program.step, *call[0], **call[1])
        stays, result = self._auditor.rehearse(run, *call)
        if stays:
            return result
        step.doing, obstacle = "proof", None
        try:
            self._outcomes.append(self._outcome(call))
        except CandidateFailedError as error:
            obstacle = self._rescue.candidate_failed(error, self._context.base_tier)
        self._context.reports.proof_took(time.perf_counter() - began)
        if obstacle is not None:
            self._end(f"{step.own_compiles} could not be compared with its uncompiled form: {obstacle.reason}")
        elif len(self._outcomes) == proof.STEPS:
            self._judge()
        return step.eagerly(run)

    def _outcome(self, call: Call) -> Outcome:
        program, context = self._step.program, self._context
        run, scalars = self._runs.call(call), counted_rounding(program.holdings.optimizers.values())
        limits = dataclasses.replace(Limits.compiled(context.compute_dtype()), scalars=scalars)

        def given() -> Any:
            with context.eager():
                return run()

        elsewhere = roundings(self._runs, call, given, limits) if self._by_roundings else None
        wide = in_more_bits(self._runs, call)
        with self._runs.aside():
            made = StepOutputs.of(program, run, wide)
        outcome = Outcome(None, made.compare_run(program, given, limits), nbytes=0, on_host=False)
        return with_roundings(outcome, elsewhere)

    def _judge(self) -> None:
        """Conclude from the steps so far: the code is right, is wrong, or other roundings decide."""
        joined, own = over_steps(self._outcomes), self._step.own_compiles
        self._outcomes.clear()
        if joined.agrees:
            self._end(f"{own}, which the step compiles itself, agrees with its uncompiled form")
        elif joined.may_be_noise and not self._by_roundings:
            self._by_roundings = True
        elif joined.undecided:
            self._end(f"{own}: {joined.why}")
        else:
            why = f"{own}, which the step compiles itself, does not agree with its uncompiled form: {joined.why}"
            self._end(f"{why}. {_LEAVE_OUT}", logging.WARNING)

    def _end(self, line: str, level: int = logging.INFO) -> None:
        self._over = True
        numbers = {"action": "compare own compiles", "agrees": level == logging.INFO}
        self._context.reports.decided(f"{self._step.name}: {line}", numbers, level)
