"""The interface of engines, which record a step and replay it; the implementations are in `capture.engines`."""

from __future__ import annotations

import contextlib
import gc
import threading
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import torch

    from hotloop.step.state.streams import Streams


class Segment(Protocol):
    """A recorded part of a step."""

    def replay(self) -> None:
        """Run it again, on the values that its tensors hold now."""


class Recording(Protocol):
    """A step that is being recorded; everything recorded has been executed once its segment has ended.

    Attributes:
        replay_seconds: how long its segments took to execute, without the recording; None if that is unknown.
    """

    replay_seconds: float | None

    def cut(self, ready: Callable[[], None]) -> Segment:
        """End the current segment.

        Args:
            ready: called once it is recorded, before a GPU executes it; raises where another process has no recording.
        """

    def resume(self) -> None:
        """Begin a new segment."""

    def abandon(self) -> None:
        """Abandon the recording, in whatever state it is, and close it."""

    def close(self) -> None:
        """Leave the recording, after the last segment has ended."""


class Engine(Protocol):
    """A recorder of steps on the devices of one type.

    Attributes:
        name: the name in messages.
        kernels: whether kernels that a compiler generated are recorded as well.
        launches: whether a segment is a single launch, which fails before any of it has run or not at all.
    """

    name: str
    kernels: bool
    launches: bool

    @property
    def pool_bytes(self) -> int:
        """Device memory that recordings have taken."""

    @property
    def idle_bytes(self) -> int:
        """The part of `pool_bytes` that is idle between two replays, and that no other code can use."""

    @property
    def shares(self) -> bool:
        """Whether steps beside a recording use its memory, which is idle between two replays."""

    def look(self) -> None:
        """Look at what lies in that memory now, so that the next step in it need not."""

    def overwrites(self) -> bool:
        """Return whether a replay would overwrite what a step beside it has left, and nobody moved out."""

    def begin(self, device: torch.device, streams: Streams, *, reports_capturing: bool) -> Recording:
        """Begin to record; the first segment is open.

        Args:
            device: the device of the step.
            streams: the random streams that an eager run of the step drew from.
            reports_capturing: the value that ``torch.cuda.is_current_stream_capturing()`` reports to the step.
        """

    def ambience(
        self, device: torch.device, *, reports_capturing: bool, asked: Callable[[], None] | None = None
    ) -> contextlib.AbstractContextManager[None]:
        """Run an eager step on the path that a recording will take: its stream, and the same report of a capture.

        ``asked`` is called when code outside torch asks whether a capture is going on.
        """

    def reference_stream(self, device: torch.device) -> contextlib.AbstractContextManager[None]:
        """Run an eager step on the stream of recordings, and change nothing else."""

    def beside(self, device: torch.device) -> contextlib.AbstractContextManager[None]:
        """Run an eager step on the stream of recordings, in their memory if there are any.

        Nothing that lies there outlives the next replay: `Holdings.keep_outside` moves what the program keeps.
        """


_collector_lock = threading.Lock()
_collector_was_on: list[bool] = []
"""For each block in progress, whether Python's garbage collector was on when the block began."""


@contextlib.contextmanager
def collector_paused() -> Iterator[None]:
    """Pause Python's garbage collector while the block runs.

    In a recording the collector would free objects of others: graphs, events, pinned memory. During a proof, which
    creates thousands of measurements, it would scan everything the program has imported two or three times: a fifth of
    the time that preparing a UNet takes on a CPU.
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
