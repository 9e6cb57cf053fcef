"""Finds what is at fault if a sentinel step disagrees with eager: the recording, or a region of the compiled code."""

from __future__ import annotations

import functools
import logging
from typing import TYPE_CHECKING

from hotloop.errors import describe
from hotloop.measure import Limits
from hotloop.step.obstacle import CandidateFailedError
from hotloop.step.prove.culprit import NOT_AGAIN, Culprit, Tests, search
from hotloop.step.prove.rounding_evidence import in_more_bits
from hotloop.step.prove.step_outputs import StepOutputs
from hotloop.step.tiers import Tier

if TYPE_CHECKING:
    from hotloop.step.prove.reference_runs import ReferenceRuns
    from hotloop.step.state.program import Call

_log = logging.getLogger("hotloop")
SECONDS = 60.0
"""How long a run may stand still for the search for the region at fault."""


def at_fault(runs: ReferenceRuns, calls: list[Call], *, recorded: bool) -> tuple[bool, Culprit | None]:
    """Return whether a recording is at fault rather than the code in it, and the region of the code that is.

    Args:
        runs: the reference runs of the step.
        calls: the arguments of the steps that disagreed.
        recorded: these steps were replays.

    Raises:
        CandidateFailedError: code failed in the search, and what it had done could not be undone.
    """
    program, compiled = runs.program, runs.context.compiled
    try:
        steps = []
        for call in calls:
            wide = in_more_bits(runs, call)
            with runs.aside():
                made = StepOutputs.of(program, runs.call(call), wide)
            steps.append((functools.partial(program.step, *call[0], **call[1]), made))
        tests = Tests(
            program,
            compiled.models,
            steps,
            limits=Limits.compiled(runs.context.compute_dtype()),
            settings=compiled.settings(Tier(compiled.base)),
            seconds=SECONDS,
        )
        if not tests.disagrees_now():
            return recorded, None if recorded else Culprit((), NOT_AGAIN, 1, tests.spent)
        spent = sum(component.compile_seconds for component in compiled.status().components.values())
        if spent <= SECONDS:
            return False, search(compiled.models, tests, shown=True)
        _log.info("sentinel: no search for the region at fault, as compiling took %.0f s", spent)
    except CandidateFailedError as error:
        if not error.undone:
            raise
        _log.info("sentinel: the region at fault could not be searched for: %s", describe(error.__cause__ or error))
    return False, None
