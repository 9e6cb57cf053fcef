"""Decides whether two results differ only by rounding, where eager's own rounding is large.

In a deep stack of BatchNorms, or with a tiny loss, rounding is so large a part of a gradient that two right ways to
compute it are further apart than the normal limits. Then the step is run in more bits, and both results are compared
with that. If this does not decide, or does not fit in memory, the step is run in other roundings.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from hotloop._torch.deterministic import without_randomness
from hotloop._torch.fake import uncounted
from hotloop._torch.places import overlaps, write
from hotloop._torch.sharded import shard_of
from hotloop.errors import describe
from hotloop.measure import BLIND, DRAWS, Limits
from hotloop.measure.limits import SPREADS
from hotloop.measure.machine import free_bytes
from hotloop.step.obstacle import CandidateFailedError
from hotloop.step.prove.outcomes import OF_COMPILED
from hotloop.step.prove.reference_runs import ReferenceRuns, StepOutputs
from hotloop.step.prove.wide_reference import draws_of, step_in_first, wider_dtypes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from hotloop.measure import Comparison, Difference
    from hotloop.step.prove import proof
    from hotloop.step.prove.outcomes import Outcome
    from hotloop.step.prove.proof import Run
    from hotloop.step.state.program import Call, Program

_log = logging.getLogger("hotloop")
_T = TypeVar("_T")
_EPS = {"float64": 2.0**-52, "float32": 2.0**-23, "tf32": 2.0**-10, "float16": 2.0**-10, "bfloat16": 2.0**-7}
"""The distance from 1 to the next number."""
_MOST_ROOM = 0.5
"""The room that a spread may leave a recording, relative to a tensor: a tensor of zeros is off by 1."""


def in_more_bits(runs: ReferenceRuns, call: Call) -> dict[str, torch.Tensor | None] | None:
    """Run a step in a wider dtype, and undo it; return None if it runs in none.

    A step that computes in 16 bits, or in TF32, runs in float32: float32's rounding is a thousandth of its own or less.
    float64 would tell no more, and takes twice the memory.

    Raises:
        CandidateFailedError: the step raised in its own dtype; the state is as before.
    """
    return _in_more_bits(runs, runs.program, call)


def _in_more_bits(runs: ReferenceRuns, program: Program, call: Call) -> dict[str, torch.Tensor | None] | None:
    context = runs.context
    with runs.aside():
        draws = draws_of(program, call) if context.progress.draws_random else []
        narrowest_first = list(reversed(wider_dtypes(context.compute_dtype())))
        return step_in_first(program, call, narrowest_first, draws)[0]


def differs_by_chance(runs: ReferenceRuns, call: Call) -> bool:
    """Return whether the step on the path of a capture differs only in the random numbers that it draws.

    Raises:
        CandidateFailedError: a run could not be undone.
    """
    try:
        return _agrees_without_chance(runs, call)
    except CandidateFailedError as error:
        if not error.undone:
            raise
        return False
    except Exception as error:  # noqa: BLE001 - a comparison that fails shows nothing, and ends no run
        line = f"{runs.name}: the two paths of the step could not be compared: {describe(error)}"
        runs.context.reports.say_once(line)
        return False


def _agrees_without_chance(runs: ReferenceRuns, call: Call) -> bool:
    """Run the step without its random numbers on both paths, and compare; dropout must drop the same shares on both.

    Where the values may differ by rounding alone, the step in more bits decides: most of the gradients of a trained
    model are rounding. With other processes it does not: they may have no question to decide, and this one's
    collectives would wait for them.
    """
    context, given, rates = runs.context, runs.program.step, list[set[float]]()

    def without_chance(*args: Any, **kwargs: Any) -> Any:
        rates.append(set())
        with without_randomness(rates[-1]):
            return given(*args, **kwargs)

    program = dataclasses.replace(runs.program, step=without_chance)
    run, limits = functools.partial(without_chance, *call[0], **call[1]), Limits.compiled(context.compute_dtype())

    def plain() -> Any:
        with context.eager():
            return runs.on_capture_stream(run)

    def on_path() -> Any:
        with context.eager():
            return runs.on_capture_path(run, reports_capturing=True)

    made = StepOutputs.of(program, plain)
    held = made.compare_run(program, on_path, limits)
    if rates[0] != rates[1]:
        return False
    unlike = {kind: comparison for kind, comparison in held.items() if not comparison.agrees}
    if not unlike:
        return True
    decidable = context.peers is None and all(one.may_be_rounding for one in unlike.values())
    wide = _in_more_bits(runs, program, call) if decidable else None
    if wide is None:
        return False
    held = dataclasses.replace(made, wide=wide).compare_run(program, on_path, limits)
    return all(held[kind].agrees for kind in unlike)


def roundings(
    runs: ReferenceRuns, call: Call, candidate: Run, limits: Limits | None = None
) -> dict[str, Comparison] | None:
    """Compare a candidate with eager and with other roundings of eager, from displaced parameters, and undo it all.

    Args:
        runs: the reference runs of the step.
        call: the step's arguments.
        candidate: runs the step in another way.
        limits: how far the two may be apart where no rounding explains more; by default those of compiled code.

    Returns:
        the comparisons by kind of tensor; None if they cannot be made: too little memory, a step that does not run
        from displaced parameters, or a step that does not repeat itself.

    Raises:
        CandidateFailedError: the candidate raised, and the state is as before; or a run could not be undone.
    """
    program, run = runs.program, runs.call(call)
    with contextlib.ExitStack() as stack:

        def displaced_draws() -> tuple[StepOutputs, list[dict[str, Difference]]]:
            stack.enter_context(_displaced(program))
            with runs.aside():
                made = StepOutputs.of(program, run)
                again = made.compare_run(program, run, runs.limits_of_repeats())
                if unlike := next((held for held in again.values() if not held.agrees), None):
                    raise _UndecidedError(f"it does not repeat itself from the same state: {unlike}")
                draws = _draws(runs, run, made)
                if not _finite(made):
                    raise _UndecidedError("there is NaN or infinity in it")
                return made, draws

        made_and_draws = _unless_it_fails(runs, displaced_draws)
        if made_and_draws is None:
            return None
        made, draws = made_and_draws
        return made.compare_run(program, candidate, limits or Limits.compiled(runs.context.compute_dtype()), draws)


def repeats_elsewhere(runs: ReferenceRuns, unlike: proof.Unlike, once: Run, again: Run, limits: Limits) -> bool:
    """Return whether two runs of a step differ only by rounding, and undo the runs that it takes to find out.

    Where gradients nearly cancel, kernels that are not deterministic leave two runs further apart than an honest
    compile and eager are anywhere else. Then other roundings of the step are at least as far from it, and from
    displaced parameters the step repeats itself. A clock or a generator that nobody puts back is found too: as far as
    its effect is larger than rounding, or shows from displaced parameters.

    Args:
        runs: the reference runs of the step.
        unlike: the difference of two runs. If it leaves room for half of a tensor or more, nothing can be decided.
        once: the first run.
        again: the second run.
        limits: how far the two may be apart.

    Raises:
        CandidateFailedError: a run could not be undone.
    """
    program = runs.program
    if runs.context.peers is not None:
        return False  # another process may have no question to decide, and this one's collectives would wait for it
    numbers = [failure.value for failure in unlike.failures if failure.measure in ("slope", "residual", "relative")]
    if len(numbers) < len(unlike.failures) or not all(isinstance(number, float) for number in numbers):
        return False
    if SPREADS * max(number for number in numbers if isinstance(number, float)) > _MOST_ROOM:
        return False

    def alike() -> bool:
        made = StepOutputs.of(program, again)
        here = made.compare_run(program, once, limits, _draws(runs, again, made))
        with _displaced(program):
            made = StepOutputs.of(program, again)
            elsewhere = made.compare_run(program, once, limits)
        # Not the updates: those as small as a parameter's last place are rounding in every state.
        comparisons = [held[kind] for held in (here, elsewhere) for kind in OF_COMPILED if kind in held]
        failures = [failure for comparison in comparisons for failure in comparison.failures]
        return _finite(made) and all(failure.measure == BLIND for failure in failures)

    return _unless_it_fails(runs, alike) or False


def with_roundings(outcome: Outcome, elsewhere: Mapping[str, Comparison] | None) -> Outcome:
    """Return a step's outcome with its numbers judged from displaced parameters; other disagreements stay."""
    if elsewhere is None:
        return outcome
    not_rounding = {kind: held for kind, held in outcome.comparisons.items() if not held.may_be_rounding}
    return dataclasses.replace(outcome, comparisons={**elsewhere, **not_rounding})


class _UndecidedError(Exception):
    """The reason why runs in another state decide nothing."""


def _unless_it_fails(runs: ReferenceRuns, run: Callable[[], _T]) -> _T | None:
    """Run a step in another state; return None, and log why, if that fails.

    Raises:
        CandidateFailedError: a run could not be undone.
    """
    try:
        return run()
    except CandidateFailedError as error:
        if not error.undone:
            raise
        why = describe(error.__cause__ or error)
    except Exception as error:  # noqa: BLE001 - too little memory for the copies, say; each run was undone before
        why = describe(error)
    _log.info("%s is not run in another state: %s", runs.name, why)
    return None


def _draws(runs: ReferenceRuns, run: Run, made: StepOutputs) -> list[dict[str, Difference]]:
    """Run a step from parameters that were moved by at most a rounding; return how far each run is from ``made``.

    Raises:
        CandidateFailedError: a run failed.
        _UndecidedError: a run is not finite.
    """
    # Half of what rounding moves parameters by that are held in more bits.
    nudge = functools.partial(_nudge, share=0.25 * _EPS[runs.context.compute_dtype()])
    draws = []
    for draw in range(DRAWS):
        with _changed(runs.program, nudge, 1 + draw):
            draws.append(made.differences(runs.program, run))
    if not all(difference.finite for draw in draws for difference in draw.values()):
        raise _UndecidedError("there is NaN or infinity in it")
    return draws


def _finite(made: StepOutputs) -> bool:
    return all(value is None or bool(value.isfinite().all()) for value in made.ours.values())


@contextlib.contextmanager
def _displaced(program: Program) -> Iterator[None]:
    """Displace the parameters in the block.

    Raises:
        CandidateFailedError: see `_changed`.
        _UndecidedError: the copies would not fit in memory beside the program.
    """
    tensors = program.holdings.tensors()
    # Four copies: from before each of two changes, and what two runs made of the parameters.
    needed = 4 * sum(parameter.nbytes for parameter in program.holdings.parameters().values())
    needed += sum(tensor.nbytes for tensor in tensors.values() if tensor.layout == torch.strided)
    free = free_bytes(program.device)
    if free is not None and needed > free:
        raise _UndecidedError(f"that needs about {needed / 2**30:.1f} GiB, and {free / 2**30:.1f} GiB are free")
    with _changed(program, _displace, 0):
        yield


def _displace(parameter: torch.Tensor, draws: torch.Generator) -> None:
    """Add normal numbers to a parameter, of 0.3 times its root mean square.

    That is far enough that what nearly cancels in the run's state no longer does, and near enough that the same model
    is proven.
    """
    size = 0.3 * parameter.float().square().mean().sqrt()
    by = torch.randn(parameter.shape, generator=draws, device=parameter.device, dtype=torch.float32)
    parameter.add_(by.mul_(size).to(parameter.dtype))


def _nudge(parameter: torch.Tensor, draws: torch.Generator, share: float) -> None:
    """Multiply each element by at most ``1 ± share``, or ``1 ± eps`` of its dtype where that is more."""
    size = max(share, torch.finfo(parameter.dtype).eps)
    wide = torch.promote_types(parameter.dtype, torch.float32)
    by = torch.rand(parameter.shape, generator=draws, device=parameter.device, dtype=wide)
    parameter.mul_(by.mul_(2 * size).add_(1 - size))


@contextlib.contextmanager
def _changed(program: Program, change: Callable[[torch.Tensor, torch.Generator], None], seed: int) -> Iterator[None]:
    """Change the parameters that can be written, in place, and put them back after the block.

    Raises:
        CandidateFailedError: no parameter could be changed, or there was no memory for a copy, and the state is as
            before; or a parameter could not be put back.
    """
    before: list[tuple[torch.Tensor, torch.Tensor]] = []
    draws: dict[torch.device, torch.Generator] = {}
    try:
        try:
            with torch.no_grad():
                for parameter in map(shard_of, program.holdings.parameters().values()):
                    if not parameter.is_floating_point() or parameter.layout != torch.strided or overlaps(parameter):
                        continue
                    if parameter.device not in draws:
                        draws[parameter.device] = torch.Generator(parameter.device).manual_seed(seed)
                    before.append((parameter, parameter.detach().clone()))
                    with uncounted([parameter]):
                        change(parameter, draws[parameter.device])
        except Exception as error:
            raise CandidateFailedError from error
        if not before:
            raise CandidateFailedError
        yield
    finally:
        _put_back(before)


def _put_back(before: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    lost: Exception | None = None
    for parameter, value in reversed(before):
        try:
            write([parameter.detach()], [value])
        except Exception as error:  # noqa: BLE001 - the other parameters are put back all the same
            lost = lost if torch.equal(parameter, value) else error
    if lost is not None:
        raise CandidateFailedError(undone=False) from lost
