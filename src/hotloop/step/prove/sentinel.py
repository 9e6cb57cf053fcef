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

import torch

from hotloop import events as ev
from hotloop.compiling.fallback.causes import describe
from hotloop.errors import ConfigError
from hotloop.measure import Limits
from hotloop.step.calls.call_kind import SPREADS
from hotloop.step.loop.status import SentinelStatus
from hotloop.step.obstacle import CandidateFailedError, Obstacle
from hotloop.step.prove import proof
from hotloop.step.prove.attribution import at_fault
from hotloop.step.prove.code_proofs import remedy_of
from hotloop.step.prove.outcomes import Outcome, over_steps, verdict
from hotloop.step.prove.proof import plain_run, prove_step
from hotloop.step.prove.rounding_evidence import in_more_bits, repeats_elsewhere, roundings, with_roundings
from hotloop.step.tiers import Tier

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from hotloop.measure import Comparison, Failure
    from hotloop.step.calls.call_kind import Variant
    from hotloop.step.loop.loop import Loop
    from hotloop.step.loop.runner import Runner
    from hotloop.step.prove.culprit import Culprit
    from hotloop.step.state.program import Call

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


class Sentinel:
    """Watches one decorated step of a loop.

    Args:
        loop: whose.
        runner: of the step.
        share: the share of time that checks may cost.
    """

    def __init__(self, loop: Loop, runner: Runner, share: float) -> None:
        self._loop, self._runner, self._share = loop, runner, share
        self._goal: Tier | None = None
        self._left = self._every = FIRST
        self._steps = 0
        """Steps with this goal, over which the share is kept, and what checks among them have cost."""
        self._extra = 0.0
        self._suspects, self._measures, self._rounds, self._code = False, False, False, True
        self._spreads = 0
        """How often a recorded step may still be run twice, to see how far its kernels are from themselves by now."""
        self._evidence: list[tuple[Outcome, Call]] = []
        self._checks = self._suspicions = 0
        self._seconds = 0.0
        self._stayed = 0
        """How many of the last checks came to nothing, since the step could be run once only."""
        self._disagreed = self._off = ""

    @property
    def status(self) -> SentinelStatus:
        """What was done so far."""
        return SentinelStatus(
            function=self._runner.name,
            every=self._every,
            checks=self._checks,
            suspicions=self._suspicions,
            seconds=self._seconds,
            disagreed=self._disagreed,
            off=self._off,
        )

    def due(self) -> bool:
        """Count a step that runs compiled or captured; tell whether it is to be checked."""
        if self._loop.goal is not self._goal:
            self._begin(self._loop.goal)
        self._steps += 1
        self._left -= 1
        if self._left > 0 or self._off:
            return False
        return self._loop.auto is None or self._loop.auto.trial is None  # a trial's steps are for its times

    def _begin(self, goal: Tier) -> None:
        if goal != self._goal:
            self._left = self._every = FIRST
            self._steps, self._extra = 0, 0.0
            self._suspects = self._measures = self._rounds = False
            self._evidence.clear()
        self._goal = goal

    def check(self, variant: Variant | None, call: Call, tier: Tier) -> Any:
        """Run a step both ways and compare; gives eager's result.

        Args:
            variant: whose recording runs; None for compiled code without one.
            call: the step's arguments.
            tier: what it runs in.

        Raises:
            CandidateFailedError: the tier's code failed, before eager ran; all is as before.
            Exception: eager's own, which is the user's.
        """
        loop, runner = self._loop, self._runner
        runner.kind, runner.ran = "sentinel", tier.name
        if loop.device.type == "cuda":
            torch.cuda.synchronize(loop.device)  # what earlier steps launched is not this one's cost
        began = time.perf_counter()
        code = self._of_code(variant, tier)
        if variant is None or self._measures or (self._suspects and code):  # a replay runs no Python of the step's
            stays, result = runner.looking.rehearse(functools.partial(runner.step, *call[0], **call[1]), *call)
            if stays:
                self._plan(time.perf_counter() - began, tier)
                self._not_checked()
                return result
            self._stayed = 0
        limits = Limits.compiled(loop.surveyed.compute_dtype()) if code else Limits.rounding()
        wide = in_more_bits(self._runner, call) if self._suspects and code and not self._rounds else None
        other = Tier(loop.given) if code else tier.without_graph()
        reference = functools.partial(
            loop.stepping.beside, other, functools.partial(self._otherwise, variant, call, tier, code=code)
        )
        if self._measures and variant is not None:
            return self._measured(variant, reference, tier)
        spread = variant.spread if variant is not None else None
        candidate = runner.candidate_of(variant, call)
        elsewhere = roundings(runner, call, candidate) if self._rounds else None
        updated = variant.updated if variant is not None and not code else ()
        outcome = prove_step(runner.program, candidate, reference, limits, spread=spread, wide=wide, updated=updated)
        if variant is not None and variant.captured is not None:
            variant.captured.keep_gradients()
        self._checks += 1
        self._plan(time.perf_counter() - began, tier)
        referred = wide is not None or elsewhere is not None or not code
        judged = _to_judge(with_roundings(outcome, elsewhere), referred=referred)
        self._carefully(self._judge, judged, variant, call, tier)
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
        """The step could be run once only. What is done every so often is not done at the next check, most likely."""
        runner = self._runner
        if runner.once is None:
            return
        self._stayed += 1
        if self._stayed >= _STAYED:
            self.stop(str(runner.once))
        runner.once = None

    def stop(self, why: str) -> None:
        """Make no more checks."""
        self._off = why
        self._loop.say_once(f"{self._runner.name}: no more sentinel steps: {why}")

    def _of_code(self, variant: Variant | None, tier: Tier) -> bool:
        """Tell whether this check is of compiled code.

        A recording of such code is held against eager and, by turns, to a few ulp against that code itself.
        """
        return tier.compiles and (variant is None or self._code)

    # -- both ways -------------------------------------------------------------------------------------------------

    def _otherwise(self, variant: Variant | None, call: Call, tier: Tier, *, code: bool) -> Any:
        """Run the step eagerly or, to judge the recording alone, as what was recorded; on the stream of recordings."""
        run = functools.partial(self._runner.step, *call[0], **call[1])
        graphs = self._runner.graphs
        with self._runner.code.as_given() if code else contextlib.nullcontext():
            if variant is not None:
                return graphs.reference(variant, run)
            return graphs.on_stream_of_recordings(run) if tier.graph else plain_run(self._loop.holdings, run)

    def _measured(self, variant: Variant, run: Callable[[], Any], tier: Tier) -> Any:
        """Run the step twice as what was recorded, to see anew how far its kernels are from themselves: a real step.

        Then the steps that were looked into are judged again. Late in a training gradients that are rounding and
        nothing else, of a bias that a softmax cancels, differ more than they did when the recording was proven.
        """
        began = time.perf_counter()
        limits = self._runner.graphs.limits_of_repeats()
        result, spread = proof.spread_of(self._runner.program, run, run, limits)
        if variant.captured is not None:
            variant.captured.keep_gradients()
        before = variant.spread, [*variant.measured]
        excused = isinstance(spread, proof.Unlike) and repeats_elsewhere(self._runner, spread, run, run)
        self._plan(time.perf_counter() - began, tier)
        self._measures, self._left = False, 0
        self._spreads -= 1
        if isinstance(spread, proof.Unlike) and excused:
            spread = spread.spread
        if isinstance(spread, dict):
            variant.note_spread(spread)
        else:
            self._spreads = 0  # no noise explains it: what disagrees next counts
        self._carefully(self._weigh, variant, tier)
        if excused:  # of these steps: elsewhere in the training so much noise would hide a fault
            variant.spread, variant.measured = before
        return result

    # -- what it means ---------------------------------------------------------------------------------------------

    def _may_be_noise(self, joined: Outcome, variant: Variant | None) -> bool:
        """Tell whether running the step twice may explain a disagreement; not for ever."""
        return variant is not None and variant.noisy and self._spreads > 0 and joined.may_be_noise

    def _judge(self, outcome: Outcome, variant: Variant | None, call: Call, tier: Tier) -> None:
        if outcome.failed:
            self.stop(outcome.why)
        elif _certain(outcome, self._loop.surveyed.compute_dtype()):
            self._disagrees(outcome, [call], variant, tier)
        elif not self._suspects and not outcome.agrees:
            self._suspicions += 1
            self._suspects, self._left, self._spreads = True, 0, SPREADS
            _log.info("sentinel: step %d in %s is looked into: %s", self._loop.steps + 1, tier.name, outcome.why)
        elif self._suspects:
            self._evidence.append((outcome, call))
            self._weigh(variant, tier)

    def _weigh(self, variant: Variant | None, tier: Tier) -> None:
        """Judge the steps since a suspicion: three together, and three more where these disagree by little."""
        outcomes = [one for one, _ in self._evidence]
        if len(outcomes) % proof.STEPS:
            self._left = 0
            return
        code = self._of_code(variant, tier)
        joined = over_steps(outcomes) if code else verdict(outcomes, (variant and variant.spread) or {})
        if code and not joined.hopeless:
            joined = over_steps(outcomes, scatter=True)
            if not joined.agrees and len(outcomes) == proof.STEPS:
                self._left = 0
                return
        if not joined.agrees and not code and self._may_be_noise(joined, variant):
            self._measures, self._left = True, 0
            return
        if not joined.agrees and code and not self._rounds and joined.may_be_noise and self._runner.together is None:
            self._rounds, self._left = True, 0
            self._evidence.clear()
            return
        calls = [one for _, one in self._evidence[-proof.STEPS :]]
        self._evidence.clear()
        self._suspects = self._rounds = False
        if not joined.agrees:
            self._disagrees(joined, calls, variant, tier)

    def _disagrees(self, joined: Outcome, calls: list[Call], variant: Variant | None, tier: Tier) -> None:
        """Say what disagrees, and where; from the next step on, another tier runs."""
        rough = joined.undecided
        recorded, blamed = (False, None) if rough else self._looked_for(calls, variant, tier)
        where = "the recording, not the code in it" if recorded else str(blamed) if blamed is not None else ""
        region = blamed.regions[0] if blamed is not None and len(blamed.regions) == 1 else None
        worst = _worst(joined)
        at = f"; at fault: {where}" if where else ""
        said = f"{worst if worst is not None else joined.why}{at}"
        self._disagreed = f"step {self._loop.steps + 1} in {tier.name}: {said}"
        self._loop.emit(
            ev.SentinelDisagreed(
                step=self._loop.steps,
                function=self._runner.name,
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
        obstacle = Obstacle(f"a sentinel step does not agree with eager: {said}", remedy_of(joined, _VERIFY))
        self._goal = None
        self._runner.gave_way(tier, obstacle, variant if recorded else None)

    def _looked_for(self, calls: list[Call], variant: Variant | None, tier: Tier) -> tuple[bool, Culprit | None]:
        """Tell whether a recording is at fault rather than the code in it; and which region of the code is."""
        if not self._of_code(variant, tier):
            return True, None
        return at_fault(self._runner, calls, recorded=variant is not None)

    # -- when ------------------------------------------------------------------------------------------------------

    def _plan(self, seconds: float, tier: Tier) -> None:
        """Put the next check where all with this goal, and it, have cost their share of the time."""
        usual = self._loop.account.tiers[tier.name].seconds
        if usual is None:  # no step of this tier was timed yet
            self._left = self._every = FIRST
            return
        extra = max(0.0, seconds - usual)
        self._seconds += extra
        self._extra += extra
        of_one = self._share * usual
        self._every = max(LEAST, math.ceil(extra / of_one))
        planned = max(LEAST, math.ceil((self._extra + extra) / of_one) - self._steps)
        self._left = _spread_out(planned, self._loop.steps)


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
