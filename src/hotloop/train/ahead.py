"""One batch ahead: the next batch is read, and copied to the GPU on a stream of its own, while a step runs."""

from __future__ import annotations

import itertools
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Generic, TypeVar

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

S = TypeVar("S")
T = TypeVar("T")


class CopyStream:
    """A stream of a GPU beside that of the steps."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream = device, torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def run(self, act: Callable[[], T]) -> T:
        """Do something on this stream, behind what the steps' stream was given so far: memory freed there is free."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            return act()

    def join(self) -> None:
        """Let the steps' stream wait for what this one was given so far."""
        torch.cuda.current_stream(self._device).wait_stream(self._stream)


def copy_stream(device: torch.device) -> CopyStream | None:
    """Return a stream for copies to a device; None where there are none, as on a CPU."""
    return CopyStream(device) if device.type == "cuda" else None


class CopiedAhead(Generic[S, T]):
    """Batches as they were copied, each while the step before it ran.

    Random numbers are drawn in one order, since the next batch is read before the step begins, and not beside it.

    Args:
        source: the batches.
        copy: copies one.
        stream: where.
        before: is called before each is read.
    """

    def __init__(
        self,
        source: Iterator[S],
        copy: Callable[[S], T],
        stream: CopyStream,
        before: Callable[[], object] = lambda: None,
    ) -> None:
        self._source, self._copy, self._stream, self._before = source, copy, stream, before
        self._ahead: deque[T] = deque()

    def __iter__(self) -> Iterator[T]:
        if not self._ahead:
            self.fetch()
        while self._ahead:
            self._stream.join()  # before the next copy begins, for which the step need not wait
            self.fetch()
            yield self._ahead.popleft()

    def fetch(self) -> None:
        """Read the next batch, if there is one, and begin its copy."""
        self._before()
        self._ahead.extend(self._stream.run(lambda: [self._copy(one) for one in itertools.islice(self._source, 1)]))


def read_ahead(read: Callable[[S], T], items: Iterable[S]) -> Iterator[T]:
    """Yield what is read of each item; a thread reads the next one meanwhile, so that reading may draw nothing."""
    left = iter(items)
    with ThreadPoolExecutor(1) as pool:
        ahead = deque(pool.submit(read, one) for one in itertools.islice(left, 1))
        while ahead:
            found = ahead.popleft().result()
            ahead.extend(pool.submit(read, one) for one in itertools.islice(left, 1))
            yield found
