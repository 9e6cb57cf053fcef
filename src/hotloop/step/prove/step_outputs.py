"""The values that one eager call of a step produces, and the comparison of several candidates with them."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from hotloop.measure import differences
from hotloop.step.prove.outcomes import OF_COMPILED, Updates, compare_kinds, kind_of
from hotloop.step.prove.proof import parameters_of, run_and_undo

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch

    from hotloop.measure import Comparison, Difference, Limits
    from hotloop.step.prove.proof import Run
    from hotloop.step.state.program import Program


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
