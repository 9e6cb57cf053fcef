"""Undoing a step that failed before it wrote a parameter: random state, buffers and gradients go back to its start.

The start is saved at every step that compiled or captured code runs, so saving is made cheap: buffers are copied in one
launch into memory that is kept, and gradients only where they exist and are read.
"""

from __future__ import annotations

import copy
import functools
import types
from collections.abc import MutableMapping
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.weak import TensorWeakRef

from hotloop._torch.fake import is_view, uncounted, version_of
from hotloop._torch.foreach import copy_all
from hotloop._torch.hooks import module_tables
from hotloop._torch.places import overlaps, places_of, put_back, viewed_like
from hotloop._torch.random_state import RandomState
from hotloop._torch.sharded import Sharded, is_spread, shard_of
from hotloop.step.state.holdings import EVERY_OPTIMIZERS, Holdings, Memory, wrappers_in

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from hotloop.step.state.program import Program


class Bindings:
    """The gradients, the optimizers' dictionaries and attributes, and the attributes of the other state.

    Attributes of an optimizer are included because a user's optimizer may count its steps there, and an undone step
    must not count.
    """

    def __init__(self, holdings: Holdings) -> None:
        self._parameters = list(holdings.parameters().values())
        self._gradients = [parameter.grad for parameter in self._parameters]
        self._optimizers = [
            (
                optimizer,
                [(group, {**group, "params": list(group["params"])}) for group in optimizer.param_groups],
                [(key, entry, _copy_containers(entry)) for key, entry in optimizer.state.items()],
                {
                    name: (value, _copy_containers(value))
                    for name, value in vars(optimizer).items()
                    if name not in EVERY_OPTIMIZERS
                },
            )
            for optimizer in holdings.optimizers.values()
        ]
        self._others = [
            (holder, {name: _copy_containers(value) for name, value in vars(holder).items()})
            for holder in holdings.state
            if not isinstance(holder, torch.nn.Module) and hasattr(holder, "__dict__")
        ]

    def restore(self) -> None:
        """Bind everything as it was; the tensors themselves are not touched."""
        for parameter, gradient in zip(self._parameters, self._gradients, strict=True):
            if parameter.grad is not gradient:
                parameter.grad = gradient
        for saved in self._optimizers:
            self._restore_optimizer(*saved)
        for holder, values in self._others:
            vars(holder).clear()
            vars(holder).update({name: _copy_containers(value) for name, value in values.items()})

    @staticmethod
    def _restore_optimizer(
        optimizer: torch.optim.Optimizer,
        groups: list[tuple[dict[str, Any], dict[str, Any]]],
        state: list[tuple[Any, Any, Any]],
        attributes: dict[str, tuple[Any, Any]],
    ) -> None:
        for group, values in groups:
            group.clear()
            group.update({**values, "params": list(values["params"])})
        optimizer.param_groups[:] = [group for group, _ in groups]
        optimizer.state.clear()
        for key, entry, values in state:
            optimizer.state[key] = entry
            if isinstance(entry, MutableMapping):  # the same dictionary object, since recordings refer to it
                entry.clear()
                entry.update(_copy_containers(values))
        for name in vars(optimizer).keys() - EVERY_OPTIMIZERS - attributes.keys():
            delattr(optimizer, name)
        for name, (value, content) in attributes.items():
            if type(value) is dict:
                value.clear()
                value.update(_copy_containers(content))
            elif type(value) is list:
                value[:] = _copy_containers(content)
            vars(optimizer)[name] = value


class ForwardSyncs:
    """What wrappers for several processes keep for the next forward and backward, as the last ones decided.

    DDP keeps whether it sends its buffers. FSDP2 keeps what a step has switched, and whole gradients where a step has
    reduced none; a step that ended half-way has left more.
    """

    def __init__(self, holdings: Holdings) -> None:
        self._wrappers = [one for root in holdings.modules.values() for one in wrappers_in(root)]
        self._sharded = Sharded(holdings.modules.values())
        self.save()

    def save(self) -> None:
        """Note what holds now."""
        self._found = [one.require_forward_param_sync for one in self._wrappers]
        self._switches = self._sharded.switches()

    def restore(self) -> None:
        """Let the next forward and backward do what was noted."""
        for wrapper, found in zip(self._wrappers, self._found, strict=True):
            wrapper.require_forward_param_sync = found
        self._sharded.undo(self._switches)


class BufferTables:
    """The tensor that each buffer of the modules is; a step may replace a buffer, or register a first one.

    Args:
        holdings: the program, whose modules are meant.
    """

    def __init__(self, holdings: Holdings) -> None:
        self._holders: list[dict[str, torch.Tensor | None]] = [
            module_tables(module)[1] for root in holdings.modules.values() for module in root.modules()
        ]
        self._tables: list[tuple[dict[str, torch.Tensor | None], dict[str, torch.Tensor | None]]] = []
        self.save()

    def save(self) -> None:
        """Note the tensors that the buffers are now."""
        self._tables = [(held, dict(held)) for held in self._holders if held]

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The buffers that were there when they were noted."""
        return [buffer for _, table in self._tables for buffer in table.values() if buffer is not None]

    def restore(self) -> None:
        """Put the same tensors under the same names; their values are not touched."""
        tables = {id(held): table for held, table in self._tables}
        for held in self._holders:
            if held or id(held) in tables:
                held.clear()
                held.update(tables.get(id(held), {}))


def _copy_containers(value: Any) -> Any:
    """Copy lists and dictionaries, whose content may change in place, but not what they contain."""
    if isinstance(value, MutableMapping):
        copied = copy.copy(value)
        for key, item in value.items():
            copied[key] = _copy_containers(item)
        return copied
    return [_copy_containers(item) for item in value] if type(value) is list else value


class StepStart:
    """The state that a step found at its start.

    Args:
        program: the program of the step.
    """

    def __init__(self, program: Program) -> None:
        holdings = program.holdings
        self.complete = False
        """Whether everything was saved; if memory ran out while saving, the step has not begun."""
        self._device, self._rng_usage = program.device, program.rng_usage
        self._ran, self._had_run = program.ran, program.ran.state
        self._parameters = list(holdings.parameters().values())
        self._owned = [one for name, one in holdings.parameters().items() if name not in holdings.strangers]
        self._places = Memory(self._owned)
        self._others = Holdings({}, {}, holdings.state)
        self._others.found = holdings.found
        self._buffers, self._syncs = BufferTables(holdings), ForwardSyncs(holdings)
        self._with_buffers = True
        self._sources: list[torch.Tensor] = []
        self._addresses: list[int] = []
        self._copies: list[torch.Tensor] = []
        self._live: list[torch.Tensor] = []
        self._gradients: list[torch.Tensor | None] = []
        self._copied: dict[int, tuple[Callable[[], torch.Tensor | None], torch.Tensor]] = {}
        """By index of the parameter: a function that returns the gradient while it exists, and the gradient's copy. The
        gradients are not held: a step that drops them before its forward can reuse their memory, as in eager."""
        self._room: dict[int, torch.Tensor] = {}
        self._versions: list[int] = []
        self._random: RandomState | None = None
        self._bindings: Bindings | None = None

    def save(self, *, gradients: bool, buffers: bool = True) -> None:
        """Copy what the coming step may change before it writes a parameter.

        Args:
            gradients: copy the gradients that exist; not needed if the step drops them unread.
            buffers: copy buffers and other state; not needed if the step runs as a whole or not at all.
        """
        self.complete = False
        self._had_run = self._ran.state
        self._with_buffers = buffers
        if buffers:
            self._buffers.save()
            self._make_room([shard_of(one) for one in (*self._buffers.tensors, *self._others.other_tensors().values())])
            copy_all(self._copies, self._live)
        found = [parameter.grad for parameter in self._parameters]
        self._copied = {}
        if gradients:
            self._copy_gradients(found)
        self._gradients = [None if place in self._copied else one for place, one in enumerate(found)]
        self._versions = [version_of(parameter) for parameter in self._owned]
        if self._places.moved():
            self._places = Memory(self._owned)
        self._random = RandomState([self._device], python=buffers)
        self._bindings = Bindings(self._others)
        self._syncs.save()
        self.complete = True

    def _make_room(self, sources: list[torch.Tensor]) -> None:
        """Keep the memory of the last step's copies, unless there are other tensors now."""
        addresses = [source.data_ptr() for source in sources]
        if addresses == self._addresses:
            return
        # The tensors are held, so that no other tensor gets the same address meanwhile.
        self._sources, self._addresses = sources, addresses
        self._live = [places_of(source) for source in sources]
        self._copies = [torch.empty_like(live, requires_grad=False) for live in self._live]

    def _copy_gradients(self, found: Sequence[torch.Tensor | None]) -> None:
        """Copy the gradients that exist, in few launches, into memory that is kept."""
        dense, places = [], dict[int, int]()
        for place, gradient in enumerate(found):
            if gradient is None:
                continue
            if (first := places.setdefault(id(gradient), place)) != place:  # a gradient shared by several parameters
                self._copied[place] = self._copied[first]
                continue
            held = shard_of(gradient)
            if held.layout != torch.strided:
                copied = held.clone()
            elif overlaps(held):
                copied = viewed_like(places_of(held).detach().clone(), held)
            else:
                copied = self._room_for(place, held)
                dense.append((copied, held))
            self._copied[place] = self._reference(gradient), copied
        copy_all([room for room, _ in dense], [gradient for _, gradient in dense])

    def _room_for(self, place: int, like: torch.Tensor) -> torch.Tensor:
        room = self._room.get(place)
        if room is None or room.shape != like.shape or room.dtype != like.dtype or room.device != like.device:
            room = self._room[place] = torch.empty_like(like, requires_grad=False)
        return room

    @staticmethod
    def _reference(gradient: torch.Tensor) -> Callable[[], torch.Tensor | None]:
        """Return a weak reference to a gradient, or a strong one if no copy could stand in for it.

        A gradient that is a part of somebody's memory (a buffer that all gradients lie in) has to be that part again,
        and one that can be differentiated has its graph. A copy of a shard is no tensor that is spread over processes.
        """
        if is_view(gradient) or gradient.requires_grad or is_spread(gradient):
            return lambda: gradient
        reference: Callable[[], torch.Tensor | None] = TensorWeakRef(gradient)
        return reference

    def let_go(self) -> None:
        """Forget the gradients after the step: torch swaps no tensor that has weak references (``Module.to``)."""
        self._copied, self._had_run, self.complete = {}, (), False

    def wrote(self) -> bool:
        """Return whether the step has changed a parameter since, through an optimizer or by hand.

        A parameter that was given other memory (``parameter.data = ...``) is not changed: its old memory still exists.
        """
        return [version_of(parameter) for parameter in self._owned] != self._versions

    def untouched(self) -> set[int]:
        """Return the ids of the parameters that torch counted no write for, and that still have the same memory."""
        moved = set(self._places.moved())
        versions = enumerate(zip(self._owned, self._versions, strict=True))
        return {id(one) for place, (one, version) in versions if version_of(one) == version and place not in moved}

    def restore(self) -> None:
        """Go back to the start of the step."""
        assert self._random is not None
        assert self._bindings is not None
        self._places.restore()
        if self._with_buffers:
            self._buffers.restore()
            put_back(self._live, self._copies)
        for place, (parameter, gradient) in enumerate(zip(self._parameters, self._gradients, strict=True)):
            parameter.grad = self._restored_gradient(place) if place in self._copied else gradient
        self._bindings.restore()
        self._syncs.restore()
        self._random.restore(leaving=self._rng_usage.others())
        self._ran.state = self._had_run

    def _restored_gradient(self, place: int) -> torch.Tensor:
        """Return a copied gradient as it was; if the gradient itself is gone, its copy, which is then given away."""
        reference, copied = self._copied[place]
        gradient = reference()
        if gradient is None:
            self._room.pop(place, None)
            return copied
        if gradient.layout == torch.strided:
            put_back([places_of(shard_of(gradient).detach())], [places_of(copied)])
            return gradient
        with torch.no_grad(), uncounted([gradient]):
            return gradient.copy_(copied)


class WriteWatch:
    """A watch for the first optimizer step since the step began: from then on the step cannot be undone.

    ``ever`` says whether an optimizer has stepped at all; ``tell`` is called with each, before it steps.
    """

    def __init__(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        self.begun = self.ever = False
        self.tell: Callable[[torch.optim.Optimizer], None] | None = None
        watched = list(optimizers)
        self._undo_hooks = [self._enable_hooks(optimizer) for optimizer in watched]
        self._handles = [optimizer.register_step_pre_hook(self._began) for optimizer in watched]

    def _began(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self.begun = self.ever = True
        if self.tell is not None:
            self.tell(optimizer)

    def close(self) -> None:
        """Stop watching."""
        for handle in self._handles:
            handle.remove()
        for undo in self._undo_hooks:
            undo()
        self._undo_hooks.clear()

    @staticmethod
    def _enable_hooks(optimizer: torch.optim.Optimizer) -> Callable[[], None]:
        """Make hooks work on an optimizer that lacks torch's hook tables, or whose ``step`` calls no hooks.

        A wrapper (Lookahead, SAM) may leave out `Optimizer.__init__`, and have tables of its own or none. torch's hook
        handles refer to a table weakly, which a plain dict does not allow. If ``step`` calls no hooks, nobody learns of
        its steps, and a recording would freeze its learning rate. Only this instance is changed: others of its class
        may have no tables.

        Returns:
            a function that restores the optimizer's own ``step``.
        """
        plain = torch.optim.SGD([torch.zeros(1)])
        for name, table in vars(plain).items():
            if name.endswith("_hooks") and not isinstance(own := vars(optimizer).get(name, {}), type(table)):
                setattr(optimizer, name, type(table)(own))
        if hasattr(optimizer.step, "hooked"):
            return lambda: None
        before = vars(optimizer).get("step")

        @functools.wraps(optimizer.step)  # keeps the marks that a scheduler has put on it
        def bare(called: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
            """Step the optimizer that is called, which may be a copy of the optimizer that this was made for."""
            if before is not None:
                return before(*args, **kwargs)
            step: Any = type(called).step
            if hasattr(step, "hooked"):  # the class was patched since, for another instance: call hooks only once
                step = step.__wrapped__
            return step(called, *args, **kwargs)

        calling: Any = torch.optim.Optimizer.profile_hook_step(bare)
        calling.hooked = True
        optimizer.step = types.MethodType(calling, optimizer)  # type: ignore[method-assign]

        def undo() -> None:
            if getattr(vars(optimizer).get("step"), "__func__", None) is not calling:
                return  # somebody has replaced it since
            if before is None:
                del optimizer.step
            else:
                optimizer.step = before  # type: ignore[method-assign]

        return undo


def drop_tracebacks(error: BaseException) -> None:
    """Drop the tracebacks of an exception and its causes: their frames hold everything the failed step computed."""
    waiting: list[BaseException | None] = [error]
    seen: set[int] = set()
    while waiting:
        current = waiting.pop()
        if current is not None and id(current) not in seen:
            seen.add(id(current))
            current.__traceback__ = None
            waiting += current.__cause__, current.__context__
