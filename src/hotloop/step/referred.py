"""What tells of two results whether they are two roundings of one, where rounding is large.

A deep stack of BatchNorms, or a small loss, makes eager's own rounding so large a part of a gradient that two right
ways to compute it are further apart than limits allow that know nothing of it. So the step is run in more bits, which
both are held against; and where that does not tell, or does not fit into memory, in other roundings.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from typing import TYPE_CHECKING, Any

import torch

from hotloop.fallback.causes import describe
from hotloop.measure import DRAWS
from hotloop.step import proof
from hotloop.step.proof import CandidateFailedError
from hotloop.step.reference import Draw, NotRepeatableError, candidates, noting_draws, wide_step

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hotloop.measure import Difference
    from hotloop.step.captured import Call, Program
    from hotloop.step.runner import Runner

_log = logging.getLogger("hotloop")
_EPS = {"float64": 2.0**-52, "float32": 2.0**-23, "tf32": 2.0**-10, "float16": 2.0**-10, "bfloat16": 2.0**-7}
"""The distance from 1 to the next number."""
_OF_EPS = 0.25
"""By how much of it parameters are moved: half of what rounding them moves them by."""


@contextlib.contextmanager
def aside(runner: Runner) -> Iterator[None]:
    """Run eagerly, and leave nothing behind that would tie a later capture to another stream."""
    engine = runner.loop.engine
    stream = engine.reference_stream(runner.loop.device) if engine is not None else contextlib.nullcontext()
    with runner.code.as_given(), stream:
        yield


def in_more_bits(runner: Runner, call: Call) -> dict[str, torch.Tensor | None] | None:
    """Run a step in the widest dtype that it runs in, and undo it; None where it does in none.

    Raises:
        CandidateFailedError: the step raised as it is; the state is as before.
    """
    program, loop = runner.program, runner.loop
    draws: list[Draw] = []

    def noted() -> Any:
        with noting_draws(draws):
            return proof.plain_run(program.holdings, functools.partial(runner.step, *call[0], **call[1]))

    with aside(runner):
        if loop.draws_random:
            proof.kept(program, noted)
        for dtype in candidates(loop.compute_dtype()):
            try:
                return wide_step(program, call, dtype, draws)
            except NotRepeatableError as error:
                _log.info("%s is not run in more bits: %s", runner.name, error)
    return None


def roundings(runner: Runner, call: Call) -> list[dict[str, Difference]]:
    """Run a step several times from parameters that were moved by less than they are rounded by, and undo it.

    Gives how far each was from the step as it is, by tensor; none where that does not run.

    Raises:
        CandidateFailedError: it failed, and could not be undone.
    """
    program, loop = runner.program, runner.loop
    run = functools.partial(proof.plain_run, program.holdings, functools.partial(runner.step, *call[0], **call[1]))
    found: list[dict[str, Difference]] = []
    try:
        with aside(runner):
            made = proof.kept(program, run)
            for draw in range(DRAWS):
                with _moved(program, _OF_EPS * _EPS[loop.compute_dtype()], draw):
                    found.append(proof.apart(program, run, made))
    except CandidateFailedError as error:
        if not error.undone:
            raise
        why = describe(error.__cause__ or error)
    except Exception as error:  # noqa: BLE001 - no memory for what is kept, say; each run was undone before that
        why = describe(error)
    else:
        return found
    _log.info("%s is not run in other roundings: %s", runner.name, why)
    return []


@contextlib.contextmanager
def _moved(program: Program, share: float, draw: int) -> Iterator[None]:
    """Move each element of a parameter by a part of itself, at most ``share`` or what its dtype can hold."""
    before: list[tuple[torch.Tensor, torch.Tensor]] = []
    draws: dict[torch.device, torch.Generator] = {}
    try:
        with torch.no_grad():
            for one in program.holdings.parameters().values():
                if not one.is_floating_point():
                    continue
                if one.device not in draws:
                    draws[one.device] = torch.Generator(one.device).manual_seed(draw)
                before.append((one, one.clone()))
                size = max(share, torch.finfo(one.dtype).eps)
                wide = torch.promote_types(one.dtype, torch.float32)
                by = torch.rand(one.shape, generator=draws[one.device], device=one.device, dtype=wide)
                one.mul_(by.mul_(2 * size).add_(1 - size))
        yield
    finally:
        with torch.no_grad():
            for changed, value in reversed(before):
                changed.copy_(value)
