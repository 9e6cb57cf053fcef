"""What is at fault where a sentinel step disagrees with eager: a recording, or a region of the code in it."""

from __future__ import annotations

import functools
import logging
from typing import TYPE_CHECKING

from hotloop.compiling.fallback.causes import describe
from hotloop.measure import Limits
from hotloop.step.obstacle import CandidateFailedError
from hotloop.step.prove.culprit import NOT_AGAIN, Culprit, Tests, search
from hotloop.step.prove.proof import plain_run
from hotloop.step.prove.rounding_evidence import aside, in_more_bits
from hotloop.step.prove.step_outputs import StepOutputs
from hotloop.step.tiers import Tier

if TYPE_CHECKING:
    from hotloop.step.loop.runner import Runner
    from hotloop.step.state.program import Call

_log = logging.getLogger("hotloop")
SECONDS = 60.0
"""How long a run may stand still for the search for the region at fault."""


def at_fault(runner: Runner, calls: list[Call], *, recorded: bool) -> tuple[bool, Culprit | None]:
    """Tell whether a recording is at fault rather than the code in it; and which region of the code is.

    Args:
        runner: of the step that disagreed.
        calls: the arguments of the steps that did.
        recorded: they were replays.

    Raises:
        CandidateFailedError: code failed in the search, and what it had done could not be undone.
    """
    try:
        return _look(runner, calls, recorded=recorded)
    except CandidateFailedError as error:
        if not error.undone:
            raise
        _log.info("sentinel: the region at fault could not be searched for: %s", describe(error.__cause__ or error))
    return False, None


def _look(runner: Runner, calls: list[Call], *, recorded: bool) -> tuple[bool, Culprit | None]:
    program, loop = runner.program, runner.loop
    made = []
    for call in calls:
        run = functools.partial(runner.step, *call[0], **call[1])
        wide = in_more_bits(runner, call)
        with aside(runner):
            made.append((run, StepOutputs.of(program, functools.partial(plain_run, program.holdings, run), wide)))
    tests = Tests(
        program,
        loop.compiled.models,
        made,
        limits=Limits.compiled(loop.surveyed.compute_dtype()),
        settings=loop.compiled.settings(Tier(loop.compiled.base)),
        seconds=SECONDS,
    )
    if not tests.disagrees_now():
        return recorded, None if recorded else Culprit((), NOT_AGAIN, 1, tests.spent)
    spent = sum(one.compile_seconds for one in loop.compiled.status().components.values())
    if spent > SECONDS:
        _log.info("sentinel: no search for the region at fault, as compiling took %.0f s", spent)
        return False, None
    return False, search(loop.compiled.models, tests, shown=True)
