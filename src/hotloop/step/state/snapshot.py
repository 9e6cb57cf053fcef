"""A copy of everything that a step may change, so that the step can be undone."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from hotloop._torch.fake import uncounted
from hotloop._torch.foreach import copies, copy_all, differing
from hotloop._torch.places import places_of, put_back, viewed_like, write
from hotloop._torch.random_state import RandomState
from hotloop.measure.machine import free_bytes
from hotloop.step.state.holdings import Memory, distinct_views, in_place
from hotloop.step.state.undo import Bindings, BufferTables, ForwardSyncs

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from hotloop.step.state.program import Program


class Snapshot:
    """Everything that a step may change, copied: the step can be undone, or run twice.

    Memory: one copy of the tensors, on their device as far as `Program.room` allows, the rest in host memory
    (`on_host` is True then).

    Args:
        program: the program of the step.
        everything: copy parameters and optimizer state too; otherwise buffers, other state and gradients only, which
            is enough as long as no optimizer has stepped.
        gradients: copy the gradients that exist; False if the step never reads them.
    """

    def __init__(self, program: Program, *, everything: bool = True, gradients: bool = True) -> None:
        holdings = program.holdings
        self.random, self._rng_usage = RandomState([program.device]), program.rng_usage
        self._ran, self._had_run = program.ran, program.ran.state
        with holdings.still():
            self.bindings, self._buffers = Bindings(holdings), BufferTables(holdings)
            self._syncs = ForwardSyncs(holdings)
            objects = holdings.objects()
            existing = {f"gradient {name}": one for name, one in holdings.gradients().items() if one is not None}
            self._memory = Memory([*objects.values(), *existing.values()])
            if everything:
                self.live = holdings.tensors()
            else:
                buffers = {f"buffer {name}": one for name, one in holdings.buffers().items()}
                others = {**buffers, **holdings.other_tensors()}
                self.live = distinct_views({name: in_place(one) for name, one in others.items()})
            if gradients:
                self.live = distinct_views({**self.live, **{name: in_place(one) for name, one in existing.items()}})
        sparse = [name for name, tensor in self.live.items() if tensor.layout != torch.strided]
        self._sparse = {name: (self.live[name], self.live.pop(name).clone()) for name in sparse}
        self._places = {name: places_of(tensor) for name, tensor in self.live.items()}
        self._room, self._device = program.room, program.device
        self._hosted: set[str] = set()
        """Names of the tensors whose copies are in host memory, though they are not."""
        self._copies = self._copied()
        self._view()

    def _copied(self) -> dict[str, torch.Tensor]:
        """Copy all places: those that fit on their device, the rest to the host."""
        devices = {place.device for place in self._places.values()}
        left = {device: self._room.for_copies(device) for device in devices}
        fit: dict[str, torch.Tensor] = {}
        for name, place in self._places.items():
            room = left[place.device]
            if room is None or place.nbytes <= room:
                fit[name] = place
                left[place.device] = None if room is None else room - place.nbytes
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

    def make_room(self) -> int:
        """Move copies to the host until an eager step fits on the device; return the bytes that it may lack then."""
        here = [n for n, place in self._places.items() if place.device == self._device and n not in self._hosted]
        lacking = self._room.lacking(self._device)
        while lacking > 0 and here:
            name = here.pop()
            lacking -= self._copies[name].nbytes
            self._hosted.add(name)
            (self._copies[name],) = copies_on_host([self._copies[name]])
        self._view()
        return max(0, lacking)

    @property
    def nbytes(self) -> int:
        """How many bytes the copies take."""
        return sum(copied.nbytes for copied in self._copies.values())

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
        self.bindings.restore()
        self.random.restore(leaving=self._rng_usage.others())
        for tensor, copied in self._sparse.values():
            with torch.no_grad(), uncounted([tensor]):
                tensor.copy_(copied)
        self._buffers.restore()
        self._syncs.restore()
        self._ran.state = self._had_run


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
