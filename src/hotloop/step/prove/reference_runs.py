"""The runs of a decorated step that proofs compare with, and the values that one such run produces.

A reference runs the models as given, or on the stream or path of a capture.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from typing import TYPE_CHECKING, Any

from hotloop.measure import Limits
from hotloop.step.capture.engines import traced_path
from hotloop.step.capture.recording import own_autocast_cache
from hotloop.step.prove.outcomes import OF_COMPILED, compare_kinds, kind_of
from hotloop.step.prove.proof import parameters_of, plain_run, run_and_undo
from hotloop.step.prove.wide_reference import draws_of, step_in_first, wider_dtypes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    import torch

    from hotloop.measure import Comparison, Difference
    from hotloop.step.context import DecoratedStep
    from hotloop.step.prove.proof import Run
    from hotloop.step.state.program import Call, Program


class ReferenceRuns:
    """The runs of a decorated step as the reference of a proof.

    Args:
        step: the decorated step.
    """

    def __init__(self, step: DecoratedStep) -> None:
        self.context, self.program = step.context, step.program

    def call(self, call: Call) -> Callable[[], Any]:
        """Return a function that runs the step, and returns its result and the gradients that its optimizers read."""
        run = functools.partial(self.program.step, *call[0], **call[1])
        return functools.partial(plain_run, self.program.holdings, run)

    @contextlib.contextmanager
    def as_given(self) -> Iterator[None]:
        """Run the models as they were given in the block.

        Where random numbers are drawn, eager takes the path that compilers trace, as its own may draw others.
        """
        path = traced_path(self.program.device) if self.context.progress.draws_random else contextlib.nullcontext()
        with self.context.eager(), path:
            yield

    def in_more_bits(self, call: Call) -> dict[str, torch.Tensor | None] | None:
        """Run a step in a wider dtype, and undo it; return None if it runs in none.

        A step that computes in 16 bits, or in TF32, runs in float32: float32's rounding is a thousandth of its own or
        less. float64 would tell no more, and takes twice the memory.

        Raises:
            CandidateFailedError: the step raised in its own dtype; the state is as before.
        """
        with self.aside():
            draws = draws_of(self.program, call) if self.context.progress.draws_random else []
            narrowest_first = list(reversed(wider_dtypes(self.context.compute_dtype())))
            return step_in_first(self.program, call, narrowest_first, draws)[0]

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

    def limits_of_repeats(self) -> Limits:
        """Return how far a step may be from itself: a step further from itself depends on something not put back.

        By default cuDNN's convolutions compute in TF32, whatever matrix products compute in. So a kernel that is not
        deterministic may differ from itself by as much as an honest compile differs in TF32.
        """
        compute = self.context.compute_dtype()
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

    def compare_run(self, program: Program, run: Run, limits: Limits) -> dict[str, Comparison]:
        """Run a candidate from the state that these values were made from, undo it, and compare by kind of tensor.

        Args:
            program: what the step changes.
            run: the candidate.
            limits: the limits of compiled code.

        Raises:
            CandidateFailedError: the candidate raised; the state is as before.
        """
        return self.compare(run_and_undo(program, run)[1], limits)

    def compare(self, theirs: dict[str, torch.Tensor | None], limits: Limits) -> dict[str, Comparison]:
        """Compare the values of another run with eager's, by kind of tensor."""
        return compare_kinds(self.ours, theirs, self.start, limits, self.spread, self.wide)
