"""The sentinel: now and then a step of a proven tier is also run eagerly, from the same state, and compared.

A proof looks at three steps, and a run has a million. A recording may go stale, a size may come that compiled code does
not fit, and gradients that are wrong by 1% kill nothing. So every N steps or so one is run both ways, as in a proof:
eager's outcome stays, so it is a training step like any other. N follows from what such a step costs and the share of
time that it may cost. The distance is another one each time, from half of N to one and a half: what a step does only
every so often would else never be checked where N is a multiple of that.

One comparison past its limits is a suspicion only: there are hundreds of checks of hundreds of tensors in a run, and as
a model learns, its gradients become small beside their rounding. So the next three steps are run both ways too, and in
more bits besides, and three more where these are past their limits by little. Joined over these, whose chance is their
own, with what eager itself is wrong by and how far the steps scatter allowed for, a recording that disagrees counts;
code is held against other roundings of the next steps first, in the same way. Until then eager's outcomes stay. What no
rounding makes (NaN where eager has none, a missing gradient) counts at once.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import math
import random
import time
from typing import TYPE_CHECKING, Any

from hotloop import events as ev
from hotloop.errors import ConfigError, describe
from hotloop.measure import Limits
from hotloop.step.obstacle import CandidateFailedError, Obstacle
from hotloop.step.prove import noise, proof
from hotloop.step.prove.attribution import at_fault
from hotloop.step.prove.code_proofs import remedy_of
from hotloop.step.prove.outcomes import Outcome, over_steps, verdict
from hotloop.step.prove.rounding_evidence import in_more_bits, repeats_elsewhere, roundings, with_roundings
from hotloop.step.state.trial_run import wait_for

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from hotloop.measure import Comparison, Failure
    from hotloop.step.audit.auditor import StepAuditor
    from hotloop.step.context import DecoratedStep
    from hotloop.step.prove.graph_proofs import GraphProofs, Recorded
    from hotloop.step.prove.reference_runs import ReferenceRuns
    from hotloop.step.state.program import Call
    from hotloop.step.tiers import Tier

_log = logging.getLogger("hotloop")
SHARE = 0.01
"""The share of time that sentinel steps may cost, unless the user says otherwise."""
FIRST, LEAST = 100, 10
"""Steps in a tier before the first check, which tells what one costs; and between two checks in the mean, at least."""
_STAYED = 5
"""Steps in a row that could be run once only, after which all are taken to be such."""
_SHAPES = ("missing", "shape", "dtype", "layout")
_VERIFY = "hotloop verify FILE.py:FUNCTION says more; report it: this is a bug of the compiler's or of ours"


def share_of(given: Any) -> float:
    """Check the setting; 0 where there is to be no sentinel.

    Raises:
        ConfigError: it is no share of time.
    """
    if given is None:
        return 0.0
    if isinstance(given, bool) or not isinstance(given, int | float) or not 0 <= given <= 1:
        raise ConfigError(
            f"sentinel {given!r}: expected the share of time that it may cost, from 0 to 1 (0.01, say), or None"
        )
    return float(given)


@dataclasses.dataclass(frozen=True)
class Disagreement:
    """A tier that a sentinel found wrong: its recording is at fault, or else its compiled code."""

    obstacle: Obstacle
    of_recording: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class SentinelStatus:
    """What the sentinel of one decorated step did.

    Args:
        function: the step.
        every: steps between two checks, as it is now.
        checks: steps that were run both ways.
        suspicions: checks past a limit, after which the next steps were looked into.
        seconds: what checks have cost beyond what their steps take otherwise.
        disagreed: what was found to be wrong, and where; empty where nothing was.
        off: why no more checks are made.
    """

    function: str
    every: int
    checks: int
    suspicions: int
    seconds: float
    disagreed: str = ""
    off: str = ""

    def __str__(self) -> str:
        if self.disagreed:
            return f"sentinel: {self.function} did not agree with eager: {self.disagreed}"
        looked = f" ({self.suspicions:,} were looked into, and not confirmed)" if self.suspicions else ""
        said = f"sentinel: {self.function}: {self.checks:,} steps were also run eagerly and agreed{looked}, "
        return said + (f"then no more: {self.off}" if self.off else f"one in {self.every:,}; {self.seconds:.1f} s")


class Sentinel:
    """Checks a decorated step now and then: runs it eagerly as well, and compares.

    Args:
        step: the decorated step.
        runs: its reference runs.
        graphs: the proofs of its recordings.
        auditor: rehearses a step whose Python is about to run twice.
        share: the share of time that checks may cost.
    """

    def __init__(
        self, step: DecoratedStep, runs: ReferenceRuns, graphs: GraphProofs, auditor: StepAuditor, share: float
    ) -> None:
        self._step, self._context, self._share = step, step.context, share
        self._runs, self._graphs, self._auditor = runs, graphs, auditor
        self._tier: Tier | None = None
        self._left = self._every = FIRST
        self._steps = 0
        """Steps in this tier, over which the share is kept."""
        self._extra = 0.0
        """Seconds that checks among these steps have cost."""
        self._suspects, self._measures, self._rounds, self._code = False, False, False, True
        self._spreads = 0
        """How often a recorded step may still be run twice, to see how far its kernels are from themselves by now."""
        self._evidence: list[tuple[Outcome, Call]] = []
        self._checks = self._suspicions = 0
        self._seconds = 0.0
        self._stayed = 0
        """How many of the last checks came to nothing, since the step could be run only once."""
        self._said = self._off = ""
        self._disagreement: Disagreement | None = None

    @property
    def status(self) -> SentinelStatus:
        """What was done so far."""
        return SentinelStatus(
            function=self._step.name,
            every=self._every,
            checks=self._checks,
            suspicions=self._suspicions,
            seconds=self._seconds,
            disagreed=self._said,
            off=self._off,
        )

    def due(self) -> bool:
        """Count a step that runs compiled or captured; return whether to check it."""
        progress = self._context.progress
        if progress.tier is not self._tier:
            self._begin(progress.tier)
        self._steps += 1
        self._left -= 1
        return self._left <= 0 and not self._off and not progress.in_trial

    def _begin(self, tier: Tier) -> None:
        if tier != self._tier:
            self._left = self._every = FIRST
            self._steps, self._extra = 0, 0.0
            self._suspects = self._measures = self._rounds = False
            self._evidence.clear()
        self._tier = tier

    def check(self, recorded: Recorded | None, call: Call, tier: Tier) -> tuple[Any, Disagreement | None]:
        """Run a step both ways and compare.

        Args:
            recorded: whose recording runs; None for compiled code without one.
            call: the step's arguments.
            tier: what the step runs in.

        Returns:
            Eager's result, and what disagrees, if that is known by now.

        Raises:
            CandidateFailedError: the tier's code failed, before eager ran; all is as before.
            Exception: eager's own, which is the user's.
        """
        self._disagreement = None
        return self._checked(recorded, call, tier), self._disagreement

    def _checked(self, recorded: Recorded | None, call: Call, tier: Tier) -> Any:
        step, context = self._step, self._context
        step.doing, step.ran = "sentinel", tier.name
        wait_for(context.device)  # what earlier steps launched is not this one's cost
        began = time.perf_counter()
        code = self._of_code(recorded, tier)
        if recorded is None or self._measures or (self._suspects and code):  # a replay runs no Python of the step's
            run = functools.partial(step.program.step, *call[0], **call[1])
            stays, result = self._auditor.rehearse(run, *call)
            if stays:
                self._plan(time.perf_counter() - began, tier)
                self._not_checked()
                return result
            self._stayed = 0
        other = context.base_tier if code else tier.without_graph()
        reference = functools.partial(
            context.reports.timed_beside, other, functools.partial(self._otherwise, recorded, call, tier, code=code)
        )
        if self._measures and recorded is not None:
            return self._measured(recorded, reference, tier)
        candidate = self._runs.call(call)
        if recorded is not None and recorded.recording is not None:
            candidate = functools.partial(self._graphs.candidate, recorded, call)
        wide = in_more_bits(self._runs, call) if self._suspects and code and not self._rounds else None
        elsewhere = roundings(self._runs, call, candidate) if self._rounds else None
        outcome = proof.prove_step(
            step.program,
            candidate,
            reference,
            Limits.compiled(context.compute_dtype()) if code else Limits.rounding(),
            spread=recorded.noise.spread if recorded is not None else None,
            wide=wide,
            updated=recorded.updated if recorded is not None and not code else (),
        )
        if recorded is not None and recorded.recording is not None:
            recorded.recording.keep_gradients()
        self._checks += 1
        self._plan(time.perf_counter() - began, tier)
        referred = wide is not None or elsewhere is not None or not code
        judged = _to_judge(with_roundings(outcome, elsewhere), referred=referred)
        self._carefully(self._judge, judged, recorded, call, tier)
        return outcome.result

    def _carefully(self, judge: Callable[..., None], *args: Any) -> None:
        """Judge, and turn to the other kind of check where nothing is suspected."""
        try:
            judge(*args)
        except CandidateFailedError:
            raise
        except Exception as error:  # noqa: BLE001 - the step is done and right, whatever is wrong with looking at it
            _log.warning("a sentinel step could not be judged", exc_info=True)
            self.stop(f"one could not be judged: {describe(error)}")
        if not self._suspects:
            self._code = not self._code

    def _not_checked(self) -> None:
        """Note a step that could be run only once: most likely it does at the next check what can be repeated."""
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

    def _of_code(self, recorded: Recorded | None, tier: Tier) -> bool:
        """Return whether this check is of compiled code.

        A recording of such code is held against eager and, by turns, to a few ulp against that code itself.
        """
        return tier.compiles and (recorded is None or self._code)

    # -- both ways -------------------------------------------------------------------------------------------------

    def _otherwise(self, recorded: Recorded | None, call: Call, tier: Tier, *, code: bool) -> Any:
        """Run the step eagerly or, to judge the recording alone, as what was recorded; on the stream of recordings."""
        run = functools.partial(self._step.program.step, *call[0], **call[1])
        with self._runs.as_given() if code else contextlib.nullcontext():
            if recorded is not None:
                return self._graphs.reference(recorded.path, run)
            return self._runs.on_capture_stream(run) if tier.graph else self._runs.call(call)()

    def _measured(self, recorded: Recorded, run: Callable[[], Any], tier: Tier) -> Any:
        """Run the step twice as what was recorded, to see anew how far its kernels are from themselves: a real step.

        Then the steps that were looked into are judged again. Late in a training gradients that are rounding and
        nothing else, of a bias that a softmax cancels, differ more than they did when the recording was proven.
        """
        began = time.perf_counter()
        result, spread = proof.spread_of(self._step.program, run, run, self._runs.limits_of_repeats())
        if recorded.recording is not None:
            recorded.recording.keep_gradients()
        before = recorded.noise
        excused = isinstance(spread, proof.Unlike) and repeats_elsewhere(self._runs, spread, run, run)
        self._plan(time.perf_counter() - began, tier)
        self._measures, self._left = False, 0
        self._spreads -= 1
        if isinstance(spread, proof.Unlike) and excused:
            spread = spread.spread
        if isinstance(spread, dict):
            recorded.noise = before.joined(spread)
        else:
            self._spreads = 0  # no noise explains it: what disagrees next counts
        self._carefully(self._weigh, recorded, tier)
        if excused:  # this noise is of these steps: elsewhere in the training so much would hide a fault
            before.noisy = recorded.noise.noisy
            recorded.noise = before
        return result

    # -- what it means ---------------------------------------------------------------------------------------------

    def _judge(self, outcome: Outcome, recorded: Recorded | None, call: Call, tier: Tier) -> None:
        if outcome.failed:
            self.stop(outcome.why)
        elif _certain(outcome, self._context.compute_dtype()):
            self._disagrees(outcome, [call], recorded, tier)
        elif not self._suspects and not outcome.agrees:
            self._suspicions += 1
            self._suspects, self._left, self._spreads = True, 0, noise.MOST
            now = self._context.progress.steps + 1
            _log.info("sentinel: step %d in %s is looked into: %s", now, tier.name, outcome.why)
        elif self._suspects:
            self._evidence.append((outcome, call))
            self._weigh(recorded, tier)

    def _weigh(self, recorded: Recorded | None, tier: Tier) -> None:
        """Judge the steps since a suspicion: three together, and three more where these disagree by little."""
        outcomes = [outcome for outcome, _ in self._evidence]
        if len(outcomes) % proof.STEPS:
            self._left = 0
            return
        code = self._of_code(recorded, tier)
        joined = over_steps(outcomes) if code else verdict(outcomes, recorded.noise.spread if recorded else {})
        if code and not joined.hopeless:
            joined = over_steps(outcomes, scatter=True)
            if not joined.agrees and len(outcomes) == proof.STEPS:
                self._left = 0
                return
        if not joined.agrees and joined.may_be_noise:
            # Noise may explain it: kernels that differ from run to run, or eager's own rounding. Not for ever.
            if not code and recorded is not None and recorded.noise.noisy and self._spreads > 0:
                self._measures, self._left = True, 0
                return
            if code and not self._rounds and self._context.peers is None:
                self._rounds, self._left = True, 0
                self._evidence.clear()
                return
        calls = [call for _, call in self._evidence[-proof.STEPS :]]
        self._evidence.clear()
        self._suspects = self._rounds = False
        if not joined.agrees:
            self._disagrees(joined, calls, recorded, tier)

    def _disagrees(self, joined: Outcome, calls: list[Call], recorded: Recorded | None, tier: Tier) -> None:
        """Say what disagrees, and where; from the next step on, another tier runs."""
        step, at_step = self._step, self._context.progress.steps
        if joined.undecided:
            of_recording, blamed = False, None
        elif not self._of_code(recorded, tier):
            of_recording, blamed = True, None
        else:
            of_recording, blamed = at_fault(self._runs, calls, recorded=recorded is not None)
        where = "the recording, not the code in it" if of_recording else str(blamed) if blamed is not None else ""
        region = blamed.regions[0] if blamed is not None and len(blamed.regions) == 1 else None
        worst = _worst(joined)
        said = f"{worst if worst is not None else joined.why}{f'; at fault: {where}' if where else ''}"
        self._said = f"step {at_step + 1} in {tier.name}: {said}"
        self._context.reports.emit(
            ev.SentinelDisagreed(
                step=at_step,
                function=step.name,
                tier=tier.name,
                tensor=worst.name if worst is not None else "",
                measure=worst.measure if worst is not None else "random position",
                value=_number(worst.value) if worst is not None else None,
                limit=_number(worst.limit) if worst is not None else None,
                reason=joined.why,
                region=where,
                file=region.file if region is not None else None,
                line=region.line if region is not None else None,
            )
        )
        reason = f"a sentinel step does not agree with eager: {said}"
        self._tier = None
        self._disagreement = Disagreement(Obstacle(reason, remedy_of(joined, _VERIFY)), of_recording=of_recording)

    # -- when ------------------------------------------------------------------------------------------------------

    def _plan(self, seconds: float, tier: Tier) -> None:
        """Put the next check where all checks in this tier, the next included, have cost their share of the time."""
        usual = self._context.reports.seconds_of(tier.name)
        if usual is None:  # no step of this tier was timed yet
            self._left = self._every = FIRST
            return
        extra = max(0.0, seconds - usual)
        self._seconds += extra
        self._extra += extra
        of_one = self._share * usual
        self._every = max(LEAST, math.ceil(extra / of_one))
        planned = max(LEAST, math.ceil((self._extra + extra) / of_one) - self._steps)
        self._left = _spread_out(planned, self._context.progress.steps)


def _spread_out(distance: int, seed: int) -> int:
    """Draw a distance around one, which is the mean, from a generator of its own: no stream of the program moves."""
    return distance + random.Random(seed).randint(-(distance // 2), distance // 2)  # noqa: S311 - nothing is secret


def _to_judge(outcome: Outcome, *, referred: bool) -> Outcome:
    """Give what counts of a step: not what compiled code returns, unless there is a reference.

    The smaller a loss, the more of it is rounding, and without a reference nobody knows how much; the gradients are
    judged in any case. NaN is one in any case too.
    """
    comparisons = outcome.comparisons
    if not referred and not any(one.measure == "finite" for one in _failures(comparisons, "result")):
        comparisons = {kind: one for kind, one in comparisons.items() if kind != "result"}
    return dataclasses.replace(outcome, result=None, comparisons=comparisons)


def _failures(comparisons: Mapping[str, Comparison], kind: str) -> Sequence[Failure]:
    return comparisons[kind].failures if kind in comparisons else ()


def _certain(outcome: Outcome, compute_dtype: str) -> bool:
    """Tell whether something differs that no rounding makes; in float16 an overflow is one that rounding does make."""
    measures = _SHAPES if compute_dtype == "float16" else (*_SHAPES, "finite")
    return any(each.measure in measures for one in outcome.comparisons.values() for each in one.failures)


def _worst(joined: Outcome) -> Failure | None:
    """Give the failure of the kind of tensors that is furthest past its limits."""
    wrong = [one for one in joined.comparisons.values() if not one.agrees]
    return max(wrong, key=lambda one: one.nearness).failures[0] if wrong else None


def _number(value: Any) -> float | None:
    return value if isinstance(value, float) and math.isfinite(value) else None
