"""A copy of what a step may change, so that the step can be undone.

A proof copies everything. A step that compiled or captured code runs is copied as far as it changes before an optimizer
steps: buffers, gradients, other state. After an optimizer has stepped, such a copy undoes nothing.
"""

from __future__ import annotations

import collections
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.weak import TensorWeakRef

from hotloop._torch.fake import is_view, uncounted, version_of
from hotloop._torch.foreach import copies, copy_all, differing
from hotloop._torch.hooks import module_tables
from hotloop._torch.places import places_of, put_back, viewed_like, write
from hotloop._torch.random_state import RandomState
from hotloop._torch.sharded import Sharded, is_spread, shard_of
from hotloop.measure.machine import free_bytes
from hotloop.step.state.holdings import EVERY_OPTIMIZERS, Holdings, Memory, distinct_views, in_place, wrappers_in

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from hotloop.step.state.program import Program

    Gradient = tuple[Callable[[], torch.Tensor | None], torch.Tensor | None]
    """Returns a gradient while it exists; and its copy, unless it is copied elsewhere or never read."""


_OF_TORCH = EVERY_OPTIMIZERS - {"state", "param_groups"}
"""Attributes of an optimizer that its step does not change: hooks, for example."""


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


class Snapshot:
    """What a step may change, copied: the step can be undone; if all was copied, it can be exchanged with another run.

    Memory: one copy of the tensors, on their device as far as `Program.room` allows, the rest in host memory
    (`on_host` is True then).

    Args:
        program: the program of the step.
        everything: copy parameters and optimizer state too; otherwise buffers, other state and gradients only, which
            is enough as long as no optimizer has stepped.
        gradients: copy the gradients that exist; False if the step never reads them.

    Attributes:
        complete: everything was saved; if memory ran out while saving, the step has not begun.
        live: the tensors that are copied, by name.
        saved: their copies; after `exchange`, the values that the undone step has left.
        random: the positions of the random streams.
    """

    def __init__(self, program: Program, *, everything: bool = True, gradients: bool = True) -> None:
        self._program, self._everything = program, everything
        named = program.holdings.parameters()
        self._parameters = list(named.values())
        self._owned = [one for name, one in named.items() if name not in program.holdings.strangers]
        self._memory = Memory([] if everything else self._owned)
        self._tables = [
            module_tables(module)[1] for root in program.holdings.modules.values() for module in root.modules()
        ]
        self._syncs, self._others = ForwardSyncs(program.holdings), Holdings({}, {}, program.holdings.state)
        self._others.found = program.holdings.found
        self._hosted: set[str] = set()
        """Names of the tensors whose copies are in host memory, though they are not."""
        self.save(gradients=gradients)

    def save(self, *, gradients: bool = True, tensors: bool = True) -> None:
        """Copy what the coming step may change.

        Args:
            gradients: copy the gradients that exist.
            tensors: copy buffers and other state; not needed if the step runs as a whole or not at all.
        """
        self.complete, holdings = False, self._program.holdings
        self._had_run = self._program.ran.state
        self._bound = [(table, dict(table)) for table in self._tables] if tensors else []
        found = {id(one): one for one in (parameter.grad for parameter in self._parameters) if one is not None}
        self._had = [id(parameter.grad) for parameter in self._parameters]
        if self._everything:
            live = self._all_live(gradients=gradients)
        else:
            live = self._buffers_and_others() if tensors else {}
            if self._memory.moved():
                self._memory = Memory(self._owned)
        self._gradients = _referred(found, copied=gradients and not self._everything)
        self._versions = [version_of(parameter) for parameter in self._owned]
        self._sparse = {name: (one, one.clone()) for name, one in live.items() if one.layout != torch.strided}
        self.live = {name: one for name, one in live.items() if name not in self._sparse}
        self._places = {name: places_of(tensor) for name, tensor in self.live.items()}
        if self._everything:
            self._copies = self._copied()
            self._view()
        else:
            self._copies = dict(zip(self._places, copies([*self._places.values()]), strict=True))
        self.random = RandomState([self._program.device], python=tensors)
        self._values = remembered_of(holdings if self._everything else self._others)
        self._syncs.save()
        self.complete = True

    def _all_live(self, *, gradients: bool) -> dict[str, torch.Tensor]:
        holdings = self._program.holdings
        with holdings.still():
            objects, live = holdings.objects(), holdings.tensors()
            existing = {f"gradient {name}": one for name, one in holdings.gradients().items() if one is not None}
        self._memory = Memory([*objects.values(), *existing.values()])
        return (
            distinct_views({**live, **{name: in_place(one) for name, one in existing.items()}}) if gradients else live
        )

    def _buffers_and_others(self) -> dict[str, torch.Tensor]:
        buffers = {id(one): one for table in self._tables for one in table.values() if one is not None}
        tensors = (*buffers.values(), *self._others.other_tensors().values())
        return {str(number): shard_of(one) for number, one in enumerate(tensors) if not one.is_meta}

    def _copied(self) -> dict[str, torch.Tensor]:
        """Copy all places: those that fit on their device, the rest to the host."""
        room = self._program.room
        left = {device: room.for_copies(device) for device in {place.device for place in self._places.values()}}
        fit: dict[str, torch.Tensor] = {}
        for name, place in self._places.items():
            space = left[place.device]
            if space is None or place.nbytes <= space:
                fit[name] = place
                left[place.device] = None if space is None else space - place.nbytes
        try:
            made = dict(zip(fit, copies(list(fit.values())), strict=True))
        except torch.OutOfMemoryError:  # the memory was in pieces, or another process was faster
            made = {}
        self._hosted = self._places.keys() - made.keys()
        hosted = {name: place for name, place in self._places.items() if name in self._hosted}
        made |= zip(hosted, copies_on_host(list(hosted.values())), strict=True)
        return {name: made[name] for name in self._places}

    def _view(self) -> None:
        self.saved = {name: viewed_like(self._copies[name], tensor) for name, tensor in self.live.items()}

    @property
    def on_host(self) -> bool:
        """Whether any copy is in host memory, as there was no room on the device."""
        return bool(self._hosted)

    @property
    def nbytes(self) -> int:
        """How many bytes the copies take."""
        return sum(copied.nbytes for copied in self._copies.values())

    def make_room(self) -> int:
        """Move copies to the host until an eager step fits on the device; return the bytes that it may lack then."""
        device = self._program.device
        here = [n for n, place in self._places.items() if place.device == device and n not in self._hosted]
        lacking = self._program.room.lacking(device)
        while lacking > 0 and here:
            name = here.pop()
            lacking -= self._copies[name].nbytes
            self._hosted.add(name)
            (self._copies[name],) = copies_on_host([self._copies[name]])
        self._view()
        return max(0, lacking)

    def let_go(self) -> None:
        """Forget the copies after the step: torch swaps no tensor that has weak references (``Module.to``)."""
        self._gradients, self._copies, self._places, self._sparse, self.live = {}, {}, {}, {}, {}
        self._had_run, self.complete = (), False

    def wrote(self) -> bool:
        """Return whether the step has changed a parameter since, through an optimizer or by hand.

        A parameter that was given other memory (``parameter.data = ...``) is not changed: its old memory still exists.
        """
        return [version_of(parameter) for parameter in self._owned] != self._versions

    def untouched(self) -> set[int]:
        """Return the ids of the parameters that torch counted no write for, and that still have the same memory."""
        moved = set(self._memory.moved())
        versions = enumerate(zip(self._owned, self._versions, strict=True))
        return {id(one) for place, (one, version) in versions if version_of(one) == version and place not in moved}

    def restore(self) -> None:
        """Undo: values, memory, bindings and random streams are as they were."""
        self._memory.restore()
        put_back(list(self._places.values()), list(self._copies.values()))
        self._restore_rest()

    def exchange(self) -> None:
        """Undo, and keep in `saved` the values that the undone step had left in each tensor."""
        self._memory.restore()
        named = list(self._places)
        changed = differing(list(self._places.values()), list(self._copies.values()))
        places = {name: self._places[name] for name in (named[place] for place in changed)}
        # Larger groups need fewer calls: a GPU with much free memory can spare a 64th of it, up to 256 MiB.
        devices = {tensor.device for tensor in places.values() if tensor.device.type == "cuda"}
        spare = min((free_bytes(device) or 0 for device in devices), default=0) // 64
        beside = {name: place for name, place in places.items() if name not in self._hosted}
        for names in chunks(beside, min(spare, 1 << 28)):
            live, saved = [places[name] for name in names], [self._copies[name] for name in names]
            try:
                between = copies(live)
            except torch.OutOfMemoryError:  # half of an exchange would lose the run
                between = copies_on_host(live)
            write(live, saved)
            copy_all(saved, between)
        for name in places.keys() & self._hosted:  # where they meet on the host, the device has no copy of either
            (left,) = copies_on_host([places[name]])
            write([places[name]], [self._copies[name]])
            self._copies[name] = left
        self._view()
        self._restore_rest()

    def _restore_rest(self) -> None:
        for tensor, copied in self._sparse.values():
            _write_sparse(tensor, copied)
        restored = {key: _restored(*gradient) for key, gradient in self._gradients.items()}
        for parameter, key in zip(self._parameters, self._had, strict=True):
            if parameter.grad is not (gradient := restored.get(key)):
                parameter.grad = gradient
        for table, tensors in self._bound:
            table.clear()
            table.update(tensors)
        self._values()
        self._syncs.restore()
        self.random.restore(leaving=self._program.rng_usage.others())
        self._program.ran.state = self._had_run


def _held(gradient: torch.Tensor) -> Callable[[], torch.Tensor]:
    return lambda: gradient


def _referred(found: dict[int, torch.Tensor], *, copied: bool) -> dict[int, Gradient]:
    """Refer to gradients; weakly to copied ones: a step that drops them first can reuse their memory, as in eager."""
    if not copied:
        return {key: (_held(one), None) for key, one in found.items()}
    shards = [shard_of(one) for one in found.values()]
    made = copies([places_of(one) for one in shards])
    views = [viewed_like(place, one) for place, one in zip(made, shards, strict=True)]
    return {key: (_reference(one), view) for (key, one), view in zip(found.items(), views, strict=True)}


def _reference(gradient: torch.Tensor) -> Callable[[], torch.Tensor | None]:
    """Return a weak reference to a gradient, or a strong one if no copy could stand in for it.

    A gradient that is a part of somebody's memory (a buffer that all gradients lie in) has to be that part again,
    and one that can be differentiated has its graph. A copy of a shard is no tensor that is spread over processes.
    """
    if is_view(gradient) or gradient.requires_grad or is_spread(gradient):
        return _held(gradient)
    reference: Callable[[], torch.Tensor | None] = TensorWeakRef(gradient)
    return reference


def _restored(reference: Callable[[], torch.Tensor | None], copied: torch.Tensor | None) -> torch.Tensor | None:
    """Return a gradient as it was; if the gradient itself is gone, its copy."""
    gradient = reference()
    if gradient is None or copied is None:
        return copied if gradient is None else gradient
    if gradient.layout == torch.strided:
        put_back([places_of(shard_of(gradient).detach())], [places_of(copied)])
    else:
        _write_sparse(gradient, copied)
    return gradient


def _write_sparse(tensor: torch.Tensor, copied: torch.Tensor) -> None:
    with torch.no_grad(), uncounted([tensor]):
        tensor.copy_(copied)


def remembered_of(holdings: Holdings) -> Callable[[], None]:
    """Remember the optimizers' dictionaries and own attributes, and the attributes of the other state.

    A user's optimizer may count its steps in an attribute, and an undone step must not count.

    Returns:
        a function that puts them back; the tensors in them are not touched.
    """
    others = [one for one in holdings.state if not isinstance(one, torch.nn.Module) and hasattr(one, "__dict__")]
    kept = []
    for holder in (*holdings.optimizers.values(), *others):
        leaving = _OF_TORCH if isinstance(holder, torch.optim.Optimizer) else frozenset[str]()
        values = {name: _remembered(value) for name, value in vars(holder).items() if name not in leaving}
        kept.append((vars(holder), leaving, values))

    def put_back() -> None:
        for attributes, leaving, values in kept:
            for name in attributes.keys() - leaving - values.keys():
                del attributes[name]
            attributes.update({name: value() for name, value in values.items()})

    return put_back


def _remembered(value: Any) -> Callable[[], Any]:
    """Remember what lists and dictionaries contain; the function puts it back into the same ones and returns them."""
    if isinstance(value, dict):
        items = {key: _remembered(item) for key, item in value.items()}
        kind: Any = collections.OrderedDict if isinstance(value, collections.OrderedDict) else dict

        def refilled() -> Any:
            kind.clear(value)  # past a class that refuses it, as transformers' ModelOutput does
            kind.update(value, {key: item() for key, item in items.items()})
            return value

        return refilled
    if type(value) is list:
        parts = [_remembered(item) for item in value]

        def refilled_list() -> Any:
            value[:] = [part() for part in parts]
            return value

        return refilled_list
    return lambda: value


def copies_on_host(sources: list[torch.Tensor]) -> list[torch.Tensor]:
    """Copy tensors to host memory."""
    made = [torch.empty_like(source, device="cpu", requires_grad=False) for source in sources]
    copy_all(made, sources)
    return made


def chunks(tensors: Mapping[str, torch.Tensor], most: int) -> Iterator[list[str]]:
    """Yield the names of tensors in groups, so small that one more copy of a group does not matter.

    Args:
        tensors: by name; a tensor that is larger than a group makes a group of its own.
        most: bytes of a group, but at least 64 MiB.
    """
    most = max(64 * 2**20, most)
    chunk: list[str] = []
    size = 0
    for name, tensor in tensors.items():
        if chunk and size + tensor.nbytes > most:
            yield chunk
            chunk, size = [], 0
        chunk.append(name)
        size += tensor.nbytes
    if chunk:
        yield chunk
