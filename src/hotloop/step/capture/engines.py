"""Engines that record a step and replay it: `torch.cuda.CUDAGraph` on a GPU; none on a CPU, except in tests.

A recording is a list of segments. It can be cut: the part recorded so far is executed, something runs outside (an
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

from hotloop._torch import pools
from hotloop._torch.capture import recover_from_failed_capture, stale_streams_overridden
from hotloop._torch.thread_patch import replaced
from hotloop.measure.machine import device_memory
from hotloop.step.capture.device_streams import DeviceStreams
from hotloop.step.engine import Engine, Recording, Segment, collector_paused

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from hotloop.step.state.streams import Streams


class CudaEngine:
    """An engine that records into CUDA graphs on a side stream; all graphs of the engine share one memory pool.

    Sharing is safe although steps are replayed in any order. Results that outlive a replay are copied out at once, and
    gradients are kept alive while later steps are recorded, so no recording is given their memory.
    """

    name = "cuda"
    kernels = True
    launches = True

    def __init__(self) -> None:
        self._pool: _Pool | None = None
        self._apart = False
        """Something outlived a step in the memory of recordings: from then on steps have memory of their own."""

    @property
    def pool_bytes(self) -> int:
        """See `Engine`."""
        return self._pool.nbytes if self._pool is not None and self._pool.usable else 0

    @property
    def idle_bytes(self) -> int:
        """See `Engine`."""
        return self._pool.idle if self._pool is not None and self._pool.usable else 0

    @property
    def shares(self) -> bool:
        """See `Engine`."""
        return self._pool is not None and self._pool.shares

    def look(self) -> None:
        """See `Engine`."""
        if self._pool is not None and self._pool.shares and not self.overwrites():
            self._pool.used = pools.blocks_in(self._pool.handle)

    def overwrites(self) -> bool:
        """See `Engine`."""
        pool = self._pool
        if pool is None or not pool.dirty:
            return False
        now = pools.blocks_in(pool.handle)
        if now - pool.before:
            gc.collect()  # a cycle may hold it
            now = pools.blocks_in(pool.handle)
        pool.dirty, pool.used = False, now
        if now - pool.before:
            self._apart = pool.failed = True
        return pool.failed

    def begin(self, device: torch.device, streams: Streams, *, reports_capturing: bool) -> Recording:
        """Begin to record on a side stream, after the work that the current stream still has to do."""
        if self._pool is None or not self._pool.usable:
            self._pool = _Pool(torch.cuda.graph_pool_handle(), apart=self._apart)
        draws = DeviceStreams(streams, device)
        return _CudaRecording(self._pool, _side_stream(device), draws, reports_capturing=reports_capturing)

    @contextlib.contextmanager
    def ambience(
        self, device: torch.device, *, reports_capturing: bool, asked: Callable[[], None] | None = None
    ) -> Iterator[None]:
        """Run on the side stream, where libraries then set up what they need; see `Engine.ambience`."""
        with self.beside(device), reporting_capture(reports_capturing, asked):
            yield

    @contextlib.contextmanager
    def reference_stream(self, device: torch.device) -> Iterator[None]:
        """Run on the side stream, so that autograd graphs that outlive the step belong to the stream of recordings."""
        side, current = _side_stream(device), torch.cuda.current_stream(device)
        # Memory allocated here is used on the current stream later. The side stream waits for that stream before it
        # continues, so no memory is given away too early.
        side.wait_stream(current)
        try:
            with torch.cuda.stream(side):
                yield
        finally:
            current.wait_stream(side)

    @contextlib.contextmanager
    def beside(self, device: torch.device) -> Iterator[None]:
        """See `Engine`."""
        pool = self._pool
        if pool is None or not pool.usable:  # torch caches by stream: else each would keep the memory of a step
            torch.cuda.empty_cache()
        with self.reference_stream(device):
            if pool is None or not pool.shares or pools.is_inside() or not pools.may_share():
                yield
            else:
                with pools.allocating_in(device, pool.handle, pool.begins()):
                    yield
        if pool is None or not pool.usable:
            torch.cuda.empty_cache()


_local = threading.local()
"""Holds ``streams``: the side streams of this thread, by index of the device."""


def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the stream on which this thread records for all its loops: cuBLAS keeps 64 MiB for each stream."""
    streams: dict[int, torch.cuda.Stream] = vars(_local).setdefault("streams", {})
    index = torch.cuda.current_device() if device.index is None else device.index
    if index not in streams:
        # A loss that the program keeps until its next step holds nodes of the stream on which that step ran. torch
        # warns of it when the next step runs on another stream; recordings are made so that it does no harm.
        torch.autograd.graph.set_warn_on_accumulate_grad_stream_mismatch(False)
        streams[index] = torch.cuda.Stream(index)  # type: ignore[no-untyped-call]
    return streams[index]


class _Pool:
    """A memory pool that recordings share.

    torch drops a pool with the last graph in it, and captures nothing into it from then on, nor after a failure.
    """

    def __init__(self, handle: Any, *, apart: bool) -> None:
        self.handle, self._apart = handle, apart
        self.failed = self.dirty = False
        self.before: frozenset[int] = frozenset()
        """The blocks in use before the first step that ran in this memory since a replay, if it is `dirty`."""
        self.used: frozenset[int] | None = None
        """The blocks in use now, if they are known."""
        self.nbytes = self.idle = 0
        """Bytes taken from the device, and those of them that no tensor has between two replays."""
        self._graphs: weakref.WeakSet[torch.cuda.CUDAGraph] = weakref.WeakSet()
        self._used = False

    @property
    def usable(self) -> bool:
        return not self.failed and (not self._used or len(self._graphs) > 0)

    @property
    def shares(self) -> bool:
        return self._used and self.usable and not self._apart

    def begins(self) -> frozenset[int]:
        """Note that a step allocates in this memory; return the blocks in use before the first since a replay."""
        if not self.dirty:
            self.before = pools.blocks_in(self.handle) if self.used is None else self.used
        self.used, self.dirty = None, True
        return self.before

    def add(self, graph: torch.cuda.CUDAGraph) -> None:
        self._used, self.used = True, None
        self._graphs.add(graph)


class _CudaRecording:
    def __init__(self, pool: _Pool, side: torch.cuda.Stream, draws: DeviceStreams, *, reports_capturing: bool) -> None:
        self.replay_seconds: float | None = None
        self._pool, self._side, self._draws, self._first = pool, side, draws, True
        self._stack = contextlib.ExitStack()
        self._graph: torch.cuda.CUDAGraph | None = None
        self._current = torch.cuda.current_stream(side.device)
        torch.cuda.synchronize(side.device)
        memory = device_memory(side.device)
        assert memory is not None
        untaken = memory.free - (memory.reserved - memory.allocated)
        # A recording has memory of its own, and cannot use memory that is cached outside or held by garbage. If all
        # that was ever taken fits in a second time, no garbage is collected: that takes up to a second for a UNet.
        if untaken < memory.total / 2:
            gc.collect()
        torch.cuda.empty_cache()
        side.wait_stream(self._current)
        self._stack.enter_context(torch.cuda.stream(side))
        self._stack.callback(draws.leave)
        self._stack.enter_context(draws.served())
        self._stack.enter_context(reporting_capture(reports_capturing))
        self._stack.enter_context(stale_streams_overridden())
        self._stack.enter_context(collector_paused())
        try:
            self.resume()
        except BaseException:
            self.abandon()
            raise

    def resume(self) -> None:
        self._before = self._taken()
        graph = torch.cuda.CUDAGraph()
        self._draws.register(graph)
        self._graph = graph
        # Only forbidden calls of this thread end the capture: a data loader's thread may go on pinning memory.
        self._graph.capture_begin(pool=self._pool.handle, capture_error_mode="thread_local")

    def cut(self, ready: Callable[[], None]) -> Segment:
        graph = self._graph
        assert graph is not None
        with self._empty_allowed():
            graph.capture_end()
        self._graph = None  # from here on there is nothing to recover from
        self._draws.leave()
        self._pool.add(graph)
        segment, self._first = self._draws.segment(graph, first=self._first), False
        reserved, allocated = (now - then for now, then in zip(self._taken(), self._before, strict=True))
        self._pool.nbytes += max(0, reserved)
        self._pool.idle += max(0, reserved - max(0, allocated))
        ready()
        torch.cuda.synchronize(self._side.device)
        began = time.perf_counter()
        segment.replay()
        torch.cuda.synchronize(self._side.device)
        self.replay_seconds = (self.replay_seconds or 0.0) + time.perf_counter() - began
        return segment

    def _taken(self) -> tuple[int, int]:
        """Return the bytes that torch has reserved on the device, and the bytes that tensors use."""
        device = self._side.device
        return torch.cuda.memory_reserved(device), torch.cuda.memory_allocated(device)

    def abandon(self) -> None:
        graph, self._graph = self._graph, None
        self._draws.leave()  # what puts the generator right afterwards must find its own stream
        try:
            if graph is not None:
                self._pool.failed = True
                with self._empty_allowed():
                    recover_from_failed_capture(graph, self._side, self._pool.handle)
        finally:
            self.close()

    @staticmethod
    @contextlib.contextmanager
    def _empty_allowed() -> Iterator[None]:
        """Silence torch's warning about a segment without work: the end of a step after its optimizer, say."""
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*CUDA Graph is empty.*")
            yield

    def close(self) -> None:
        """Go back to the stream that the step was called on."""
        self._stack.close()
        self._current.wait_stream(self._side)


def reporting_capture(answer: bool, asked: Callable[[], None] | None = None) -> contextlib.AbstractContextManager[None]:
    """Make ``torch.cuda.is_current_stream_capturing()`` report the same in a recording and in the runs around it.

    transformers' masks take another path when it reports True, with other attention kernels. So it reports False for a
    recording of eager code if the step's usual path may be captured; the recording then is that path, kernel by kernel.
    If that path may not be captured (a mask is read on the host), it reports True in all runs. Code that was compiled
    on one path would be recompiled in a capture of the other path, which would end the capture: the code is guarded on
    the very function that it called.

    An optimizer always gets the truth: those of torch 2.11 refuse to step in a capture unless they are capturable.
    They are made capturable only while a recording is made, and an optimizer that steps outside of it is in no capture.
    So does all of torch if the answer would be False, since it must not take a path that a capture forbids.

    Args:
        answer: the value that is reported.
        asked: called when code outside torch has called the function.
    """

    def make(real: Callable[[], bool]) -> Callable[[], bool]:
        def answers() -> bool:
            by_torch, by_optimizer = _callers()
            if asked is not None and not by_torch:
                asked()
            return real() if by_optimizer or (by_torch and not answer) else answer

        return answers

    return replaced(torch.cuda, "is_current_stream_capturing", make, constant=True)


def _callers() -> tuple[bool, bool]:
    """Return whether the function that asks is torch's own, and whether an optimizer is stepping in this thread.

    torch wraps each optimizer's ``step`` in a function of one file, which is looked for among the frames. A hook could
    not do that, since none runs after a step that raised.
    """
    between = (__file__, inspect.unwrap(replaced).__code__.co_filename)
    optimizers = torch.optim.Optimizer.profile_hook_step.__code__.co_filename
    frame = inspect.currentframe()
    while frame is not None and frame.f_code.co_filename in between:
        frame = frame.f_back
    torch_folder = os.path.join(os.path.dirname(torch.__file__), "")  # noqa: PTH118, PTH120 - compared as strings
    by_torch = frame is not None and frame.f_code.co_filename.startswith(torch_folder)
    while frame is not None and frame.f_code.co_filename != optimizers:
        frame = frame.f_back
    return by_torch, frame is not None


def traced_path(device: torch.device) -> contextlib.AbstractContextManager[None]:
    """Run eager code on the path that a compiler traces: there, too, transformers takes the path that reads no mask.

    The two paths may have other attention kernels, which draw other dropout masks; then nothing could be compared.
    """
    return reporting_capture(True) if device.type == "cuda" else contextlib.nullcontext()


_engines: dict[str, Callable[[], Engine]] = {"cuda": CudaEngine}


def engine_for(device: torch.device) -> Engine | None:
    """Return a new engine for a device, or None if steps cannot be captured on it."""
    make = _engines.get(device.type)
    return make() if make is not None else None


@contextlib.contextmanager
def using(device_type: str, make: Callable[[], Engine]) -> Iterator[None]:
    """Record steps on devices of a type with another engine while the block runs."""
    before = _engines.get(device_type)
    _engines[device_type] = make
    try:
        yield
    finally:
        if before is None:
            del _engines[device_type]
        else:
            _engines[device_type] = before
