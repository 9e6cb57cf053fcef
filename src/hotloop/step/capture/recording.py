"""One captured step: recorded once, replayed from then on, for arguments, gradients and settings that fit it."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import weakref
from typing import TYPE_CHECKING, Any

import torch

from hotloop.errors import describe
from hotloop.measure import flatten, unflatten
from hotloop.step.audit.averaged_model import answered
from hotloop.step.calls.key import Regions, shared
from hotloop.step.capture.inputs import Inputs
from hotloop.step.capture.invariants import Change, Frozen
from hotloop.step.capture.optimizers import Recorded, move_step_counts
from hotloop.step.guard.python_state import Watch, objects_in
from hotloop.step.state.memory import Memory

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from hotloop.step.audit.op_trace import Survey
    from hotloop.step.engine import Engine, Recording, Segment
    from hotloop.step.state.program import Call, Program

_SCALER_ATTRIBUTES = ("grad_scale", "found_inf")
"""What a GradScaler hands to a fused optimizer, as attributes, for the time of one call."""

_AS_FOUND: Any = object()
"""In place of a gradient that the step found and left alone: another model's, which a replay must not put back."""

_of: Any = torch.Tensor
_gradient = _of.grad.__get__

_recorded_gradients: weakref.WeakValueDictionary[int, torch.Tensor] = weakref.WeakValueDictionary()
"""By id: gradients in memory that recordings share."""


@dataclasses.dataclass
class _OutsideCall:
    """An optimizer step between two segments, with the gradients that it finds and what it is called with."""

    optimizer: torch.optim.Optimizer
    gradients: list[Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    attributes: dict[str, Any]

    def run(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        bind(parameters, self.gradients)
        for name, value in self.attributes.items():
            setattr(self.optimizer, name, value)
        try:
            self.optimizer.step(*self.args, **self.kwargs)
        finally:
            for name in self.attributes:
                delattr(self.optimizer, name)


class Outermost:
    """Pre- and post-hooks of an optimizer step that act on its outermost call: a subclass may call ``super().step()``.

    torch runs the hooks of both calls then.
    """

    def __init__(self, enter: Callable[..., None], leave: Callable[..., None]) -> None:
        self._enter, self._leave, self._depth = enter, leave, 0

    def enter(self, *args: Any) -> None:
        """The pre-hook."""
        self._depth += 1
        if self._depth == 1:
            self._enter(*args)

    def leave(self, *args: Any) -> None:
        """The post-hook."""
        self._depth -= 1
        if self._depth == 0:
            self._leave(*args)


class CapturedStep:
    """A step that was recorded. Make one with `capture`, which runs the step as it records it."""

    def __init__(self, program: Program, seen: Survey, recorded: dict[str, Recorded], *, launched: bool) -> None:
        self.program, self.recorded, self._launched = program, recorded, launched
        named = program.holdings.parameters()
        self._parameters = list(named.values())
        read = [one for name, one in named.items() if name in seen.read_gradients]
        self._reads = [(one, one.grad) for one in read if one.grad is not None]
        """Parameters whose gradients it reads, with these: what another one holds is copied into them."""
        self._start_memory = Memory([one for _, one in self._reads])
        self._shared = self._shared_now()
        self._unread = [None if name in seen.read_gradients else parameter.grad for name, parameter in named.items()]
        self._frozen = Frozen(program.holdings, recorded)
        self._parts: list[Segment | _OutsideCall] = []
        self._inputs: Inputs | None = None
        self._regions, self._inside = Regions([]), list[int]()
        self._end: list[Any] = []
        self._end_memory = Memory([])
        self._left_alone: list[int] = []
        self._given: list[int] = []
        self._on_host = seen.on_host
        self._results: tuple[Any, list[Callable[[], Any] | int]] = (None, [])
        """The structure of what the step returns, and what gives each part after a replay; an int is an argument."""
        self.gradients_at_step: dict[str, torch.Tensor] = {}
        """The gradients as an optimizer found them: kept, so that a proof can read them after a replay."""
        self._watch: Watch | None = None
        self.in_users_code = False
        """An optimizer outside the recording is stepping: what a replay raises then is its own."""
        self._done = 0
        self.first_seconds: float | None = None
        """What it took to execute when it was recorded."""

    def replay(self, leaves: list[Any]) -> Any:
        """Run the step on a new batch; gives its result, in tensors of its own."""
        assert self._inputs is not None
        self._done, self.in_users_code = 0, False
        self._inputs.fill(leaves)
        for one in self.recorded.values():
            one.refresh()
        self._start_memory.bring_back()
        if not self._finds_its_own():
            for parameter, expected in self._reads:
                if parameter.grad is not expected and parameter.grad is not None:
                    expected.copy_(parameter.grad)
        self.save_others()
        for part in self._parts:
            self.in_users_code = isinstance(part, _OutsideCall)
            if isinstance(part, _OutsideCall):
                part.run(self._parameters)
            else:
                part.replay()
            self._done += 1
        self.in_users_code = False
        self._end_memory.restore()
        bind(self._parameters, self._end)
        return self.result(leaves)

    def save_others(self) -> None:
        """Copy gradients of another recording that this one leaves alone: it may have had their memory for a while.

        A recording's passing tensors give their memory to whatever is recorded after it, and a replay writes there.
        """
        for index in self._left_alone:
            found = self._parameters[index].grad
            if found is not None and _recorded_gradients.get(id(found)) is found:
                self._parameters[index].grad = found.clone()

    @property
    def atomic(self) -> bool:
        """Tell whether a replay is one launch, which fails before anything has run or not at all."""
        return len(self._parts) == 1 and self._launched

    @property
    def wrote(self) -> bool:
        """Tell whether the last replay may have run a recorded optimizer, which no hook tells."""
        return self._done > 0 and bool(self.recorded)

    def result(self, leaves: Sequence[Any]) -> Any:
        """Copy out what the step returned: the recording's own tensors are overwritten by the next replay.

        Args:
            leaves: of the call's arguments; one that the step returns is given back itself, on its own device.
        """
        structure, makers = self._results
        made = [leaves[make] if isinstance(make, int) else make() for make in makers]
        first = len(made) - len(self._given)
        for index, own in zip(self._given, made[first:], strict=True):
            self._parameters[index].grad = own
        return unflatten(structure, made[:first])

    def keep_gradients(self) -> None:
        """Have what eager left as gradients where a replay leaves them, after a step that was run eagerly instead."""
        with torch.no_grad():
            for index, (parameter, ours) in enumerate(zip(self._parameters, self._end, strict=True)):
                theirs = parameter.grad
                if index in self._given:  # the caller has it, and what is done to it is done to the gradient
                    continue
                if ours is not None and ours is not _AS_FOUND and theirs is not None and ours is not theirs:
                    ours.copy_(theirs)
                    parameter.grad = ours

    def forget_gradients(self) -> None:
        """Let go of the gradients that a proof looked at."""
        self.gradients_at_step = {}

    def changed(self) -> Change | None:
        """Name something that is no longer as it was captured; None where a replay is right.

        Where the program cannot be looked at, that is named.
        """
        try:
            return self._changed()
        except Exception as error:  # noqa: BLE001 - an object of the user's that cannot be looked at
            return Change(f"what the step reads, which cannot be looked at ({describe(error)}),")

    def _changed(self) -> Change | None:
        if (change := self._frozen.changed()) is not None:
            return change
        # Gradients that it reads are copied into its own: one that is two parameters' would become two.
        if not self._finds_its_own() and self._shared_now() != self._shared:
            return Change("which gradients are one tensor, or share memory,")
        name = self._watch.changed() if self._watch is not None else ""
        return Change(name) if name else None

    def _finds_its_own(self) -> bool:
        """Tell whether the gradients that it reads, if any, are those that it was recorded with."""
        return all(_gradient(parameter) is expected for parameter, expected in self._reads)

    def _shared_now(self) -> tuple[tuple[int, int, int], ...]:
        return shared([one for one in map(_gradient, self._parameters) if one is not None])

    def _gradients(self) -> list[Any]:
        """While recording: give the gradients as the step has made them so far."""
        now = [parameter.grad for parameter in self._parameters]
        pairs = zip(now, self._unread, strict=True)
        return [_AS_FOUND if own is found and found is not None else own for own, found in pairs]

    def of_its_own(self, leaves: Sequence[Any]) -> int | None:
        """Give the place of an argument that is, or is in, what the step may change, and was not in the recording.

        A recording reads a copy of it, which the step does not change.
        """
        for place, (region, recorded) in enumerate(zip(self._regions.of(leaves), self._inside, strict=True)):
            if region not in (-1, recorded):
                return place
        if self._finds_its_own():
            return None
        others = Regions([one.grad for one, _ in self._reads if one.grad is not None]).of(leaves)
        return next((place for place, region in enumerate(others) if region >= 0), None)

    def _finish(self, inputs: Inputs, given: Sequence[Any], result: Any) -> None:
        self._inputs = inputs
        leaves, structure = flatten(result)
        own = list(self.program.holdings.objects().values())
        self._regions = Regions([*own, *(one for _, one in self._reads)])
        self._inside = self._regions.of(given)
        self._end, self._unread = self._gradients(), []
        self._results = (structure, self._makers(leaves, own, inputs.leaves))
        self._left_alone = [index for index, one in enumerate(self._end) if one is _AS_FOUND]
        made = [one for one in self._end if isinstance(one, torch.Tensor)]
        self._end_memory = Memory(made)
        _recorded_gradients.update({id(one): one for one in made})
        program = self.program
        self._watch = Watch(program.step, program.holdings, program.ignore, objects_in(inputs.leaves), self.recorded)

    def _makers(
        self, leaves: Sequence[Any], own: Sequence[torch.Tensor], arguments: Sequence[Any]
    ) -> list[Callable[[], Any] | int]:
        """Give what makes each result, and after these each gradient that a result is, or is a part of.

        Who gets a gradient may clip it, and means the gradient; who keeps it keeps its values. So both get a new one.

        Raises:
            RuntimeError: a result is a part of a gradient that the step only finds: it is another tensor by the replay.
        """
        places = {_place_of(one) for one in leaves if isinstance(one, torch.Tensor)} - {0}
        self._given = [
            index for index, one in enumerate(self._end) if isinstance(one, torch.Tensor) and _place_of(one) in places
        ]
        makers = _givers([*leaves, *(self._end[index] for index in self._given)], own, arguments)
        for index, one in enumerate(self._end):
            found = self._parameters[index].grad
            if one is not _AS_FOUND or found is None or _place_of(found) not in places:
                continue
            for number, leaf in enumerate(leaves):
                if leaf is found:
                    makers[number] = functools.partial(getattr, self._parameters[index], "grad")
                elif isinstance(leaf, torch.Tensor) and _place_of(leaf) == _place_of(found):
                    raise RuntimeError("the step returns a part of a gradient that was there before it")
        for number, (leaf, make) in enumerate(zip(leaves, makers, strict=False)):
            elsewhere = isinstance(leaf, torch.Tensor) and leaf.device.type != "cpu"
            if elsewhere and number in self._on_host and not isinstance(make, int):
                makers[number] = functools.partial(_to_host, make)
        return makers

    @contextlib.contextmanager
    def _optimizers(self, recording: Recording) -> Iterator[None]:
        """While recording: recorded optimizers read the device, the others are called between two segments."""
        with contextlib.ExitStack() as stack:
            for name, optimizer in self.program.holdings.optimizers.items():
                pre, post = self._looks(name), None
                if name in self.recorded:
                    stack.enter_context(self.recorded[name].on_device())
                else:
                    outermost = Outermost(self._cuts(recording, pre), lambda *_: recording.resume())
                    pre, post = outermost.enter, outermost.leave
                stack.callback(optimizer.register_step_pre_hook(pre).remove)
                if post is not None:
                    stack.callback(optimizer.register_step_post_hook(post).remove)
            yield

    def _looks(self, name: str) -> Callable[..., None]:
        names = {id(parameter): path for path, parameter in self.program.holdings.parameters().items()}

        def hook(optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
            self.gradients_at_step |= gradients_of(optimizer, names)

        hook.__name__ = f"gradients_of_{name}"
        return hook

    def _cuts(self, recording: Recording, look: Callable[..., None]) -> Callable[..., None]:
        def hook(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            look(optimizer, args, kwargs)
            self._parts.append(recording.cut())
            gradients = self._gradients()
            found = {name: getattr(optimizer, name) for name in _SCALER_ATTRIBUTES if hasattr(optimizer, name)}
            self._parts.append(_OutsideCall(optimizer, gradients, args[1:], dict(kwargs), found))

        return hook

    def record(self, recording: Recording, run: Callable[[], Any]) -> Any:
        """Run the step while it is recorded."""
        try:
            with self._optimizers(recording), own_autocast_cache(compiled=self.program.compiled()):
                result = run()
            self._parts.append(recording.cut())
        except BaseException:
            recording.abandon()
            raise
        recording.close()
        self.first_seconds = recording.replay_seconds
        return result


def prepare(program: Program, seen: Survey, outside: set[str]) -> None:
    """Before a capture, and the proof around it: have step counts where a recorded optimizer reads them."""
    for name, optimizer in program.holdings.optimizers.items():
        if name in seen.stepped and name not in outside:
            move_step_counts(optimizer, program.device)


def capture(  # noqa: PLR0913 - what is recorded, by what, and how
    program: Program, engine: Engine, seen: Survey, outside: set[str], call: Call, *, reports_capturing: bool
) -> tuple[CapturedStep, Any]:
    """Run a step once and record it.

    Args:
        program: what the step belongs to.
        engine: records it.
        seen: what a survey of a step with these arguments found.
        outside: names of the optimizers that run between segments.
        call: the step's arguments.
        reports_capturing: what code hears that asks whether a capture is going on.

    Returns:
        The recording, and what the step returned, in tensors of its own.

    Raises:
        Exception: whatever the step or the engine raised. Nothing is recorded then, and what the step has done in
            Python has to be undone by the caller; on a GPU nothing has been executed but what ran outside.
    """
    recorded = {
        name: Recorded(optimizer, program.device)
        for name, optimizer in program.holdings.optimizers.items()
        if name in seen.stepped and name not in outside
    }
    captured = CapturedStep(program, seen, recorded, launched=engine.launches)
    leaves, structure = flatten(call)
    inputs = Inputs(leaves, program.device)
    inputs.fill(leaves)
    static_args, static_kwargs = unflatten(structure, inputs.leaves)
    with answered(program.holdings.modules):
        result = captured.record(
            engine.begin(program.device, reports_capturing=reports_capturing),
            lambda: program.step(*static_args, **static_kwargs),
        )
    captured._finish(inputs, leaves, result)  # noqa: SLF001 - the two halves of one construction
    return captured, captured.result(leaves)


@contextlib.contextmanager
def own_autocast_cache(*, compiled: bool) -> Iterator[None]:
    """Keep weights that autocast has cast from passing the borders of the block: a recording would freeze them.

    In eager code nothing is cached at all, as torch advises for captures; that reaches every ``torch.autocast`` that is
    made in the block without a ``cache_enabled`` of its own. Compiled code casts for itself, and is guarded on the
    setting: to change it would compile everything anew.
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


def gradients_of(optimizer: torch.optim.Optimizer, names: dict[int, str]) -> dict[str, torch.Tensor]:
    """Give the gradients that an optimizer is about to use, by parameter name."""
    return {
        names.get(id(parameter), "a parameter"): parameter.grad
        for group in optimizer.param_groups
        for parameter in group["params"]
        if parameter.grad is not None
    }


def bind(parameters: Sequence[torch.nn.Parameter], gradients: Sequence[Any]) -> None:
    """Make these the parameters' gradients: a tensor, None, or ``_AS_FOUND``."""
    for parameter, gradient in zip(parameters, gradients, strict=True):
        if gradient is not _AS_FOUND and parameter.grad is not gradient:
            parameter.grad = gradient


def _givers(
    leaves: Sequence[Any], own: Sequence[torch.Tensor], arguments: Sequence[Any]
) -> list[Callable[[], Any] | int]:
    """Give what makes each result after a replay: a copy, unless it is a tensor of the program's own, or a part of one.

    Who gets a parameter may write into it, as ``logit_scale.clamp_()`` does, and means the parameter. An argument is
    told by its number: the recording has a copy of it, which on a GPU lies there where the caller's may not.
    """
    known, memory = {id(one) for one in own}, {_place_of(one) for one in own} - {0}
    numbers = {id(one): number for number, one in enumerate(arguments) if isinstance(one, torch.Tensor)}
    parts = collections.Counter(_place_of(one) for one in leaves if isinstance(one, torch.Tensor))
    shared: dict[int, _Shared] = {}
    givers: list[Callable[[], Any] | int] = []
    for leaf in leaves:
        if id(leaf) in numbers:
            givers.append(numbers[id(leaf)])
        elif not isinstance(leaf, torch.Tensor) or id(leaf) in known:
            givers.append(functools.partial(_itself, leaf))
        else:  # detached: a graph that a result kept alive would tie other steps to the stream of this recording
            result, place = leaf.detach(), _place_of(leaf)
            if place and parts[place] > 1 and place not in memory:
                givers.append(shared.setdefault(place, _Shared()).part(result))
            else:
                givers.append(result.detach if place in memory else result.clone)
    return givers


class _Shared:
    """Memory that several results are parts of: copied once a replay, so that they are parts of one memory again."""

    def __init__(self) -> None:
        self._parts = 0
        self._copy: torch.UntypedStorage | None = None

    def part(self, tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Give what makes one part after a replay; the parts are made in the order in which they were added."""
        number, self._parts = self._parts, self._parts + 1

        def make() -> torch.Tensor:
            if number == 0 or self._copy is None:
                self._copy = tensor.untyped_storage().clone()  # type: ignore[no-untyped-call]
            copy = tensor.new_empty(0).set_(self._copy, tensor.storage_offset(), tensor.shape, tensor.stride())
            if number == self._parts - 1:
                self._copy = None  # the caller's alone from here on
            return copy

        return make


def _itself(value: Any) -> Any:
    return value


def _to_host(make: Callable[[], torch.Tensor]) -> torch.Tensor:
    """Give what eager makes on the host of an argument that lies there, and a recording on the device."""
    return make().cpu()


def _place_of(tensor: torch.Tensor) -> int:
    """Give where the memory that a tensor is a part of begins; 0 where it has none of its own."""
    return tensor.untyped_storage().data_ptr() if tensor.layout == torch.strided else 0
