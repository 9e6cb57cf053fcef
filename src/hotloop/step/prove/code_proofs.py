"""Proofs of compiled code, or another layout: a step runs so and eager, until it is known to be right."""

from __future__ import annotations

import collections
import dataclasses
import functools
import time
from typing import TYPE_CHECKING, Any

from hotloop.diagnose.observed import no_effect
from hotloop.interrupts import uninterrupted
from hotloop.measure import ALL, Limits
from hotloop.remedies import NOT_CHECKPOINTED
from hotloop.step.obstacle import CandidateFailedError, Obstacle
from hotloop.step.prove import proof
from hotloop.step.prove.outcomes import STEPS, Outcome, Verdict, over_steps
from hotloop.step.prove.unseen import Unseen
from hotloop.step.state.rng_usage import other_threads
from hotloop.step.state.trial_run import wait_for

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    import torch

    from hotloop.step.audit.auditor import StepAuditor
    from hotloop.step.context import DecoratedStep
    from hotloop.step.prove.reference_runs import ReferenceRuns
    from hotloop.step.rescue import Rescue
    from hotloop.step.state.program import Call
    from hotloop.step.tiers import Tier

_COMPILE_IT = "give the loop the modules that are called, not one around them: Loop([encoder, head], optimizer)"
_SEE_IT = "mend what the reason names, or train on without this tier"
_REPORT_IT = "train on without this tier, and report it: this is a bug of the compiler's or of ours"
_ELSEWHERE = (
    "where another thread draws from the same stream, have it draw from a generator of its own (torch.Generator, "
    f"random.Random, numpy.random.default_rng), or load in worker processes; else {_REPORT_IT}"
)
_SIXTEEN_BITS = ("bfloat16", "float16")
"""Compute dtypes in which convolutions of another layout are past the normal limits, as a rule: BatchNorms follow."""


def judge(outcomes: Sequence[Outcome], *, closer: bool) -> tuple[Outcome, Verdict]:
    """Judge compiled code by its proof steps.

    Args:
        outcomes: of the steps, one or more.
        closer: whether the step can be compared in more bits, and was not yet.
    """
    joined, enough = over_steps(outcomes), len(outcomes) == STEPS
    if joined.agrees:
        return joined, Verdict.PROVEN if enough else Verdict.MORE
    if closer and joined.may_be_noise:
        return joined, Verdict.CLOSER
    return joined, Verdict.WRONG if enough or joined.far_off else Verdict.MORE


def remedy_of(verdict: Outcome, otherwise: str = _REPORT_IT) -> str:
    """Return what to do about a proof, or a check, that does not agree."""
    return _ELSEWHERE if verdict.random_moved and other_threads() else otherwise


class CodeProofs:
    """The proofs of the compiled code of one decorated step.

    Args:
        step: the decorated step.
        runs: its reference runs.
        auditor: has watched the step, and says whether it was left as it was.
        rescue: undoes a proof that failed.

    Attributes:
        distrusted: by base, why its code has to be proven again, until all processes do so.
    """

    def __init__(self, step: DecoratedStep, runs: ReferenceRuns, auditor: StepAuditor, rescue: Rescue) -> None:
        self._step, self._context = step, step.context
        self._runs, self._auditor, self._rescue = runs, auditor, rescue
        self._outcomes: dict[str, list[Outcome]] = collections.defaultdict(list)
        self._agree: set[str] = set()
        """Bases whose code has agreed with eager."""
        self._closer: dict[str, bool] = {}
        """By base that was past the normal limits: whether the step runs in more bits, which then decides."""
        self._known = "", 0
        """The base in force, and the number of its compiles before the step, or at the end of a proof."""
        self._in_step = False
        """A step is running, or has raised."""
        self.distrusted: dict[str, str] = {}
        self._unseen: dict[str, Unseen] = {}
        """By base, the gradients that were zero throughout the proof of its code."""
        self._looked: Mapping[str, torch.Tensor] | None = None
        """If the gradients of the step are to be looked at, those that its optimizers have read in a replay."""
        self._tell: Callable[[], None] | None = None
        """Reports that code is proven, once it is so in all processes."""

    def proven(self, base: str) -> bool:
        """Return whether code compiled as a base asks has agreed with eager often enough."""
        return base in self._agree

    def needs_more_bits(self, base: str) -> bool:
        """Return whether only a step in more bits tells whether a base's code is right."""
        return self._closer.get(base, False)

    def steps_left(self, base: str) -> int:
        """Return how many more steps have to be run both ways and agree until the code is proven."""
        return max(1, STEPS - len(self._outcomes[base]))

    def _note_proven(self, tier: Tier, verdict: Outcome) -> None:
        """Keep what to report once code is proven in all processes."""
        self._tell = functools.partial(
            self._context.reports.proven,
            self._step,
            tier,
            worst=verdict.worst,
            copied_bytes=verdict.nbytes,
            on_host=verdict.on_host,
        )

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
            self._unseen.pop(base, None)  # what was seen, was seen of other code
            self.distrusted[base] = f"step {self._context.progress.steps + 1} has compiled code anew"

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
            self.distrusted[base] = f"step {now} had a gradient that was too small whenever the code was compared"

    def prove_again(self, base: str, why: str) -> None:
        """Treat proven code as code that was not proven, and audit the step anew."""
        self.forget(base)
        self._rescue.look_again()
        line = f"{self._step.name}: {base} is proven again: {why}"
        self._context.reports.decided(line, {"action": "prove again", "tier": base})

    def forget(self, base: str) -> None:
        """Forget what was proven of a base's code."""
        self._agree.discard(base)
        self._outcomes.pop(base, None)
        self._closer.pop(base, None)

    @uninterrupted
    def prove(self, call: Call, tier: Tier) -> Any:
        """Run the step compiled and eager, and compare losses, gradients and buffers; return the step's result.

        The optimizer's step is not compiled, so its outcome is not compared here. The proof of a graph compares it.
        """
        step, context, began = self._step, self._context, time.perf_counter()
        ready = context.peers.ready
        candidate, seconds = self._runs.call(call), list[float]()

        def timed() -> Any:
            wait_for(context.device)
            started = time.perf_counter()
            made = candidate()
            wait_for(context.device)
            seconds.append(time.perf_counter() - started)
            return made

        def eager() -> Any:
            with self._runs.as_given():
                return context.reports.timed_beside(context.base_tier, timed, step.call)

        limits = Limits.compiled(context.compute_dtype())
        obstacle: Obstacle | None = None
        step.doing = "proof"
        self._auditor.look_again()  # what changed since the last step is none of this one's doing
        unheld = self._auditor.unheld()
        try:
            self._install(tier)
            compiles = context.compiled.compiles()
            wide = self._in_more_bits(tier, call)
            outcome = proof.prove_step(step.program, timed, eager, limits, wide=wide, ready=ready)
            self._note_compiles()
            if context.compiled.compiles() > compiles and not self.proven(tier.base):
                self._unseen.pop(tier.base, None)
        except CandidateFailedError as error:
            obstacle = self._rescue.candidate_failed(error, tier)
        if obstacle is not None:
            run = functools.partial(step.program.step, *call[0], **call[1])
            return self._rescue.rung_down(run, tier.without_graph(), obstacle)
        context.reports.proof_took(time.perf_counter() - began, outcome.nbytes)
        step.note_not_repeatable([*self._auditor.written(unheld), *self._auditor.changed_inside()])
        if step.not_repeatable is not None:
            context.reports.failed(step, tier.without_graph(), step.not_repeatable)
        else:
            self._conclude(outcome, tier)
        if tier.channels_last and self.proven(tier.base):
            context.reports.proof_saves(max(0.0, seconds[-1] - seconds[0]), context.base_tier.name)
        return outcome.result

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

    def _in_more_bits(self, tier: Tier, call: Call) -> dict[str, torch.Tensor | None] | None:
        """Run the step in more bits where that decides; note where it does not run so."""
        if tier.channels_last and self._context.compute_dtype() in _SIXTEEN_BITS and self._context.peers.alone:
            self._closer.setdefault(tier.base, True)
        if not self._closer.get(tier.base):
            return None
        wide = self._runs.in_more_bits(call)
        self._closer[tier.base] = wide is not None
        return wide

    def _nothing_compiled(self, why: str) -> Obstacle:
        """Return the obstacle that nothing of the model was compiled, with the line and remedy of its first cause."""
        cause, reason = self._context.compiled.first_cause(), f"nothing of the model was compiled: {why}"
        if cause is None:
            return Obstacle(reason, _COMPILE_IT)
        if cause.hint == no_effect("bypassed").change:
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

    def _conclude(self, outcome: Outcome, tier: Tier) -> None:
        """Do what the proof steps so far say: the code is proven, is wrong, or is compared more closely."""
        step, context, base = self._step, self._context, tier.base
        outcomes = self._outcomes[base]
        if base in self._agree:  # the step's shapes are new, and so may its code be: earlier steps say nothing of it
            outcomes.clear()
        # Without the result, whose graph would tie a later capture to the stream of this step.
        outcomes.append(dataclasses.replace(outcome, result=None))
        del outcomes[:-STEPS]
        # With other processes, none may run a step more often than the others, whose collectives would wait.
        joined, verdict = judge(outcomes, closer=context.peers.alone and base not in self._closer)
        if not joined.agrees:  # until further steps have decided, only eager's outcomes stay
            self._agree.discard(base)
        if verdict is Verdict.CLOSER:
            self._closer[base] = True  # from the next step on
            outcomes.clear()
        elif verdict is Verdict.WRONG:
            context.reports.failed(step, tier.without_graph(), self._disagreement(joined, tier))
        elif verdict is Verdict.PROVEN and (idle := context.compiled.idle()):
            context.reports.failed(step, tier.without_graph(), self._nothing_compiled(idle))
        elif verdict is Verdict.PROVEN and base not in self._agree:
            self._agree.add(base)
            self._unseen[base] = Unseen.after(outcomes, context.holdings.parameters(), self._unseen.get(base))
            self._note_proven(tier.without_graph(), joined)
