"""Undoing a step that failed before it wrote a parameter: random state, buffers and gradients go back to its start.

It is saved at every step that compiled or captured code runs, so it is made to cost little: buffers are copied in one
launch into memory that is kept, gradients only where they exist and are read.
"""

from __future__ import annotations

import functools
import types
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch.utils.weak import TensorWeakRef

from hotloop._torch.fake import is_part, uncounted, version_of
from hotloop._torch.foreach import copy_all
from hotloop._torch.hooks import module_tables
from hotloop.step.state.bindings import Bindings
from hotloop.step.state.holdings import Holdings
from hotloop.step.state.memory import Memory
from hotloop.step.state.places import over, overlaps, places_of, put_back
from hotloop.step.state.random_state import RandomState

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence


_Copied: TypeAlias = "tuple[Callable[[], torch.Tensor | None], torch.Tensor]"
"""What gives a gradient as long as there is one, and its copy."""


class BufferTables:
    """Which tensor each buffer of the modules is: a step may put another one in its place, or a first one.

    Args:
        holdings: whose modules.
    """

    def __init__(self, holdings: Holdings) -> None:
        self._holders: list[dict[str, torch.Tensor | None]] = [
            module_tables(module)[1] for root in holdings.modules.values() for module in root.modules()
        ]
        self._tables: list[tuple[dict[str, torch.Tensor | None], dict[str, torch.Tensor | None]]] = []
        self.save()

    def save(self) -> None:
        """Note how it is now."""
        self._tables = [(held, dict(held)) for held in self._holders if held]

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The buffers that there were."""
        return [one for _, table in self._tables for one in table.values() if one is not None]

    def restore(self) -> None:
        """Have the same tensors under the same names; what they hold is not touched."""
        tables = {id(held): table for held, table in self._tables}
        for held in self._holders:
            if held or id(held) in tables:
                held.clear()
                held.update(tables.get(id(held), {}))


class StepStart:
    """What a step found at its start.

    Args:
        holdings: what it may change.
        devices: where it may draw random numbers.
    """

    def __init__(self, holdings: Holdings, devices: Sequence[torch.device]) -> None:
        self.complete = False
        """Whether all of it was saved: where memory ran out in between, the step has not begun."""
        self._devices = devices
        self._parameters = list(holdings.parameters().values())
        self._owned = [one for name, one in holdings.parameters().items() if name not in holdings.strangers]
        self._places = Memory(self._owned)
        others = Holdings({}, {}, holdings.state)
        others.found = holdings.found
        self._others = others
        self._buffers = BufferTables(holdings)
        self._with_buffers = True
        self._all: list[torch.Tensor] = []
        self._memory: list[int] = []
        self._copies: list[torch.Tensor] = []
        self._live: list[torch.Tensor] = []
        self._gradients: list[torch.Tensor | None] = []
        self._copied: dict[int, _Copied] = {}
        """By place: gradients that were copied, and their copies. They are not held: a step that drops its gradients
        before its forward has their memory for it, as in eager."""
        self._room: dict[int, torch.Tensor] = {}
        self._versions: list[int] = []
        self._random: RandomState | None = None
        self._bindings: Bindings | None = None

    def save(self, *, gradients: bool, buffers: bool = True) -> None:
        """Copy what the coming step may change before it writes a parameter.

        Args:
            gradients: copy those that exist; not needed where the step drops them unread.
            buffers: copy buffers and other state; not needed where the step runs as a whole or not at all.
        """
        self.complete = False
        self._with_buffers = buffers
        if buffers:
            self._buffers.save()
            self._make_room([*self._buffers.tensors, *self._others.other_tensors().values()])
            copy_all(self._copies, self._live)
        found = [parameter.grad for parameter in self._parameters]
        self._copied = self._copy(found) if gradients else {}
        self._gradients = [None if place in self._copied else one for place, one in enumerate(found)]
        self._versions = [version_of(parameter) for parameter in self._owned]
        if self._places.moved():
            self._places = Memory(self._owned)
        self._random = RandomState(self._devices, python=buffers)
        self._bindings = Bindings(self._others)
        self.complete = True

    def _make_room(self, found: list[torch.Tensor]) -> None:
        """Keep the memory of the last step's copies, unless there are other tensors now."""
        memory = [one.data_ptr() for one in found]
        if memory == self._memory:
            return
        self._all, self._memory = found, memory  # held, so that no other tensor gets the same address meanwhile
        self._live = [places_of(one) for one in found]
        self._copies = [torch.empty_like(one, requires_grad=False) for one in self._live]

    def _copy(self, found: Sequence[torch.Tensor | None]) -> dict[int, _Copied]:
        """Copy the gradients that exist, in few launches, into memory that is kept."""
        copied: dict[int, _Copied] = {}
        dense, places = [], dict[int, int]()
        for place, one in enumerate(found):
            if one is None:
                continue
            if (first := places.setdefault(id(one), place)) != place:  # of several parameters at once
                copied[place] = copied[first]
                continue
            if one.layout != torch.strided:
                copied[place] = _way_to(one), one.clone()
                continue
            if overlaps(one):
                copied[place] = _way_to(one), over(places_of(one).detach().clone(), one)
                continue
            room = self._room.get(place)
            if room is None or room.shape != one.shape or room.dtype != one.dtype or room.device != one.device:
                room = self._room[place] = torch.empty_like(one, requires_grad=False)
            copied[place] = _way_to(one), room
            dense.append((room, one))
        copy_all([room for room, _ in dense], [one for _, one in dense])
        return copied

    def wrote(self) -> bool:
        """Tell whether the step has changed a parameter since, through an optimizer or by hand.

        One that was given other memory (``parameter.data = ...``) is not: what it had is there still.
        """
        return [version_of(parameter) for parameter in self._owned] != self._versions

    def untouched(self) -> set[int]:
        """Give the ids of the parameters whose writes count none since, and that have the memory that they had."""
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
            parameter.grad = self._brought_back(place) if place in self._copied else gradient
        self._bindings.restore()
        self._random.restore()

    def _brought_back(self, place: int) -> torch.Tensor:
        """Give a gradient that was copied, as it was; where nobody has held it, its copy, which is kept no more."""
        found, copied = self._copied[place]
        gradient = found()
        if gradient is None:
            self._room.pop(place, None)
            return copied
        if gradient.layout == torch.strided:
            put_back([places_of(gradient.detach())], [places_of(copied)])
            return gradient
        with torch.no_grad(), uncounted([gradient]):
            return gradient.copy_(copied)


def _way_to(gradient: torch.Tensor) -> Callable[[], torch.Tensor | None]:
    """Give what gives a gradient while somebody holds it; always, where no copy is the same.

    A part of memory that is somebody's (a buffer that all gradients lie in) is to be that part again, and one that can
    be differentiated has its graph.
    """
    if is_part(gradient) or gradient.requires_grad:
        return lambda: gradient
    found: Callable[[], torch.Tensor | None] = TensorWeakRef(gradient)
    return found


class WriteWatch:
    """Tells whether one of the optimizers has stepped since the step began: from then on it cannot be undone."""

    def __init__(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        self.begun = False
        watched = list(optimizers)
        self._give_back = [_take_hooks(one) for one in watched]
        self._handles = [one.register_step_pre_hook(self._began) for one in watched]

    def _began(self, *_: Any) -> None:
        self.begun = True

    def close(self) -> None:
        """Stop watching."""
        for handle in self._handles:
            handle.remove()
        for give_back in self._give_back:
            give_back()
        self._give_back.clear()


def _take_hooks(optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    """Let hooks be put on an optimizer, whoever made its tables of them, and have its steps call them.

    A wrapper (Lookahead, SAM) may leave out `Optimizer.__init__` and make tables of its own, or none. What torch gives
    to take a hook off again refers to the table weakly, which nobody can do with a plain dict. Unless its steps call
    hooks, nobody hears of them, and a recording freezes its learning rate. This instance alone is changed: others of
    its class may have no tables.

    Returns:
        What has its steps be its own again.
    """
    plain = torch.optim.SGD([torch.zeros(1)])
    for name, table in vars(plain).items():
        if name.endswith("_hooks") and not isinstance(own := vars(optimizer).get(name, {}), type(table)):
            setattr(optimizer, name, type(table)(own))
    if hasattr(optimizer.step, "hooked"):
        return lambda: None
    before = vars(optimizer).get("step")

    @functools.wraps(optimizer.step)  # with the marks that a scheduler has put on it
    def bare(called: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Step the optimizer that is called, which may be a copy of the one that this was made for."""
        if before is not None:
            return before(*args, **kwargs)
        step: Any = type(called).step
        if hasattr(step, "hooked"):  # since then, for another instance: hooks are called once
            step = step.__wrapped__
        return step(called, *args, **kwargs)

    calling: Any = torch.optim.Optimizer.profile_hook_step(bare)
    calling.hooked = True
    optimizer.step = types.MethodType(calling, optimizer)  # type: ignore[method-assign]

    def give_back() -> None:
        if getattr(vars(optimizer).get("step"), "__func__", None) is not calling:
            return  # somebody has put something else there
        if before is None:
            del optimizer.step
        else:
            optimizer.step = before  # type: ignore[method-assign]

    return give_back


def let_go(error: BaseException) -> None:
    """Drop what an exception's traces keep in memory: all that the failed step had computed."""
    waiting: list[BaseException | None] = [error]
    seen: set[int] = set()
    while waiting:
        one = waiting.pop()
        if one is not None and id(one) not in seen:
            seen.add(id(one))
            one.__traceback__ = None
            waiting += one.__cause__, one.__context__
