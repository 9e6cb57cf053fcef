"""Runs one decorated step, call by call: decides what to do with a call, agrees on it with other processes, does it."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
from typing import TYPE_CHECKING, Any

import torch

from hotloop._torch.collectives import patience
from hotloop.errors import StepLostError, describe
from hotloop.interrupts import uninterrupted
from hotloop.measure import flatten
from hotloop.step.audit.auditor import StepAuditor
from hotloop.step.calls.shapes import Shapes
from hotloop.step.context import DecoratedStep
from hotloop.step.layout import channels_last
from hotloop.step.loop.capturing import Capturing
from hotloop.step.loop.deciding import Deciding
from hotloop.step.loop.kinds import Captured, Decision, Doing, Proven, StepCall
from hotloop.step.obstacle import CandidateFailedError, Obstacle
from hotloop.step.prove.check import Check
from hotloop.step.prove.code_proofs import CodeProofs
from hotloop.step.prove.graph_proofs import GraphProofs
from hotloop.step.prove.outcomes import STEPS
from hotloop.step.prove.reference_runs import ReferenceRuns
from hotloop.step.ranks.peers import AS_MANY, About
from hotloop.step.ranks.threads import WAITS, another_trains
from hotloop.step.rescue import Rescue
from hotloop.step.state.memory_limit import NoRoomError
from hotloop.step.state.program import Program, Ran

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from hotloop.step.capture.optimizers import RecordedOptimizers
    from hotloop.step.context import Context
    from hotloop.step.loop.kinds import CallKind
    from hotloop.step.prove.check import SentinelStatus
    from hotloop.step.prove.outcomes import Outcome
    from hotloop.step.tiers import Tier

EVERY = 32
"""Calls between two votes while proven compiled code runs without a graph: each process runs it for itself."""
GIVE_UP = 64
"""Calls in a row after which a tier is left that not all processes can run together."""
_TOGETHER = (Doing.LOOK, Doing.AUDIT, Doing.PROVE_CODE, Doing.WARM_UP, Doing.CAPTURE, Doing.PROVE)
"""What all processes do in one call, and agree on the outcome of."""
_PAD = "pad batches to a few sizes (buckets=), and drop a short last one"
_NOT_THE_SAME = Obstacle(
    f"in {GIVE_UP} calls in a row not all processes could do the same",
    f"{_PAD}; leave what differs between processes (a rank, a path) out of the arguments of the step",
)
_SEE_OTHERS = "see the log of the process that it failed in"


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
        self.context, self._peers = context, context.peers
        self.shapes = Shapes(function)
        ran, compiles = Ran(), context.compiled.runs_compiled
        followed = ran.follow(function)
        program = Program(
            followed, context.holdings, context.device, compiles, (self, *ignore), ran=ran, room=context.room
        )
        self.step = DecoratedStep(context, program, self.shapes.argument)
        self._rescue = Rescue(self.step)
        self.auditor = StepAuditor(self.step, self._rescue)
        runs = ReferenceRuns(self.step)
        self.code = CodeProofs(self.step, runs, self.auditor, self._rescue)
        graphs = GraphProofs(self.step, runs, optimizers)
        self.sentinel = Check(self.step, runs, graphs, self.code, sentinel_share) if sentinel_share else None
        self.capturing = Capturing(
            self.step,
            self.auditor,
            graphs,
            self._rescue,
            self.code,
            optimizers=optimizers,
            plain=self._without_graph,
            schedule=self.sentinel.schedule if self.sentinel is not None else None,
        )
        self._deciding = Deciding(
            self.step,
            self.capturing,
            self.code,
            self.shapes,
            check=self.sentinel,
        )
        self._fruitless = self._checked = 0
        self._works = False
        """All processes have run a recording together."""
        self._do: dict[Doing, Callable[[CallKind, StepCall, Tier, Decision], Any]] = {
            Doing.LEAVE: self._leave,
            Doing.AGAIN: self._again,
            Doing.DECLINED: self._decline,
            Doing.PLAIN: self._plain,
            Doing.LOOK: lambda kind, call, tier, _: self.capturing.look(kind, call, tier),
            Doing.AUDIT: self._audit,
            Doing.PROVE_CODE: self._prove_code,
            Doing.WARM_UP: lambda kind, call, tier, _: self.capturing.warm_up(kind, call, tier),
            Doing.CAPTURE: lambda kind, call, tier, _: self.capturing.prove(kind, call, tier),
            Doing.PROVE: lambda kind, call, tier, _: self.capturing.prove(kind, call, tier),
            Doing.CHECK: self._check,
            Doing.REPLAY: lambda kind, call, tier, _: self.capturing.replay(kind, call, tier),
        }

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
        step = self.step
        step.doing, step.ran, step.call = "run", tier.name, None
        self._peers.called(step.name, reduces=not self._peers.alone and self.context.parts.reduces())
        run = functools.partial(step.program.step, *args, **kwargs)
        if not tier.other_kernels and not tier.graph:
            return self._rescue.guarded(run, tier)
        if tier.graph or tier.compiles:  # in all processes: else one would gather what another has whole
            self.context.parts.sharded().rest()
        inputs = self.shapes.note(args, kwargs)
        step.call = inputs.tensors()
        call = StepCall((args, kwargs), flatten((args, kwargs))[0], inputs, run)
        if tier.other_kernels:
            self.shapes.count(tier.base, inputs)
        kind, decision = self._decide(call, tier)
        decision = self._agreed(decision, kind, tier)
        if decision.doing in _TOGETHER:
            return self._together(kind, call, tier, decision)
        return self._do[decision.doing](kind, call, tier, decision)  # type: ignore[arg-type]

    def _decide(self, call: StepCall, tier: Tier) -> tuple[CallKind | None, Decision]:
        """Return the kind that a call is of, and what this process would do with it.

        Proven compiled code without a graph asks for no kind. Several processes wait for this one's vote, so that a
        call that it cannot decide on has all of them leave the tier.
        """
        kind = None
        try:
            if tier.graph or not self.code.proven(tier.base):
                kind = self.capturing.kind_of(call)
            return kind, self._deciding.next_doing(kind, call, tier)
        except Exception as error:
            if self._peers.alone:
                raise
            obstacle = Obstacle(f"the call could not be looked at: {describe(error)}", _SEE_OTHERS)
            return kind, Decision(Doing.LEAVE, obstacle, tier)

    # -- what all processes do -------------------------------------------------------------------------------------

    def _agreed(self, mine: Decision, kind: CallKind | None, tier: Tier) -> Decision:  # noqa: PLR0911 - an outcome each
        """Return what all processes do with a call: the lowest of what each of them would do."""
        if self._peers.alone:
            return mine
        code = self.code.proven(tier.base) and not tier.graph
        if code and self._peers.calls % EVERY:
            return Decision(Doing.PLAIN)
        if mine.doing in (Doing.LEAVE, Doing.DECLINED):
            self._peers.tell(str(mine.because))
        number, graph = kind.number if kind is not None else 0, mine.left is None or mine.left == tier
        found = self._peers.lowest(About.CALL, mine.doing, -mine.doing, number, -number, graph)
        if found is None:
            return Decision(Doing.LEAVE, Obstacle(self._peers.unanswered, AS_MANY))
        lowest, highest, alike = Doing(found[0]), Doing(-found[1]), found[2] == -found[3]
        doing = self._settled(lowest, highest, alike=alike)
        self._works |= doing >= Doing.CHECK
        unlike = doing is Doing.AUDIT and not alike
        self._fruitless = self._fruitless + 1 if unlike or doing is Doing.PLAIN < highest else 0
        if doing is Doing.LEAVE:
            why = mine.because if mine.doing is Doing.LEAVE else self._elsewhere("it failed in another process")
            return Decision(doing, why, tier if found[4] else tier.without_graph())
        if self._fruitless >= GIVE_UP and not self._works:
            return Decision(Doing.LEAVE, _NOT_THE_SAME, tier)
        if doing is mine.doing:
            return mine
        if doing is Doing.DECLINED:
            return Decision(doing, self._elsewhere("another process cannot capture such a call"))
        if doing is Doing.AUDIT and kind is not None and lowest is not highest:
            self.capturing.begin_anew(kind)
            return Decision(Doing.PLAIN if kind.declined is not None else doing)
        return Decision(doing)

    @staticmethod
    def _settled(lowest: Doing, highest: Doing, *, alike: bool) -> Doing:
        """Return what all processes do, by what one and another of them would do with calls that are ``alike``."""
        if lowest <= Doing.AGAIN or lowest in (Doing.PLAIN, Doing.LOOK):
            return lowest
        if lowest is highest and (alike or lowest in (Doing.AUDIT, Doing.PROVE_CODE)):
            return lowest
        if not alike or lowest is Doing.PROVE_CODE:
            return Doing.PLAIN
        checks = (lowest, highest) == (Doing.CHECK, Doing.REPLAY)
        return lowest if checks or lowest is Doing.DECLINED else Doing.AUDIT

    def _together(self, kind: CallKind | None, call: StepCall, tier: Tier, decision: Decision) -> Any:
        """Do in all processes what each could not do alone, and agree on what it has come to."""
        peers, kind = self._peers, kind or self.capturing.kind_of(call)
        peers.run_begins(kind.collectives)
        with patience.held("a loop") if tier.compiles and not peers.alone else contextlib.nullcontext():
            try:
                result = self._do[decision.doing](kind, call, tier, decision)
            except StepLostError:
                raise
            except Exception:  # the user's own, of a run that stays
                # Where it has not made all of its collectives, the others wait in one, as they would without a loop.
                if not peers.alone and peers.made_all():
                    kind.forget()
                    self._agree(kind, tier, decision.doing)
                raise
            self._agree(kind, tier, decision.doing)
        if decision.doing in (Doing.LOOK, Doing.AUDIT):
            kind.collectives = peers.made()
        return result

    def _agree(self, kind: CallKind, tier: Tier, doing: Doing) -> None:
        """Agree on what a call has come to: no process goes on with what another one has not reached."""
        proven = self.code.proven(tier.base)
        found = self._peers.lowest(About.OUTCOME, proven, *self.capturing.progress_of(kind))
        if found is None:
            return
        if doing is Doing.PROVE_CODE and found[0]:
            self.code.tell_proven()
        elif proven and not found[0]:
            self.code.not_proven(tier.base)
        if doing is not Doing.PROVE_CODE:
            self.capturing.agree(kind, found[1:], self._elsewhere("another process cannot capture such a call"))

    def _elsewhere(self, what: str) -> Obstacle:
        """Return the obstacle that ``what`` is so, with the reason of the process that has told it."""
        told = self._peers.told()
        return Obstacle(f"{what}{told and f' ({told})'}", _SEE_OTHERS)

    # -- doing it --------------------------------------------------------------------------------------------------

    def _leave(self, _kind: CallKind | None, call: StepCall, tier: Tier, decision: Decision) -> Any:
        """Leave a tier in this call, which is the same one in all processes, and run the models as given."""
        assert isinstance(decision.because, Obstacle)
        left = [decision.left] if decision.left is not None else [tier.without_graph(), tier]
        for one in dict.fromkeys(left):
            if not one.graph:
                self.code.not_proven(one.base)
            self.context.reports.left(self.step, one, decision.because)
        self._fruitless = 0
        return self.step.eagerly(call.run)

    def _again(self, kind: CallKind | None, call: StepCall, tier: Tier, decision: Decision) -> Any:
        """Prove the compiled code of a tier again, from this call on."""
        here = self.code.distrusted.pop(tier.base, "") or str(decision.because or "another process has compiled anew")
        self.code.prove_again(tier.base, here)
        return self._together(kind, call, tier, Decision(Doing.PROVE_CODE))

    def _decline(self, kind: CallKind, call: StepCall, tier: Tier, decision: Decision) -> Any:
        assert isinstance(decision.because, Obstacle)
        self.capturing.decline(kind, decision.because)
        return self._without_graph(kind, call, tier)

    def _plain(self, _kind: CallKind | None, call: StepCall, tier: Tier, decision: Decision) -> Any:
        """Run a call without a graph, each process for itself."""
        if decision.because:
            level = logging.WARNING if decision.because == WAITS else logging.INFO
            self.context.reports.say_once(f"{self.step.name}: {decision.because}", level)
        if advice := self.shapes.advice():
            self.context.reports.say_once(advice)
        below, shapes = tier.without_graph(), self.shapes
        if not tier.other_kernels:
            return self._rescue.guarded(call.run, below)
        seen = shapes.compiled(tier.base, call.inputs) or (self._peers.alone and shapes.many)
        failed = tier.base in self.code.distrusted or below.name in self.context.reports.vetoes
        if not seen or failed or not self.code.proven(tier.base):
            return self.step.eagerly(call.run)
        shapes.saw(tier.base, call.inputs)
        return self.code.run(call.run, below)

    def _without_graph(self, kind: CallKind, call: StepCall, tier: Tier) -> Any:
        """Run a call without its graph; one process may prove its compiled code for new shapes meanwhile."""
        decision = self._deciding.plain(call, tier)
        if decision.doing is Doing.PROVE_CODE and self._peers.alone:
            return self._together(kind, call, tier, decision)
        return self._plain(kind, call, tier, Decision(Doing.PLAIN))

    def _audit(self, kind: CallKind, call: StepCall, tier: Tier, decision: Decision) -> Any:
        """Run the call eagerly and observe it."""
        if not tier.other_kernels or self.code.proven(tier.base):
            because: Any = decision.because
            return self.capturing.audit(kind, call, because=because)
        self._deciding.audits += 1
        self.step.not_repeatable = None
        self.capturing.forget_audits()
        result = self.capturing.audit(kind, call)
        if kind.audit is None and kind.declined is None:  # another step has to be seen
            self._deciding.audits -= 1
        return result

    def _prove_code(self, _kind: CallKind | None, call: StepCall, tier: Tier, _decision: Decision) -> Any:
        """Run the call compiled and eager, and compare."""
        self.shapes.saw(tier.base, call.inputs)
        if not self._peers.alone:
            self.context.reports.say_once(
                f"{self.step.name}: all {self._peers.size} processes compile {tier.base} now, in the foreground: this "
                "step takes as long as the slowest compile"
            )
        return self.code.prove(call.arguments, tier)

    def _check(self, kind: CallKind | None, call: StepCall, tier: Tier, _decision: Decision) -> Any:
        """Check a recording, or compiled code without a graph; several processes prove a recording again."""
        if not self._peers.alone:
            assert kind is not None
            assert isinstance(kind.state, Proven)
            assert self.sentinel is not None
            usual = self.context.reports.seconds_of(tier.name)
            self.sentinel.schedule.checked(STEPS * (usual or 0.0), usual, recorded=True)
            kind.state = Captured(kind.state.recorded, kind.state.recording)
            kind.checked, self._checked = True, self._checked + STEPS
            return self._together(kind, call, tier, Decision(Doing.PROVE))
        return self._compare(kind, call, tier)

    @uninterrupted
    def _compare(self, kind: CallKind | None, call: StepCall, tier: Tier) -> Any:
        """Run a recording, or compiled code without one, and eager, and compare; return the step's result."""
        assert self.sentinel is not None
        recorded = kind.state.recorded if kind is not None and isinstance(kind.state, Proven) else None
        unheld = self.auditor.unheld()
        try:
            result, outcome = self.sentinel.run(recorded, call.arguments, tier)
        except CandidateFailedError as error:
            no_memory = isinstance(error.__cause__, torch.OutOfMemoryError | NoRoomError)
            obstacle = self._rescue.candidate_failed(error, tier)
        else:
            written = self.auditor.written(unheld)
            if written and kind is not None and recorded is not None:
                self.capturing.decline(kind, written[0])
            elif written:
                self.context.reports.failed(self.step, tier.without_graph(), written[0])
            elif not outcome.agrees:
                self._disagreed(outcome, tier)
            return result
        if no_memory:
            off = self.sentinel.schedule.off = "a step and a copy of its state do not fit in memory together"
            self.context.reports.say_once(f"{self.step.name}: its values are compared with eager's no more: {off}")
            self.step.doing = "run"
            replays = kind is not None and recorded is not None
            return self._do[Doing.REPLAY if replays else Doing.PLAIN](kind, call, tier, Decision(Doing.PLAIN))  # type: ignore[arg-type]
        if kind is not None and recorded is not None:
            return self.capturing.instead(kind, recorded.audit, call, tier, obstacle)
        return self._rescue.rung_down(call.run, tier, obstacle)

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

    # -- for the loop ----------------------------------------------------------------------------------------------

    def checks(self) -> SentinelStatus | None:
        """Return what the sentinel has done; None where it has checked nothing."""
        status = self.sentinel.status if self.sentinel is not None else None
        if status is not None and not self._peers.alone:
            status = dataclasses.replace(status, checks=self._checked, disagreed=self.capturing.disagreed)
        return status if status is not None and (status.checks or status.disagreed) else None

    def lacks(self, tier: Tier) -> str:
        """Say what is missing before the step runs in a tier; empty where nothing is."""
        kinds, then = [kind for kind in self.capturing.kinds.values() if kind.declined is None], ""
        if tier.other_kernels and not self.code.proven(tier.base):
            left, which = (
                self._deciding.to_be_audited(tier) + self.code.steps_left(tier.base),
                "shapes that came before",
            )
            then = ", and then some to capture it" if tier.graph else ""
        elif tier.graph and kinds and not any(kind.proven for kind in kinds):
            left, which = min(kind.steps_left for kind in kinds), "the same shapes and other arguments"
        else:
            return ""
        if another_trains(self.context):
            return f"not proven yet: {WAITS}"
        steps = f"{left} more step{'s' if left > 1 else ''} with {which} to compare it with eager{then}"
        return f"not proven yet: it takes {steps}; eager's outcome counts till then"
