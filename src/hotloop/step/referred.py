"""A step of a runner's in more bits: what eager and compiled code are both held against where rounding is large.

A deep stack of BatchNorms, or a small loss, makes eager's own rounding so large a part of a gradient that two right
ways to compute it are further apart than limits allow that know nothing of it.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from typing import TYPE_CHECKING, Any

from hotloop.step import proof
from hotloop.step.reference import Draw, NotRepeatableError, candidates, noting_draws, wide_step

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

    from hotloop.step.captured import Call
    from hotloop.step.runner import Runner

_log = logging.getLogger("hotloop")


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
