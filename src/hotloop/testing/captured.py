"""A captured step without a GPU: every operation is recorded with its storages, and replayed into them.

The effects of a CUDA graph on a step are emulated: no Python of the step runs in a replay, host numbers are frozen,
results and gradients are overwritten in place, reading a value on the host ends the capture. Not emulated are kernels
that Inductor generates for a CPU (they bypass the dispatcher), streams, and memory.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed
from torch.optim.swa_utils import AveragedModel

from hotloop._torch.collectives import wait_for_collective
from hotloop._torch.dispatch import name_of, observing, tensors_in
from hotloop._torch.host_reads import host_read
from hotloop._torch.rng_calls import rng_calls
from hotloop._torch.thread_patch import replaced
from hotloop.interrupts import uninterrupted
from hotloop.step.audit.host_side import on_host
from hotloop.step.capture import engines
from hotloop.step.state.holdings import in_place
from hotloop.step.state.streams import Repeated

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from hotloop.step.state.streams import Streams


class CaptureForbiddenError(RuntimeError):
    """An operation that no capture allows; CUDA raises ``cudaErrorStreamCaptureUnsupported`` here."""


@contextlib.contextmanager
def captured_step_emulation() -> Iterator[None]:
    """Let ``hotloop.Loop`` capture steps on the CPU while the block runs, so that programs can be tested on them.

    A replay runs the recorded operations one by one: it is as slow as eager, and equal to it bit by bit. Inductor's
    kernels cannot be recorded: ``run="aot_eager+graph"`` works here, while an Inductor tier or preset with a graph is a
    `ConfigError`, and ``run="auto"`` leaves it out.

    The CPU is the device. What lies on the host beside a GPU is found only where somebody says so, by `on_host`. The
    count of a `torch.optim.swa_utils.AveragedModel` that was given no device is such a tensor without that.
    """
    with engines.using("cpu", TapeEngine), replaced(AveragedModel, "__init__", _counting_on_the_host):
        yield


def _counting_on_the_host(real: Callable[..., None]) -> Callable[..., None]:
    def init(average: AveragedModel, model: torch.nn.Module, device: Any = None, *args: Any, **kwargs: Any) -> None:
        real(average, model, device, *args, **kwargs)
        if device is None:
            on_host(average.n_averaged)

    return init


class TapeEngine:
    """The engine of the emulation: records operations on a tape."""

    name = "tape"
    kernels = False
    launches = False  # an operation in the middle may raise: a label out of range
    pool_bytes = idle_bytes = 0  # a CPU's memory is not counted
    shares = False

    def look(self) -> None:
        """Do nothing: steps have memory of their own."""

    def overwrites(self) -> bool:
        """Return False, for the same reason."""
        return False

    def begin(self, device: torch.device, streams: Streams, *, reports_capturing: bool) -> TapeRecording:
        """Begin a tape."""
        return TapeRecording(device, streams, reports_capturing=reports_capturing)

    @contextlib.contextmanager
    def ambience(
        self,
        device: torch.device,  # noqa: ARG002 - the CPU is the only one
        *,
        reports_capturing: bool,
        asked: Callable[[], None] | None = None,
    ) -> Iterator[None]:
        """Answer code that asks whether a capture is going on as in a capture."""
        with engines.reporting_capture(reports_capturing, asked):
            yield

    def reference_stream(self, device: torch.device) -> contextlib.AbstractContextManager[None]:  # noqa: ARG002
        """Do nothing: a CPU has no streams."""
        return contextlib.nullcontext()

    beside = reference_stream


class TapeRecording:
    """A tape that is being recorded; operations run as they are recorded."""

    def __init__(self, device: torch.device, streams: Streams, *, reports_capturing: bool) -> None:
        self._device, self._calls = device, Repeated(streams)
        self._states: dict[int, torch.Tensor] = {}
        """The random states that the step has read, each by the number of the call; a replay reads them anew."""
        self._reports_capturing = reports_capturing
        self.replay_seconds: float | None = None  # operations run as they are recorded, so nothing was timed apart
        self._open: contextlib.ExitStack | None = None
        self._tape = Tape()
        self.resume()

    def resume(self) -> None:
        """Begin a new tape."""
        self.abandon()
        self._tape = Tape()
        self._open = contextlib.ExitStack()
        self._open.enter_context(engines.reporting_capture(self._reports_capturing))
        self._open.enter_context(observing(self._tape.record))
        self._open.enter_context(rng_calls(self._device, self._read_state, self._set_state))
        self._open.enter_context(replaced(torch.UntypedStorage, "resize_", self._tape.resizing))
        if distributed.is_available():
            self._open.enter_context(replaced(distributed.Work, "wait", self._tape.waiting))

    def cut(self, ready: Callable[[], None]) -> Tape:
        """End the tape, whose operations ran as they were recorded."""
        self.abandon()
        ready()
        return self._tape

    def _read_state(self, real: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Record that the random state is read; the step gets the one that was noted, as in a capture on a GPU."""
        number, noted = self._calls.read()
        self._states[number] = self._tape.call(real)
        return noted

    def _set_state(self, real: Callable[[torch.Tensor], None], state: torch.Tensor) -> None:
        """Record that the random state is set to one that was read."""
        self._tape.call(real, self._states[self._calls.set(state).source])

    def abandon(self) -> None:
        """Stop recording."""
        if self._open is not None:
            self._open.close()
            self._open = None

    def close(self) -> None:
        """Stop recording."""
        self.abandon()


class Tape:
    """Recorded operations, each with the memory of its arguments and of its results.

    The tape holds memory and not the tensors: ``tensor.data = other`` gives a tensor other memory later, which a
    recording must not follow.
    """

    def __init__(self) -> None:
        self._operations: list[tuple[Any, tuple[Any, ...], dict[str, Any], list[torch.Tensor]]] = []
        """Operations; and calls of ``UntypedStorage.resize_``, by which FSDP2 gives whole parameters memory."""
        self._waits = False
        """A collective is waited for: what it copies then is a part of it, and comes again where it is replayed."""
        self._modes: list[tuple[bool, bool]] = []
        """Whether gradients and inference mode were on for each operation: nn.LSTM saves for its backward only then."""

    def record(self, operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation and record it.

        Raises:
            CaptureForbiddenError: Python waits for its result.
        """
        if why := host_read(operation, args, kwargs):
            raise CaptureForbiddenError(f"operation not permitted while a step is captured: {why}")
        result = operation(*args, **kwargs)
        if self._waits:
            return result
        kept = {name: _memory_of(value) for name, value in kwargs.items()}
        made = [in_place(tensor) for tensor in tensors_in(result)]
        self._operations.append((operation, _memory_of(args), kept, made))
        self._modes.append((torch.is_grad_enabled(), torch.is_inference_mode_enabled()))
        return result

    def resizing(self, real: Callable[[torch.UntypedStorage, int], None]) -> Callable[..., Any]:
        """Return a function that resizes memory, and records that: no operation of torch's does it."""

        def resize(storage: torch.UntypedStorage, size: int) -> Any:
            return self.call(real, storage, size)

        return resize

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call a function that is no operation of torch's, and record it."""
        result = function(*args)
        self._operations.append((function, args, {}, list(tensors_in(result))))
        self._modes.append((torch.is_grad_enabled(), torch.is_inference_mode_enabled()))
        return result

    def waiting(self, real: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that waits for a collective, and records nothing of what that does."""

        def wait(*args: Any, **kwargs: Any) -> Any:
            before, self._waits = self._waits, True
            try:
                return real(*args, **kwargs)
            finally:
                self._waits = before

        return wait

    @uninterrupted  # as a GPU runs a graph that was launched: an interrupt comes before all of it, or after
    def replay(self) -> None:
        """Run the operations again, in order, and write each result into the storage of the first one."""
        with torch.no_grad():
            recorded = zip(self._operations, self._modes, strict=True)
            for (operation, args, kwargs, made), (with_gradients, inferring) in recorded:
                with _inference(inferring), torch.set_grad_enabled(with_gradients):
                    again = operation(*args, **kwargs)
                    wait_for_collective(operation, again)
                for old, new in zip(made, tensors_in(again), strict=True):
                    for ours, theirs in zip(_dense_parts(old), _dense_parts(new), strict=True):
                        if ours.data_ptr() != theirs.data_ptr():  # else a view in place (transpose_) may change it
                            _check_size(operation, ours, theirs)
                            with _inference(ours.is_inference()):  # outside, torch forbids the write
                                ours.copy_(theirs)


def _check_size(operation: Any, ours: torch.Tensor, theirs: torch.Tensor) -> None:
    """Refuse a result of another size than the recorded one: what follows was recorded for that."""
    if ours.shape != theirs.shape:
        raise CaptureForbiddenError(
            f"the size of a result depends on the data: {name_of(operation)} gave {list(ours.shape)} when the step was "
            f"captured, and {list(theirs.shape)} later"
        )


def _inference(on: bool) -> contextlib.AbstractContextManager[Any]:
    return torch.inference_mode() if on else contextlib.nullcontext()


def _memory_of(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return in_place(value)
    return type(value)(map(_memory_of, value)) if type(value) in (list, tuple) else value


def _dense_parts(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the dense tensors that hold a tensor's memory: for a sparse one its indices and values.

    No replay can change the number of these.
    """
    if tensor.layout == torch.sparse_coo:
        return tensor._indices(), tensor._values()  # noqa: SLF001 - the public ones need a coalesced tensor
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return tensor.crow_indices(), tensor.col_indices(), tensor.values()
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return tensor.ccol_indices(), tensor.row_indices(), tensor.values()
    return (tensor,)
