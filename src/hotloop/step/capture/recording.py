"""One captured step: recorded once, then replayed for calls whose arguments, gradients and settings fit it."""

from __future__ import annotations

import contextlib
import functools
import weakref
from typing import TYPE_CHECKING, Any

import torch

from hotloop._torch.checks import checks_left_out
from hotloop._torch.foreach import copies
from hotloop._torch.host_constants import HostConstants
from hotloop._torch.pools import unowned
from hotloop._torch.scaler import accelerates, scaled_steps, take_masked
from hotloop._torch.scripted import unscripted
from hotloop._torch.sharded import shard_of
from hotloop.errors import describe
from hotloop.interrupts import interruptible
from hotloop.measure import flatten, unflatten
from hotloop.step.audit.averaged_model import answered
from hotloop.step.calls.call_key import Regions
from hotloop.step.capture.in_and_out import Inputs, Results
from hotloop.step.capture.invariants import Change, Frozen
from hotloop.step.capture.optimizers import Recorded, move_step_counts
from hotloop.step.capture.outside import AS_FOUND, OutsideCall, OutsideHooks, bind
from hotloop.step.state.holdings import Memory
from hotloop.step.state.snapshot import ForwardSyncs
from hotloop.step.state.trial_run import alone, copied

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence

    from hotloop.step.audit.findings import AuditFindings
    from hotloop.step.engine import Engine, Recording, Segment
    from hotloop.step.state.program import Call, Program
    from hotloop.step.state.streams import Streams
    from hotloop.step.state.trial_run import Ready

_tensor: Any = torch.Tensor
_gradient = _tensor.grad.__get__  # mapped over all parameters before each replay
_recorded_gradients: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()
"""The memory of gradients that recordings share. Of the gradients themselves no weak references are held: torch could
not swap them (`Module.to`)."""


class CapturedStep:
    """A recorded step. `capture` makes it, and runs the step as it records it.

    Args:
        program: the program of the step.
        seen: what the audit of a step with such arguments found.
        recorded: the optimizers whose steps are recorded.
        engine: records the step.

    Attributes:
        gradients_at_step: the gradients that the optimizers read, for proofs: right until something else runs in the
            memory of recordings.
        in_users_code: an optimizer outside of the recording is stepping: an exception is the user's own.
        first_seconds: how long the first execution took.
    """

    def __init__(self, program: Program, seen: AuditFindings, recorded: dict[str, Recorded], engine: Engine) -> None:
        self.program, self.recorded, self._engine = program, recorded, engine
        named = program.holdings.parameters()
        self._parameters = list(named.values())
        read = [parameter for name, parameter in named.items() if name in seen.read_gradients]
        self._reads = [(parameter, parameter.grad) for parameter in read if parameter.grad is not None]
        """Parameters whose gradients the step reads, and these gradients: a replay copies later ones into them."""
        self._start_memory = Memory([gradient for _, gradient in self._reads])
        self._unread = [None if name in seen.read_gradients else parameter.grad for name, parameter in named.items()]
        self._frozen = Frozen(program.holdings, recorded)
        self._parts: list[Segment | OutsideCall] = []
        self._inputs: Inputs | None = None
        self._results: Results | None = None
        self._regions, self._inside = Regions([]), list[int]()
        self._end: list[Any] = []
        """The gradients after the step, by parameter: a tensor, None, or ``AS_FOUND``."""
        self._end_memory = Memory([])
        self._on_host = seen.on_host
        self._constants = HostConstants(seen.constant_bytes) if seen.constants else None
        self._overflows: list[tuple[Any, torch.Tensor]] = []
        """Optimizers of Accelerate's that note whether a GradScaler skipped their step, and the scaler's finding."""
        self._parts_done, self._syncs = 0, ForwardSyncs(program.holdings)
        self.gradients_at_step: dict[str, torch.Tensor] = {}
        self.in_users_code = False
        self.first_seconds: float | None = None

    def replay(self, leaves: list[Any]) -> Any:
        """Run the step on a new batch; return its result, in tensors that the next replay does not overwrite."""
        assert self._inputs is not None
        self._parts_done, self.in_users_code = 0, False
        self._inputs.fill(leaves)
        for optimizer in self.recorded.values():
            optimizer.refresh()
        self._start_memory.bring_back()
        if not self._finds_recorded_gradients():
            for parameter, recorded in self._reads:
                if parameter.grad is not recorded and parameter.grad is not None:
                    recorded.copy_(parameter.grad)
        self.save_others()
        for part in self._parts:
            self.in_users_code = isinstance(part, OutsideCall)
            if isinstance(part, OutsideCall):
                part.run(self._parameters)
            else:
                part.replay()
            self._parts_done += 1
        self.in_users_code = False
        for accelerated, found in self._overflows:
            accelerated._is_overflow = found > 0  # noqa: SLF001 - read on the host by who asks for it
        self._end_memory.restore()
        bind(self._parameters, self._end)
        self._syncs.restore()
        return self.result(leaves)

    def save_others(self) -> None:
        """Copy the gradients that another recording made and this one leaves alone: a replay may write over them.

        Recordings share the memory of their temporary tensors.
        """
        for parameter, end in zip(self._parameters, self._end, strict=True):
            gradient = parameter.grad if end is AS_FOUND else None
            if gradient is not None and _memory_of(gradient) in _recorded_gradients:
                parameter.grad = gradient.clone()

    @property
    def atomic(self) -> bool:
        """Whether a replay is a single launch, which fails before anything has run, or not at all."""
        return len(self._parts) == 1 and self._engine.launches

    @property
    def wrote(self) -> bool:
        """Whether the last replay may have run a recorded optimizer, which calls no hook."""
        return self._parts_done > 0 and bool(self.recorded)

    def result(self, leaves: Sequence[Any]) -> Any:
        """Return the step's result, copied out of the recording; `leaves` are those of the call's arguments."""
        assert self._results is not None
        return self._results.make(leaves)

    def keep_gradients(self) -> None:
        """After a step that ran eagerly instead, copy its gradients to where a replay leaves them."""
        with torch.no_grad():
            for parameter, ours in zip(self._parameters, self._end, strict=True):
                theirs = parameter.grad
                if isinstance(ours, torch.Tensor) and theirs is not None and ours is not theirs:
                    ours.copy_(theirs)
                    parameter.grad = ours

    def release(self) -> None:
        """Let go of all memory, whoever holds the recording: an eager step may need it at once."""
        self._parts.clear()
        self._inputs = self._results = None
        self._end, self._end_memory, self.gradients_at_step, self._overflows = [], Memory([]), {}, []

    def read_gradients(self) -> dict[str, torch.Tensor]:
        """Return the gradients that the optimizers have read in the replay that has just ended."""
        if not self._engine.shares:
            return self.gradients_at_step
        return dict(zip(self.gradients_at_step, copies([*self.gradients_at_step.values()]), strict=True))

    def forget_gradients(self, but: Collection[str] = ()) -> None:
        """Drop the gradients that were kept for a proof, but those of some parameters."""
        self.gradients_at_step = {name: one for name, one in self.gradients_at_step.items() if name in but}

    def changed(self) -> Change | None:
        """Name what has changed since the capture, or cannot be checked; None if a replay is right."""
        try:
            if self._engine.overwrites():
                return Change("its memory, in which something lies that outlives a step beside it,")
            if (change := self._frozen.changed()) is not None:
                return change
        except Exception as error:  # noqa: BLE001 - an object of the user's that cannot be looked at
            return Change(f"what the step holds, which cannot be looked at ({describe(error)}),")
        return None

    def _finds_recorded_gradients(self) -> bool:
        """Return whether the gradients that the step reads, if any, are the tensors that it was recorded with."""
        return all(_gradient(parameter) is recorded for parameter, recorded in self._reads)

    def gradients(self) -> list[Any]:
        """While recording: return the gradients as they are now, with ``AS_FOUND`` for those left alone so far."""
        now = [parameter.grad for parameter in self._parameters]
        pairs = zip(now, self._unread, strict=True)
        return [AS_FOUND if own is found and found is not None else own for own, found in pairs]

    def of_its_own(self, leaves: Sequence[Any]) -> int | None:
        """Return the number of an argument that shares memory with what the step may change, and did not before.

        A recording would read a copy of the argument, which the step does not change.
        """
        for place, (region, recorded) in enumerate(zip(self._regions.of(leaves), self._inside, strict=True)):
            if region not in (-1, recorded):
                return place
        if self._finds_recorded_gradients():
            return None
        others = Regions([parameter.grad for parameter, _ in self._reads if parameter.grad is not None]).of(leaves)
        return next((place for place, region in enumerate(others) if region >= 0), None)

    def finish(self, inputs: Inputs, leaves: Sequence[Any], result: Any) -> None:
        """Complete the recording after the step has run: its inputs, the arguments' own leaves, and its result."""
        program, self._inputs = self.program, inputs
        own = list(program.holdings.objects().values())
        self._regions = Regions([*own, *(gradient for _, gradient in self._reads)])
        self._inside = self._regions.of(leaves)
        self._end, self._unread = self.gradients(), []
        self._syncs.save()
        made = [gradient for gradient in self._end if isinstance(gradient, torch.Tensor)]
        if self._engine.shares:
            self.gradients_at_step = {name: unowned(one) for name, one in self.gradients_at_step.items()}
        gradients = [one for one in map(_gradient, self._parameters) if one is not None]
        self._results = Results(result, program, inputs.leaves, gradients, self._on_host)
        self._end_memory = Memory(made)
        _recorded_gradients.update(filter(None, map(_memory_of, made)))

    def record(self, recording: Recording, run: Callable[[], Any], executes: Callable[[], None]) -> Any:
        """Run the step while it is recorded; ``executes`` is called before what was recorded is executed."""
        try:
            with self._optimizers(recording, executes), own_autocast_cache(compiled=self.program.compiled()):
                result = interruptible(run)
            self._parts.append(recording.cut(executes))
        except BaseException:
            recording.abandon()
            raise
        recording.close()
        self.first_seconds = recording.replay_seconds
        return result

    @contextlib.contextmanager
    def replacing(self) -> Iterator[None]:
        """Replace what the step calls and no recording can hold."""
        nothing, constants = contextlib.nullcontext(), self._constants
        with unscripted(), checks_left_out(), constants.copied_from() if constants else nothing:
            yield

    @contextlib.contextmanager
    def _optimizers(self, recording: Recording, executes: Callable[[], None]) -> Iterator[None]:
        """While recording: recorded optimizers read the device, the others are called between two segments."""
        names = {id(parameter): path for path, parameter in self.program.holdings.parameters().items()}

        def note_gradients(optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
            self.gradients_at_step |= gradients_of(optimizer, names)

        beside: dict[int, OutsideHooks] = {}

        def scaled(optimizer: torch.optim.Optimizer, step: functools.partial[Any], found: torch.Tensor) -> Any:
            hooks = beside.get(id(optimizer))
            if (accelerated := accelerates(optimizer)) is not None:
                self._overflows.append((accelerated, found))
            return take_masked(optimizer, step, found) if hooks is None else hooks.scaled(optimizer, step, found)

        with contextlib.ExitStack() as stack:
            stack.enter_context(scaled_steps(scaled))
            for name, optimizer in self.program.holdings.optimizers.items():
                if name in self.recorded:
                    stack.enter_context(self.recorded[name].on_device())
                    stack.callback(optimizer.register_step_pre_hook(note_gradients).remove)
                else:
                    hooks = OutsideHooks(self, recording, self._parts, note_gradients, executes)
                    beside[id(optimizer)] = hooks
                    stack.callback(optimizer.register_step_pre_hook(hooks.enter).remove)
                    stack.callback(optimizer.register_step_post_hook(hooks.leave).remove)
            yield


def prepare(program: Program, seen: AuditFindings, outside: set[str]) -> None:
    """Before a capture and its proof, move step counts to where a recorded optimizer reads them."""
    for optimizer in _inside(program, seen, outside).values():
        move_step_counts(optimizer, program.device)


def _inside(program: Program, seen: AuditFindings, outside: set[str]) -> dict[str, torch.optim.Optimizer]:
    """Return the optimizers whose steps a recording holds, by name."""
    optimizers = program.holdings.optimizers.items()
    return {name: optimizer for name, optimizer in optimizers if name in seen.stepped and name not in outside}


def capture(  # noqa: PLR0913 - what is recorded, by what, and how
    program: Program,
    engine: Engine,
    seen: AuditFindings,
    outside: set[str],
    call: Call,
    *,
    streams: Streams,
    reports_capturing: bool,
    ready: Ready = alone,
) -> tuple[CapturedStep, Any]:
    """Run a step once and record it.

    Args:
        program: the program of the step.
        engine: records it.
        seen: what the audit of a step with such arguments found.
        outside: names of the optimizers that run between segments.
        call: the step's arguments.
        streams: the random streams that an eager run of the step drew from.
        reports_capturing: the answer to code that asks whether a capture is going on.
        ready: decides whether what was recorded is executed; asked once, where there are other processes.

    Returns:
        The recording; and what the step returned, in tensors that no replay overwrites.

    Raises:
        Exception: whatever the step or the engine raised. Nothing is recorded then. The caller has to undo what the
            step has done in Python. On a GPU nothing was executed but optimizers outside of the recording.
    """
    leaves, structure = flatten(call)
    captured, inputs = copied(functools.partial(_prepared, program, engine, seen, outside, leaves), ready)
    static_args, static_kwargs = unflatten(structure, inputs.leaves)
    asked = False

    def executes() -> None:
        nonlocal asked
        asked = True
        ready.recorded(None)

    try:
        with answered(program.holdings.modules), captured.replacing():
            result = captured.record(
                engine.begin(program.device, streams, reports_capturing=reports_capturing),
                lambda: program.step(*static_args, **static_kwargs),
                executes,
            )
    except Exception as error:
        if not asked:
            ready.recorded(error)
        raise
    captured.finish(inputs, leaves, result)
    return captured, captured.result(leaves)


def _prepared(
    program: Program, engine: Engine, seen: AuditFindings, outside: set[str], leaves: list[Any]
) -> tuple[CapturedStep, Inputs]:
    """Make what a recording needs before it begins: an empty one, and the tensors that the arguments are copied to."""
    inside = _inside(program, seen, outside).items()
    recorded = {name: Recorded(optimizer, program.device) for name, optimizer in inside}
    captured = CapturedStep(program, seen, recorded, engine)
    inputs = Inputs(leaves, program.device)
    inputs.fill(leaves)
    return captured, inputs


@contextlib.contextmanager
def own_autocast_cache(*, compiled: bool) -> Iterator[None]:
    """Keep weights that autocast has cast within the block: a recording would freeze them.

    In eager code nothing is cached at all, as torch advises for captures: every ``torch.autocast`` in the block without
    a ``cache_enabled`` of its own follows. Compiled code casts for itself. It is guarded on the setting, and would be
    compiled anew if the setting changed.
    """
    before = torch.is_autocast_cache_enabled()
    torch.clear_autocast_cache()
    if not compiled:
        torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)
        torch.clear_autocast_cache()


def _memory_of(gradient: torch.Tensor) -> torch.UntypedStorage | None:
    held = shard_of(gradient)
    return held.untyped_storage() if held.layout == torch.strided else None


def gradients_of(optimizer: torch.optim.Optimizer, names: dict[int, str]) -> dict[str, torch.Tensor]:
    """Return the gradients that an optimizer is about to use, or this process's shards of them, by parameter name."""
    return {
        names.get(id(parameter), "a parameter"): shard_of(parameter.grad)
        for group in optimizer.param_groups
        for parameter in group["params"]
        if parameter.grad is not None
    }
