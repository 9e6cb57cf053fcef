"""Audits a step before it is captured: one real eager step is observed, with the Python state that it reads."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from typing import TYPE_CHECKING, Any

import torch

from hotloop._torch.autograd import was_freed
from hotloop._torch.fake import version_of
from hotloop._torch.ledger import CapabilityMissingError
from hotloop._torch.own_compiles import uncompiled
from hotloop._torch.random_state import CPU, NUMPY, PYTHON, RandomState
from hotloop._torch.sharded import is_spread
from hotloop.compiling.control import paused
from hotloop.interrupts import uninterrupted
from hotloop.measure import flatten
from hotloop.step.audit.findings import AuditFindings
from hotloop.step.audit.op_trace import trace_step
from hotloop.step.audit.side_effects import SideEffects
from hotloop.step.audit.strangers import forget_whole, noting_strangers, of_strangers
from hotloop.step.audit.values import SPREAD, found_in_arguments, gradients_of, named, not_copied
from hotloop.step.engine import collector_paused
from hotloop.step.guard.changes import SCHEDULE_OUTSIDE, UNHEARD, Changes
from hotloop.step.guard.compare import frozen_settings, learning_rates
from hotloop.step.obstacle import CandidateFailedError, Obstacle
from hotloop.step.ranks import threads
from hotloop.step.state.rng_usage import other_threads
from hotloop.step.state.trial_run import alone, before_a_run, undo, wait_for

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from hotloop.step.context import DecoratedStep
    from hotloop.step.rescue import Rescue
    from hotloop.step.state.snapshot import Snapshot
    from hotloop.step.state.trial_run import Ready

_CHANGES_SETTINGS = Obstacle(
    "the step changes its optimizer's settings",
    f"{SCHEDULE_OUTSIDE}; an optimizer that sets them itself is not captured",
    not_repeatable=True,
)
_ADDS_GROUPS = Obstacle(
    "the step adds or removes a parameter group of its optimizer",
    "add and remove parameter groups between two steps",
    not_repeatable=True,
)
_WAITS = "the step returns a loss with its graph, whose backward it leaves to the caller or has asked to keep"
_BACKWARD = "call loss.backward() inside the step; where it is done there, return loss.detach()"
_SAID_OUTSIDE = "A replay runs no Python, so this is not said there: return what it says, and say it outside the step"
_OVERWRITTEN = "the next replay would overwrite what it holds"
_PLAIN = "return tensors, alone or in a dict, a list, a tuple or a dataclass"


@dataclasses.dataclass
class _Observed:
    """What a look at one run has found."""

    before: Snapshot
    """What was there before."""
    obstacles: list[Obstacle]
    gradients: list[tuple[int, int]]
    """Those that there were before, and how often each had been written."""
    begun: int  # collectives, before it
    result: Any = None
    strangers: list[Obstacle] = dataclasses.field(default_factory=list)
    heard: SideEffects = dataclasses.field(default_factory=SideEffects)
    met_others: bool = False
    """It met parameters or buffers that nobody named: from the next run on they are among what it changes."""

    @property
    def seen(self) -> AuditFindings:
        return self.heard.seen

    def all_obstacles(self) -> list[Obstacle]:
        return [*self.strangers, *self.seen.obstacles, *self.obstacles]

    @property
    def irreversible(self) -> bool:
        """Whether the run changed something that cannot be undone: no copy of it was made, or it is not in memory."""
        return (
            self.met_others
            or self.seen.stopped  # the rest of the step was not observed
            or bool(self.seen.written_found)
            or any(one.not_repeatable for one in self.all_obstacles())
        )


class StepAuditor:
    """Runs a decorated step eagerly and observes what it does, and what Python state it reads.

    Args:
        step: the decorated step.
        rescue: explains a run that failed, and is told when there is more to undo.
    """

    def __init__(self, step: DecoratedStep, rescue: Rescue) -> None:
        self._step, self._context, self._program, self._rescue = step, step.context, step.program, rescue
        self._changes = Changes(step.program)

    def look_again(self) -> None:
        """Compare what the step reads from now on with itself: something changed between two steps."""
        self._changes.look_again()

    @uninterrupted
    @collector_paused()
    def audit(
        self,
        run: Callable[[], Any],
        args: Any,
        kwargs: Any,
        *,
        reports_capturing: bool,
    ) -> tuple[Any, AuditFindings | None]:
        """Run the step eagerly and observe it: a real step. Once more would be of no use, its rest runs unobserved.

        Args:
            run: the step.
            args: its arguments.
            kwargs: its named arguments.
            reports_capturing: the answer for code of the step that asks whether a capture is going on.

        Returns:
            The step's result, and what was seen; None in place of that where another step has to be seen. What was
            `stopped` is of no use but for what it has `asked`.
        """
        step, context = self._step, self._context
        step.doing = "survey"
        engine = context.engine
        asked: list[bool] = []
        # The audit takes the path of the capture: code that asks for one (masks in transformers) must not be judged by
        # another path. Where no capture can come, cuBLAS need not keep its memory for another stream.
        ambience: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        if engine is not None and context.progress.may_capture:
            ambience = engine.ambience(
                self._program.device, reports_capturing=reports_capturing, asked=lambda: asked.append(True)
            )

        def ends(seen: AuditFindings) -> bool:
            # Code that asks has another path, which is audited next: of this one nothing more needs to be known.
            return bool(asked) and not reports_capturing and bool(seen.obstacles)

        try:
            looked = self._look_at(run, (args, kwargs), ambience, ends=ends)
        except CandidateFailedError as error:
            failed = self._rescue.candidate_failed(error, context.base_tier)
            looked = None
        if looked is None:  # outside of the except clause, so that what eager raises does not carry our exception along
            result = step.eagerly(run)
            context.reports.decided(f"{step.name} could not be looked at, so it is not captured: {failed}", {})
            return result, AuditFindings(obstacles=[failed])
        # Another training began meanwhile, and what was seen may be its doing; or tensors were met that nobody named;
        # or a GradScaler skipped the optimizer's step; or an average began. Each later step does other things.
        other = looked.met_others or looked.seen.skipped or looked.seen.begins
        if threads.another_trains(context) or other:
            return looked.result, None
        seen = looked.seen
        if seen.stopped:
            seen.asked = bool(asked) and bool(seen.obstacles) and seen.failed is None
            if seen.failed is not None:
                step.note_not_repeatable([seen.failed])
            return looked.result, seen
        # Strangers come first: what such an optimizer does (Adam reads its counts on the host) would seem the step's.
        seen.obstacles = [*looked.strangers, *seen.obstacles, *looked.obstacles, *self._of_result(looked, args, kwargs)]
        seen.asked = bool(asked)
        said = str(looked.heard)
        if said and context.progress.may_capture and not seen.obstacles:
            context.reports.say_once(f"{step.name}: {said}. {_SAID_OUTSIDE}", logging.WARNING)
        step.note_not_repeatable(seen.obstacles)
        progress = context.progress
        progress.audits += 1
        progress.draws_random |= seen.random_operations > 0
        progress.matrix_dtypes |= seen.matrix_dtypes
        return looked.result, seen

    def _of_result(self, looked: _Observed, args: Any, kwargs: Any) -> list[Obstacle]:
        """List what in the step's result keeps it from being captured; note which tensors of it are on the host."""
        leaves = flatten(looked.result)[0]
        tensors = [(number, leaf) for number, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        looked.seen.on_host = [number for number, tensor in tensors if tensor.device.type == "cpu"]
        obstacles = []
        waits = any(tensor.grad_fn is not None and not was_freed(tensor) for _, tensor in tensors)
        if waits and not looked.seen.stepped and looked.gradients == self._gradients():
            obstacles.append(Obstacle(_WAITS, _BACKWARD))
        obstacles += [SPREAD] if any(is_spread(tensor) for _, tensor in tensors) else []
        if any(isinstance(leaf, float | complex) for leaf in leaves):
            obstacles.append(
                Obstacle("the step returns a Python number, which a replay would repeat", "return a tensor instead")
            )
        if what := not_copied(looked.result, (*flatten((args, kwargs))[0], *self._context.parts.modules())):
            obstacles.append(Obstacle(f"the step returns {what}: {_OVERWRITTEN}", _PLAIN))
        return obstacles

    def _kept(self, seen: AuditFindings) -> list[Obstacle]:
        """Return what no function of ours may stand in for: compiled code is guarded on torch's, and compiles anew."""
        compiled = self._step.own_compiles.functions or self._context.base_tier.name != "eager"
        return [*seen.checks, *seen.constants] if compiled else []

    def _look_at(
        self,
        run: Callable[[], Any],
        call: tuple[Any, Any],
        ambience: contextlib.AbstractContextManager[None],
        ready: Ready = alone,
        ends: Callable[[AuditFindings], bool] = lambda _: False,
    ) -> _Observed:
        """Run the step eagerly and observe it; add tensors that it wrote unknown to the loop to the holdings.

        Raises:
            CandidateFailedError: the step raised, and was undone. Or this torch cannot show what a step does.
            Exception: the step raised after something that cannot be undone, so that it must not run again.
        """
        moved = self.moved_outside(*call)
        self._context.parts.look_again()
        looked = _Observed(before_a_run(self._program, ready), moved, self._gradients(), self._begun())
        recorder = self._changes.recorder(compiled=self._context.base_tier.name != "eager")
        looked.heard.recorder, looked.heard.ends, looked.heard.own_compiles = recorder, ends, self._step.own_compiles
        looked.heard.checks = "auto" if self._context.base_tier.name == "eager" else "keep"
        given = named(*call)
        asks = gradients_of(one for (_, attribute), one in given.items() if not attribute)
        inputs = [one for one in flatten(call)[0] if isinstance(one, torch.Tensor)]
        random, settings = RandomState([self._program.device]), self._settings()
        holdings, device = self._program.holdings, self._program.device
        failed: Exception | None = None
        strangers, others, own_before = (
            list[torch.optim.Optimizer](),
            list[torch.nn.Module](),
            self._step.own_compiles.beside_models,
        )
        try:
            noting = noting_strangers(
                holdings.optimizers.values(), self._context.parts.sharded(), strangers, others, looked.heard
            )
            with self._context.eager(), self._uncompiled(), ambience, noting:
                looked.result, _ = trace_step(holdings, device, inputs, run, looked.heard)
                wait_for(device)  # a kernel's failure belongs to the code that launched it
        except CapabilityMissingError as error:  # this torch shows no operations: nothing of the step has run
            raise CandidateFailedError(began=False) from error
        except Exception as error:  # noqa: BLE001 - the user's own, or of what looks at it: the next run tells
            failed = error
        if looked.seen.stopped:
            self._changes.look_again()
            self._program.rng_usage.note(None)
            self._note_writes(looked.seen, others)
        # One that another thread's training began beside says nothing: what was seen may be its doing.
        elif failed is not None or not threads.another_trains(self._context):
            looked.strangers = of_strangers(strangers, others, holdings.optimizers.values())
            looked.obstacles += _changed_settings(settings, self._settings())
            looked.obstacles += [*self._changes.inside(recorder), *([] if looked.heard.complete else [UNHEARD])]
            looked.obstacles += found_in_arguments(given, named(*call), self._step.argument)
            looked.obstacles += [asks] if asks is not None else []
            looked.obstacles += [*self._kept(looked.seen), *looked.heard.obstacles]
            looked.obstacles += self._drawn_since(random, looked.heard)
            self._note_writes(looked.seen, others)
            looked.met_others = self._changes.strangers() or self._own_compiled(before=own_before)
            if looked.met_others:
                self._rescue.look_again()
            looked.seen.read, looked.seen.found = self._changes.heard, self._changes.found
        if failed is None:
            return looked
        if looked.irreversible or self._begun() != looked.begun:  # in the other processes it has happened
            try:
                raise failed
            finally:
                failed = None  # its traceback holds this frame, and all that the step has made
        undo(self._program, looked.before, failed)
        raise CandidateFailedError from failed

    def _begun(self) -> int:
        peers = self._context.peers
        return peers.begun() if peers is not None else 0

    def _own_compiled(self, *, before: bool = False) -> bool:
        """Return whether the step calls compiled functions beside models that were compiled before the loop got them.

        The writes of compiled code cannot be observed. A model's tensors are known without that, a function's are not.
        """
        return self._step.own_compiles.beside_models and not before and self._context.base_tier.name != "eager"

    @contextlib.contextmanager
    def _uncompiled(self) -> Iterator[None]:
        """Run the block without any compile, so that all is seen; with, where only models are known to be compiled."""
        if self._context.base_tier.name == "eager" or self._own_compiled():
            with paused(self._context.compiled.models.values()), uncompiled():
                yield
        else:
            yield

    def _note_writes(self, seen: AuditFindings, others: list[torch.nn.Module]) -> None:
        """Add tensors to the holdings that the step writes and nobody named: proofs put them back and compare them."""
        forget_whole(seen, others)
        self._program.holdings.gradients_altered |= seen.altered
        self._step.recounted |= seen.recounted
        if seen.written_found:
            self._program.holdings.found += seen.written_found
            self._rescue.look_again()

    def _drawn_since(self, before: RandomState, heard: SideEffects) -> list[Obstacle]:
        """Name the streams on the host that the step drew from: a replay draws from none of them."""
        self._program.rng_usage.note(heard.drawn() if self._context.base_tier.name == "eager" else None)
        hosts = {PYTHON, NUMPY}
        if self._context.device.type != "cpu":
            hosts.add(CPU)
        how = (
            "draw on the device (torch.rand(..., device=...)), or outside the step; do not draw at all where the share "
            "is 0 (if p > 0 and ...)"
        )
        moved = self._program.rng_usage.own(RandomState([self._program.device]).moved_since(before))
        numpys = " (or another thread does)" if other_threads() else ""
        return [
            Obstacle(f"the step draws from {name}{numpys if name == NUMPY else ''}", how)
            for name in moved
            if name in hosts
        ]

    def _gradients(self) -> list[tuple[int, int]]:
        """Return the identity of each gradient that exists, and how often it was written."""
        found = (parameter.grad for parameter in self._program.holdings.parameters().values())
        return [(id(one), version_of(one)) if one is not None else (0, 0) for one in found]

    def _settings(self) -> list[Any]:
        optimizers = self._program.holdings.optimizers.values()
        return [(frozen_settings(one), learning_rates(one)) for one in optimizers]

    def moved_outside(self, *call: Any) -> list[Obstacle]:
        """Note what the step reads in Python and somebody changed since the last look; twice is too often."""
        return self._changes.outside(call)

    def note(self, seen: AuditFindings) -> None:
        """Remember the present Python state: the next step, and the reads of this audit, are compared with it."""
        seen.found = self._changes.note(seen.read)

    def is_of_now(self, seen: AuditFindings) -> bool:
        """Return whether the Python values that the step reads are those of its audit.

        With other values it may do something that the audit did not see, and that an undo would miss.
        """
        return self._changes.stand(seen.read, seen.found)

    def changed_inside(self) -> list[Obstacle]:
        """Return what Python state the step that has just run changed, since `moved_outside` was asked before it."""
        return self._changes.inside()


def _changed_settings(before: list[Any], after: list[Any]) -> list[Obstacle]:
    """Return the obstacle that a step changes settings of optimizers; each is given as its groups and their rates."""
    groups = [[len(group) for group, _ in one] for one in (before, after)]
    if groups[0] != groups[1]:
        return [_ADDS_GROUPS]
    return [_CHANGES_SETTINGS] if before != after else []
