"""The sentinel: every N steps or so, a step of a proven tier is also run eagerly, from the same state, and compared.

A proof compares three steps, and a run has a million. A recording may become stale, a new size may come that compiled
code handles wrongly, and gradients that are wrong by 1% do not stop training. In a checked step eager's outcome stays.
N follows from what a check costs, and from the share of time that checks may cost (`hotloop.step.prove.budget`). The
distance to the next check is random, from half of N to one and a half: with a fixed N, what the step does every N steps
would never be checked, or always.

A single comparison past its limits is only a suspicion. A run compares hundreds of tensors hundreds of times, so some
are past a limit by chance, and as a model learns, its gradients become small beside their rounding. The next step
clears it, if that agrees; else it is confirmed in three, or six where these are past their limits by little:

- A recording is compared with the code that it recorded, with room for how far its kernels are from themselves.
- Compiled code is compared with eager, and both with the step in more bits, with room for how far the steps scatter.
  If it still disagrees, the next steps are judged by other roundings of the step. Where the normal limits were wrong
  once, in its proof or in a suspicion that was not confirmed, what the step in more bits allowed is the limit from then
  on; where only other roundings told, they judge each later check.

Each of these waits until the share pays for it. But where a tensor is far past its limit, as right code never is, the
next ones are checked at once, whatever that costs, and it takes two to clear it. What no rounding makes counts at once:
NaN where eager has none, a missing gradient.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import random
import statistics
import time
from typing import TYPE_CHECKING, Any

from hotloop.errors import describe
from hotloop.measure import Limits
from hotloop.step.obstacle import CandidateFailedError
from hotloop.step.prove import noise, proof
from hotloop.step.prove.attribution import disagreement
from hotloop.step.prove.budget import Budget, SentinelStatus, Work
from hotloop.step.prove.outcomes import Outcome, over_steps, verdict, without_result
from hotloop.step.prove.rounding_evidence import in_more_bits, repeats_elsewhere, roundings, with_roundings
from hotloop.step.state.trial_run import wait_for

if TYPE_CHECKING:
    from collections.abc import Callable

    from hotloop.step.audit.auditor import StepAuditor
    from hotloop.step.context import DecoratedStep
    from hotloop.step.prove.attribution import Disagreement
    from hotloop.step.prove.code_proofs import CodeProofs
    from hotloop.step.prove.graph_proofs import GraphProofs, Recorded
    from hotloop.step.prove.reference_runs import ReferenceRuns
    from hotloop.step.state.program import Call
    from hotloop.step.tiers import Tier

_log = logging.getLogger("hotloop")
SHARE = 0.01
"""The share of time that sentinel steps may cost, unless the user says otherwise."""
FIRST, LEAST = 100, 10
"""Steps in a tier before its first check, which shows what a check costs; and the least mean distance of two checks."""
_STAYED = 5
"""Checks in a row whose step could be run only once, after which no more are made."""


class Sentinel:
    """The check of a decorated step, now and then: the step runs eagerly as well, and is compared.

    Args:
        step: the decorated step.
        runs: its reference runs.
        graphs: the proofs of its recordings.
        auditor: rehearses a step before its Python runs twice.
        code: the proofs of its compiled code.
        share: the share of time that checks may cost.
    """

    def __init__(  # noqa: PLR0913, PLR0917 - the parts of a step's runner
        self,
        step: DecoratedStep,
        runs: ReferenceRuns,
        graphs: GraphProofs,
        auditor: StepAuditor,
        code: CodeProofs,
        share: float,
    ) -> None:
        self._step, self._context = step, step.context
        self._budget = Budget(share, step.context.total_steps)
        self._runs, self._graphs, self._auditor, self._code = runs, graphs, auditor, code
        self._tier: Tier | None = None
        self._left = self._every = FIRST
        self._checks_code = True
        """The next check is of compiled code, if the tier has any, and not of its recording alone."""
        self._suspects = False
        self._urgent = False
        """What is suspected was far past its limits, so that its checks wait for nothing."""
        self._measures = False
        """The next check measures how far the step is from itself."""
        self._rounds = False
        """The next checks are judged by other roundings."""
        self._measures_left = 0
        """How often the noise of a recorded step may still be measured for this suspicion."""
        self._evidence: list[tuple[Outcome, Call]] = []
        self._checks = self._suspicions = 0
        self._stayed = 0
        """How many of the last checks were not made, since the step could be run only once."""
        self._disagreed = self._off = self._waits = ""
        self._disagreement: Disagreement | None = None

    @property
    def status(self) -> SentinelStatus:
        """The checks so far."""
        return SentinelStatus(
            function=self._step.name,
            every=self._every,
            checks=self._checks,
            suspicions=self._suspicions,
            seconds=self._budget.spent,
            disagreed=self._disagreed,
            off=self._off,
            waits=self._waits,
        )

    def due(self) -> bool:
        """Count a step that runs compiled or captured; return whether to check it."""
        progress = self._context.progress
        if progress.tier is not self._tier:
            if progress.tier != self._tier:
                self._left = self._every = FIRST
                self._budget.enter(progress.steps)
                self._suspects = self._urgent = self._measures = self._rounds = False
                self._waits = ""
                self._evidence.clear()
            self._tier = progress.tier
        self._budget.steps += 1
        self._left -= 1
        return self._left <= 0 and not self._off and not progress.in_trial and self._may_begin(progress.tier)

    def check(self, recorded: Recorded | None, call: Call, tier: Tier) -> tuple[Any, Disagreement | None]:
        """Run a step both ways and compare.

        Args:
            recorded: the step whose recording runs; None for compiled code without a recording.
            call: the step's arguments.
            tier: the tier that the step runs in.

        Returns:
            Eager's result; and what disagrees, if that is known by now.

        Raises:
            CandidateFailedError: the tier's code failed, before eager ran; the state is as before.
            Exception: eager's own, which is the user's.
        """
        self._disagreement = None
        return self._result_of(recorded, call, tier), self._disagreement

    def _result_of(self, recorded: Recorded | None, call: Call, tier: Tier) -> Any:
        step, context = self._step, self._context
        step.doing, step.ran = "sentinel", tier.name
        wait_for(context.device)  # earlier steps may still run, and are no part of this step's time
        began = time.perf_counter()
        code, work = self._is_of_code(recorded, tier), self._work(recorded is not None, tier)
        run = functools.partial(step.program.step, *call[0], **call[1])
        if recorded is None or work not in {"recording", "code"}:  # a replay does not run the step's Python
            stays, result = self._auditor.rehearse(run, *call)
            if stays:
                self._plan(time.perf_counter() - began, tier, work)
                self._not_checked()
                return result
            self._stayed = 0
        reference = functools.partial(
            context.reports.timed_beside,
            context.base_tier if code else tier.without_graph(),
            functools.partial(self._reference, recorded, call, tier, code=code),
        )
        if work == "noise" and recorded is not None:
            return self._measure_noise(recorded, reference, tier)
        candidate = self._runs.call(call)
        if recorded is not None and recorded.recording is not None:
            candidate = functools.partial(self._graphs.candidate, recorded, call)
        wide = in_more_bits(self._runs, call) if work == "more bits" else None
        elsewhere = roundings(self._runs, call, candidate) if work == "roundings" else None
        outcome = proof.prove_step(
            step.program,
            candidate,
            reference,
            Limits.compiled(context.compute_dtype()) if code else Limits.rounding(),
            spread=recorded.noise.spread if recorded is not None else None,
            wide=wide,
            updated=recorded.updated if recorded is not None and not code else (),
        )
        if recorded is not None:
            recorded.keep_gradients()
        self._checks += 1
        self._plan(time.perf_counter() - began, tier, work)
        judged = with_roundings(outcome, elsewhere)
        if code and wide is None and elsewhere is None:
            judged = self._code.by_learnt_limits(tier.base, without_result(judged))
        judged = dataclasses.replace(judged, result=None)
        self._unless_it_raises(lambda: self._judge(judged, recorded, call, tier))
        return outcome.result

    def _unless_it_raises(self, judge: Callable[[], None]) -> None:
        """Judge, or stop if that raises; without a suspicion, the next check is of the other kind."""
        try:
            judge()
        except CandidateFailedError:
            raise
        except Exception as error:  # noqa: BLE001 - the step is done and right, only the comparison failed
            _log.warning("a sentinel step could not be judged", exc_info=True)
            self.stop(f"one could not be judged: {describe(error)}")
        if not self._suspects:
            self._checks_code = not self._checks_code

    def _not_checked(self) -> None:
        """Count a step that could be run only once; by the next check it may do only what can be repeated."""
        step = self._step
        if step.not_repeatable is None:
            return
        self._stayed += 1
        if self._stayed >= _STAYED:
            self.stop(str(step.not_repeatable))
        step.not_repeatable = None

    def stop(self, why: str) -> None:
        """Make no more checks."""
        self._off = why
        self._context.reports.say_once(f"{self._step.name}: no more sentinel steps: {why}")

    def _is_of_code(self, recorded: Recorded | None, tier: Tier) -> bool:
        """Return whether this check is of compiled code.

        Checks of a recording of compiled code alternate: with eager, and within a few ulp with that code itself.
        """
        return tier.other_kernels and (recorded is None or self._checks_code)

    def _work(self, recorded: bool, tier: Tier) -> Work:
        """Return what the coming check does, of a step that is ``recorded`` or not."""
        if recorded and self._measures:
            return "noise"
        if not tier.other_kernels or (recorded and not self._checks_code):
            return "recording"
        if self._rounds or self._code.needs_roundings(tier.base):
            return "roundings"
        return "more bits" if self._suspects or self._code.needs_more_bits(tier.base) else "code"

    # -- both ways -------------------------------------------------------------------------------------------------

    def _reference(self, recorded: Recorded | None, call: Call, tier: Tier, *, code: bool) -> Any:
        """Run the step eagerly or, to judge the recording alone, as it was recorded; on the stream of recordings."""
        run = functools.partial(self._step.program.step, *call[0], **call[1])
        with self._runs.as_given() if code else contextlib.nullcontext():
            if recorded is not None:
                return self._graphs.reference(recorded.path, run)
            return self._runs.on_capture_stream(run) if tier.graph else self._runs.call(call)()

    def _measure_noise(self, recorded: Recorded, run: Callable[[], Any], tier: Tier) -> Any:
        """Run the step twice as it was recorded, measure how far the runs differ, and judge the evidence again.

        Late in a training, gradients that are only rounding (of a bias that a softmax cancels) differ more from run to
        run than when the recording was proven. The second run is a real step.
        """
        began = time.perf_counter()
        once = functools.partial(self._graphs.by_recorded_kernels, recorded.audit, run)
        most = self._runs.limits_of_repeats(recorded_kernels=recorded.audit.computes_on)
        result, spread = proof.spread_of(self._step.program, once, run, most)
        recorded.keep_gradients()
        before = recorded.noise
        excused = isinstance(spread, proof.Unlike) and repeats_elsewhere(self._runs, spread, once, run, most)
        self._plan(time.perf_counter() - began, tier, "noise")
        self._measures, self._left = False, 0
        self._measures_left -= 1
        if isinstance(spread, proof.Unlike) and excused:
            spread = spread.spread
        if isinstance(spread, dict):
            recorded.noise = before.joined(spread)
        else:
            self._measures_left = 0  # noise does not explain the difference: the next disagreement counts
        self._unless_it_raises(lambda: self._weigh(recorded, tier))
        if excused:  # this much noise is of these steps alone, and would hide a fault later
            before.noisy = recorded.noise.noisy
            recorded.noise = before
        return result

    # -- judging ---------------------------------------------------------------------------------------------------

    def _judge(self, outcome: Outcome, recorded: Recorded | None, call: Call, tier: Tier) -> None:
        """Judge a checked step: stop, disagree, begin a suspicion, or add to its evidence."""
        # No rounding makes any of these; but in float16 rounding may make an overflow.
        certain = {"missing", "shape", "dtype", "layout"}
        if self._context.compute_dtype() != "float16":
            certain.add("finite")
        if outcome.failed:
            self.stop(outcome.why)
        elif any(failure.measure in certain for held in outcome.comparisons.values() for failure in held.failures):
            self._disagrees(outcome, [call], recorded, tier)
        elif self._suspects:
            self._evidence.append((outcome, call))
            self._urgent |= outcome.hopeless
            self._weigh(recorded, tier)
        elif not outcome.agrees:
            self._suspicions += 1
            self._suspects, self._left, self._measures_left = True, 0, noise.MOST
            self._urgent = outcome.hopeless
            now = self._context.progress.steps + 1
            _log.info("sentinel: step %d in %s is suspected, the next are checked: %s", now, tier.name, outcome.why)

    def _weigh(self, recorded: Recorded | None, tier: Tier) -> None:
        """Judge the steps since a suspicion: three together, and three more where these disagree by little."""
        outcomes = [outcome for outcome, _ in self._evidence]
        cleared = len(outcomes) == 1 + self._urgent and all(outcome.agrees for outcome in outcomes)
        if len(outcomes) % proof.STEPS and not cleared:
            self._left = 0
            return
        code = self._is_of_code(recorded, tier)
        joined = over_steps(outcomes) if code else verdict(outcomes, recorded.noise.spread if recorded else {})
        if code and not joined.hopeless:
            joined = over_steps(outcomes, scatter=True)
            if not joined.agrees and len(outcomes) == proof.STEPS:
                self._left = 0
                return
        if not joined.agrees and joined.may_be_noise:
            # Kernels that differ from run to run may explain it, or eager's own rounding.
            if not code and recorded is not None and recorded.noise.noisy and self._measures_left > 0:
                self._measures, self._left = True, 0
                return
            if code and not self._rounds and self._context.peers is None:
                self._rounds, self._left = True, 0
                self._evidence.clear()
                return
        calls = [call for _, call in self._evidence[-proof.STEPS :]]
        by_roundings, self._rounds = self._rounds, False
        self._evidence.clear()
        self._suspects = self._urgent = False
        if not joined.agrees:
            self._disagrees(joined, calls, recorded, tier)
        elif code and by_roundings:
            self._code.needs_roundings_from_now_on(tier.base)
        elif code:
            self._code.learn(tier.base, outcomes)

    def _disagrees(self, joined: Outcome, calls: list[Call], recorded: Recorded | None, tier: Tier) -> None:
        """Report what disagrees, and where; from the next step on, another tier runs."""
        code = self._is_of_code(recorded, tier)
        found = disagreement(self._runs, joined, calls, tier, code=code, recorded=recorded is not None)
        self._disagreed = f"step {found.event.step + 1} in {tier.name}: {found.line}"
        self._context.reports.emit(found.event)
        self._tier, self._disagreement = None, found

    # -- when ------------------------------------------------------------------------------------------------------

    def _may_begin(self, tier: Tier) -> bool:
        """Return whether the share pays for the check that is due; if not, put it off."""
        usual = self._context.reports.seconds_of(tier.name)
        if usual is None or self._urgent:
            return True
        budget, work = self._budget, self._work(tier.graph, tier)
        budget.take_pace(usual)
        for evidence, seconds in self._code.seconds.items():
            budget.guess(evidence, seconds)
        if self._graphs.seconds is not None:
            budget.guess("recording", self._graphs.seconds)
        now, total = self._context.progress.steps, self._context.total_steps
        if (lacks := budget.lacks(work, now, first=not self._checks, repeats=self._suspects)) <= 0:
            self._waits = ""
            return True
        self._left = max(FIRST, budget.steps_for(lacks))
        what = "a suspicion is looked into" if self._suspects else "a step is checked"
        self._waits = f"{what} for about {budget.expected(work):.2g} s, once the share of time pays for it"
        if self._evidence or (self._suspects and total is not None and now + self._left >= total):
            again = ", and so was the next that was checked" if self._evidence else ", which rounding may do as well"
            line = f"{self._step.name}: a step in {tier.name} was past its limits{again}"
            self._context.reports.say_once(f"{line}; a greater share, sentinel=, tells sooner", logging.WARNING)
        return False

    def _plan(self, seconds: float, tier: Tier, work: Work) -> None:
        """Plan the next check for when all checks, with the next, have cost their share of the time.

        Args:
            seconds: what this check took, its step included.
            tier: the tier in force.
            work: what the check did.
        """
        usual, budget = self._context.reports.seconds_of(tier.name), self._budget
        budget.note(work, max(0.0, seconds - (usual or 0.0)))
        if not usual:  # no step of this tier was timed yet
            self._left = self._every = FIRST
            return
        budget.take_pace(usual)
        works: list[Work] = ["recording"] if tier.graph else []
        if tier.other_kernels:
            exact: Work = "more bits" if self._code.needs_more_bits(tier.base) else "code"
            works.append("roundings" if self._code.needs_roundings(tier.base) else exact)
        following = statistics.mean(map(budget.expected, works))
        self._every = max(LEAST, budget.steps_for(following))
        distance = max(LEAST, budget.steps_to_next(following, works[-1], self._context.progress.steps))
        draws = random.Random(self._context.progress.steps)  # noqa: S311 - its own: no stream of the program moves
        self._left = distance + draws.randint(-(distance // 2), distance // 2)
