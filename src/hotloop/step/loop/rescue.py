"""What happens when a step fails in its tier: it is undone and run eagerly, or the run is told that it cannot be."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from hotloop import events as ev
from hotloop._torch.dispatch import place_of
from hotloop._torch.dynamo import RaisedError
from hotloop.compiling.fallback.causes import describe
from hotloop.errors import CompiledRunError, StepLostError
from hotloop.step.obstacle import Obstacle
from hotloop.step.state.undo import StepStart, drop_tracebacks

if TYPE_CHECKING:
    from collections.abc import Callable

    from hotloop.step.loop.loop import Loop
    from hotloop.step.loop.runner import Runner
    from hotloop.step.obstacle import CandidateFailedError
    from hotloop.step.tiers import Tier


class Rescue:
    """Undoes the steps of one runner."""

    def __init__(self, loop: Loop, runner: Runner) -> None:
        self._loop, self._runner = loop, runner
        self._start: StepStart | None = None
        self._sizes: list[int] = []
        self._begun = 0
        """Collectives that had begun when the step did."""

    def look_again(self) -> None:
        """What a step may change is not what it was: find it anew."""
        self._start = None

    def save(self, *, gradients: bool, tensors: bool = True) -> None:
        """Note what the coming step finds.

        Args:
            gradients: it may read the gradients that exist.
            tensors: it may fail half-way, so that copies are needed.
        """
        sizes = [len(group["params"]) for one in self._loop.holdings.optimizers.values() for group in one.param_groups]
        if self._start is None or sizes != self._sizes:
            self._sizes = sizes
            self._start = StepStart(self._loop.holdings, [self._loop.device])
        self._loop.writes.begun = False
        self._begun = self._loop.peers.begun() if self._loop.peers is not None else 0
        self._start.save(gradients=gradients and tensors, buffers=tensors)

    def recover(self, error: Exception, run: Callable[[], Any], tier: Tier, *, ours: bool, wrote: bool = False) -> Any:
        """The step failed in a tier: undo it and run it eagerly, or say that it cannot be undone.

        Args:
            error: what it raised.
            run: runs the step.
            tier: the tier it failed in.
            ours: the exception cannot be the user's own: none of their code was running.
            wrote: a recorded optimizer has stepped.
        """
        self._check_alive(error, tier)
        peers = self._loop.peers
        if peers is not None and peers.begun() != self._begun:
            raise peers.lost(error, f"in tier {tier.name}, step {self._loop.steps + 1}", ours=ours)
        start = self._start
        if start is not None and start.complete:  # else it failed before the step began
            self._check_unwritten(error, tier, ours=ours, wrote=wrote or start.wrote())
            try:
                start.restore()
            except Exception:  # noqa: BLE001 - no matter why: half of the step is still there
                raise self._lost(error, tier, "and could not be undone") from error
        obstacle = obstacle_of(error)
        drop_tracebacks(error)
        return self.rung_down(run, tier, obstacle)

    def rung_down(self, run: Callable[[], Any], tier: Tier, obstacle: Obstacle) -> Any:
        """Run eagerly a step that was undone; from the next one on, the tier below is in force."""
        self._runner.kind = "undone"
        with self._loop.eager():
            result = run()  # what it raises as well is the user's own, and passes
        undone = ev.StepUndone(
            step=self._loop.steps, function=self._runner.name, tier=tier.name, reason=obstacle.reason
        )
        self._loop.emit(undone)
        self._loop.course.failed(tier, obstacle, self._runner)
        return result

    def candidate_failed(self, failed: CandidateFailedError, tier: Tier) -> Obstacle:
        """Say why a candidate failed, and let go of what its exception keeps in memory."""
        error = failed.__cause__
        assert isinstance(error, Exception)
        self._check_alive(error, tier)
        if self._loop.peers is not None and failed.began:  # the others are in its collectives, or behind them
            ours = is_compiled_codes(error) or isinstance(error, torch.OutOfMemoryError) or not failed.undone
            raise self._loop.peers.lost(error, f"in a proof of tier {tier.name}", ours=ours)
        if not failed.undone:
            raise self._lost(error, tier, "and could not be undone") from error
        obstacle = obstacle_of(error)
        drop_tracebacks(failed)
        return obstacle

    def _check_alive(self, error: Exception, tier: Tier) -> None:
        """Raise what tells that the GPU itself is lost, where it is."""
        if self._loop.device.type != "cuda":
            return
        try:
            torch.cuda.synchronize(self._loop.device)
        except RuntimeError as poisoned:
            raise StepLostError(
                f"the CUDA context is lost in tier {tier.name}, step {self._loop.steps + 1}: {describe(poisoned)}. "
                f'Start the program again from its last checkpoint, with Loop(..., run="{self._loop.given}")'
            ) from error

    def _check_unwritten(self, error: Exception, tier: Tier, *, ours: bool, wrote: bool) -> None:
        """After a parameter has been written, a step cannot be undone. The user's own exception passes."""
        if not self._loop.writes.begun and not wrote:
            return
        if not ours:
            raise error
        what = "the optimizer had begun to write" if self._loop.writes.begun else "a parameter had been written"
        raise self._lost(error, tier, f"after {what}") from error

    def _lost(self, error: Exception, tier: Tier, when: str) -> StepLostError:
        where = f"in tier {tier.name}, step {self._loop.steps + 1}, {when}"
        return StepLostError(
            f"{_cause_of(error)} {where}: the step cannot be repeated. "
            f'Go on from the last checkpoint, with Loop(..., run="{self._loop.given}")'
        )


def obstacle_of(error: Exception) -> Obstacle:
    """Explain why a capture or a compiled step failed, with the innermost line of the user's."""
    file, line = place_of(error) or (None, None)
    cause = _cause_of(error)
    if _TWICE in cause:
        return Obstacle(_DIFFERENTIATED_TWICE, _NOT_COMPILED, file, line)
    if isinstance(error, CompiledRunError):
        return Obstacle(cause, _OF_THE_COMPILERS, file, line)
    return Obstacle(cause, "see the reason; move what it names out of the step", file, line)


_OF_THE_COMPILERS = (
    "eager runs the same step without a failure, so compiled code is at fault: train on without this tier, or name "
    "another preset"
)


_TWICE = "does not currently support double backward"
_DIFFERENTIATED_TWICE = (
    "the step differentiates a gradient of compiled code, as a gradient penalty does (create_graph=True), and torch's "
    "aot_autograd, which all compiled code goes through, does not support double backward"
)
_NOT_COMPILED = (
    'train such a step uncompiled: run="eager+graph" captures it on a GPU; hotloop.compile() can compile the models of '
    "the program whose gradients are not differentiated again"
)


def is_compiled_codes(error: Exception) -> bool:
    """Tell whether compiled code failed, rather than the user's; of memory that ran out, in whose hands it did."""
    if isinstance(error, CompiledRunError) or RaisedError(error).is_compile_error:
        return True
    trace = error.__traceback__ if isinstance(error, torch.OutOfMemoryError) else None
    while trace is not None:
        if str(trace.tb_frame.f_globals.get("__name__")) in _COMPILED_CODE:
            return True
        trace = trace.tb_next
    return False


_COMPILED_CODE = ("hotloop.compiling.fallback.backend", "hotloop._torch.autograd")
"""Modules whose frames are around compiled code that runs: its forward and its backward."""


def _cause_of(error: Exception) -> str:
    """Give the cause of a failure; of compiled code the original one, as ours advises for a step that nobody owns."""
    cause = error.__cause__ if isinstance(error, CompiledRunError) else None
    return describe(cause or error)
