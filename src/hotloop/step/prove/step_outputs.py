"""What one call of a step makes as eager runs it, and several candidates held against that."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from hotloop.measure import differences
from hotloop.step.prove.outcomes import OF_COMPILED, compare_kinds, kind_of, updates_of
from hotloop.step.prove.proof import parameters_of, tried

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch

    from hotloop.measure import Comparison, Difference, Limits
    from hotloop.step.prove.proof import Run
    from hotloop.step.state.program import Program


@dataclasses.dataclass(frozen=True)
class Made:
    """What one call of a step makes as eager runs it, kept so that several candidates can be held against it.

    Args:
        start: the parameters before the step.
        ours: eager's values, by name.
        wide: those of the step in more bits; None without a reference.
        spread: as `prove_step` takes it.
    """

    start: dict[str, torch.Tensor]
    ours: dict[str, torch.Tensor | None]
    wide: Mapping[str, torch.Tensor | None] | None = None
    spread: Mapping[str, Difference] | None = None


def kept(program: Program, run: Run, wide: Mapping[str, torch.Tensor | None] | None = None, **more: Any) -> Made:
    """Run a step eagerly and undo it; gives what it made.

    Raises:
        CandidateFailedError: it raised; the state is as before.
    """
    before, ours, _ = tried(program, run)
    start = parameters_of(before.live, on_host=before.on_host)
    judged = (name for name in ours if kind_of(name) in (*OF_COMPILED, "parameter"))
    values = {name: None if (one := ours[name]) is None else one.detach().clone() for name in judged}
    return Made(start, values, wide, **more)


def held_against(
    program: Program, run: Run, made: Made, limits: Limits, draws: Sequence[Mapping[str, Difference]] = ()
) -> dict[str, Comparison]:
    """Run a candidate from the state that ``made`` was made from, undo it, and compare, by kind of tensor.

    Args:
        program: what the step changes.
        run: the candidate.
        made: what eager made.
        limits: those of compiled code.
        draws: how far other roundings of eager's step are from it (`hotloop.step.prove.rounding_evidence.roundings`).

    Raises:
        CandidateFailedError: the candidate raised; the state is as before.
    """
    _, theirs, _ = tried(program, run)
    return compare_kinds(made.ours, theirs, made.start, limits, made.spread, made.wide, draws=draws)


def compared(made: Made, theirs: dict[str, torch.Tensor | None], limits: Limits) -> dict[str, Comparison]:
    """Hold the values of another run against those that eager made, by kind of tensor."""
    return compare_kinds(made.ours, theirs, made.start, limits, made.spread, made.wide)


def apart(program: Program, run: Run, made: Made) -> dict[str, Difference]:
    """Run another rounding of the step that ``made`` was made of, undo it, and tell how far the two are apart.

    Parameters are compared by their updates, since the two may begin with others.

    Raises:
        CandidateFailedError: it raised; the state is as before.
    """
    before, theirs, _ = tried(program, run)
    sides = [
        {name: one for name, one in side.items() if kind_of(name) in OF_COMPILED} | updates_of(side, start)
        for side, start in (
            (made.ours, made.start),
            (theirs, parameters_of(before.live, on_host=before.on_host)),
        )
    ]
    return differences(*sides)[0]
