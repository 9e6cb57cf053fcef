"""What records a step and replays it: `torch.cuda.CUDAGraph` on a GPU; on a CPU nothing, or the stand-in of the tests.

A recording is a list of segments. It can be cut: what is recorded so far is executed, something runs outside (an
optimizer that cannot be captured), and a new segment begins.
"""

from __future__ import annotations

import contextlib
import gc
import inspect
import os
import threading
import time
import warnings
import weakref
from typing import TYPE_CHECKING, Any

import torch

from hotloop._torch.capture import recover_from_failed_capture, stale_streams_overridden
from hotloop._torch.thread_patch import replaced
from hotloop.step.engine import Engine, Recording, Segment, collector_paused

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


_EMPTY = ".*CUDA Graph is empty.*"
"""torch's warning about a segment without work: the end of a step after its optimizer, say."""


class CudaEngine:
    """Records into CUDA graphs on a side stream; all graphs of the engine share one memory pool.

    Sharing is safe though steps are replayed in any order: what a replay leaves for later is copied out at once
    (results), or is kept alive while later steps are recorded (gradients), so its memory is given to none of them.
    """

    name = "cuda"
    kernels = True
    launches = True

    def __init__(self) -> None:
        self._pool: _Pool | None = None

    def begin(self, device: torch.device, *, reports_capturing: bool) -> Recording:
        """Begin to record on a side stream, behind what the current one still has to do."""
        if self._pool is None or not self._pool.usable:
            self._pool = _Pool(torch.cuda.graph_pool_handle())
        return _CudaRecording(self._pool, _side_stream(device), reports_capturing=reports_capturing)

    @contextlib.contextmanager
    def ambience(
        self, device: torch.device, *, reports_capturing: bool, asked: Callable[[], None] | None = None
    ) -> Iterator[None]:
        """Run on the side stream; libraries set up what they need there."""
        with self.reference_stream(device), reporting_capture(reports_capturing, asked):
            yield

    @contextlib.contextmanager
    def reference_stream(self, device: torch.device) -> Iterator[None]:
        """Run on the side stream: what the step leaves behind of its graph belongs to the stream of recordings."""
        side, current = _side_stream(device), torch.cuda.current_stream(device)
        # What is allocated here is used on the current stream later; the side stream waits for that one before it goes
        # on, so no memory is given away too early.
        side.wait_stream(current)
        try:
            with torch.cuda.stream(side):
                yield
        finally:
            current.wait_stream(side)


class _Sides(threading.local):
    """The side streams of one thread, by device."""

    def __init__(self) -> None:
        self.streams: dict[int, torch.cuda.Stream] = {}


_sides = _Sides()


def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """Give the stream that this thread records on, for all its loops: cuBLAS keeps 64 MiB for every stream it sees."""
    index = torch.cuda.current_device() if device.index is None else device.index
    if index not in _sides.streams:
        _sides.streams[index] = torch.cuda.Stream(index)  # type: ignore[no-untyped-call]
    return _sides.streams[index]


class _Pool:
    """A memory pool that recordings share.

    torch drops a pool with the last graph in it, and captures nothing into it from then on; nor after a failure.
    """

    def __init__(self, handle: Any) -> None:
        self.handle = handle
        self.failed = False
        self._graphs: weakref.WeakSet[torch.cuda.CUDAGraph] = weakref.WeakSet()
        self._used = False

    @property
    def usable(self) -> bool:
        return not self.failed and (not self._used or len(self._graphs) > 0)

    def add(self, graph: torch.cuda.CUDAGraph) -> None:
        self._used = True
        self._graphs.add(graph)


class _CudaRecording:
    def __init__(self, pool: _Pool, side: torch.cuda.Stream, *, reports_capturing: bool) -> None:
        self.replay_seconds: float | None = None
        self._pool, self._side = pool, side
        self._stack = contextlib.ExitStack()
        self._graph: torch.cuda.CUDAGraph | None = None
        self._current = torch.cuda.current_stream(side.device)
        torch.cuda.synchronize(side.device)
        free, total = torch.cuda.mem_get_info(side.device)
        # A recording has memory of its own, and cannot use what was cached outside, nor what garbage holds. Where all
        # that was ever taken fits in a second time there is no need: to collect takes up to a second, and to give back
        # and take again a quarter of one, for a UNet.
        if free < total / 2:
            gc.collect()
            torch.cuda.empty_cache()
        side.wait_stream(self._current)
        self._stack.enter_context(torch.cuda.stream(side))
        self._stack.enter_context(capture_safe_random())
        self._stack.enter_context(reporting_capture(reports_capturing))
        self._stack.enter_context(stale_streams_overridden())
        self._stack.enter_context(collector_paused())
        try:
            self.resume()
        except BaseException:
            self.abandon()
            raise

    def resume(self) -> None:
        self._graph = torch.cuda.CUDAGraph()
        # Only this thread's forbidden calls end the capture: a data loader's thread may go on pinning memory.
        self._graph.capture_begin(pool=self._pool.handle, capture_error_mode="thread_local")

    def cut(self) -> Segment:
        graph = self._graph
        assert graph is not None
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=_EMPTY)
            graph.capture_end()
        self._graph = None  # from here on there is nothing to recover from
        self._pool.add(graph)
        torch.cuda.synchronize(self._side.device)
        began = time.perf_counter()
        graph.replay()
        torch.cuda.synchronize(self._side.device)
        self.replay_seconds = (self.replay_seconds or 0.0) + time.perf_counter() - began
        return graph

    def abandon(self) -> None:
        graph, self._graph = self._graph, None
        try:
            if graph is not None:
                self._pool.failed = True
                with warnings.catch_warnings():
                    warnings.filterwarnings("ignore", message=_EMPTY)
                    recover_from_failed_capture(graph, self._side, self._pool.handle)
        finally:
            self.close()

    def close(self) -> None:
        """Go back to the stream that the step was called on."""
        self._stack.close()
        self._current.wait_stream(self._side)


def reporting_capture(
    answer: bool,
    asked: Callable[[], None] | None = None,
) -> contextlib.AbstractContextManager[None]:
    """Have code that asks whether a capture is going on hear the same in a recording and in the runs around it.

    transformers' masks take another path where they hear yes, with other attention kernels. So a recording of eager
    code says no, where the step's usual path may be captured: it then is that path, kernel by kernel. Where it may not
    (a mask is read on the host), all hear yes. Code compiled on one path would be compiled anew in the capture of the
    other, and kill it; it is guarded on the very function that it asked.

    An optimizer that asks hears the truth: those of torch 2.11 refuse to step in a capture unless they are capturable,
    which they are made for the time of a recording only, and one that steps outside of it is in none. So does all of
    torch where the answer would be no: it must not take a path that a capture forbids.

    Args:
        answer: what code hears.
        asked: called when code outside torch has asked.
    """

    def make(real: Callable[[], bool]) -> Callable[[], bool]:
        def answers() -> bool:
            by_torch = _torch_asks()
            if asked is not None and not by_torch:
                asked()
            return real() if _an_optimizer_asks() or (by_torch and not answer) else answer

        return answers

    return replaced(torch.cuda, "is_current_stream_capturing", make, constant=True)


def traced_path(device: torch.device) -> contextlib.AbstractContextManager[None]:
    """Run eager code as it is while it is compiled: there, too, transformers takes the path that looks at no mask.

    The two paths may have other attention kernels, which draw other dropout masks: then nothing could be compared.
    """
    return reporting_capture(True) if device.type == "cuda" else contextlib.nullcontext()


def _torch_asks() -> bool:
    """Tell whether the function that asks is torch's own."""
    frame = inspect.currentframe()
    while frame is not None and frame.f_code.co_filename in _BETWEEN:
        frame = frame.f_back
    return frame is not None and frame.f_code.co_filename.startswith(_TORCH)


def _an_optimizer_asks() -> bool:
    """Tell whether an optimizer is stepping in this thread: torch wraps each one's ``step`` in a function of one file.

    No hook tells, since none runs after a step that raised.
    """
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code.co_filename == _OPTIMIZERS:
            return True
        frame = frame.f_back
    return False


@contextlib.contextmanager
def capture_safe_random() -> Iterator[None]:
    """Let activation checkpointing save and restore the GPU's random state in a capture, where torch forbids to ask.

    The state is neither read nor set then. That is right where nothing random is recomputed, which the survey of the
    step has made sure of.
    """
    nothing = torch.empty(0, dtype=torch.uint8)
    with (
        replaced(torch.cuda, "get_rng_state", lambda _real: lambda *_args, **_kwargs: nothing),
        replaced(torch.cuda, "set_rng_state", lambda _real: lambda *_args, **_kwargs: None),
    ):
        yield


_OPTIMIZERS = torch.optim.Optimizer.profile_hook_step.__code__.co_filename
_TORCH = os.path.join(os.path.dirname(torch.__file__), "")  # noqa: PTH118, PTH120 - compared as strings
_BETWEEN = (__file__, inspect.unwrap(replaced).__code__.co_filename)
"""Files of the frames between who asks and who answers."""

_engines: dict[str, Callable[[], Engine]] = {"cuda": CudaEngine}


def engine_for(device: torch.device) -> Engine | None:
    """Give a new engine for a device, or None where steps cannot be captured on it."""
    make = _engines.get(device.type)
    return make() if make is not None else None


@contextlib.contextmanager
def using(device_type: str, make: Callable[[], Engine]) -> Iterator[None]:
    """Have steps on devices of a type recorded by another engine while the block runs."""
    before = _engines.get(device_type)
    _engines[device_type] = make
    try:
        yield
    finally:
        if before is None:
            del _engines[device_type]
        else:
            _engines[device_type] = before
