"""Whether compiled code agrees with eager, for one decorated step: its proofs, and what they found."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import time
from typing import TYPE_CHECKING, Any, Literal

from hotloop.diagnose.no_effect import NoEffect
from hotloop.measure import Limits
from hotloop.step.capture.engines import traced_path
from hotloop.step.obstacle import CandidateFailedError, Obstacle
from hotloop.step.prove import proof
from hotloop.step.prove.outcomes import Outcome, over_steps
from hotloop.step.prove.proof import plain_run, prove_step
from hotloop.step.prove.rounding_evidence import in_more_bits, roundings, with_roundings
from hotloop.step.state.random_state import other_threads
from hotloop.step.state.trial_run import alone
from hotloop.step.tiers import Tier

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import torch

    from hotloop.step.loop.runner import Runner
    from hotloop.step.state.program import Call

_COMPILE_IT = "give the loop the modules that are called, not one around them: Loop([encoder, head], optimizer)"
_REPORT_IT = "train on without this tier, and report it: this is a bug of the compiler's or of ours"
_TOO_ROUGH = "train on without this tier: where the model is now, eager's own rounding is as large as what it computes"
_ELSEWHERE = (
    "another thread draws from the same stream, it seems: have it draw from a generator of its own (torch.Generator, "
    "random.Random, numpy.random.default_rng), or load in worker processes"
)
_STAYED = 2
"""Such steps after which its Python is taken to run exactly once."""
Evidence = Literal["more bits", "roundings"]


def remedy_of(verdict: Outcome, otherwise: str = _REPORT_IT) -> str:
    """Say what to do about a proof, or a check, that does not agree."""
    if verdict.undecided:
        return _TOO_ROUGH
    return _ELSEWHERE if verdict.random_moved and other_threads() else otherwise


class CodeProofs:
    """What is known of the compiled code of one runner's step."""

    def __init__(self, runner: Runner) -> None:
        self._runner, self._loop = runner, runner.loop
        self._outcomes: dict[str, list[Outcome]] = collections.defaultdict(list)
        self._agree: set[str] = set()
        """Bases whose code has agreed with eager."""
        self._evidence: dict[str, Evidence] = {}
        """What else has to tell, by base, whether code is right that was further from eager than is usual."""
        self._traced_path = False
        self._stayed = 0
        """Steps that did what nobody can undo, though the step had been looked at."""
        self._known = "", 0
        """The base in force, and how much of its code was compiled before the step, or is compared in it."""
        self._looks = False
        """A step is running, or has raised."""

    def proven(self, base: str) -> bool:
        """Tell whether code compiled as a base asks has agreed with eager often enough."""
        return base in self._agree

    def steps_left(self, base: str) -> int:
        """Give the steps that have to be run both ways before the code is proven, as far as none differs."""
        return max(1, proof.STEPS - len(self._outcomes[base]))

    def not_proven(self, base: str) -> None:
        """Take a proof back: another process has not come to it."""
        self._agree.discard(base)

    def look_before(self) -> None:
        """Note what is compiled of the base in force; after a step that raised, what there was before that one."""
        base = self._loop.compiled.base
        if not self._looks or self._known[0] != base:
            self._compared()
        self._looks = True

    def _compared(self) -> None:
        """Note that all that is compiled of the base in force is proven, or is being compared."""
        self._known = self._loop.compiled.base, self._loop.compiled.compiles()

    def look_after(self) -> None:
        """After a step: code that was compiled anew in it (an adapter was added, say) is to be proven like the first.

        A proof has compared what is compiled in it. Several processes agree on when they prove it.
        """
        base, known = self._known
        self._looks = False
        if base != self._loop.compiled.base or not self.proven(base) or self._loop.compiled.compiles() <= known:
            return
        if self._runner.together is not None:
            self._runner.together.compiled_anew = self._loop.steps + 1
        else:
            self.prove_again(base, f"step {self._loop.steps + 1} has compiled code anew")

    def prove_again(self, base: str, why: str) -> None:
        """Take code that was proven for code that was not, and look at the step anew."""
        self.forget(base)
        self._runner.looking.look_again()  # there may be other modules and parameters
        self._runner.rescue.look_again()
        self._loop.decided(
            f"{self._runner.name}: {base} is proven again: {why}", {"action": "prove again", "tier": base}
        )

    def forget(self, base: str) -> None:
        """What was proven of a base's code does not count any more."""
        self._agree.discard(base)
        self._outcomes.pop(base, None)
        self._evidence.pop(base, None)

    @contextlib.contextmanager
    def as_given(self) -> Iterator[None]:
        """Run the models as they were given, on the path that compilers take where another draws other numbers."""
        path = traced_path(self._runner.program.device) if self._traced_path else contextlib.nullcontext()
        with self._loop.eager(), path:
            yield

    def prove(self, run: Callable[[], Any], tier: Tier) -> Any:
        """Run the step compiled and eager, and compare losses, gradients and buffers; gives the step's result.

        What the optimizer makes of equal gradients is its own, uncompiled code; where it is captured as well, the proof
        of the graph compares that.
        """
        runner, loop = self._runner, self._loop
        holdings, began = runner.program.holdings, time.perf_counter()
        ready = alone if runner.together is None else runner.together.ready
        assert isinstance(run, functools.partial)
        call = run.args, run.keywords

        def eager() -> Any:
            with self.as_given():
                return loop.stepping.beside(Tier(loop.given), functools.partial(plain_run, holdings, run))

        limits = Limits.compiled(loop.surveyed.compute_dtype())
        candidate = functools.partial(plain_run, holdings, run)
        obstacle: Obstacle | None = None
        try:
            stays, result = runner.looking.rehearse(run, *call, ready)
            if stays:
                self._not_yet(tier)
                return result
            runner.kind = "proof"
            loop.course.put_on(tier)
            wide = self._in_more_bits(tier.base, call)
            elsewhere = roundings(runner, call, candidate) if self._evidence.get(tier.base) == "roundings" else None
            proved = prove_step(runner.program, candidate, eager, limits, wide=wide, ready=ready)
            outcome = with_roundings(proved, elsewhere)
            self._compared()
        except CandidateFailedError as error:
            obstacle = runner.rescue.candidate_failed(error, tier)
        if obstacle is not None:
            return runner.rescue.rung_down(run, tier.without_graph(), obstacle)
        loop.proof_costs(time.perf_counter() - began, outcome)
        runner.found_once(runner.looking.changed_inside())
        if runner.once is not None:
            loop.course.failed(tier.without_graph(), runner.once, runner)
        else:
            self._judge(outcome, run, tier)
        return outcome.result

    def _not_yet(self, tier: Tier) -> None:
        """A step could be run once only. What sets something up does so in the first of its kind, and not again."""
        runner = self._runner
        if runner.once is None:
            return
        self._stayed += 1
        if self._stayed < _STAYED:
            runner.once = None
        else:
            self._loop.course.failed(tier.without_graph(), runner.once, runner)

    def _in_more_bits(self, base: str, call: Call) -> dict[str, torch.Tensor | None] | None:
        """Run the step in more bits where these have to tell; where they are not to be had, other roundings do."""
        if self._evidence.get(base) != "more bits":
            return None
        wide = in_more_bits(self._runner, call)
        if wide is None:
            self._evidence[base] = "roundings"
            self._outcomes[base].clear()
        return wide

    def _nothing(self, why: str) -> Obstacle:
        """Say that nothing of the model was compiled, with the line and the remedy of what kept it from that."""
        cause, reason = self._loop.compiled.first_cause(), f"nothing of the model was compiled: {why}"
        if cause is None or not cause.hint:
            return Obstacle(reason, _COMPILE_IT)
        if cause.hint == NoEffect.problem("bypassed").change:
            return Obstacle(reason, f"call the model itself, model(x), or {_COMPILE_IT}")
        return Obstacle(reason, cause.hint, cause.file, cause.line)

    def _judge(self, outcome: Outcome, run: Callable[[], Any], tier: Tier) -> None:
        """Say what a proof step means for the code."""
        runner, loop, base = self._runner, self._loop, tier.base
        outcomes = self._outcomes[base]
        # Without its result, whose graph would tie a later capture to the stream of this step.
        outcomes.append(dataclasses.replace(outcome, result=None))
        del outcomes[: -proof.STEPS]
        verdict = over_steps(outcomes)
        wrong = verdict.hopeless or (len(outcomes) == proof.STEPS and not verdict.agrees)
        alone = runner.together is None  # else nobody runs a step more often than the others, whose collectives wait
        by_chance = verdict.random_moved and alone and runner.program.device.type == "cuda"
        if by_chance and not self._traced_path and runner.graphs.differs_by_chance(run):
            self._traced_path = True  # from the next step on, eager is compared on the path that compilers take
            outcomes.clear()
        elif alone and base not in self._evidence and not verdict.agrees and verdict.may_be_noise:
            self._evidence[base] = "more bits"  # from the next step on
            outcomes.clear()
        elif self._evidence.get(base) == "more bits" and wrong and verdict.may_be_noise:
            self._evidence[base] = "roundings"
            outcomes.clear()
        elif wrong:
            self._agree.discard(base)
            reason = f"compiled code does not agree with eager: {verdict.why}"
            loop.course.failed(tier.without_graph(), Obstacle(reason, remedy_of(verdict)), runner)
        elif len(outcomes) == proof.STEPS and (idle := loop.compiled.idle()):
            loop.course.failed(tier.without_graph(), self._nothing(idle), runner)
        elif len(outcomes) == proof.STEPS and base not in self._agree:
            self._agree.add(base)
            loop.course.base_accepted(tier, runner, verdict)
