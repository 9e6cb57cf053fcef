"""Runs one decorated step, call by call, in the tier in force: compiled, captured, or on the way to either."""

from __future__ import annotations

import contextlib
import functools
from typing import TYPE_CHECKING, Any

import torch

from hotloop.interrupts import uninterrupted
from hotloop.measure import flatten
from hotloop.step.audit.auditor import StepAuditor
from hotloop.step.audit.values import gradients_of
from hotloop.step.calls.shapes import Shapes
from hotloop.step.context import DecoratedStep
from hotloop.step.layout import channels_last
from hotloop.step.loop.agreed_capturing import AgreedCapturing
from hotloop.step.loop.agreed_compiling import AgreedStep
from hotloop.step.loop.capturing import Capturing
from hotloop.step.loop.kind_states import StepCall
from hotloop.step.obstacle import CandidateFailedError
from hotloop.step.prove.agreed_sentinel import AgreedSentinel
from hotloop.step.prove.check import Check
from hotloop.step.prove.code_proofs import CodeProofs
from hotloop.step.prove.graph_proofs import GraphProofs
from hotloop.step.prove.reference_runs import ReferenceRuns
from hotloop.step.ranks.threads import WAITS, another_trains
from hotloop.step.rescue import Rescue
from hotloop.step.state.memory_limit import NoRoomError
from hotloop.step.state.program import Program, Ran

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from hotloop.measure import Signature
    from hotloop.step.capture.optimizers import RecordedOptimizers
    from hotloop.step.context import Context
    from hotloop.step.loop.kind_states import CallKind
    from hotloop.step.obstacle import Obstacle
    from hotloop.step.prove.check import SentinelStatus
    from hotloop.step.prove.graph_proofs import Recorded
    from hotloop.step.prove.outcomes import Outcome
    from hotloop.step.tiers import Tier

    Arguments = tuple[tuple[Any, ...], dict[str, Any]]

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
        self.shapes = Shapes(function)
        ran = Ran()
        program = Program(
            ran.follow(function),
            context.holdings,
            context.device,
            context.compiled.runs_compiled,
            (self, *ignore),
            ran=ran,
            room=context.room,
        )
        self.step = DecoratedStep(context, program, self.shapes.argument)
        self._rescue = Rescue(self.step)
        self._auditor = StepAuditor(self.step, self._rescue)
        runs = ReferenceRuns(self.step)
        self.code = CodeProofs(self.step, runs, self._auditor, self._rescue)
        graphs = GraphProofs(self.step, runs, optimizers)
        alone = context.peers is None
        self.sentinel = Check(self.step, runs, graphs, self.code, sentinel_share) if sentinel_share and alone else None
        self.capturing = (Capturing if alone else AgreedCapturing)(
            self.step,
            self._auditor,
            graphs,
            self._rescue,
            self.code,
            optimizers=optimizers,
            sentinel=self.sentinel,
            uncaptured=self._uncaptured,
            compare=self.compare,
        )
        self._audits = 0
        self._agreed: AgreedStep | None = None
        self._checks: Check | AgreedSentinel | None = self.sentinel
        if context.peers is not None:
            self._agreed = AgreedStep(self.step, self.code, self._rescue, self._audit_agreed, self._to_be_audited)
            assert isinstance(self.capturing, AgreedCapturing)
            checks = AgreedSentinel(self.step, graphs, sentinel_share) if sentinel_share else None
            self.capturing.follow(self._agreed, checks)
            self._checks = checks

    # -- one call --------------------------------------------------------------------------------------------------

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any], tier: Tier) -> Any:
        """Run the step once, in a tier or on the way to it; return the step's result."""
        with self._beside_recordings(tier):
            if not tier.channels_last:
                return self._run(args, kwargs, tier)
            with channels_last(self.context.parts.modules()):
                return self._run(args, kwargs, tier)

    @contextlib.contextmanager
    def _beside_recordings(self, tier: Tier) -> Iterator[None]:
        """In a trial, run the steps without a graph in the memory of the recordings that they are timed beside."""
        engine, device = self.context.engine, self.context.device
        if tier.graph or engine is None or not engine.shares or not self.context.progress.in_trial:
            yield
            return
        with engine.beside(device):
            yield  # what the step leaves is moved out once it is timed

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any], tier: Tier) -> Any:
        step, context = self.step, self.context
        asked = tier if self._agreed is None else self._agreed.asked(tier)
        if asked is not None and asked.compiles:
            # In all processes, whatever each runs by now: else one would gather what another has whole.
            context.parts.sharded().rest()
        if tier.compiles and not self._leaves(tier) and (kept := context.parts.kept()) is not None:
            context.reports.failed(step, tier.without_graph(), kept)
            tier = context.progress.tier
        step.doing, step.ran, step.call = "run", tier.name, None
        run = functools.partial(step.program.step, *args, **kwargs)
        if self._agreed is not None:
            return self._run_agreed(self._agreed, run, tier, (args, kwargs))
        if not tier.other_kernels and not tier.graph:
            return self._rescue.guarded(run, tier)
        signature = self.shapes.note(args, kwargs)
        step.call = signature.tensors()
        call = StepCall((args, kwargs), flatten((args, kwargs))[0], run)
        if tier.other_kernels and signature.require_gradients() and (asks := gradients_of(call.leaves)) is not None:
            context.reports.failed(step, tier.without_graph(), asks)
            return step.eagerly(run)
        unproven = tier.other_kernels and not self.code.proven(tier.base)
        if not tier.graph and not unproven:
            return self._compiled(call, tier, signature)
        kind = self.capturing.kind_of(signature, call.leaves)
        if unproven:
            return self._towards_code(kind, call, tier)
        return self.capturing.run(kind, call, tier)

    def _leaves(self, tier: Tier) -> bool:
        """Return whether this process waits for the others to leave the code of a tier."""
        return self._agreed is not None and self._agreed.left_here(tier)

    def _run_agreed(self, agreed: AgreedStep, run: functools.partial[Any], tier: Tier, arguments: Arguments) -> Any:
        """Run the step in one of several processes: on the way to a recording or to compiled code, or through it."""
        peers, capturing = self.context.peers, self.capturing
        assert peers is not None
        peers.called(self.step.name)
        if self.context.parts.reduces():
            peers.reduced[self.step.name] += 1
        inputs = self.shapes.note(*arguments)
        self.step.call = inputs.tensors()
        assert isinstance(capturing, AgreedCapturing)
        if not peers.captures or peers.graphs_left or capturing.over:
            below = tier.without_graph()
            self.step.ran = below.name
            return agreed.run(run, below, inputs, arguments)
        return capturing.run_agreed(inputs, StepCall(arguments, flatten(arguments)[0], run), tier)

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
        if not seen and not self.shapes.many:
            if another_trains(self.context):
                return self.step.eagerly(call.run)
            return self.code.prove(call.arguments, tier)
        if self.capturing.check_due():
            return self.compare(
                None,
                call,
                tier,
                unchecked=lambda: self.code.run(call.run, tier),
                failed=lambda obstacle: self._rescue.rung_down(call.run, tier, obstacle),
            )
        return self.code.run(call.run, tier)

    def _uncaptured(self, kind: CallKind, call: StepCall, tier: Tier) -> Any:
        """Run the step in a tier without its graph."""
        below = tier.without_graph()
        if self._agreed is not None:
            return self._agreed.without_vote(call.run, below, kind.signature)
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
        unchecked: Callable[[], Any],
        failed: Callable[[Obstacle], Any],
    ) -> Any:
        """Run a recording, or compiled code where it is None, and eager, and compare; return the step's result.

        Args:
            recorded: the recording.
            call: the call.
            tier: the tier in force.
            unchecked: runs the call without a check, where there is no memory for it.
            failed: runs the call, and leaves a candidate that failed for the obstacle.
        """
        assert self.sentinel is not None
        try:
            result, outcome = self.sentinel.run(recorded, call.arguments, tier)
        except CandidateFailedError as error:
            no_memory = isinstance(error.__cause__, torch.OutOfMemoryError | NoRoomError)
            obstacle = self._rescue.candidate_failed(error, tier)
        else:
            if not outcome.agrees:
                self._disagreed(outcome, tier)
            return result
        if no_memory:
            self.sentinel.schedule.off = "a step and a copy of its state do not fit in memory together"
            self.step.doing = "run"
            return unchecked()
        return failed(obstacle)

    def _disagreed(self, outcome: Outcome, tier: Tier) -> None:
        """Prove a tier again that a check found wrong; leave it if that was not the first time."""
        assert self.sentinel is not None
        obstacle = self.sentinel.conclude(outcome, tier)
        code = self.sentinel.of_code
        if obstacle is None:
            self.capturing.prove_again()
            if code:
                self.code.prove_again(tier.base, "a step that was also run eagerly did not agree")
        elif code:
            self.code.forget(tier.base)
            self.context.reports.failed(self.step, tier.without_graph(), obstacle)
        else:
            self.capturing.decline_recordings(obstacle)

    # -- for the loop, and for the agreement of several processes ---------------------------------------------------

    def _audit_agreed(self, signature: Signature, call: tuple[tuple[Any, ...], dict[str, Any]]) -> Any:
        """Audit the step in the same call in all processes."""
        leaves = flatten(call)[0]
        run = functools.partial(self.step.program.step, *call[0], **call[1])
        return self._audit(self.capturing.kind_of(signature, leaves), StepCall(call, leaves, run))

    def _to_be_audited(self) -> bool:
        """Return whether the step has to be audited a first or, for what a first call sets up, a second time."""
        return not self._audits or (self.step.not_repeatable is not None and self._audits < AUDITS)

    def checks(self) -> SentinelStatus | None:
        """Return what the sentinel has done; None where it has checked nothing."""
        status = self._checks.status if self._checks is not None else None
        return status if status is not None and (status.checks or status.disagreed) else None

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
