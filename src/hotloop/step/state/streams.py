"""Where a step goes back in its random stream, as a checkpointed block does to draw its dropout again.

An eager run of the step tells where: it notes each time that the random state is read or set. A recording then makes
the same calls in the same order. It gets the states that were noted, and draws on from another stream wherever the step
has gone back. Nobody can read where a stream is while a step is captured, nor set it.
"""

from __future__ import annotations

import contextlib
import dataclasses
from typing import TYPE_CHECKING

from hotloop._torch.rng_calls import content, position, rng_calls, state_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import torch

OWN = 0
"""The stream that a step begins on, and that the next step goes on with."""


@dataclasses.dataclass(frozen=True)
class Call:
    """A call that read the random state; or one that set it: to what an earlier call, ``source``, had read.

    From there on the step draws from ``stream``; the number is -1 for a read.
    """

    state: bytes
    source: int = -1
    stream: int = -1


class Streams:
    """The streams that a step draws from, by what an eager run of it reads and sets.

    Args:
        device: the device on which the step draws.
        stranger: called where the run sets a state that it has not read: a recording could not do that.

    Attributes:
        begin: where the run began.
        starts: where each stream but its own began.
        calls: what was read and set, in order.
    """

    def __init__(self, device: torch.device, stranger: Callable[[], None] | None = None) -> None:
        self._device, self._stranger = device, stranger
        self.begin = position(device)
        self.starts: list[bytes] = []
        self.calls: list[Call] = []
        self._read_by: dict[bytes, int] = {}
        self._now, self._left_at = OWN, {OWN: self.begin}
        """The stream in use, and where each was left."""

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Note what the block reads and sets."""
        with rng_calls(self._device, self._read, self._set):
            yield

    def _read(self, real: Callable[[], torch.Tensor]) -> torch.Tensor:
        state = real()
        self._read_by[content(state)] = len(self.calls)
        self.calls.append(Call(content(state)))
        return state

    def _set(self, real: Callable[[torch.Tensor], None], state: torch.Tensor) -> None:
        wanted, self._left_at[self._now] = content(state), position(self._device)
        if wanted not in self._read_by and self._stranger is not None:
            self._stranger()
        # A stream that stands there is taken up again: its own first, else it would end somewhere else than eager's.
        standing = (number for number in (OWN, self._now, *self._left_at) if self._left_at[number] == wanted)
        self._now = next(standing, len(self._left_at))
        if self._now not in self._left_at:
            self.starts.append(wanted)
        self._left_at[self._now] = wanted
        self.calls.append(Call(wanted, self._read_by.get(wanted, -1), self._now))
        real(state)


class Repeated:
    """The calls of a recording, which must be those that were noted."""

    def __init__(self, streams: Streams) -> None:
        self._calls = streams.calls
        self._done = 0

    def read(self) -> tuple[int, torch.Tensor]:
        """Return the number of the coming call, which reads, and the state that it gets."""
        call = self._next()
        if call is None or call.stream >= 0:
            raise _otherwise()
        return self._done - 1, state_of(call.state)

    def set(self, state: torch.Tensor) -> Call:
        """Return the coming call, which sets the state."""
        call = self._next()
        if call is None or call.source < 0 or content(state) != call.state:
            raise _otherwise()
        return call

    def _next(self) -> Call | None:
        self._done += 1
        return self._calls[self._done - 1] if self._done <= len(self._calls) else None


def _otherwise() -> RuntimeError:
    return RuntimeError("the step reads and sets the random state otherwise than in the step before it was captured")
