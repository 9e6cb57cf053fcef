"""The runs of a decorated step that proofs compare with: models as given, or on the stream or path of a capture."""

from __future__ import annotations

import contextlib
import functools
from typing import TYPE_CHECKING, Any

from hotloop._torch.deterministic import without_randomness
from hotloop.errors import describe
from hotloop.measure import Limits
from hotloop.step.capture.engines import traced_path
from hotloop.step.capture.recording import own_autocast_cache
from hotloop.step.obstacle import CandidateFailedError
from hotloop.step.prove.proof import plain_run
from hotloop.step.prove.step_outputs import StepOutputs

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from hotloop.step.context import DecoratedStep
    from hotloop.step.state.program import Call


class ReferenceRuns:
    """The runs of a decorated step as the reference of a proof.

    Args:
        step: the decorated step.

    Attributes:
        on_traced_path: eager takes the path that compilers trace, since other random numbers are drawn there.
    """

    def __init__(self, step: DecoratedStep) -> None:
        self.context, self.program, self.name = step.context, step.program, step.name
        self.on_traced_path = False

    def call(self, call: Call) -> Callable[[], Any]:
        """Return a function that runs the step, and returns its result and the gradients that its optimizers read."""
        run = functools.partial(self.program.step, *call[0], **call[1])
        return functools.partial(plain_run, self.program.holdings, run)

    @contextlib.contextmanager
    def as_given(self) -> Iterator[None]:
        """Run the models as they were given in the block, on the path that is compared."""
        path = traced_path(self.program.device) if self.on_traced_path else contextlib.nullcontext()
        with self.context.eager(), path:
            yield

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """Run the models as they were given in the block, on the capture stream if the step may be captured later."""
        engine = self.context.engine if self.context.progress.may_capture else None
        stream = engine.reference_stream(self.program.device) if engine is not None else contextlib.nullcontext()
        with self.as_given(), stream:
            yield

    def on_capture_stream(self, run: Callable[[], Any]) -> Any:
        """Run the step as it is, on the stream of recordings: autograd's nodes stay tied to their stream."""
        engine = self.context.engine
        assert engine is not None
        with engine.reference_stream(self.program.device):
            return plain_run(self.program.holdings, run, as_left=True)

    def on_capture_path(self, run: Callable[[], Any], *, reports_capturing: bool) -> Any:
        """Run the step on the path of a recording: code that asks whether it is captured gets the same answer."""
        engine = self.context.engine
        assert engine is not None
        ambience = engine.ambience(self.program.device, reports_capturing=reports_capturing)
        with ambience, own_autocast_cache(compiled=self.program.compiled()):
            return plain_run(self.program.holdings, run, as_left=True)

    def limits_of_repeats(self, *, recorded_kernels: bool = False) -> Limits:
        """Return how far a step may be from itself: a step further from itself depends on something not put back.

        By default cuDNN's convolutions compute in TF32, whatever matrix products compute in. So a kernel that is not
        deterministic may differ from itself by as much as an honest compile differs in TF32.

        Args:
            recorded_kernels: one of the two runs has a recording's optimizer kernels, whose learning rate is float32.
        """
        compute = self.context.compute_dtype()
        if recorded_kernels and compute == "float64":
            compute = "float32"
        return Limits.compiled("tf32" if compute == "float32" and self.program.device.type == "cuda" else compute)

    def differs_by_chance(self, run: Callable[[], Any]) -> bool:
        """Return whether the step on the path of a capture differs only in the random numbers that it draws.

        Raises:
            CandidateFailedError: a run could not be undone.
        """

        def on_path() -> Any:
            with without_randomness(), self.context.eager():
                return self.on_capture_path(run, reports_capturing=True)

        def plain() -> Any:
            with without_randomness(), self.context.eager():
                return self.on_capture_stream(run)

        try:
            made = StepOutputs.of(self.program, plain)
            held = made.compare_run(self.program, on_path, Limits.compiled(self.context.compute_dtype()))
        except CandidateFailedError as error:
            if not error.undone:
                raise
            return False
        except Exception as error:  # noqa: BLE001 - a comparison that fails shows nothing, and ends no run
            line = f"{self.name}: the two paths of the step could not be compared: {describe(error)}"
            self.context.reports.say_once(line)
            return False
        return all(comparison.agrees for comparison in held.values())
