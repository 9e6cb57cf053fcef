"""The random streams of a recording on a GPU: where the step goes back, the graph draws from a generator of its own.

Before a replay these generators are set to where an eager step would go back to: as far from the step's begin as in the
eager step that was watched.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from hotloop._torch.rng_calls import index_of, rng_calls
from hotloop.step.state.streams import OWN, Repeated, Streams

if TYPE_CHECKING:
    import contextlib
    from collections.abc import Callable

_SEED = 8
"""Bytes of a GPU's random state that hold the seed; the offset comes after them."""


class DeviceStreams:
    """The streams of one recording, all of whose segments share them.

    Attributes:
        now: the stream that the step draws from while it is recorded.
    """

    def __init__(self, streams: Streams, device: torch.device) -> None:
        self._device, self._calls, self.now = device, Repeated(streams), OWN
        self._default = torch.cuda.default_generators[index_of(device)]
        # Shares the default generator's stream: set by it, cuDNN's dropout is not seeded anew (see `put_back`).
        self._own = self._default.graphsafe_get_state()
        if any(start[:_SEED] != streams.begin[:_SEED] for start in streams.starts):
            raise RuntimeError("the step draws by another seed than it began with")
        self._distances = [_offset(start) - _offset(streams.begin) for start in streams.starts]
        self._others = [self._default.clone_state() for _ in streams.starts]

    def served(self) -> contextlib.AbstractContextManager[None]:
        """Let the step read and set the random state in the block, which is captured."""
        return rng_calls(self._device, self._read, self._set, forbidden=True)

    def register(self, graph: torch.cuda.CUDAGraph) -> None:
        """Let a graph that is about to be captured draw from these streams.

        Raises:
            RuntimeError: what ran before, outside of a recording, may have moved a stream that the step had gone to.
        """
        if self.now != OWN:
            raise RuntimeError("an optimizer outside of the recording steps while the step's random state is set back")
        for generator in self._others:
            graph.register_generator_state(generator)

    def _read(self, _real: Callable[[], torch.Tensor]) -> torch.Tensor:
        return self._calls.read()[1]

    def _set(self, _real: Callable[[torch.Tensor], None], state: torch.Tensor) -> None:
        self.now = self._calls.set(state).stream
        self._default.graphsafe_set_state((self._own, *self._others)[self.now])

    def leave(self) -> None:
        """Give the default generator its own stream back."""
        self._default.graphsafe_set_state(self._own)

    def segment(self, graph: torch.cuda.CUDAGraph, *, first: bool) -> Segment:
        """Return a segment that has been captured, which replays with these streams."""
        return Segment(graph, self, first=first)

    def rewind(self) -> None:
        """Set the streams for the step that begins now."""
        seed, offset = self._own.initial_seed(), self._own.get_offset()
        for generator, distance in zip(self._others, self._distances, strict=True):
            if generator.initial_seed() != seed:
                generator.manual_seed(seed)
            generator.set_offset(offset + distance)

    def end_on(self, stream: int) -> None:
        """Let the next step go on from where the replayed one has ended: after ``fork_rng`` on another stream."""
        if stream != OWN:
            self._own.set_offset(self._others[stream - 1].get_offset())


class Segment:
    """A captured graph that draws from several streams."""

    def __init__(self, graph: torch.cuda.CUDAGraph, streams: DeviceStreams, *, first: bool) -> None:
        self._graph, self._streams, self._first, self._end = graph, streams, first, streams.now

    def replay(self) -> None:
        """Replay the graph."""
        if self._first:
            self._streams.rewind()
        self._graph.replay()
        self._streams.end_on(self._end)


def _offset(state: bytes) -> int:
    return int.from_bytes(state[_SEED:], "little", signed=True)
