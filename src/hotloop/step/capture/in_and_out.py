"""What goes into a captured step and what comes out: its static inputs, and the results that its caller gets."""

from __future__ import annotations

import collections
import functools
from typing import TYPE_CHECKING, Any

import torch

from hotloop._torch.dynamo import attributes_of
from hotloop._torch.places import overlaps, span_of, unexpanded
from hotloop._torch.sharded import shard_of
from hotloop.measure import flatten, unflatten
from hotloop.step.state.holdings import view_of

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from hotloop.step.state.program import Program

    Maker = Callable[[], Any] | int
    """Makes one result after a replay; a number is the argument with that number, which is returned itself."""


class Inputs:
    """Tensors of a captured step that each batch is copied into.

    Args:
        leaves: the leaves of one call's arguments; a leaf that is no tensor is part of the captured step as it is.
        device: the device of the step. On a GPU, host tensors become device tensors, copied through pinned buffers:
            the step's own ``x.to(device)`` then finds them on the device.
    """

    def __init__(self, leaves: list[Any], device: torch.device) -> None:
        self._written: list[torch.Tensor | None] = []
        self.leaves: list[Any] = []
        """The leaves that the step is called with: one tensor for arguments that are one tensor, and memory with one
        beginning for arguments that begin at one address. Other memory in common matters only for writes, and a step
        that writes there is not captured."""
        memory, given = _Memory(leaves, device), dict[int, Any]()
        for leaf in leaves:
            again = not isinstance(leaf, torch.Tensor) or id(leaf) in given
            self._written.append(None if again else (static := memory.static(leaf)))
            if not again:
                given[id(leaf)] = static if static.shape == leaf.shape else static.expand(leaf.shape)
                given[id(leaf)].__dict__.update(attributes_of(leaf))
            self.leaves.append(given.get(id(leaf), leaf))
        self._staged = {
            index: _Staged(unexpanded(leaf), device)
            for index, leaf in enumerate(leaves)
            if self._written[index] is not None and leaf.device.type == "cpu" and device.type == "cuda"
        }

    def fill(self, leaves: list[Any]) -> None:
        """Copy a batch in; its shapes and strides are those of the first batch."""
        for index, (static, leaf) in enumerate(zip(self._written, leaves, strict=True)):
            if static is None or self.leaves[index] is leaf:
                continue
            if index in self._staged:
                self._staged[index].copy(unexpanded(leaf), static)
            else:
                static.copy_(unexpanded(leaf).detach(), non_blocking=True)


class _Memory:
    """The memory of the static tensors of one call: tensors that begin at one address share memory."""

    def __init__(self, leaves: list[Any], device: torch.device) -> None:
        self._device = device
        tensors = {id(leaf): unexpanded(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor)}.values()
        self._spans: dict[tuple[Any, ...], int] = {}
        count = collections.Counter(map(self._begin, tensors))
        for tensor in tensors:
            if (begin := self._begin(tensor)) and count[begin] > 1 and self._keeps_strides(tensor):
                self._spans[begin] = max(span_of(tensor), self._spans.get(begin, 0))
        self._made: dict[tuple[Any, ...], torch.Tensor] = {}

    def static(self, leaf: torch.Tensor) -> torch.Tensor:
        """Return memory for a tensor, each element once; the caller expands it as the tensor is expanded.

        It has the tensor's strides, since compiled code is made for them (``tokens[:, :-1]``). A tensor that overlaps,
        or is spread thinly over a large memory, gets the strides of a copy that torch makes.
        """
        where = self._device if leaf.device.type == "cpu" else leaf.device
        base = unexpanded(leaf)
        begin, keeps = self._begin(base), self._keeps_strides(base)
        if begin not in self._spans or not keeps:
            strides = base.stride() if keeps else torch.empty_like(base, device="meta").stride()
            return torch.empty_strided(base.shape, strides, dtype=leaf.dtype, device=where)
        if begin not in self._made:
            self._made[begin] = torch.empty(self._spans[begin], dtype=leaf.dtype, device=where)
        return self._made[begin].as_strided(base.shape, base.stride())

    @staticmethod
    def _begin(tensor: torch.Tensor) -> tuple[Any, ...]:
        """Return address, dtype and device of a tensor's memory; empty if it has no address."""
        at = view_of(tensor)
        return (at[0], tensor.dtype, tensor.device) if at and at[0] else ()

    @staticmethod
    def _keeps_strides(leaf: torch.Tensor) -> bool:
        # With its strides a buffer may take twice the memory of its elements, and 16 MiB more.
        small = span_of(leaf) * leaf.element_size() <= 2 * leaf.nbytes + 2**24
        return leaf.numel() > 0 and small and not overlaps(leaf)


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
    ``logit_scale.clamp_()`` does, means the parameter. A view of such a tensor stays a view of it. Results that share
    memory share it after a replay, too.

    A caller may clip a returned gradient, and means the gradient; a caller that keeps it keeps its values. So each
    replay makes a new tensor, for the caller and as the parameter's gradient.

    Args:
        result: what the step returned while it was recorded.
        program: the program of the step.
        arguments: the recording's own copies of the arguments.
        made: the gradients that the recording makes, by the number of their parameter.
        left_alone: the numbers of the parameters whose gradients were there before and are left alone.
        on_host: the numbers of the results that eager makes on the host, from arguments that are there.

    Attributes:
        gradients: the numbers of the parameters whose gradients share memory with a result.

    Raises:
        RuntimeError: a result is a part of a gradient that is left alone: another tensor may be there at a replay.
    """

    def __init__(  # noqa: PLR0913, PLR0917 - the result, and everything that it may be a part of
        self,
        result: Any,
        program: Program,
        arguments: Sequence[Any],
        made: Mapping[int, torch.Tensor],
        left_alone: Sequence[int],
        on_host: Collection[int],
    ) -> None:
        leaves, self._structure = flatten(result)
        self._parameters = list(program.holdings.parameters().values())
        addresses = {_address(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor)} - {0}
        self.gradients = [index for index, gradient in made.items() if _address(gradient) in addresses]
        own = list(program.holdings.objects().values())
        self._makers = _makers([*leaves, *(made[index] for index in self.gradients)], own, arguments)
        for index in left_alone:
            parameter = self._parameters[index]
            gradient = parameter.grad
            if gradient is None or _address(gradient) not in addresses:
                continue
            for number, leaf in enumerate(leaves):
                if leaf is gradient:
                    self._makers[number] = functools.partial(getattr, parameter, "grad")
                elif isinstance(leaf, torch.Tensor) and _address(leaf) == _address(gradient):
                    raise RuntimeError("the step returns a part of a gradient that was there before it")
        for number, leaf in enumerate(leaves):
            make = self._makers[number]
            on_device = isinstance(leaf, torch.Tensor) and leaf.device.type != "cpu"
            if on_device and number in on_host and not isinstance(make, int):
                self._makers[number] = functools.partial(_on_host, make)

    def make(self, arguments: Sequence[Any]) -> Any:
        """Return the results of the last replay, and set the gradients that share memory with them.

        Args:
            arguments: the call's own. A result that is an argument is returned itself, on its own device.
        """
        made = [arguments[make] if isinstance(make, int) else make() for make in self._makers]
        first = len(made) - len(self.gradients)
        for index, gradient in zip(self.gradients, made[first:], strict=True):
            self._parameters[index].grad = gradient
        return unflatten(self._structure, made[:first])


def _makers(leaves: Sequence[Any], own: Sequence[torch.Tensor], arguments: Sequence[Any]) -> list[Maker]:
    """Return what makes each result after a replay, as `Results` says."""
    own_ids, own_addresses = {id(tensor) for tensor in own}, {_address(tensor) for tensor in own} - {0}
    numbers = {id(leaf): number for number, leaf in enumerate(arguments) if isinstance(leaf, torch.Tensor)}
    uses = collections.Counter(_address(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor))
    copies: dict[int, _SharedCopy] = {}
    makers: list[Maker] = []
    for leaf in leaves:
        if id(leaf) in numbers:
            makers.append(numbers[id(leaf)])
        elif not isinstance(leaf, torch.Tensor) or id(leaf) in own_ids:
            makers.append(functools.partial(_itself, leaf))
        else:
            # Detached: a graph that a result kept alive would tie other steps to the stream of this recording.
            result, address = leaf.detach(), _address(leaf)
            if address in own_addresses:
                makers.append(result.detach)
            elif address and uses[address] > 1:
                makers.append(copies.setdefault(address, _SharedCopy()).part(result))
            else:
                makers.append(result.clone)
    return makers


class _SharedCopy:
    """Memory that several results share. It is copied once a replay, so that they share memory again."""

    def __init__(self) -> None:
        self._parts = 0
        self._copy: torch.UntypedStorage | None = None

    def part(self, tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Return what makes one part after a replay. Parts are made in the order in which they were added."""
        number = self._parts
        self._parts += 1

        def make() -> torch.Tensor:
            if number == 0 or self._copy is None:
                self._copy = tensor.untyped_storage().clone()  # type: ignore[no-untyped-call]
            copy = tensor.new_empty(0).set_(self._copy, tensor.storage_offset(), tensor.shape, tensor.stride())
            if number == self._parts - 1:
                self._copy = None  # from here on only the caller holds it
            return copy

        return make


def _itself(value: Any) -> Any:
    return value


def _on_host(make: Callable[[], torch.Tensor]) -> torch.Tensor:
    return make().cpu()


def _address(tensor: torch.Tensor) -> int:
    """Return where a tensor's storage begins; 0 if it has none of its own."""
    tensor = shard_of(tensor)
    return tensor.untyped_storage().data_ptr() if tensor.layout == torch.strided else 0
