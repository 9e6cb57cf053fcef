"""The layout of convolutions' weights in memory: channels last while a tier asks for it, else as they were given.

On a GPU a convolution in half precision computes channels last. Where its weight is laid out otherwise, it transposes
what goes in and comes out. One weight that is channels last makes it return its result so, and what follows keeps that.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import itertools
import math
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from hotloop._torch.fake import is_view, uncounted
from hotloop._torch.foreach import copy_all
from hotloop.interrupts import uninterrupted
from hotloop.step.state.memory import Views

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

_CONVOLUTIONS = (nn.Conv2d, nn.Conv3d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}


@dataclasses.dataclass
class _Places:
    """The two places of one tensor: with the strides that it was given, and channels last.

    Each place stays as long as a recording may hold its address.
    """

    tensor: torch.Tensor
    strides: tuple[tuple[int, ...], tuple[int, ...]]
    memory: list[torch.Tensor | None] = dataclasses.field(default_factory=lambda: [None, None])

    def holds(self, on: bool) -> bool:
        """Return whether the tensor is where a switch has put it: a program may have given it other memory since."""
        memory = self.memory[on]
        there = memory is not None and memory.data_ptr() == self.tensor.data_ptr()
        return there and self.tensor.stride() == self.strides[on]

    def other(self, on: bool) -> torch.Tensor:
        """Return the memory of a place that the tensor is not at, and keep the memory that it is at."""
        self.memory[not on] = self.tensor.detach()
        memory = self.memory[on]
        if memory is None:
            like = self.tensor
            memory = torch.empty_strided(like.shape, self.strides[on], dtype=like.dtype, device=like.device)
            self.memory[on] = memory
        return memory


class Layout:
    """The layout of the weights of models' convolutions, and of what belongs to each: gradient and optimizer state.

    A switch copies values and changes strides. The tensors stay the same objects with the same values.

    Args:
        models: the models.
        optimizers: of their parameters. What their ``state_dict()`` returns has the strides that were given: a fused
            optimizer needs state with the strides of its parameter, and on a CPU does not check it.

    Attributes:
        on: whether the weights are channels last by a switch.
    """

    def __init__(self, models: Iterable[nn.Module], optimizers: Iterable[torch.optim.Optimizer] = ()) -> None:
        self._models, self._optimizers = list(models), list(optimizers)
        self.on = False
        self._places: dict[int, _Places] = {}
        self._views = Views([])
        """Of the weights that are channels last by a switch."""
        self._hooks: list[Any] = []

    def _weights(self) -> list[tuple[str, nn.Parameter]]:
        """Return the weights of the convolutions with their names, each once."""
        named: dict[int, tuple[str, nn.Parameter]] = {}
        for model in self._models:
            for path, module in model.named_modules():
                if not isinstance(module, _CONVOLUTIONS):
                    continue
                weight = dict(module.named_parameters(recurse=False)).get("weight")
                if weight is not None and not nn.parameter.is_lazy(weight):
                    named.setdefault(id(weight), (f"{path}.weight" if path else "weight", weight))
        return list(named.values())

    @property
    def has_optimizers(self) -> bool:
        """Return whether an optimizer is known: a fused one computes wrongly where its state has other strides."""
        return bool(self._optimizers)

    def why_not(self) -> str:
        """Say why the weights cannot be laid out channels last, or why that is of no use; empty where they can be."""
        if self.on:
            return ""
        weights = self._weights()
        if not any(math.prod(weight.shape[2:]) > 1 for _, weight in weights):
            return "no convolution of the models has a kernel larger than 1"
        tensors = {
            id(one): one for model in self._models for one in itertools.chain(model.parameters(), model.buffers())
        }
        shared = collections.Counter(map(_address, tensors.values()))
        for name, weight in weights:
            if why := _hindrance(weight, shared):
                return f"{name} {why}"
        if all(weight.is_contiguous(memory_format=_FORMATS[weight.dim()]) for _, weight in weights):
            return "the convolutions' weights are channels last already"
        quantised = {str(one.dtype) for _, _, state in self._tensors() for one in state if not one.is_floating_point()}
        if quantised:
            return f"an optimizer keeps state of a weight in {quantised.pop()}, perhaps with scales by order"
        return ""

    def _tensors(self) -> Iterator[tuple[nn.Parameter, tuple[int, ...], list[torch.Tensor]]]:
        """Yield each weight, its strides channels last, and the optimizer state that has its shape."""
        for _, weight in self._weights():
            entries = [optimizer.state.get(weight) for optimizer in self._optimizers]
            values = [value for entry in entries if isinstance(entry, dict) for value in entry.values()]
            state = [one for one in values if isinstance(one, torch.Tensor) and one.shape == weight.shape]
            yield weight, _laid_out(weight), state

    def switch(self, on: bool) -> None:
        """Lay the weights out channels last, or as they were given; where they are so already, do nothing.

        Raises:
            RuntimeError: they cannot be laid out channels last now.
        """
        if on == self.on:
            return
        if on and (why := self.why_not()):
            raise RuntimeError(why)
        self._move(on)
        if on and not self._hooks:
            for optimizer in self._optimizers:
                self._hooks.append(optimizer.register_state_dict_post_hook(self._with_given_strides))
                self._hooks.append(optimizer.register_load_state_dict_post_hook(self._match_loaded))

    @uninterrupted
    def _move(self, on: bool) -> None:
        places: dict[int, _Places] = {}
        moves: list[tuple[torch.Tensor, torch.Tensor]] = []
        for weight, laid, state in self._tensors():
            place = self._place_of(weight, (weight.stride(), laid), on)
            if place is None:
                continue
            for tensor in (weight, *state):
                found = place if tensor is weight else self._place_of(tensor, (place.strides[0], laid), on)
                if found is None:
                    continue
                places[id(tensor)] = found
                if not found.holds(on):
                    moves.append((tensor, found.other(on)))
            gradient = weight.grad
            if gradient is not None and gradient.layout == torch.strided and gradient.stride() != place.strides[on]:
                new = torch.empty_strided(
                    gradient.shape, place.strides[on], dtype=gradient.dtype, device=gradient.device
                )
                moves.append((gradient, new))
        with uncounted([memory for _, memory in moves]):  # a place counts its writes with the tensor itself
            copy_all([memory for _, memory in moves], [tensor.detach() for tensor, _ in moves])
        for tensor, memory in moves:
            tensor.data = memory
        self._places, self.on = places, on
        self._views = Views([weight for _, weight in self._weights() if id(weight) in places] if on else [])

    def match(self) -> None:
        """Before a step, lay out a weight that the program has given other memory since (an average's, for a while).

        The gradient and the optimizer state of a weight need its strides.
        """
        if self.on and not self._views.same():
            self._move(True)

    def _place_of(
        self,
        tensor: torch.Tensor,
        strides: tuple[tuple[int, ...], tuple[int, ...]],
        on: bool,
    ) -> _Places | None:
        """Return the places of a tensor; None for a tensor that stays as it is.

        Args:
            tensor: a weight, or state of its optimizer.
            strides: of the weight as it was given, and channels last.
            on: the layout that is asked for.
        """
        known = self._places.get(id(tensor))
        if known is not None and known.tensor is tensor and (known.holds(on) or known.holds(not on)):
            return known
        if on:  # new, or the program has given it other memory
            return _Places(tensor, (tensor.stride(), strides[1])) if tensor.stride() != strides[1] else None
        # The optimizer made it while the weight was channels last, or the program has given it other memory since.
        return _Places(tensor, strides) if known is None and tensor.stride() == strides[1] != strides[0] else None

    def drop_other(self) -> None:
        """Free the memory of the layout that is not in force: no recording holds its addresses any more."""
        for place in self._places.values():
            place.memory[not self.on] = None

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """Lay the weights out as they were given while the block runs."""
        if not self.on:
            yield
            return
        kept = {key for key, place in self._places.items() if place.memory[False] is not None}
        self.switch(False)
        try:
            yield
        finally:
            self._move(True)
            for key in self._places.keys() - kept:
                self._places[key].memory[False] = None

    def close(self) -> None:
        """Lay the weights out as they were given, and forget them."""
        self.switch(False)
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._places.clear()

    # -- the optimizers' checkpoints -------------------------------------------------------------------------------

    def _with_given_strides(self, _: torch.optim.Optimizer, saved: dict[str, Any]) -> dict[str, Any]:
        """Return a state dict in which state has the strides that its weight was given, as in eager."""
        if not self.on:
            return saved
        given: dict[int, tuple[int, ...]] = {}
        for weight, laid, state in self._tensors():
            if (place := self._places.get(id(weight))) is not None:
                known = {id(one): self._places.get(id(one), place).strides[0] for one in state if one.stride() == laid}
                given |= known
        entries = {}
        for key, entry in saved["state"].items():
            entries[key] = entry
            if isinstance(entry, dict):
                entries[key] = {
                    name: _restrided(value, given[id(value)]) if id(value) in given else value
                    for name, value in entry.items()
                }
        return {**saved, "state": entries}

    def _match_loaded(self, _: torch.optim.Optimizer) -> None:
        """Lay out what a checkpoint brought, whose strides are others."""
        if self.on:
            self._move(True)


def _restrided(tensor: torch.Tensor, strides: tuple[int, ...]) -> torch.Tensor:
    made = torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device)
    return made.copy_(tensor.detach())


def _laid_out(weight: torch.Tensor) -> tuple[int, ...]:
    """Return the strides of a weight that is channels last."""
    return torch.empty(weight.shape, device="meta", memory_format=_FORMATS.get(weight.dim())).stride()


def _address(tensor: torch.Tensor) -> int:
    try:
        return tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):  # sparse tensors, and wrapper subclasses without memory
        return -id(tensor)


def _hindrance(weight: nn.Parameter, shared: collections.Counter[int]) -> str:
    """Say why a weight cannot be given other strides; empty where it can."""
    if type(weight) is not nn.Parameter or weight.layout != torch.strided or weight.dim() not in _FORMATS:
        return f"is a {type(weight).__name__} of {weight.dim()} dimensions, with memory of its own kind"
    for what, tensor in (("is", weight), ("has a gradient that is", weight.grad)):
        if tensor is None or tensor.layout != torch.strided:
            continue
        if is_view(tensor) or tensor.untyped_storage().nbytes() != tensor.nbytes:
            return f"{what} a part of a larger memory"
    return "shares its memory with another parameter or buffer" if shared[_address(weight)] > 1 else ""
