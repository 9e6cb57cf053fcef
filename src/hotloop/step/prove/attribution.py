"""Tells what is at fault if a sentinel step disagrees with eager: the recording, or the compiled code in it."""

from __future__ import annotations

import dataclasses
import logging
import math
from typing import TYPE_CHECKING, Any

from hotloop import events as ev
from hotloop import measure
from hotloop.errors import describe
from hotloop.measure import Limits
from hotloop.step.obstacle import CandidateFailedError, Obstacle
from hotloop.step.prove.code_proofs import remedy_of
from hotloop.step.prove.reference_runs import ReferenceRuns, StepOutputs
from hotloop.step.prove.rounding_evidence import in_more_bits

if TYPE_CHECKING:
    from hotloop.step.prove.outcomes import Outcome
    from hotloop.step.state.program import Call
    from hotloop.step.tiers import Tier

_log = logging.getLogger("hotloop")


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
        CandidateFailedError: code failed as it was run once more, and what it had done could not be undone.
    """
    of_recording = not joined.undecided and not code
    if code and recorded and tier.compiles and not joined.undecided:
        of_recording = _code_agrees(runs, calls)
    where = "the recording, not the code in it" if of_recording else ""
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
    )
    remedy = remedy_of(joined, _verify(tier)) if tier.compiles and not of_recording else remedy_of(joined)
    obstacle = Obstacle(f"a sentinel step does not agree with eager: {line}", remedy)
    return Disagreement(obstacle, of_recording, line, event)


def _verify(tier: Tier) -> str:
    """Return the order to search for the module at fault, in code that is compiled as the tier's."""
    command = f"hotloop verify FILE.py:FUNCTION --preset {tier.base}"
    if tier.preset is not None:  # the user's own, which has no name on the command line
        command = 'hotloop.verify("FILE.py:FUNCTION", PRESET)'
    elif tier.base == "autotune":  # a name of tiers alone
        command = f"hotloop verify FILE.py:FUNCTION --preset {tier.settings['preset']}"
    return f"{command} names the module at fault; report it: this is a bug of the compiler's or of ours"


def _finite_or_none(value: Any) -> float | None:
    return value if isinstance(value, float) and math.isfinite(value) else None


def _code_agrees(runs: ReferenceRuns, calls: list[Call]) -> bool:
    """Return whether compiled code agrees with eager where its recording did not; False where it fails."""
    limits, found = Limits.compiled(runs.context.compute_dtype()), dict[str, list[measure.Comparison]]()
    try:
        for call in calls:
            wide = in_more_bits(runs, call)
            with runs.aside():
                made = StepOutputs.of(runs.program, runs.call(call), wide)
            for kind, held in made.compare_run(runs.program, runs.call(call), limits).items():
                found.setdefault(kind, []).append(held)
    except CandidateFailedError as error:
        if not error.undone:
            raise
        _log.info("sentinel: the code in the recording could not be compared: %s", describe(error.__cause__ or error))
        return False
    return all(measure.over_steps(held).agrees for held in found.values())
