"""What records a step and replays it, as the rooms of `step` see it; implementations are in `capture.engines`."""

from __future__ import annotations

import contextlib
import gc
import threading
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import torch


class Segment(Protocol):
    """A recorded part of a step."""

    def replay(self) -> None:
        """Run it again, on what its tensors hold now."""


class Recording(Protocol):
    """A step that is being recorded; everything recorded has been executed once its segment has ended.

    Attributes:
        replay_seconds: what its segments took to execute, recording them apart; None where that cannot be told.
    """

    replay_seconds: float | None

    def cut(self) -> Segment:
        """End the current segment."""

    def resume(self) -> None:
        """Begin a new segment."""

    def abandon(self) -> None:
        """Give the recording up, in whatever state it is, and close it."""

    def close(self) -> None:
        """Leave the recording, after the last segment has ended."""


class Engine(Protocol):
    """Records steps on the devices of one type.

    Attributes:
        name: what messages call it.
        kernels: whether what a compiler's own kernels do is recorded as well.
        launches: whether a segment is one launch, which fails before anything of it has run or not at all.
    """

    name: str
    kernels: bool
    launches: bool

    def begin(self, device: torch.device, *, reports_capturing: bool) -> Recording:
        """Begin to record; the first segment is open, and code that asks for a capture hears what it is told."""

    def ambience(
        self, device: torch.device, *, reports_capturing: bool, asked: Callable[[], None] | None = None
    ) -> contextlib.AbstractContextManager[None]:
        """Run an eager step on the path that a recording will take: stream, and code that looks for a capture."""

    def reference_stream(self, device: torch.device) -> contextlib.AbstractContextManager[None]:
        """Run an eager step on the stream of recordings, and no more."""


_collector_lock = threading.Lock()


_collector_was_on: list[bool] = []
"""For each block under way, whether Python's collector was on when it began."""


@contextlib.contextmanager
def collector_paused() -> Iterator[None]:
    """Keep Python's collector away while the block runs.

    In a recording it would free what belongs to others: graphs, events, pinned memory. Around a proof, which makes
    thousands of differences, it would go through all that the program has imported, two or three times: a fifth of
    what the preparation of a UNet takes on a CPU.
    """
    with _collector_lock:
        _collector_was_on.append(gc.isenabled())
        gc.disable()
    try:
        yield
    finally:
        with _collector_lock:  # another thread's recording may have begun meanwhile
            if len(_collector_was_on) == 1 and _collector_was_on[0]:
                gc.enable()
            _collector_was_on.pop()
