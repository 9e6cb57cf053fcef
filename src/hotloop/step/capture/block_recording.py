"""One block of a model, recorded forward and backward, and replayed as one node of the program's autograd graph."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.function import once_differentiable

from hotloop._torch.dispatch import host_read, observing, tensors_in, written_by
from hotloop._torch.foreach import copies, copy_all
from hotloop._torch.hooks import hooks_of_gradients
from hotloop._torch.module import eager_call
from hotloop._torch.places import write
from hotloop._torch.random_state import CPU, NUMPY, PYTHON, RandomState
from hotloop.measure import flatten, unflatten
from hotloop.step.capture.recording import own_autocast_cache

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from hotloop.step.engine import Engine, Segment

PLAIN = (type(None), bool, int, float, str, torch.dtype, torch.device)
"""Types of arguments and results that are no tensors: a recording holds their values."""


_TENSOR: Any = object()
"""In place of a tensor among a block's results."""


class NotRecordedError(Exception):
    """A block does what no recording of it alone can repeat."""


class BlockRecording:
    """A recorded call of a block.

    Args:
        block: the block.
        engine: records it; no other recording may use its memory pool, since others run between forward and backward.
        device: where the block runs.
        call: the leaves of the call's arguments, and their structure.
        known: tensors that the block may read beside its arguments: all parameters and buffers.

    Attributes:
        waits: the forward was replayed, and its backward was not.
        inputs: the number of its tensor arguments.

    Raises:
        NotRecordedError: the block does what a recording cannot repeat.
        Exception: what the block or the engine raised. The block's buffers and the random streams are as before.
    """

    def __init__(
        self,
        block: torch.nn.Module,
        engine: Engine,
        device: torch.device,
        call: tuple[list[Any], Any],
        known: Iterable[torch.Tensor],
    ) -> None:
        self.waits = False
        self._replays = 0
        """Forwards so far: a backward is told of which one it is."""
        leaves, structure = call
        self._places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        given = [leaves[place] for place in self._places]
        self._inputs = [one.detach().clone().requires_grad_(one.requires_grad) for one in given]
        self.inputs, static = len(given), list(leaves)
        for place, own in zip(self._places, self._inputs, strict=True):
            static[place] = own
        self._parameters = [one for one in block.parameters() if one.requires_grad]
        if hooks_of_gradients(self._parameters):
            raise NotRecordedError("a parameter has a gradient hook, which a replay would call twice")
        watch = _OperationWatch(self._inputs, list(block.buffers()), known)
        with _put_back(block, device), observing(watch.operation), own_autocast_cache(compiled=False):
            self._record(block, engine, device, unflatten(structure, static))

    def _record(self, block: torch.nn.Module, engine: Engine, device: torch.device, arguments: Any) -> None:
        recording = engine.begin(device, reports_capturing=False)
        try:
            result = eager_call(block, *arguments[0], **arguments[1])
            self._forward: Segment = recording.cut()
            self._results, self._structure = flatten(result)
            self._outputs = _tensors_of(self._results)
            trained = [one for one in self._outputs if one.requires_grad]
            self._grad_outputs = [torch.zeros_like(one) for one in trained]
            sources = [one for one in (*self._inputs, *self._parameters) if one.requires_grad]
            recording.resume()
            found = iter(torch.autograd.grad(trained, sources, self._grad_outputs, allow_unused=True))
            self._backward: Segment = recording.cut()
        except BaseException:
            recording.abandon()
            raise
        recording.close()
        asked = [one.requires_grad for one in (*self._inputs, *self._parameters)]
        self._gradients = [next(found) if one else None for one in asked]
        self._trained = [one.requires_grad for one in self._outputs]
        # The graph of the recorded run is used up; its outputs are memory that replays write into.
        self._outputs = [one.detach() for one in self._outputs]
        self._results = [_TENSOR if isinstance(leaf, torch.Tensor) else leaf for leaf in self._results]

    def run(self, leaves: Sequence[Any]) -> Any:
        """Replay the forward on a call's arguments; return the block's result, in tensors of its own."""
        self.waits = True
        self._replays += 1
        given = [leaves[place] for place in self._places]
        made = iter(_Replayed.apply(self, self._replays, *given, *self._parameters))  # type: ignore[no-untyped-call]
        results = [next(made) if leaf is _TENSOR else leaf for leaf in self._results]
        return unflatten(self._structure, results)

    def forward(self, given: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Replay the forward; return copies of what it made."""
        copy_all([one.detach() for one in self._inputs], [one.detach() for one in given])
        self._forward.replay()
        return copies(self._outputs)

    def untrained(self, made: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return those of the outputs that carry no gradient."""
        return [one for one, trained in zip(made, self._trained, strict=True) if not trained]

    def backward(self, replay: int, gradients: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
        """Replay the backward; return copies of the gradients of arguments and parameters.

        Raises:
            RuntimeError: the forward ran again since, or its backward has run: what it saved is overwritten.
        """
        if replay != self._replays or not self.waits:
            raise RuntimeError("a captured block is to go backward a second time through one call, which it cannot")
        trained = [one for one, is_trained in zip(gradients, self._trained, strict=True) if is_trained]
        copy_all(self._grad_outputs, trained)
        self._backward.replay()
        self.waits = False
        made = iter(copies([one for one in self._gradients if one is not None]))
        return [None if one is None else next(made) for one in self._gradients]


class _Replayed(torch.autograd.Function):
    """A replayed block: forward and backward are one launch each."""

    @staticmethod
    def forward(ctx: Any, recording: BlockRecording, replay: int, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.recording, ctx.replay = recording, replay
        made = recording.forward(tensors[: recording.inputs])
        ctx.mark_non_differentiable(*recording.untrained(made))
        return tuple(made)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        return None, None, *ctx.recording.backward(ctx.replay, gradients)


def _tensors_of(results: Sequence[Any]) -> list[torch.Tensor]:
    if not all(isinstance(leaf, (torch.Tensor, *PLAIN)) for leaf in results):
        raise NotRecordedError("it returns an object that is no tensor")
    return [leaf for leaf in results if isinstance(leaf, torch.Tensor)]


@contextlib.contextmanager
def _put_back(block: torch.nn.Module, device: torch.device) -> Iterator[None]:
    """Put back random streams, and the buffers of a block, once the block of code has run.

    Raises:
        NotRecordedError: it drew random numbers on the host, which no replay would draw.
    """
    buffers, before = list(block.buffers()), RandomState([device])
    kept = copies(buffers)
    try:
        yield
        hosts = {PYTHON, NUMPY} if device.type == "cpu" else {PYTHON, NUMPY, CPU}
        if drawn := hosts & set(RandomState([device]).moved_since(before)):
            raise NotRecordedError(f"it draws from {drawn.pop()}")
    finally:
        write(buffers, kept)
        before.restore()


class _OperationWatch:
    """Raises where an operation of a block reads or writes what a recording of the block cannot follow."""

    def __init__(
        self, inputs: Iterable[torch.Tensor], buffers: Iterable[torch.Tensor], known: Iterable[torch.Tensor]
    ) -> None:
        self._writable = {_memory(one) for one in buffers}
        self._readable = {_memory(one) for one in (*inputs, *known)} | self._writable

    def operation(self, operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation, and look at what it reads and writes."""
        if why := host_read(operation, args):
            raise NotRecordedError(why)
        if any(_memory(one) not in self._readable for one in tensors_in(*args, *kwargs.values()) if one.numel()):
            raise NotRecordedError("it reads a tensor that is no argument, parameter or buffer")
        if any(_memory(one) not in self._writable for one in written_by(operation, args, kwargs) if one.numel()):
            raise NotRecordedError("it writes into a tensor that is not its own")
        result = operation(*args, **kwargs)
        fresh = {_memory(one) for one in tensors_in(result)} - self._readable
        self._readable |= fresh
        self._writable |= fresh
        return result


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr() if tensor.layout == torch.strided else id(tensor)
