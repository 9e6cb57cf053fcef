"""Proofs of compiled code, or another layout: a step runs so and eager, until it is known to be right."""

from __future__ import annotations

import collections
import dataclasses
import functools
import time
from typing import TYPE_CHECKING, Any, Literal

from hotloop.diagnose.no_effect import NoEffect
from hotloop.interrupts import uninterrupted
from hotloop.measure import ALL, Limits
from hotloop.measure.wide_reference import NORM
from hotloop.remedies import NOT_CHECKPOINTED
from hotloop.step.obstacle import CandidateFailedError, Obstacle
from hotloop.step.prove import proof
from hotloop.step.prove.outcomes import Outcome, over_steps
from hotloop.step.prove.rounding_evidence import differs_by_chance, in_more_bits, roundings, with_roundings
from hotloop.step.prove.unseen import Unseen
from hotloop.step.ranks.together import Together
from hotloop.step.state.rng_usage import other_threads
from hotloop.step.state.trial_run import alone, wait_for

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping

    import torch

    from hotloop.step.audit.auditor import StepAuditor
    from hotloop.step.context import DecoratedStep
    from hotloop.step.prove.budget import Work
    from hotloop.step.prove.reference_runs import ReferenceRuns
    from hotloop.step.rescue import Rescue
    from hotloop.step.state.program import Call
    from hotloop.step.tiers import Tier

_COMPILE_IT = "give the loop the modules that are called, not one around them: Loop([encoder, head], optimizer)"
_SEE_IT = "mend what the reason names, or train on without this tier"
_REPORT_IT = "train on without this tier, and report it: this is a bug of the compiler's or of ours"
_TOO_ROUGH = "train on without this tier: where the model is now, eager's own rounding is as large as what it computes"
_ELSEWHERE = (
    "where another thread draws from the same stream, have it draw from a generator of its own (torch.Generator, "
    f"random.Random, numpy.random.default_rng), or load in worker processes; else {_REPORT_IT}"
)
_STAYED = 2
"""Steps whose Python could run only once, after which it is taken to be so for good."""
Evidence = Literal["more bits", "roundings"]
_Learnt = dict[str, dict[tuple[str, str], float]]
"""Limits by kind of tensor, and by tensor and measure."""
_SIXTEEN_BITS = ("bfloat16", "float16")
"""Compute dtypes in which convolutions of another layout are past the normal limits, as a rule: BatchNorms follow."""


def remedy_of(verdict: Outcome, otherwise: str = _REPORT_IT) -> str:
    """Return what to do about a proof, or a check of the sentinel, that does not agree."""
    if verdict.undecided:
        return _TOO_ROUGH
    return _ELSEWHERE if verdict.random_moved and other_threads() else otherwise


class CodeProofs:
    """The proofs of the compiled code of one decorated step.

    Args:
        step: the decorated step.
        runs: its reference runs.
        auditor: rehearses the step before it is run both ways.
        rescue: undoes a proof that failed.

    Attributes:
        seconds: what the last proof step took, by what it compared.
        compiled_anew: with other processes, by base, why this process has to prove its code again, until all do.
    """

    def __init__(self, step: DecoratedStep, runs: ReferenceRuns, auditor: StepAuditor, rescue: Rescue) -> None:
        self._step, self._context = step, step.context
        self._runs, self._auditor, self._rescue = runs, auditor, rescue
        self._outcomes: dict[str, list[Outcome]] = collections.defaultdict(list)
        self._agree: set[str] = set()
        """Bases whose code has agreed with eager."""
        self._evidence: dict[str, Evidence] = {}
        """By base: the further evidence that decides, where code was past the normal limits."""
        self._learnt: dict[str, _Learnt] = {}
        """By base: the limits that a step in more bits has allowed code that agreed."""
        self._by_length: set[str] = set()
        """Bases of which some tensors are mostly rounding: only a step in more bits holds them to their length."""
        self.seconds: dict[Work, float] = {}
        self._proof_steps: collections.Counter[str] = collections.Counter()
        """By base: the steps that were run both ways, with whatever evidence."""
        self._stayed = 0
        """Proof steps that could be run only once."""
        self._known = "", 0
        """The base in force, and the number of its compiles before the step, or at the end of a proof."""
        self._in_step = False
        """A step is running, or has raised."""
        self.compiled_anew: dict[str, str] = {}
        self._unseen: dict[str, Unseen] = {}
        """By base, the gradients that were zero throughout the proof of its code."""
        self._looked: Mapping[str, torch.Tensor] | None = None
        """If the gradients of the step are to be looked at, those that its optimizers have read in a replay."""
        self._tell: Callable[[], None] | None = None
        """Reports that code is proven, once it is so in all of several processes."""

    def proven(self, base: str) -> bool:
        """Return whether code compiled as a base asks has agreed with eager often enough."""
        return base in self._agree

    def needs_roundings(self, base: str) -> bool:
        """Return whether only other roundings of the step tell whether a base's code is right."""
        return self._evidence.get(base) == "roundings"

    def needs_roundings_from_now_on(self, base: str) -> None:
        """Note that only other roundings of a step could tell that a base's code was right."""
        self._evidence[base] = "roundings"

    def needs_more_bits(self, base: str) -> bool:
        """Return whether limits that were learnt let anything pass: a tensor of zeros is off by 1."""
        return base in self._by_length

    def learn(self, base: str, outcomes: Iterable[Outcome]) -> None:
        """Note what steps in more bits have allowed code that agreed with them: the normal limits were wrong for it."""
        self._evidence.setdefault(base, "more bits")
        learnt = self._learnt.setdefault(base, {})
        for outcome in outcomes:
            for kind, held in outcome.comparisons.items():
                limits = learnt.setdefault(kind, {})
                for score in held.scores:
                    if score.measure == NORM:
                        self._by_length.add(base)
                    key = score.name, score.measure
                    limits[key] = max(limits.get(key, 0.0), score.limit)

    def by_learnt_limits(self, base: str, outcome: Outcome) -> Outcome:
        """Judge a step that was compared with eager alone by what was learnt of the base's code."""
        learnt = self._learnt.get(base, {})
        held = {kind: one.with_limits(learnt.get(kind, {})) for kind, one in outcome.comparisons.items()}
        return dataclasses.replace(outcome, comparisons=held)

    def steps_left(self, base: str) -> int:
        """Return how many more steps have to be run both ways and agree until the code is proven."""
        return max(1, proof.STEPS - len(self._outcomes[base]))

    def _note_proven(self, tier: Tier, verdict: Outcome) -> None:
        """Report that code is proven here; with other processes, once it is so in all of them."""
        self._tell = functools.partial(
            self._context.reports.proven,
            self._step,
            tier,
            worst=verdict.worst,
            copied_bytes=verdict.nbytes,
            on_host=verdict.on_host,
        )
        if self._context.peers is None:
            self.tell_proven()

    def tell_proven(self) -> None:
        """Report the code that was proven since the last report."""
        tell, self._tell = self._tell, None
        if tell is not None:
            tell()

    def not_proven(self, base: str) -> None:
        """Take a proof back, since another process has not proven its code."""
        self._agree.discard(base)

    def look_before(self) -> None:
        """Note how much is compiled of the base in force; after a step that raised, keep the number from before it."""
        if not self._in_step or self._known[0] != self._context.compiled.base:
            self._note_compiles()
        self._in_step = True

    def _note_compiles(self) -> None:
        """Note that all code of the base in force is proven, or is being compared."""
        self._known = self._context.compiled.base, self._context.compiled.compiles()

    def look_after(self) -> None:
        """Prove code again if the step has compiled some anew, as after an adapter was added.

        Code that is compiled in a proof is compared there. Several processes agree on when they prove code again.
        """
        base, known = self._known
        self._in_step = False
        compiled = self._context.compiled
        if base == compiled.base and self.proven(base) and compiled.compiles() > known:
            self._distrust(base, f"step {self._context.progress.steps + 1} has compiled code anew")

    def _distrust(self, base: str, why: str) -> None:
        """Prove code again from the next step on; several processes from the call on in which all know of it."""
        if self._context.peers is not None:
            self.compiled_anew[base] = why
        else:
            self.prove_again(base, why)

    def run(self, run: Callable[[], Any], tier: Tier) -> Any:
        """Run proven code without a graph."""
        self._looked, unseen = None, self._unseen.get(tier.base)
        if unseen is None or not unseen.due():
            return self._rescue.guarded(run, tier)
        with unseen.looking(self._context.writes):
            result = self._rescue.guarded(run, tier)
        self._looked = {}
        return result

    def replayed(self, base: str, gradients_at_step: Mapping[str, torch.Tensor]) -> None:
        """Note that a recording of proven code has run."""
        unseen = self._unseen.get(base)
        self._looked = gradients_at_step if unseen is not None and unseen.due() else None

    def unseen(self, base: str) -> Collection[str]:
        """Return the parameters whose gradients no proof of a base's code has seen."""
        return self._unseen[base].parameters if base in self._unseen else ()

    def look_at_gradients(self, base: str) -> None:
        """After a step, prove code again at the first gradient that its proof has not seen."""
        looked, self._looked = self._looked, None
        unseen = self._unseen.get(base)
        if unseen is None or not self.proven(base):
            return
        if looked is not None:
            unseen.look_after(looked)
        if unseen.appeared():
            now = self._context.progress.steps + 1
            self._distrust(base, f"step {now} had a gradient that was too small whenever the code was compared")

    def prove_again(self, base: str, why: str) -> None:
        """Treat proven code as code that was not proven, and audit the step anew."""
        self.forget(base)
        self._auditor.look_again()  # there may be other modules and parameters
        self._rescue.look_again()
        line = f"{self._step.name}: {base} is proven again: {why}"
        self._context.reports.decided(line, {"action": "prove again", "tier": base})

    def forget(self, base: str) -> None:
        """Forget what was proven of a base's code."""
        self._agree.discard(base)
        self._outcomes.pop(base, None)
        self._evidence.pop(base, None)
        self._learnt.pop(base, None)
        self._by_length.discard(base)

    @uninterrupted
    def prove(self, call: Call, tier: Tier) -> Any:
        """Run the step compiled and eager, and compare losses, gradients and buffers; return the step's result.

        The optimizer's step is not compiled, so its outcome is not compared here. The proof of a graph compares it.
        """
        step, context, began = self._step, self._context, time.perf_counter()
        ready = alone if context.peers is None else Together(context.peers)
        run = functools.partial(step.program.step, *call[0], **call[1])
        candidate, seconds = self._runs.call(call), list[float]()

        def timed() -> Any:
            wait_for(context.device)
            started = time.perf_counter()
            made = candidate()
            wait_for(context.device)
            seconds.append(time.perf_counter() - started)
            return made

        once = timed if tier.channels_last else candidate

        def eager() -> Any:
            with self._runs.as_given():
                return context.reports.timed_beside(context.base_tier, once)

        limits = Limits.compiled(context.compute_dtype())
        obstacle: Obstacle | None = None
        try:
            stays, result = self._auditor.rehearse(run, *call, ready)
            if stays:
                self._not_yet(tier)
                return result
            step.doing, compiles = "proof", context.compiled.compiles()
            self._install(tier)
            if tier.channels_last and context.compute_dtype() in _SIXTEEN_BITS:
                self._evidence.setdefault(tier.base, "more bits")
            wide = self._in_more_bits(tier.base, call)
            by_roundings = self._evidence.get(tier.base) == "roundings"
            elsewhere = roundings(self._runs, call, candidate) if by_roundings else None
            proved = proof.prove_step(step.program, once, eager, limits, wide=wide, ready=ready)
            outcome = with_roundings(proved, elsewhere)
            self._note_compiles()
        except CandidateFailedError as error:
            obstacle = self._rescue.candidate_failed(error, tier)
        if obstacle is not None:
            return self._rescue.rung_down(run, tier.without_graph(), obstacle)
        took = time.perf_counter() - began
        if context.compiled.compiles() == compiles:
            self.seconds["roundings" if elsewhere else "more bits" if wide else "code"] = took
        context.reports.proof_took(took, outcome.nbytes)
        step.note_not_repeatable(self._auditor.changed_inside())
        if step.not_repeatable is not None:
            context.reports.failed(step, tier.without_graph(), step.not_repeatable)
        else:
            self._judge(outcome, call, tier)
        self._proof_steps[tier.base] += 1
        if tier.channels_last:
            self._tell_layout(tier.base, took, seconds)
        return outcome.result

    def _tell_layout(self, base: str, took: float, seconds: list[float]) -> None:
        """Say what a layout saves, once it is proven; before, it may still be wrong, and the rest of the proof is told.

        Args:
            base: the layout.
            took: seconds of the proof step.
            seconds: of the step in the layout first, and in eager last.
        """
        reports = self._context.reports
        if self.proven(base):
            reports.proof_saves(max(0.0, seconds[-1] - seconds[0]), self._context.base_tier.name)
            reports.proof_takes(0.0)
        elif self._proof_steps[base] > 1:  # the first one loads kernels, too
            reports.proof_takes(self.steps_left(base) * took)

    def _install(self, tier: Tier) -> None:
        """Put a tier's code and layout in force.

        Raises:
            CandidateFailedError: the weights cannot be laid out so, or there is no memory for it.
        """
        try:
            self._context.compiled.install(tier)
        except Exception as error:
            if not tier.channels_last:
                raise
            raise CandidateFailedError from error

    def _not_yet(self, tier: Tier) -> None:
        """Count a step that could be run only once: a first step may set something up that later steps do not."""
        step = self._step
        if step.not_repeatable is None:
            return
        self._stayed += 1
        if self._stayed < _STAYED:
            step.not_repeatable = None
        else:
            self._context.reports.failed(step, tier.without_graph(), step.not_repeatable)

    def _in_more_bits(self, base: str, call: Call) -> dict[str, torch.Tensor | None] | None:
        """Run the step in more bits if these decide; if that is not possible, let other roundings decide."""
        if self._evidence.get(base) != "more bits":
            return None
        wide = in_more_bits(self._runs, call)
        if wide is None:
            self._evidence[base] = "roundings"
            self._outcomes[base].clear()
        return wide

    def _nothing_compiled(self, why: str, tier: str) -> Obstacle:
        """Return the obstacle that nothing of the model was compiled, with the line and remedy of its first cause."""
        cause, reason = self._context.compiled.first_cause(), f"nothing of the model was compiled: {why}"
        if cause is None:
            return Obstacle(reason, _COMPILE_IT)
        if cause.hint == NoEffect.problem("bypassed").change:
            if own := str(self._step.own_compiles):
                reason = f"nothing of the model was compiled by hotloop: torch compiles it as a part of {own}"
                return Obstacle(reason, f"leave torch.compile out there: {tier} compiles the model")
            return Obstacle(reason, f"call the model itself, model(x), or {_COMPILE_IT}")
        return Obstacle(reason, cause.hint or _SEE_IT, cause.file, cause.line)

    def _disagreement(self, verdict: Outcome, tier: Tier) -> Obstacle:
        """Return the obstacle that a tier does not agree with eager: a known difference, or else a bug."""
        # Buffers are judged together as well, apart from gradients and parameters.
        kinds = [{failure.name for failure in one.failures} for one in verdict.comparisons.values()]
        failed = set.union(set(), *(names - {ALL} or names for names in kinds))
        # BatchNorm's statistics are written past the dispatcher, with the count beside them.
        modules = {f"buffer {name}".rpartition(".")[0] for name in self._step.recounted}
        recounted = failed and {name.rpartition(".")[0] for name in failed} <= modules
        if recounted and tier.compiles and not verdict.random_moved and not verdict.failed:
            name = min(failed).removeprefix("buffer ")
            reason = (
                f"eager writes buffer {name} again where a checkpoint recomputes its forward, compiled code does not"
            )
            return Obstacle(reason, NOT_CHECKPOINTED)
        what = "compiled code" if tier.compiles else "a step in another layout"
        return Obstacle(f"{what} does not agree with eager: {verdict.why}", remedy_of(verdict))

    def _judge(self, outcome: Outcome, call: Call, tier: Tier) -> None:
        """Conclude from the proof steps so far: the code is proven, is wrong, or other evidence decides."""
        step, context, base = self._step, self._context, tier.base
        outcomes = self._outcomes[base]
        if base in self._agree:  # the step's shapes are new, and so may its code be: earlier steps say nothing of it
            outcomes.clear()
        # Without the result, whose graph would tie a later capture to the stream of this step.
        outcomes.append(dataclasses.replace(outcome, result=None))
        del outcomes[: -proof.STEPS]
        verdict = over_steps(outcomes)
        if not verdict.agrees:  # until further steps have decided, only eager's outcomes stay
            self._agree.discard(base)
        enough = len(outcomes) == proof.STEPS
        wrong = verdict.hopeless or (enough and not verdict.agrees)
        # With other processes, none may run a step more often than the others, whose collectives would wait.
        alone_here = context.peers is None
        by_chance = verdict.random_moved and alone_here and step.program.device.type == "cuda"
        if by_chance and not self._runs.on_traced_path and differs_by_chance(self._runs, call):
            self._runs.on_traced_path = True  # from the next step on, eager is compared on the path compilers take
            outcomes.clear()
        elif alone_here and base not in self._evidence and not verdict.agrees and verdict.may_be_noise:
            self._evidence[base] = "more bits"  # from the next step on
            outcomes.clear()
        elif self._evidence.get(base) == "more bits" and wrong and verdict.may_be_noise:
            self._evidence[base] = "roundings"
            outcomes.clear()
        elif wrong:
            context.reports.failed(step, tier.without_graph(), self._disagreement(verdict, tier))
        elif enough and (idle := context.compiled.idle()):
            context.reports.failed(step, tier.without_graph(), self._nothing_compiled(idle, tier.base))
        elif enough and base not in self._agree:
            self._agree.add(base)
            self._unseen[base] = Unseen.after(outcomes, context.holdings.parameters(), self._unseen.get(base))
            if self._evidence.get(base) == "more bits":
                self.learn(base, outcomes)
            self._note_proven(tier.without_graph(), verdict)
