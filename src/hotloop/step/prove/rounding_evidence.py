"""What tells of two results whether they are two roundings of one, where rounding is large.

A deep stack of BatchNorms, or a small loss, makes eager's own rounding so large a part of a gradient that two right
ways to compute it are further apart than limits allow that know nothing of it. So the step is run in more bits, which
both are held against; and where that does not tell, or does not fit into memory, in other roundings.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from hotloop._torch.fake import uncounted
from hotloop._torch.upcast import Draw, NotRepeatableError, recording_draws
from hotloop.errors import describe
from hotloop.measure import BLIND, DRAWS, Limits
from hotloop.measure.limits import SPREADS
from hotloop.measure.machine import free_bytes
from hotloop.step.obstacle import CandidateFailedError
from hotloop.step.prove.outcomes import OF_COMPILED
from hotloop.step.prove.step_outputs import StepOutputs
from hotloop.step.prove.wide_reference import wide_step, wider_dtypes
from hotloop.step.state.memory import overlaps, write

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from hotloop.measure import Comparison, Difference
    from hotloop.step.prove import proof
    from hotloop.step.prove.outcomes import Outcome
    from hotloop.step.prove.proof import Run
    from hotloop.step.prove.reference_runs import ReferenceRuns
    from hotloop.step.state.program import Call, Program

_log = logging.getLogger("hotloop")
_T = TypeVar("_T")
_EPS = {"float64": 2.0**-52, "float32": 2.0**-23, "tf32": 2.0**-10, "float16": 2.0**-10, "bfloat16": 2.0**-7}
"""The distance from 1 to the next number."""
_OF_EPS = 0.25
"""By how much of it parameters are moved: half of what rounding to it moves them by, where they are held in more."""
_DISPLACED = 0.3
"""By how much of their root mean square parameters are displaced, as normal numbers: far enough that what nearly
cancels in the state of the run does so no more, and not so far that another model is proven."""
_MOST_ROOM = 0.5
"""What a spread may leave a recording room for, relative to a tensor: zeros are off by 1."""
_COPIES = 4
"""Copies of the parameters that are held at once: from before each of two changes, and what two runs made of them."""


def in_more_bits(runs: ReferenceRuns, call: Call) -> dict[str, torch.Tensor | None] | None:
    """Run a step in the widest dtype that it runs in, and undo it; None where it does in none.

    Raises:
        CandidateFailedError: the step raised as it is; the state is as before.
    """
    program, context = runs.program, runs.context
    draws: list[Draw] = []

    def noted() -> Any:
        with recording_draws(draws):
            return runs.call(call)()

    with runs.aside():
        if context.progress.draws_random:
            StepOutputs.of(program, noted)
        for dtype in wider_dtypes(context.compute_dtype()):
            try:
                return wide_step(program, call, dtype, draws)
            except NotRepeatableError as error:
                _log.info("%s is not run in more bits: %s", runs.name, error)
    return None


def roundings(runs: ReferenceRuns, call: Call, candidate: Run) -> dict[str, Comparison] | None:
    """Hold a candidate against eager and other roundings of it, in another state than the run's, and undo it all.

    Gives the comparisons by kind of tensor; None where they cannot be made: no memory, a step that does not run from
    there, or one that does not repeat itself.

    Raises:
        CandidateFailedError: the candidate raised; the state is as before. Or what was tried could not be undone.
    """
    program, run = runs.program, runs.call(call)
    with contextlib.ExitStack() as stack:

        def drawn() -> tuple[StepOutputs, list[dict[str, Difference]]]:
            stack.enter_context(_displaced(program))
            with runs.aside():
                return _draws(runs, run)

        made_and_draws = _tried(runs, drawn)
        if made_and_draws is not None:
            made, draws = made_and_draws
            return made.compare_run(program, candidate, Limits.compiled(runs.context.compute_dtype()), draws)
    return None


def repeats_elsewhere(runs: ReferenceRuns, unlike: proof.Unlike, once: Run, again: Run) -> bool:
    """Tell whether two runs of a step are unlike by rounding alone, and undo what it takes to find out.

    Where gradients nearly cancel, kernels that are not deterministic leave two runs further apart than an honest
    compile is from eager anywhere else. Then other roundings of the step are at least as far from it, and in another
    state than the run's it repeats itself. What nobody puts back from run to run (a clock, a generator) is found
    as far as it is larger than rounding in the run's own state, or shows in the other.

    Args:
        runs: of the step.
        unlike: what two runs differed by. What leaves room for a half of a tensor or more is no spread to judge by.
        once: the first run.
        again: the second.

    Raises:
        CandidateFailedError: what was tried could not be undone.
    """
    program = runs.program
    if runs.context.peers is not None:
        return False  # another process may have nothing to look into, and its collectives would wait
    numbers = [one.value for one in unlike.failures if one.measure in ("slope", "residual", "relative")]
    if len(numbers) < len(unlike.failures) or not all(isinstance(one, float) for one in numbers):
        return False
    if SPREADS * max(one for one in numbers if isinstance(one, float)) > _MOST_ROOM:
        return False

    def alike() -> bool:
        limits = runs.limits_of_repeats()
        made = StepOutputs.of(program, again)
        draws = _drawn(runs, again, made)
        here = made.compare_run(program, once, limits, draws)
        with _displaced(program):
            made = StepOutputs.of(program, again)
            elsewhere = made.compare_run(program, once, limits)
        # Updates as small as a parameter's last place are rounding in every state.
        failures = [
            each for kind in OF_COMPILED for one in (here, elsewhere) if kind in one for each in one[kind].failures
        ]
        return _finite(made) and all(each.measure == BLIND for each in failures)

    return _tried(runs, alike) or False


def _tried(runs: ReferenceRuns, look: Callable[[], _T]) -> _T | None:
    """Look at a step in another state; None where that cannot be done.

    Raises:
        CandidateFailedError: what was tried could not be undone.
    """
    try:
        return look()
    except CandidateFailedError as error:
        if not error.undone:
            raise
        why = describe(error.__cause__ or error)
    except Exception as error:  # noqa: BLE001 - no memory for what is kept, say; each run was undone before that
        why = describe(error)
    _log.info("%s is not run in another state: %s", runs.name, why)
    return None


def with_roundings(outcome: Outcome, elsewhere: Mapping[str, Comparison] | None) -> Outcome:
    """Give the outcome of a step whose numbers were judged elsewhere; what rounding never makes is judged as it is."""
    if elsewhere is None:
        return outcome
    plain = {kind: one for kind, one in outcome.comparisons.items() if not one.may_be_rounding}
    return dataclasses.replace(outcome, comparisons={**elsewhere, **plain})


def _draws(runs: ReferenceRuns, run: Run) -> tuple[StepOutputs, list[dict[str, Difference]]]:
    """Run a step as it is and in other roundings, and undo each.

    Raises:
        CandidateFailedError: a run failed.
        _TellsNothingError: it does not repeat itself, or is not finite.
    """
    made = StepOutputs.of(runs.program, run)
    again = made.compare_run(runs.program, run, runs.limits_of_repeats())
    if unlike := next((one for one in again.values() if not one.agrees), None):
        raise _TellsNothingError(f"it does not repeat itself from the same state: {unlike}")
    draws = _drawn(runs, run, made)
    if not _finite(made):
        raise _TellsNothingError("there is NaN or infinity in it")
    return made, draws


def _drawn(runs: ReferenceRuns, run: Run, made: StepOutputs) -> list[dict[str, Difference]]:
    """Run a step from parameters that were moved by no more than a rounding; gives how far each is from ``made``.

    Raises:
        CandidateFailedError: a run failed.
        _TellsNothingError: one is not finite.
    """
    share, draws = _OF_EPS * _EPS[runs.context.compute_dtype()], []
    for draw in range(DRAWS):
        with _changed(runs.program, functools.partial(_nudge, share=share), 1 + draw):
            draws.append(made.differences(runs.program, run))
    if not all(one.finite for draw in draws for one in draw.values()):
        raise _TellsNothingError("there is NaN or infinity in it")
    return draws


def _finite(made: StepOutputs) -> bool:
    return all(one is None or bool(one.isfinite().all()) for one in made.ours.values())


class _TellsNothingError(Exception):
    """The step in another state tells nothing, and why."""


@contextlib.contextmanager
def _displaced(program: Program) -> Iterator[None]:
    """Have the parameters displaced in the block.

    Raises:
        CandidateFailedError: as `_changed` raises it.
        _TellsNothingError: the copies that are held would not fit in memory beside the program.
    """
    tensors = program.holdings.tensors()
    parameters = sum(one.nbytes for one in program.holdings.parameters().values())
    needed = _COPIES * parameters + sum(one.nbytes for one in tensors.values() if one.layout == torch.strided)
    free = free_bytes(program.device)
    if free is not None and needed > free:
        why = f"that needs about {needed / 2**30:.1f} GiB, and {free / 2**30:.1f} GiB are free"
        raise _TellsNothingError(why)
    with _changed(program, _displace, 0):
        yield


def _displace(one: torch.Tensor, draws: torch.Generator) -> None:
    """Add normal numbers of a part of the tensor's size to it."""
    size = _DISPLACED * one.float().square().mean().sqrt()
    by = torch.randn(one.shape, generator=draws, device=one.device, dtype=torch.float32)
    one.add_(by.mul_(size).to(one.dtype))


def _nudge(one: torch.Tensor, draws: torch.Generator, share: float) -> None:
    """Move each element by a part of itself, at most ``share``, or by its dtype's last place where that is coarser."""
    size = max(share, torch.finfo(one.dtype).eps)
    wide = torch.promote_types(one.dtype, torch.float32)
    by = torch.rand(one.shape, generator=draws, device=one.device, dtype=wide)
    one.mul_(by.mul_(2 * size).add_(1 - size))


@contextlib.contextmanager
def _changed(program: Program, change: Callable[[torch.Tensor, torch.Generator], None], seed: int) -> Iterator[None]:
    """Change the parameters in place, those that can be written, and put them back.

    Raises:
        CandidateFailedError: none could be changed, or no memory was left for a copy, and all is as before; or one
            could not be put back.
    """
    before: list[tuple[torch.Tensor, torch.Tensor]] = []
    draws: dict[torch.device, torch.Generator] = {}
    try:
        try:
            with torch.no_grad():
                for one in program.holdings.parameters().values():
                    if not one.is_floating_point() or one.layout != torch.strided or overlaps(one):
                        continue
                    if one.device not in draws:
                        draws[one.device] = torch.Generator(one.device).manual_seed(seed)
                    before.append((one, one.detach().clone()))
                    with uncounted([one]):
                        change(one, draws[one.device])
        except Exception as error:
            raise CandidateFailedError from error
        if not before:
            raise CandidateFailedError
        yield
    finally:
        _put_back(before)


def _put_back(before: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    lost: Exception | None = None
    for changed, value in reversed(before):
        try:
            write([changed.detach()], [value])
        except Exception as error:  # noqa: BLE001 - the others are put back all the same
            lost = lost if torch.equal(changed, value) else error
    if lost is not None:
        raise CandidateFailedError(undone=False) from lost
