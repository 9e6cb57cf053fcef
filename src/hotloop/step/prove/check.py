"""Checks a proven tier now and then: the step also runs eagerly, from the same state, and is compared.

A proof compares three steps, and a run has a million. A recording may become stale, a new size may come that compiled
code handles wrongly, and gradients that are wrong by 1% do not stop training. In a checked step eager's outcome stays.
`Schedule` plans the checks.

A check that fails leads to a new proof, since one comparison of hundreds is past a limit by chance. Until that has
ended, only eager's outcomes stay. Of what is past its limits so far as right code never is, the second time decides.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import time
from typing import TYPE_CHECKING, Any

from hotloop import events as ev
from hotloop.measure import Limits
from hotloop.step.obstacle import Obstacle
from hotloop.step.prove import proof
from hotloop.step.prove.code_proofs import remedy_of
from hotloop.step.prove.outcomes import Outcome, without_result
from hotloop.step.prove.schedule import Schedule
from hotloop.step.state.trial_run import wait_for

if TYPE_CHECKING:
    from collections.abc import Callable

    from hotloop.step.context import DecoratedStep
    from hotloop.step.prove.code_proofs import CodeProofs
    from hotloop.step.prove.graph_proofs import GraphProofs, Recorded
    from hotloop.step.prove.reference_runs import ReferenceRuns
    from hotloop.step.state.program import Call
    from hotloop.step.tiers import Tier

_REMEMBERED = 100
"""Checks for which a tensor far past its limit is remembered: another one in these, and the tier is left."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SentinelStatus:
    """The checks of one decorated step so far.

    Args:
        function: the name of the step.
        every: steps to the next check, as it is planned now.
        checks: steps that were run both ways.
        seconds: time that checks have cost beyond the time of their steps.
        disagreed: what disagreed last, and where; empty if nothing did.
        off: why no more checks are made; empty while they are made.
    """

    function: str
    every: int
    checks: int
    seconds: float
    disagreed: str = ""
    off: str = ""

    def __str__(self) -> str:
        if self.disagreed:
            return f"sentinel: {self.function} did not agree with eager: {self.disagreed}"
        line = f"sentinel: {self.function}: {self.checks:,} steps were also run eagerly and agreed, "
        return line + (f"then no more: {self.off}" if self.off else f"one in {self.every:,}; {self.seconds:.1f} s")


class Check:
    """The checks of one decorated step.

    Args:
        step: the decorated step.
        runs: its reference runs.
        graphs: the proofs of its recordings.
        code: the proofs of its compiled code.
        share: the share of time that checks may cost.

    Attributes:
        schedule: when they come.
        of_code: the last one compared compiled code with eager, and not a recording with what it recorded.
    """

    def __init__(
        self, step: DecoratedStep, runs: ReferenceRuns, graphs: GraphProofs, code: CodeProofs, share: float
    ) -> None:
        self._step, self._context = step, step.context
        self._runs, self._graphs, self._code = runs, graphs, code
        self.schedule = Schedule(share, step.context.total_steps)
        self._tier: Tier | None = None
        self._checks, self._failed_at, self.of_code = 0, -_REMEMBERED, False
        self._disagreed = ""

    @property
    def status(self) -> SentinelStatus:
        """The checks so far."""
        return SentinelStatus(
            function=self._step.name,
            every=self.schedule.every,
            checks=self._checks,
            seconds=self.schedule.spent,
            disagreed=self._disagreed,
            off=self.schedule.off,
        )

    def due(self, *, recorded: bool = False) -> bool:
        """Count a step that runs compiled or captured; return whether to check it, a recording by its operations."""
        progress = self._context.progress
        if progress.tier != self._tier:
            self.schedule.begin()
            self._tier, self._failed_at = progress.tier, -_REMEMBERED
        due = self.schedule.due(progress.steps + 1) and not progress.in_trial
        return due and (recorded or not self.schedule.off)

    def run(self, recorded: Recorded | None, call: Call, tier: Tier) -> tuple[Any, Outcome]:
        """Run a step both ways and compare.

        Args:
            recorded: the step whose recording runs; None for compiled code without a recording.
            call: the step's arguments.
            tier: the tier that the step runs in.

        Returns:
            Eager's result; and the outcome.

        Raises:
            CandidateFailedError: the tier's code failed, before eager ran; the state is as before.
            Exception: eager's own, which is the user's.
        """
        self._step.doing, self._step.ran = "sentinel", tier.name
        wait_for(self._context.device)  # earlier steps may still run, and are no part of this step's time
        began, usual = time.perf_counter(), self._context.reports.seconds_of(tier.name)
        # Checks of a recording of compiled code are by turns of the code, and of its recording to the last bits.
        self.of_code = tier.other_kernels and (recorded is None or self._checks % 2 == 0)
        outcome = (self._of_code if self.of_code else self._of_recording)(recorded, call, tier)
        self._checks += 1
        extra = max(0.0, time.perf_counter() - began - (usual or 0.0))
        self.schedule.checked(extra, usual, recorded=recorded is not None)
        return outcome.result, dataclasses.replace(outcome, result=None)

    def _of_recording(self, recorded: Recorded | None, call: Call, tier: Tier) -> Outcome:
        assert recorded is not None
        run = functools.partial(self._step.program.step, *call[0], **call[1])
        on_side = functools.partial(self._graphs.reference, recorded.path, run)
        beside = functools.partial(self._context.reports.timed_beside, tier.without_graph(), on_side)
        return self._graphs.compare(recorded, call, beside)

    def _of_code(self, recorded: Recorded | None, call: Call, tier: Tier) -> Outcome:
        run = functools.partial(self._step.program.step, *call[0], **call[1])
        candidate = eager = self._runs.call(call)
        if recorded is not None:
            candidate = functools.partial(self._graphs.candidate, recorded, call)
            eager = functools.partial(self._graphs.reference, recorded.path, run)
        elif tier.graph:
            eager = functools.partial(self._runs.on_capture_stream, run)
        wide = self._runs.in_more_bits(call) if self._code.needs_more_bits(tier.base) else None
        outcome = proof.prove_step(
            self._step.program,
            candidate,
            functools.partial(self._beside, eager),
            Limits.compiled(self._context.compute_dtype()),
            spread=recorded.noise.spread if recorded is not None else None,
            wide=wide,
        )
        if recorded is not None:
            recorded.keep_gradients()
        return outcome if wide is not None else without_result(outcome)

    def _beside(self, eager: Callable[[], Any]) -> Any:
        with self._runs.as_given():
            return self._context.reports.timed_beside(self._context.base_tier, eager)

    def conclude(self, outcome: Outcome, tier: Tier) -> Obstacle | None:
        """Note a check that has failed; return an obstacle if that is enough to leave the tier."""
        again = self._checks - self._failed_at < _REMEMBERED
        if outcome.far_off:
            self._failed_at = self._checks
            self.schedule.closely()
        self._disagreed = f"step {self._context.progress.steps + 1} in {tier.name}: {outcome.why}"
        self._context.reports.emit(disagreed(outcome, self._step, tier))
        if not (again and outcome.far_off):
            return None
        reason = f"a step that was also run eagerly does not agree: {outcome.why}"
        return Obstacle(reason, remedy_of(outcome, _verify(tier)) if self.of_code else remedy_of(outcome))


def disagreed(outcome: Outcome, step: DecoratedStep, tier: Tier) -> ev.SentinelDisagreed:
    """Return the event of a check that has failed, with what is furthest past its limit."""
    wrong = [one for one in outcome.comparisons.values() if not one.agrees]
    worst = max(wrong, key=lambda one: one.nearness).failures[0] if wrong else None
    value, limit = (worst.value, worst.limit) if worst is not None else (None, None)
    return ev.SentinelDisagreed(
        step=step.context.progress.steps,
        function=step.name,
        tier=tier.name,
        tensor=worst.name if worst is not None else "",
        measure=worst.measure if worst is not None else "random position",
        value=value if isinstance(value, float) and math.isfinite(value) else None,
        limit=limit if isinstance(limit, float) and math.isfinite(limit) else None,
        reason=outcome.why,
        certain=outcome.far_off,
    )


def _verify(tier: Tier) -> str:
    """Return the order to search for the module at fault, in code that is compiled as the tier's."""
    command = f"hotloop verify FILE.py:FUNCTION --preset {tier.base}"
    if tier.preset is not None:  # the user's own, which has no name on the command line
        command = 'hotloop.verify("FILE.py:FUNCTION", PRESET)'
    elif tier.base == "autotune":  # a name of tiers alone
        command = f"hotloop verify FILE.py:FUNCTION --preset {tier.settings['preset']}"
    return f"{command} names the module at fault; report it: this is a bug of the compiler's or of ours"
