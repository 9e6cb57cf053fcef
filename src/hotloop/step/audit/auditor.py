"""Audits a step before it is captured: one real eager step is observed. Later eager steps are compared with it."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import weakref
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from hotloop._torch.autograd import was_freed
from hotloop._torch.fake import version_of
from hotloop._torch.hooks import module_hooks
from hotloop._torch.ledger import CapabilityMissingError
from hotloop._torch.own_compiles import uncompiled
from hotloop._torch.places import address_of
from hotloop._torch.random_state import CPU, NUMPY, PYTHON, RandomState
from hotloop._torch.sharded import is_spread, shard_of
from hotloop.compiling.control import paused
from hotloop.interrupts import interruptible, uninterrupted
from hotloop.measure import flatten
from hotloop.step.audit.effects import Effects
from hotloop.step.audit.findings import AuditFindings, Look
from hotloop.step.audit.op_trace import as_audited, trace_step
from hotloop.step.audit.strangers import forget_whole, noting_strangers, of_strangers
from hotloop.step.audit.values import RETURN_IT, SPREAD, found_in_arguments, gradients_of, named, not_copied
from hotloop.step.engine import collector_paused
from hotloop.step.obstacle import RUNS, CandidateFailedError, Obstacle
from hotloop.step.ranks import threads
from hotloop.step.state.rng_usage import other_threads
from hotloop.step.state.trial_run import alone, before_a_run, undo, wait_for
from hotloop.step.watch.optimizers import frozen_settings, learning_rates
from hotloop.step.watch.plain import PlainWatch
from hotloop.step.watch.stream import OpStream

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from hotloop.step.context import DecoratedStep
    from hotloop.step.rescue import Rescue
    from hotloop.step.state.program import Call
    from hotloop.step.state.snapshot import Snapshot
    from hotloop.step.state.trial_run import Ready

_SCHEDULE_OUTSIDE = "call scheduler.step() outside the step"
_CHANGES_SETTINGS = Obstacle(
    "the step changes its optimizer's settings",
    f"{_SCHEDULE_OUTSIDE}; an optimizer that sets them itself is not captured",
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
_IN_PLACE = "write into the tensor that is there (.copy_(), .mul_(), .lerp_()), which a replay does too"
_PARAMETRIZE = (
    f"{_IN_PLACE}; in place of torch.nn.utils.weight_norm and spectral_norm take those of "
    "torch.nn.utils.parametrizations"
)
_BUFFERS = "._buffers.items"
_GIVE_IT = (
    "pass it to the loop, Loop(..., state=[...]), so that a step that is run twice to be compared can put it back"
)
_COUNT_OUTSIDE = f"call what counts outside the step (an average: ema.step(...)), or count in a tensor: {RUNS}"


Unheld = list[tuple[str, "weakref.ref[torch.Tensor]", int]]
"""Tensors by name, and how often each was written."""


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
    look: Look = dataclasses.field(default_factory=Look)
    changed: dict[str, tuple[Any, Any]] = dataclasses.field(default_factory=dict)
    """The marks of what the step itself has changed in Python, by name: before it, and after it."""
    said: str = ""
    """The lines that print or log."""
    met_others: bool = False
    """It met parameters or buffers that nobody named: from the next run on they are among what it changes."""

    @property
    def seen(self) -> AuditFindings:
        return self.look.seen

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
    """Runs a decorated step eagerly and observes what it does.

    Args:
        step: the decorated step.
        rescue: explains a run that failed, and is told when there is more to undo.
    """

    def __init__(self, step: DecoratedStep, rescue: Rescue) -> None:
        self._step, self._context, self._program, self._rescue = step, step.context, step.program, rescue
        self._watch: PlainWatch | None = None
        """What the last look watched."""

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
        if (said := looked.said) and context.progress.may_capture and not seen.obstacles:
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

    def _look_at(
        self,
        run: Callable[[], Any],
        call: Call,
        ambience: contextlib.AbstractContextManager[None],
        ready: Ready = alone,
        ends: Callable[[AuditFindings], bool] = lambda _: False,
    ) -> _Observed:
        """Run the step eagerly and observe it; add tensors that it wrote unknown to the loop to the holdings.

        Raises:
            CandidateFailedError: the step raised, and was undone. Or this torch cannot show what a step does.
            Exception: the step raised after something that cannot be undone, so that it must not run again.
        """
        program, parts = self._program, self._context.parts
        parts.look_again()
        looked = _Observed(before_a_run(program, ready), [], self._gradients(), self._begun(), look=Look(ends))
        seen, effects = looked.seen, Effects(looked.look)
        given = named(*call)
        asks = gradients_of(one for (_, attribute), one in given.items() if not attribute)
        random, settings = RandomState([program.device]), self._settings()
        optimizers = program.holdings.optimizers.values()
        failed: Exception | None = None
        strangers, others = list[torch.optim.Optimizer](), list[torch.nn.Module]()
        watch = self._watch = seen.watch = PlainWatch(
            program.function, program.holdings.modules.values(), optimizers, program.ignore
        )
        try:
            noting = noting_strangers(optimizers, parts.sharded(), strangers, others, looked.look)
            with self._uncompiled(), ambience, effects.listening():
                with noting, watch.hearing(looked.look.ours):
                    looked.result, _ = trace_step(program.holdings, program.device, _tensors(call), run, looked.look)
                wait_for(program.device)  # a kernel's failure belongs to the code that launched it
                looked.changed = watch.settle()  # as long as the same functions are replaced as when it looked first
            watch.look()
        except CapabilityMissingError as error:  # this torch shows no operations: nothing of the step has run
            raise CandidateFailedError(began=False) from error
        except Exception as error:  # noqa: BLE001 - the user's own, or of what looks at it: the next run tells
            failed = error
        if seen.stopped:
            program.rng_usage.note(None)
            self._note_writes(seen, others)
        # One that another thread's training began beside says nothing: what was seen may be its doing.
        elif failed is not None or not threads.another_trains(self._context):
            looked.said = str(effects)
            looked.strangers = of_strangers(strangers, others, optimizers)
            looked.obstacles += _changed_settings(settings, self._settings())
            looked.obstacles += [*effects.obstacles, *self._drawn_since(random, seen, whole=failed is None)]
            looked.obstacles += self._of_watch(watch, looked.changed)
            looked.obstacles += found_in_arguments(given, named(*call), self._step.argument)
            looked.obstacles += [asks] if asks is not None else []
            # Compiled code is guarded on torch's own functions, and compiles anew where ours stand in.
            looked.obstacles += seen.constants if self._context.base_tier.name != "eager" else []
            self._note_writes(seen, others)
            looked.met_others = self._met_strangers(watch)
            if looked.met_others:
                self._rescue.look_again()
        if failed is None:
            return looked
        if looked.irreversible or self._begun() != looked.begun:  # in the other processes it has happened
            try:
                raise failed
            finally:
                failed = None  # its traceback holds this frame, and all that the step has made
        undo(program, looked.before, failed)
        raise CandidateFailedError from failed

    @contextlib.contextmanager
    def streaming(self, seen: AuditFindings, call: Call) -> Iterator[OpStream]:
        """Compare the operations of an eager run of the step in the block with those of its audit."""
        holdings = self._program.holdings
        with self._uncompiled(), as_audited(holdings, self._program.device):
            with holdings.still():
                stream = OpStream(holdings, _tensors(call), seen.stream)
            with stream.noting():
                yield stream

    def run_compared(
        self, run: Callable[[], Any], call: Call, seen: AuditFindings, *, reports_capturing: bool
    ) -> tuple[Any, OpStream]:
        """Run the step eagerly, as a real step, on the path of its audit; return its result and what differs."""
        engine = self._context.engine
        assert engine is not None
        with (
            engine.ambience(self._program.device, reports_capturing=reports_capturing),
            self.streaming(seen, call) as stream,
        ):
            result = interruptible(run)
        self._program.holdings.keep_outside(result)
        stream.finish()
        return result, stream

    def look_again(self) -> None:
        """Take the present values for those before the coming step."""
        if self._watch is not None and self._watch.changed():
            self._watch.look()

    def changed_inside(self) -> list[Obstacle]:
        """Return what Python state has changed since the last look, by the step that has just run."""
        return [changes_state(name) for name in (self._watch.moved() if self._watch is not None else [])[:1]]

    def unheld(self) -> Unheld:
        """Note the tensors that the step meets and that no copy of the state holds, before it runs more than once."""
        holdings = self._program.holdings
        with holdings.still():
            known = [*holdings.tensors().values(), *(one for one in holdings.gradients().values() if one is not None)]
        held = {address_of(one) for one in map(shard_of, known) if one.layout == torch.strided}
        met = self._watch.tensors() if self._watch is not None else ()
        met = ((name.rpartition("<locals>.")[2], one) for name, one in met)
        others = [(name, one) for name, one in met if one.layout == torch.strided and address_of(one) not in held]
        return [(name, weakref.ref(one), version_of(one)) for name, one in others if not one.is_inference()]

    @staticmethod
    def written(unheld: Unheld) -> list[Obstacle]:
        """Return that the step has written one of the tensors that `unheld` noted, which it does in some calls only."""
        pairs = [(name, one, version) for name, reference, version in unheld if (one := reference()) is not None]
        return [
            Obstacle(
                f"the step writes into {name} in some calls only, and the loop was not given it",
                _GIVE_IT,
                not_repeatable=True,
            )
            for name, one, version in pairs
            if version_of(one) != version
        ][:1]

    def _of_watch(self, watch: PlainWatch, changed: dict[str, tuple[Any, Any]]) -> list[Obstacle]:
        """Return what of Python's state the step has changed, or takes further as it reads it."""
        obstacles = [
            dataclasses.replace(changes_state(name), hint=self._remedy_of(name, before, now))
            for name, (before, now) in changed.items()
        ]
        return obstacles[:3] + [
            Obstacle(f"the step reads {what}", hint or RETURN_IT, not_repeatable=not repeatable)
            for what, hint, repeatable in watch.refused[:3]
        ]

    def _remedy_of(self, name: str, before: Any, now: Any) -> str:
        """Say what to do about a value that the step changes, by its name and marks."""
        if name.endswith(_BUFFERS) or (isinstance(now[0], type) and issubclass(now[0], torch.Tensor)):
            modules = (part for root in self._program.holdings.modules.values() for part in root.modules())
            hooks = (hook for part in modules for table in module_hooks(part) for hook in table.values())
            return _PARAMETRIZE if any(isinstance(one, WeightNorm | SpectralNorm) for one in hooks) else _IN_PLACE
        counts = before[0] is now[0] is int and int(now[1]) == int(before[1]) + 1
        return _COUNT_OUTSIDE if counts else RETURN_IT

    def _met_strangers(self, watch: PlainWatch) -> bool:
        """Add tensors that the step meets, and that the loop was not given, to the holdings; return whether any."""
        holdings = self._program.holdings
        named = (holdings.parameters(), holdings.buffers(), holdings.other_tensors())
        held = {id(one) for tensors in named for one in tensors.values()} | {*map(id, holdings.found)}
        trained, buffers = watch.strangers(held)
        holdings.strangers |= cast("dict[str, torch.nn.Parameter]", trained)
        holdings.found += buffers
        return bool(trained or buffers)

    def _begun(self) -> int:
        return self._context.peers.begun()

    @contextlib.contextmanager
    def _uncompiled(self) -> Iterator[None]:
        """Run the block without any compiled code, so that all is seen."""
        with self._context.eager(), paused(self._context.compiled.models.values()), uncompiled():
            yield

    def _note_writes(self, seen: AuditFindings, others: list[torch.nn.Module]) -> None:
        """Add tensors to the holdings that the step writes and nobody named: proofs put them back and compare them."""
        forget_whole(seen, others)
        self._program.holdings.gradients_altered |= seen.altered
        self._step.recounted |= seen.recounted
        if seen.written_found:
            self._program.holdings.found += seen.written_found
            self._rescue.look_again()

    def _drawn_since(self, before: RandomState, seen: AuditFindings, *, whole: bool) -> list[Obstacle]:
        """Name the streams on the host that the step drew from: a replay draws from none of them."""
        moved = RandomState([self._program.device]).moved_since(before)
        self._program.rng_usage.note({*seen.drawn, *({PYTHON} & {*moved})} if whole else None)
        hosts = {PYTHON, NUMPY}
        if self._context.device.type != "cpu":
            hosts.add(CPU)
        how = (
            "draw on the device (torch.rand(..., device=...)), or outside the step; do not draw at all where the share "
            "is 0 (if p > 0 and ...)"
        )
        moved = self._program.rng_usage.own(moved)
        others = " (or another thread does)" if other_threads() else ""
        return [Obstacle(f"the step draws from {name}{others}", how) for name in moved if name in hosts]

    def _gradients(self) -> list[tuple[int, int]]:
        """Return the identity of each gradient that exists, and how often it was written."""
        found = (parameter.grad for parameter in self._program.holdings.parameters().values())
        return [(id(one), version_of(one)) if one is not None else (0, 0) for one in found]

    def _settings(self) -> list[Any]:
        optimizers = self._program.holdings.optimizers.values()
        return [(frozen_settings(one), learning_rates(one)) for one in optimizers]


def _tensors(call: Call) -> list[torch.Tensor]:
    return [one for one in flatten(call)[0] if isinstance(one, torch.Tensor)]


def changes_state(name: str) -> Obstacle:
    """Return the obstacle of a step that changes a value of Python's."""
    # A buffer that the step puts in place of another goes back with the rest of the module's.
    return Obstacle(f"the step changes Python state: {name}", RETURN_IT, not_repeatable=not name.endswith(_BUFFERS))


def _changed_settings(before: list[Any], after: list[Any]) -> list[Obstacle]:
    """Return the obstacle that a step changes settings of optimizers; each is given as its groups and their rates."""
    groups = [[len(group) for group, _ in one] for one in (before, after)]
    if groups[0] != groups[1]:
        return [_ADDS_GROUPS]
    return [_CHANGES_SETTINGS] if before != after else []
