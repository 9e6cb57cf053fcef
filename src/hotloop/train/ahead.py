"""Prefetching: while a step runs, the next batch is read, and copied to the GPU on a stream of its own.

`CopiedAhead` copies the next batch to the GPU. `read_ahead` reads it from memory or disk in a thread.
"""

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
    """A CUDA stream for copies. The GPU runs its work beside the steps, which have the current stream.

    Args:
        device: the GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream = device, torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def run(self, act: Callable[[], T]) -> T:
        """Call a function whose GPU work goes to the copy stream, and return its result.

        The copy stream first waits for the work that the steps have queued. They may still read memory which Python has
        freed, and the copy may be given this memory.
        """
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            return act()

    def join(self) -> None:
        """Make the steps wait, on the GPU, until all copies that were queued so far are done."""
        torch.cuda.current_stream(self._device).wait_stream(self._stream)


def copy_stream(device: torch.device) -> CopyStream | None:
    """Return a stream for copies to a GPU; None for any other device, where batches are copied when they come."""
    return CopyStream(device) if device.type == "cuda" else None


class CopiedAhead(Generic[S, T]):
    """An iterable of batches on the GPU. Each batch is copied there while the step before it runs.

    The next batch is read before the step begins, never during the step. So random numbers are drawn in a fixed order,
    and a resumed run can repeat it.

    Args:
        source: yields batches.
        copy: copies a batch to the GPU.
        stream: runs the copies.
        before: called before each batch is read.
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
            self._stream.join()  # now, so that the step waits for its own batch and not for the copy of the next one
            self.fetch()
            yield self._ahead.popleft()

    def fetch(self) -> None:
        """Read the next batch, if the source has another, and queue its copy."""
        self._before()
        self._ahead.extend(self._stream.run(lambda: [self._copy(one) for one in itertools.islice(self._source, 1)]))


def read_ahead(read: Callable[[S], T], items: Iterable[S]) -> Iterator[T]:
    """Read each item in a thread, and yield the results in order; the thread is one item ahead.

    Args:
        read: reads an item. It must draw no random numbers: the thread runs beside steps, which may draw some too.
        items: what to read.
    """
    left = iter(items)
    with ThreadPoolExecutor(1) as pool:
        ahead = deque(pool.submit(read, one) for one in itertools.islice(left, 1))
        while ahead:
            found = ahead.popleft().result()
            ahead.extend(pool.submit(read, one) for one in itertools.islice(left, 1))
            yield found
