"""A captured step without a GPU: every operation is recorded with its storages, and replayed into them.

What a CUDA graph does to a step, this does too: no Python of the step runs in a replay, host numbers are frozen,
results and gradients are overwritten in place, reading a value on the host ends the capture. What it does not show:
kernels that Inductor generates for a CPU (they pass the dispatcher by), streams, and memory.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch

from hotloop._torch.dispatch import host_read, observing, tensors_in
from hotloop.step.capture import engines
from hotloop.step.state.memory import in_place

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


class CaptureForbiddenError(RuntimeError):
    """An operation that no capture allows; CUDA raises ``cudaErrorStreamCaptureUnsupported`` here."""


def captured_step_emulation() -> contextlib.AbstractContextManager[None]:
    """Let ``hotloop.Loop`` capture steps on the CPU while the block runs, so that programs can be tested on them.

    A replay runs the recorded operations one by one: it is as slow as eager, and equal to it bit by bit. Inductor's
    kernels are no such operations: of compiled code ``run="aot_eager+graph"`` can be captured here, while a tier or
    preset of Inductor's with a graph is a `ConfigError`, and ``run="auto"`` leaves it out.
    """
    return engines.using("cpu", TapeEngine)


class TapeEngine:
    """Records operations on a tape."""

    name = "tape"
    kernels = False
    launches = False  # an operation in the middle may raise: a label out of range

    def begin(self, device: torch.device, *, reports_capturing: bool) -> TapeRecording:  # noqa: ARG002 - one CPU
        """Begin a tape."""
        return TapeRecording(reports_capturing=reports_capturing)

    @contextlib.contextmanager
    def ambience(
        self,
        device: torch.device,  # noqa: ARG002 - the CPU is the only one
        *,
        reports_capturing: bool,
        asked: Callable[[], None] | None = None,
    ) -> Iterator[None]:
        """Answer code that looks for a capture as a capture will."""
        with engines.reporting_capture(reports_capturing, asked):
            yield

    def reference_stream(self, device: torch.device) -> contextlib.AbstractContextManager[None]:  # noqa: ARG002
        """A CPU has no streams."""
        return contextlib.nullcontext()


class TapeRecording:
    """A tape that is being recorded; operations run as they are recorded."""

    def __init__(self, *, reports_capturing: bool) -> None:
        self._reports_capturing = reports_capturing
        self.replay_seconds: float | None = None  # what was recorded ran as it was
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

    def cut(self) -> Tape:
        """End the tape."""
        self.abandon()
        return self._tape

    def abandon(self) -> None:
        """Stop recording."""
        if self._open is not None:
            self._open.close()
            self._open = None

    def close(self) -> None:
        """Nothing is left open."""
        self.abandon()


class Tape:
    """Recorded operations, each with the memory that it was given and what it made.

    Not with the tensors: ``tensor.data = other`` gives one other memory later, of which a recording knows nothing.
    """

    def __init__(self) -> None:
        self._operations: list[tuple[Any, tuple[Any, ...], dict[str, Any], list[torch.Tensor]]] = []
        self._modes: list[tuple[bool, bool]] = []
        """Of each whether gradients were on, and inference: what nn.LSTM keeps for its backward, it keeps only then."""

    def record(self, operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation and keep it.

        Raises:
            CaptureForbiddenError: Python waits for its result.
        """
        if why := host_read(operation, args):
            raise CaptureForbiddenError(f"operation not permitted while a step is captured: {why}")
        result = operation(*args, **kwargs)
        given = {name: _memory_of(value) for name, value in kwargs.items()}
        made = [in_place(one) for one in tensors_in(result)]
        self._operations.append((operation, _memory_of(args), given, made))
        self._modes.append((torch.is_grad_enabled(), torch.is_inference_mode_enabled()))
        return result

    def replay(self) -> None:
        """Run the operations again, in order, each result into the storage of the first one."""
        with torch.no_grad():
            recorded = zip(self._operations, self._modes, strict=True)
            for (operation, args, kwargs, made), (with_gradients, inferring) in recorded:
                with _inference(inferring), torch.set_grad_enabled(with_gradients):
                    again = operation(*args, **kwargs)
                for old, new in zip(made, tensors_in(again), strict=True):
                    for ours, theirs in zip(_dense_parts(old), _dense_parts(new), strict=True):
                        if ours.data_ptr() != theirs.data_ptr():
                            with _inference(ours.is_inference()):  # elsewhere it may not be written
                                ours.copy_(theirs)


def _inference(on: bool) -> contextlib.AbstractContextManager[Any]:
    return torch.inference_mode() if on else contextlib.nullcontext()


def _memory_of(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return in_place(value)
    return type(value)(map(_memory_of, value)) if type(value) in (list, tuple) else value


def _dense_parts(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Give the memory of a tensor: of a sparse one its indices and values, whose number no replay can change."""
    if tensor.layout == torch.sparse_coo:
        return tensor._indices(), tensor._values()  # noqa: SLF001 - the public ones refuse what is not coalesced
    return (tensor,)
