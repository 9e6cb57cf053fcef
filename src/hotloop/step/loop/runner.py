"""Runs one decorated step, call by call, in the tier in force: compiled, captured, or on the way to either."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch

from hotloop import events as ev
from hotloop.interrupts import uninterrupted
from hotloop.measure import flatten
from hotloop.step.audit.argument_gradients import gradients_of
from hotloop.step.audit.auditor import StepAuditor
from hotloop.step.calls.shapes import Shapes
from hotloop.step.capture.pieces import Pieces
from hotloop.step.context import DecoratedStep
from hotloop.step.layout import channels_last
from hotloop.step.loop.agreed import AgreedStep
from hotloop.step.loop.call_kind import StepCall
from hotloop.step.loop.capturing import Capturing
from hotloop.step.obstacle import CandidateFailedError, Obstacle
from hotloop.step.policy.lookahead import worth_a_compile
from hotloop.step.prove.code_proofs import CodeProofs
from hotloop.step.prove.graph_proofs import GraphProofs
from hotloop.step.prove.reference_runs import ReferenceRuns
from hotloop.step.prove.sentinel import Sentinel
from hotloop.step.ranks.threads import WAITS, another_trains
from hotloop.step.rescue import Rescue
from hotloop.step.state.program import Program

if TYPE_CHECKING:
    import weakref
    from collections.abc import Callable

    from hotloop.measure import Signature
    from hotloop.step.capture.recorded_optimizers import RecordedOptimizers
    from hotloop.step.context import Context
    from hotloop.step.loop.call_kind import CallKind
    from hotloop.step.prove.attribution import Disagreement
    from hotloop.step.prove.graph_proofs import Recorded
    from hotloop.step.tiers import Tier

_EAGER_BLOCKS = "mend what the reason names in the blocks, or train on without this tier"
AUDITS = 2
"""Audits of a step before it is taken for one whose Python must run exactly once."""


class StepRunner:
    """One decorated step of a loop.

    Args:
        function: the step.
        optimizers: which optimizers run outside of recordings.
        ignore: objects of ours, and of a framework around us, whose state is none of the step's.
        sentinel_share: the share of time that checks may cost; 0 for none.
    """

    def __init__(
        self,
        context: Context,
        function: Callable[..., Any],
        optimizers: RecordedOptimizers,
        *,
        ignore: tuple[Any, ...],
        sentinel_share: float,
    ) -> None:
        self.context = context
        self.shapes = Shapes(function, functools.partial(worth_a_compile, context))
        program = Program(function, context.holdings, context.device, context.compiled.runs_compiled, (self, *ignore))
        self.step = DecoratedStep(context, program, self.shapes.argument)
        self._rescue = Rescue(self.step)
        self._auditor = StepAuditor(self.step, self._rescue)
        runs = ReferenceRuns(self.step)
        self.code = CodeProofs(self.step, runs, self._auditor, self._rescue)
        graphs = GraphProofs(self.step, runs, optimizers)
        alone = context.peers is None
        self.sentinel = (
            Sentinel(self.step, runs, graphs, self._auditor, self.code, sentinel_share)
            if sentinel_share and alone
            else None
        )
        self.capturing = Capturing(
            self.step,
            self._auditor,
            graphs,
            self._rescue,
            optimizers=optimizers,
            sentinel=self.sentinel,
            uncaptured=self._uncaptured,
            compare=self.compare,
        )
        self.pieces, self._pieces_told = Pieces(context), False
        self._audits = 0
        self._agreed: AgreedStep | None = None
        if context.peers is not None:
            self._agreed = AgreedStep(self.step, self.code, self._rescue, self._audit_agreed, self._to_be_audited)
        self.held: weakref.ref[Any] | None = None
        """What the user holds of the step: without that, nobody can call it any more."""

    # -- one call --------------------------------------------------------------------------------------------------

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any], tier: Tier) -> Any:
        """Run the step once, in a tier or on the way to it; return the step's result."""
        if tier.channels_last:
            with channels_last(self.context.parts.modules()):
                return self._run(args, kwargs, tier)
        return self._run(args, kwargs, tier)

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any], tier: Tier) -> Any:
        step, context = self.step, self.context
        step.doing, step.ran = "run", tier.name
        self.shapes.mark(args, kwargs)
        run = functools.partial(step.program.step, *args, **kwargs)
        if self._agreed is not None:
            return self._agreed.run(run, tier, self.shapes.note(args, kwargs), (args, kwargs))
        if not tier.other_kernels and not tier.graph:
            return self._rescue.guarded(run, tier)
        signature = self.shapes.note(args, kwargs)
        if not self.shapes.fits(signature):
            context.compiled.static = False
            line = f"{step.name} is not called with the batches that were looked at: their shapes count"
            context.reports.say_once(line)
        call = StepCall((args, kwargs), flatten((args, kwargs))[0], run)
        if tier.other_kernels and signature.require_gradients() and (asks := gradients_of(call.leaves)) is not None:
            context.reports.failed(step, tier.without_graph(), asks)
            return step.eagerly(run)
        unproven = tier.other_kernels and not self.code.proven(tier.base)
        if not (tier.graph or tier.pieces or unproven):
            return self._compiled(call, tier, signature)
        kind = self.capturing.kind_of(signature, call.leaves)
        if unproven or tier.pieces:
            return self._in_pieces(kind, call, tier) if tier.pieces else self._towards_code(kind, call, tier)
        return self.capturing.run(kind, call, tier)

    def _towards_code(self, kind: CallKind, call: StepCall, tier: Tier) -> Any:
        """Run a step on the way to compiled code that is proven: audited first, then run both ways."""
        step = self.step
        if self.capturing.must_wait():
            return step.eagerly(call.run)
        hindered = tier.graph and self.capturing.hindered
        if self._audits < AUDITS and (not self._audits or step.not_repeatable is not None or hindered):
            # What the first call of all sets up (transformers notes the kind of task in its config, an average begins
            # with a copy) is found only once.
            return self._audit(kind, call)
        if step.not_repeatable is not None:
            self.context.reports.failed(step, tier.without_graph(), step.not_repeatable)
            return step.eagerly(call.run)
        if self.shapes.may_compile(tier.base, kind.signature):
            return self.code.prove(call.arguments, tier)
        return step.eagerly(call.run)

    # -- blocks that are captured ------------------------------------------------------------------------------------

    def _in_pieces(self, kind: CallKind, call: StepCall, tier: Tier) -> Any:
        """Run the step with its blocks captured, or on the way to that: audited first, then run both ways."""
        step, audit = self.step, kind.audit
        if kind.calls <= 1 or self.capturing.must_wait():  # a first call sets up what others find
            return step.eagerly(call.run)
        if audit is None:
            self.code.forget(tier.base)  # its kind of call records blocks of its own, which have to be proven
            return self.capturing.audit(kind, call)
        if obstacle := next((one for one in audit.obstacles if not one.spares_blocks), None):
            return self._without_pieces(call, tier, obstacle)
        if self.pieces.changed() or not self._auditor.is_of_now(audit):
            return self._record_anew(kind, call, tier)
        assert audit.read is not None  # else it would not be of now
        with self.pieces.in_force(kind.key, audit.read):
            before, proven = self.pieces.recordings, self.code.proven(tier.base)
            result = self._checked(call, tier) if proven else self.code.prove(call.arguments, tier)
        self._judge_pieces(tier, before)
        return result

    def _judge_pieces(self, tier: Tier, before: int) -> None:
        """Leave the tier where no block is captured; have it proven again where the step has recorded other calls."""
        step, reports, proven = self.step, self.context.reports, self.code.proven(tier.base)
        if self.context.progress.tier != tier:
            return  # the step has failed in it
        if not self.pieces.recordings and (self.pieces.left_eager or proven):
            why = self.pieces.left_eager or ["none ran while it was proven"]
            reports.failed(step, tier, Obstacle(f"no block could be captured: {why[0]}", _EAGER_BLOCKS))
        elif proven and self.pieces.recordings > before:
            self.code.prove_again(tier.base, "another call of a block was recorded")
        elif proven and not self._pieces_told:
            self._pieces_told = True
            reports.decided(f"{step.name}: {self.pieces}", {})

    def _without_pieces(self, call: StepCall, tier: Tier, obstacle: Obstacle) -> Any:
        self.pieces.forget()
        self.context.reports.failed(self.step, tier, obstacle)
        return self.step.eagerly(call.run)

    def _record_anew(self, kind: CallKind, call: StepCall, tier: Tier) -> Any:
        """Forget what was recorded of the blocks, since the step reads something else now; too often is for good."""
        what = "what the captured blocks rest on"
        self.pieces.forget()
        self.code.forget(tier.base)
        self._auditor.look_again()
        self._rescue.look_again()
        step = self.context.progress.steps
        self.context.reports.emit(ev.CaptureDropped(step=step, function=self.step.name, reason=what))
        if kind.drop(step, what):
            hint = "keep constant what the model reads in Python, or change it less often"
            return self._without_pieces(call, tier, Obstacle(f"{what} changes again and again", hint))
        return self.capturing.audit(kind, call)

    def _audit(self, kind: CallKind, call: StepCall) -> Any:
        """Audit the step, whatever was seen of it before."""
        self._audits += 1
        self.step.not_repeatable = None
        self.capturing.forget_audits()
        before = kind.state
        result = self.capturing.audit(kind, call)
        if kind.state is before:  # another thread trained meanwhile, so nothing was learnt
            self._audits -= 1
        return result

    # -- compiled code ---------------------------------------------------------------------------------------------

    def _compiled(self, call: StepCall, tier: Tier, signature: Signature) -> Any:
        """Run the step as compiled code that has seen its shapes, else eager: one short batch compiles nothing anew."""
        if advice := self.shapes.advice():
            self.context.reports.say_once(advice)
        seen = self.shapes.compiled(tier.base, signature)
        if not self.shapes.may_compile(tier.base, signature):
            return self.step.eagerly(call.run)
        # Other shapes are other code; where every step brings some, torch has made one code of them by now.
        if not seen and not self.shapes.one_code:
            if another_trains(self.context):
                return self.step.eagerly(call.run)
            return self.code.prove(call.arguments, tier)
        return self._checked(call, tier)

    def _checked(self, call: StepCall, tier: Tier) -> Any:
        """Run the step in a tier that is proven; now and then eagerly as well, for the sentinel."""
        if self.capturing.check_due():
            return self.compare(
                None,
                call,
                tier,
                uncaptured=lambda: self._rescue.guarded(call.run, tier),
                failed=lambda obstacle: self._rescue.rung_down(call.run, tier, obstacle),
            )
        return self._rescue.guarded(call.run, tier)

    def _uncaptured(self, kind: CallKind, call: StepCall, tier: Tier) -> Any:
        """Run the step in a tier without its graph."""
        below = tier.without_graph()
        if tier.other_kernels:
            return self._compiled(call, below, kind.signature)
        if advice := self.shapes.advice():
            self.context.reports.say_once(advice)
        return self._rescue.guarded(call.run, below)

    @uninterrupted
    def compare(
        self,
        recorded: Recorded | None,
        call: StepCall,
        tier: Tier,
        *,
        uncaptured: Callable[[], Any],
        failed: Callable[[Obstacle], Any],
    ) -> Any:
        """Run a recording, or compiled code where it is None, and eager, and compare; return the step's result.

        Args:
            recorded: the recording.
            call: the call.
            tier: the tier in force.
            uncaptured: runs the call without a check, where there is no memory for it.
            failed: runs the call, and leaves a candidate that failed for the obstacle.
        """
        assert self.sentinel is not None
        try:
            result, disagreement = self.sentinel.check(recorded, call.arguments, tier)
        except CandidateFailedError as error:
            no_memory = isinstance(error.__cause__, torch.OutOfMemoryError)
            obstacle = self._rescue.candidate_failed(error, tier)
        else:
            if disagreement is not None:
                self._disagreed(disagreement, tier)
            return result
        if no_memory:
            self.sentinel.stop("a step and a copy of its state do not fit in memory together")
            self.step.doing = "run"
            return uncaptured()
        return failed(obstacle)

    def _disagreed(self, disagreement: Disagreement, tier: Tier) -> None:
        """Leave what the sentinel found wrong: the recordings of the step, or its compiled code."""
        if disagreement.of_recording:
            self.capturing.decline_recordings(disagreement.obstacle)
        else:
            self.code.forget(tier.base)
            self.context.reports.failed(self.step, tier.without_graph(), disagreement.obstacle)

    # -- for the loop, and for the agreement of several processes ---------------------------------------------------

    def release(self, tier: Tier) -> None:
        """Let go of what was captured in a tier."""
        self.capturing.release(tier.base)
        if tier.pieces:
            self.pieces.forget()
            self.code.forget(tier.base)

    def forget_recordings(self) -> None:
        """Let go of everything that was captured."""
        self.capturing.forget_recordings()
        self.pieces.forget()

    def _audit_agreed(self, signature: Signature, call: tuple[tuple[Any, ...], dict[str, Any]]) -> Any:
        """Audit the step in the same call in all processes."""
        leaves = flatten(call)[0]
        run = functools.partial(self.step.program.step, *call[0], **call[1])
        return self._audit(self.capturing.kind_of(signature, leaves), StepCall(call, leaves, run))

    def _to_be_audited(self) -> bool:
        """Return whether the step has to be audited a first or, for what a first call sets up, a second time."""
        return not self._audits or (self.step.not_repeatable is not None and self._audits < AUDITS)

    def lacks(self, tier: Tier) -> str:
        """Say what is missing before the step runs in a tier; empty where nothing is."""
        kinds, then = [kind for kind in self.capturing.kinds.values() if kind.declined is None], ""
        if tier.other_kernels and not self.code.proven(tier.base):
            left, which = self._to_be_audited() + self.code.steps_left(tier.base), "shapes that came before"
            then = ", and then some to capture it" if tier.graph else ""
        elif tier.graph and kinds and not any(kind.proven for kind in kinds):
            left, which = min(kind.steps_left for kind in kinds), "the same shapes and other arguments"
        else:
            return ""
        if another_trains(self.context):
            return f"not proven yet: {WAITS}"
        steps = f"{left} more step{'s' if left > 1 else ''} with {which} to compare it with eager{then}"
        return f"not proven yet: it takes {steps}; eager's outcome counts till then"
