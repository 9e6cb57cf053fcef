"""The runs of a decorated step that proofs compare with, and the values that one such run produces.

A reference runs the models as given, or on the stream or path of a capture.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from typing import TYPE_CHECKING, Any

from hotloop.measure import Limits, differences
from hotloop.step.capture.engines import traced_path
from hotloop.step.capture.recording import own_autocast_cache
from hotloop.step.prove.outcomes import OF_COMPILED, Updates, compare_kinds, kind_of
from hotloop.step.prove.proof import parameters_of, plain_run, run_and_undo

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    import torch

    from hotloop.measure import Comparison, Difference
    from hotloop.step.context import DecoratedStep
    from hotloop.step.prove.proof import Run
    from hotloop.step.state.program import Call, Program


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
        with engine.beside(self.program.device):
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


@dataclasses.dataclass(frozen=True)
class StepOutputs:
    """The values that one eager call of a step produces, kept so that several candidates can be compared with them.

    Args:
        start: the parameters before the step.
        ours: eager's values, by name.
        wide: the values of the same step in more bits; None without such a reference.
        spread: the difference of eager from itself, by tensor, as `prove_step` takes it.
    """

    start: dict[str, torch.Tensor]
    ours: dict[str, torch.Tensor | None]
    wide: Mapping[str, torch.Tensor | None] | None = None
    spread: Mapping[str, Difference] | None = None

    @classmethod
    def of(
        cls, program: Program, run: Run, wide: Mapping[str, torch.Tensor | None] | None = None, **more: Any
    ) -> StepOutputs:
        """Run a step, undo it, and return the values that it produced.

        Raises:
            CandidateFailedError: the step raised; the state is as before.
        """
        before, ours, _ = run_and_undo(program, run)
        start = parameters_of(before.live, on_host=before.on_host)
        judged = (name for name in ours if kind_of(name) in (*OF_COMPILED, "parameter"))
        values = {name: None if (value := ours[name]) is None else value.detach().clone() for name in judged}
        return cls(start, values, wide, **more)

    def compare_run(
        self, program: Program, run: Run, limits: Limits, draws: Sequence[Mapping[str, Difference]] = ()
    ) -> dict[str, Comparison]:
        """Run a candidate from the state that these values were made from, undo it, and compare by kind of tensor.

        Args:
            program: what the step changes.
            run: the candidate.
            limits: the limits of compiled code.
            draws: how far other roundings of eager's step are from these values
                (`hotloop.step.prove.rounding_evidence.roundings`).

        Raises:
            CandidateFailedError: the candidate raised; the state is as before.
        """
        return self.compare(run_and_undo(program, run)[1], limits, draws)

    def compare(
        self,
        theirs: dict[str, torch.Tensor | None],
        limits: Limits,
        draws: Sequence[Mapping[str, Difference]] = (),
    ) -> dict[str, Comparison]:
        """Compare the values of another run with eager's, by kind of tensor."""
        return compare_kinds(self.ours, theirs, self.start, limits, self.spread, self.wide, draws=draws)

    def differences(self, program: Program, run: Run) -> dict[str, Difference]:
        """Run another rounding of the same step, undo it, and measure how far its values are from these.

        Parameters are compared by their updates, since the two runs may begin with different parameters.

        Raises:
            CandidateFailedError: the run raised; the state is as before.
        """
        before, theirs, _ = run_and_undo(program, run)
        their_start = parameters_of(before.live, on_host=before.on_host)
        judged = (
            {name: value for name, value in values.items() if kind_of(name) in OF_COMPILED}
            for values in (self.ours, theirs)
        )
        updates = Updates(self.ours, self.start), Updates(theirs, their_start)
        return {**differences(*judged)[0], **differences(*updates)[0]}
