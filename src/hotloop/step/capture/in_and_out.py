"""What goes into a captured step and what comes out: its static inputs, and the results that its caller gets."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch

from hotloop._torch.places import overlaps, span_of, unexpanded
from hotloop._torch.sharded import shard_of
from hotloop.measure import flatten, unflatten

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Sequence

    from hotloop.step.state.program import Program

    Maker = Callable[[], Any] | int
    """Makes one result after a replay; a number is the argument with that number, which is returned itself."""


class Inputs:
    """Tensors of a captured step that each batch is copied into.

    Args:
        leaves: the leaves of one call's arguments; a leaf that is no tensor is part of the captured step as it is.
        device: the device of the step. On a GPU, host tensors become device tensors, copied through pinned buffers:
            the step's own ``x.to(device)`` then finds them on the device.

    Attributes:
        leaves: what the step is called with; one tensor for arguments that are one tensor. Other memory in common
            matters only for writes, and a step that writes there is not captured.
    """

    def __init__(self, leaves: list[Any], device: torch.device) -> None:
        self._written: dict[int, torch.Tensor] = {}
        given = dict[int, Any]()
        for index, leaf in enumerate(leaves):
            if isinstance(leaf, torch.Tensor) and id(leaf) not in given:
                static = self._written[index] = _static(leaf, device)
                given[id(leaf)] = static if static.shape == leaf.shape else static.expand(leaf.shape)
        self.leaves: list[Any] = [given.get(id(leaf), leaf) for leaf in leaves]
        self._staged = {
            index: _Staged(unexpanded(leaves[index]), device)
            for index in self._written
            if leaves[index].device.type == "cpu" and device.type == "cuda"
        }

    def fill(self, leaves: list[Any]) -> None:
        """Copy a batch in; its shapes and strides are those of the first batch."""
        for index, static in self._written.items():
            leaf = leaves[index]
            if index in self._staged:
                self._staged[index].copy(unexpanded(leaf), static)
            elif self.leaves[index] is not leaf:
                static.copy_(unexpanded(leaf).detach(), non_blocking=True)


def _static(leaf: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return memory for a tensor, each element once; the caller expands it as the tensor is expanded.

    It has the tensor's strides, since compiled code is made for them (``tokens[:, :-1]``). A tensor that overlaps, or
    is spread thinly over a large memory, gets the strides of a copy that torch makes.
    """
    base = unexpanded(leaf)
    # With its strides a buffer may take twice the memory of its elements, and 16 MiB more.
    small = span_of(base) * base.element_size() <= 2 * base.nbytes + 2**24
    keeps = base.numel() > 0 and small and not overlaps(base)
    strides = base.stride() if keeps else torch.empty_like(base, device="meta").stride()
    where = device if leaf.device.type == "cpu" else leaf.device
    return torch.empty_strided(base.shape, strides, dtype=leaf.dtype, device=where)


class _Staged:
    """Pinned buffers for one host tensor, used in turn; each waits for its last copy before it is written again.

    A tensor that is pinned itself is copied through a buffer as well. Copied from directly, it would be read after the
    call has returned, when a loader that reuses its buffers may have filled it with another batch.
    """

    BUFFERS = 3
    """The host may be this many batches ahead of the copies."""

    def __init__(self, leaf: torch.Tensor, device: torch.device) -> None:
        self._buffers = [torch.empty_like(leaf, pin_memory=True) for _ in range(self.BUFFERS)]
        self._copied: list[Any] = [torch.cuda.Event() for _ in range(self.BUFFERS)]  # type: ignore[no-untyped-call]
        self._device, self._next = device, 0

    def copy(self, leaf: torch.Tensor, static: torch.Tensor) -> None:
        buffer, copied = self._buffers[self._next], self._copied[self._next]
        copied.synchronize()
        buffer.copy_(leaf)
        static.copy_(buffer, non_blocking=True)
        copied.record(torch.cuda.current_stream(self._device))
        self._next = (self._next + 1) % self.BUFFERS


class Results:
    """What a captured step returns, copied after each replay: the next replay overwrites the recording's tensors.

    An argument is returned itself, and so is a tensor of the program: who writes into a returned parameter, as
    ``logit_scale.clamp_()`` does, means the parameter. A view of such a tensor stays a view of it. All others are
    copies, each with memory of its own.

    Args:
        result: what the step returned while it was recorded.
        program: the program of the step.
        arguments: the recording's own copies of the arguments.
        gradients: the gradients that exist after the step.
        on_host: the numbers of the results that eager makes on the host, from arguments that are there.

    Raises:
        RuntimeError: a result is, or is a part of, a gradient: who changes it means the gradient, and who keeps it its
            values.
    """

    def __init__(
        self,
        result: Any,
        program: Program,
        arguments: Sequence[Any],
        gradients: Iterable[torch.Tensor],
        on_host: Collection[int],
    ) -> None:
        leaves, self._structure = flatten(result)
        own = list(program.holdings.objects().values())
        self._own_ids, self._own = {id(one) for one in own}, {_address(one) for one in own} - {0}
        self._numbers = {id(leaf): number for number, leaf in enumerate(arguments) if isinstance(leaf, torch.Tensor)}
        if {_address(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor)} & ({*map(_address, gradients)} - {0}):
            raise RuntimeError("the step returns a gradient, or a part of one: return a copy, grad.clone()")
        self._makers = [self._maker(leaf, on_host=number in on_host) for number, leaf in enumerate(leaves)]

    def _maker(self, leaf: Any, *, on_host: bool) -> Maker:
        if (number := self._numbers.get(id(leaf))) is not None:
            return number
        if not isinstance(leaf, torch.Tensor):
            return functools.partial(_itself, leaf)
        # Detached: a graph that a result kept alive would tie other steps to the stream of this recording.
        result = leaf.detach()
        if on_host and leaf.device.type != "cpu":
            return result.cpu
        if id(leaf) in self._own_ids:
            return functools.partial(_itself, leaf)
        return result.detach if _address(leaf) in self._own else result.clone

    def make(self, arguments: Sequence[Any]) -> Any:
        """Return the results of the last replay.

        Args:
            arguments: the call's own. A result that is an argument is returned itself, on its own device.
        """
        made = [arguments[make] if isinstance(make, int) else make() for make in self._makers]
        return unflatten(self._structure, made)


def _itself(value: Any) -> Any:
    return value


def _address(tensor: torch.Tensor) -> int:
    """Return where a tensor's storage begins; 0 if it has none of its own."""
    tensor = shard_of(tensor)
    return tensor.untyped_storage().data_ptr() if tensor.layout == torch.strided else 0
