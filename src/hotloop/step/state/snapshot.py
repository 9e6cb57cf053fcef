"""A copy of everything that a step may change, to undo it by."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from hotloop._torch.fake import uncounted
from hotloop._torch.foreach import copies, copy_all, differing
from hotloop.measure.machine import free_bytes
from hotloop.step.state.bindings import Bindings
from hotloop.step.state.holdings import once
from hotloop.step.state.memory import Memory, in_place
from hotloop.step.state.places import over, places_of, put_back, write
from hotloop.step.state.random_state import RandomState

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from hotloop.step.state.holdings import Holdings
    from hotloop.step.state.rng_usage import RngUsage

_CHUNK_BYTES = 64 * 2**20
"""Tensors are exchanged in groups of at most this size (or one by one, if larger), so that little extra is needed."""

_SHARE_OF_FREE = 64
"""On a GPU with much free memory in groups of this part of it: fewer calls take less time."""


class Snapshot:
    """Everything that a step may change, copied: the step can be undone, or run twice.

    Args:
        holdings: what may change.
        devices: where random numbers may be drawn.
        everything: parameters and optimizer state too; else buffers, other state and gradients only, which is enough
            as long as no optimizer has stepped.
        gradients: whether the gradients that exist have to be copied; False where the step never reads them.
        rng_usage: which random streams the step was seen to draw from, where others may be other threads'.

    Memory: one copy of the tensors, on their device; where that does not fit, in host memory (`on_host` is True then).
    """

    def __init__(
        self,
        holdings: Holdings,
        devices: Sequence[torch.device],
        *,
        everything: bool = True,
        gradients: bool = True,
        rng_usage: RngUsage | None = None,
    ) -> None:
        self.random, self._rng_usage = RandomState(devices), rng_usage
        with holdings.still():
            self.bindings = Bindings(holdings)
            objects = holdings.objects()
            existing = {f"gradient {name}": one for name, one in holdings.gradients().items() if one is not None}
            self._memory = Memory([*objects.values(), *existing.values()])
            if everything:
                self.live = holdings.tensors()
            else:
                buffers = {f"buffer {name}": one for name, one in holdings.buffers().items()}
                others = {**buffers, **holdings.other_tensors()}
                self.live = once({name: in_place(one) for name, one in others.items()})
            if gradients:
                self.live = once({**self.live, **{name: in_place(one) for name, one in existing.items()}})
        sparse = [name for name, one in self.live.items() if one.layout != torch.strided]
        self._rebound = {name: self.live.pop(name) for name in sparse}
        self._sparse = {name: one.clone() for name, one in self._rebound.items()}
        self._places = {name: places_of(one) for name, one in self.live.items()}
        self.on_host = not _fits(self._places.values())
        self._copies = dict(zip(self._places, _copies([*self._places.values()], on_host=self.on_host), strict=True))
        self.saved = {name: over(self._copies[name], one) for name, one in self.live.items()}

    @property
    def nbytes(self) -> int:
        """How much memory the copies take."""
        return sum(_bytes(one) for one in self._copies.values())

    def restore(self) -> None:
        """Undo: values, memory, bindings and random streams are as they were."""
        self._memory.restore()
        put_back(list(self._places.values()), list(self._copies.values()))
        self._restore_rest()

    def exchange(self) -> None:
        """Undo, and keep in `saved` what the undone step had made in the memory of each tensor."""
        self._memory.restore()
        named = list(self._places)
        changed = differing(list(self._places.values()), list(self._copies.values()))
        places = {name: self._places[name] for name in (named[place] for place in changed)}
        for names in chunks(places, _spare(places.values())):
            live, saved = [places[name] for name in names], [self._copies[name] for name in names]
            between = copies(live)
            write(live, saved)
            copy_all(saved, between)
        self._restore_rest()

    def _restore_rest(self) -> None:
        self.bindings.restore()
        self.random.restore(leaving=self._rng_usage.others() if self._rng_usage is not None else frozenset())
        for name, tensor in self._rebound.items():
            with torch.no_grad(), uncounted([tensor]):
                tensor.copy_(self._sparse[name])


def _copies(tensors: Sequence[torch.Tensor], *, on_host: bool) -> list[torch.Tensor]:
    if not on_host:
        return copies(tensors)
    made = [torch.empty_like(one, device="cpu", requires_grad=False) for one in tensors]
    copy_all(made, tensors)
    return made


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _fits(tensors: Iterable[torch.Tensor]) -> bool:
    """Tell whether a GPU has room for a copy, with a fifth to spare for what the step itself needs beyond its peak."""
    needed: dict[torch.device, int] = {}
    for tensor in tensors:
        if tensor.device.type == "cuda":
            needed[tensor.device] = needed.get(tensor.device, 0) + _bytes(tensor)
    return all(size * 1.2 <= (free_bytes(device) or 0) for device, size in needed.items())


def _spare(tensors: Iterable[torch.Tensor]) -> int:
    """Give how many bytes may be held once more without a second thought."""
    on = {one.device for one in tensors}
    known = [free_bytes(device) or 0 for device in on if device.type == "cuda"]
    return min(known, default=0) // _SHARE_OF_FREE


def chunks(tensors: Mapping[str, torch.Tensor], most: int) -> Iterator[list[str]]:
    """Give the tensors' names in parts so small that another copy of one is no matter.

    Args:
        tensors: by name.
        most: bytes of a part, if that is more than what never matters.
    """
    most = max(_CHUNK_BYTES, most)
    chunk: list[str] = []
    size = 0
    for name, tensor in tensors.items():
        if chunk and size + _bytes(tensor) > most:
            yield chunk
            chunk, size = [], 0
        chunk.append(name)
        size += _bytes(tensor)
    if chunk:
        yield chunk
