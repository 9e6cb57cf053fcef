"""Finds what is at fault if a sentinel step disagrees with eager: the recording, or a region of the compiled code."""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
from typing import TYPE_CHECKING, Any

from hotloop import events as ev
from hotloop.errors import describe
from hotloop.measure import Limits
from hotloop.step.obstacle import CandidateFailedError, Obstacle
from hotloop.step.prove.code_proofs import remedy_of
from hotloop.step.prove.culprit import NOT_AGAIN, Culprit, Tests, search
from hotloop.step.prove.rounding_evidence import in_more_bits
from hotloop.step.prove.step_outputs import StepOutputs

if TYPE_CHECKING:
    from hotloop.step.prove.outcomes import Outcome
    from hotloop.step.prove.reference_runs import ReferenceRuns
    from hotloop.step.state.program import Call
    from hotloop.step.tiers import Tier

_log = logging.getLogger("hotloop")
_VERIFY = "hotloop verify FILE.py:FUNCTION says more; report it: this is a bug of the compiler's or of ours"
SECONDS = 60.0
"""How long a run may stand still for the search for the region at fault."""


@dataclasses.dataclass(frozen=True)
class Disagreement:
    """The finding of a sentinel that a tier is wrong.

    Args:
        obstacle: what disagrees, and what to do about it.
        of_recording: the recording is at fault, or else the compiled code.
        line: what disagrees, and where.
        event: the same for the record.
    """

    obstacle: Obstacle
    of_recording: bool
    line: str
    event: ev.SentinelDisagreed


def disagreement(  # noqa: PLR0913 - what disagreed, where, and in what
    runs: ReferenceRuns, joined: Outcome, calls: list[Call], tier: Tier, *, code: bool, recorded: bool
) -> Disagreement:
    """Find what is at fault for an outcome that disagrees.

    Args:
        runs: the reference runs of the step.
        joined: the outcome, joined over the steps that disagreed.
        calls: the arguments of these steps.
        tier: the tier that they ran in.
        code: compiled code was compared with eager, and not a recording with what it recorded.
        recorded: the steps were replays.

    Raises:
        CandidateFailedError: code failed in the search, and what it had done could not be undone.
    """
    of_recording, blamed = not joined.undecided and not code, None
    if code and tier.compiles and not joined.undecided:
        of_recording, blamed = _at_fault(runs, calls, recorded=recorded)
    where = "the recording, not the code in it" if of_recording else str(blamed) if blamed is not None else ""
    region = blamed.regions[0] if blamed is not None and len(blamed.regions) == 1 else None
    wrong = [comparison for comparison in joined.comparisons.values() if not comparison.agrees]
    worst = max(wrong, key=lambda comparison: comparison.nearness).failures[0] if wrong else None
    line = f"{worst if worst is not None else joined.why}{f'; at fault: {where}' if where else ''}"
    event = ev.SentinelDisagreed(
        step=runs.context.progress.steps,
        function=runs.name,
        tier=tier.name,
        tensor=worst.name if worst is not None else "",
        measure=worst.measure if worst is not None else "random position",
        value=_finite_or_none(worst.value) if worst is not None else None,
        limit=_finite_or_none(worst.limit) if worst is not None else None,
        reason=joined.why,
        region=where,
        file=region.file if region is not None else None,
        line=region.line if region is not None else None,
    )
    obstacle = Obstacle(f"a sentinel step does not agree with eager: {line}", remedy_of(joined, _VERIFY))
    return Disagreement(obstacle, of_recording, line, event)


def _finite_or_none(value: Any) -> float | None:
    return value if isinstance(value, float) and math.isfinite(value) else None


def _at_fault(runs: ReferenceRuns, calls: list[Call], *, recorded: bool) -> tuple[bool, Culprit | None]:
    """Return whether a recording is at fault rather than the code in it, and the region of the code that is."""
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
            settings=compiled.settings(compiled.tier),
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
