"""What happens when a step fails in its tier: it is undone and run eagerly, or the run ends resumable."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from hotloop import events as ev
from hotloop._torch.dispatch import place_of
from hotloop._torch.dynamo import RaisedError
from hotloop.errors import CompiledRunError, StepLostError, describe
from hotloop.interrupts import interruptible, uninterrupted
from hotloop.step.obstacle import Obstacle
from hotloop.step.state.memory_limit import NoRoomError
from hotloop.step.state.snapshot import Snapshot

if TYPE_CHECKING:
    from collections.abc import Callable

    from hotloop.step.context import DecoratedStep
    from hotloop.step.obstacle import CandidateFailedError
    from hotloop.step.tiers import Tier

_COMPILED_CODE = ("hotloop.compiling.fallback.ladder_backend", "hotloop._torch.autograd")
"""Modules whose frames are around compiled code that runs: its forward and its backward."""


class Rescue:
    """The undo and the eager repeat of a decorated step's calls that failed in their tier."""

    def __init__(self, step: DecoratedStep) -> None:
        self._step, self._context = step, step.context
        self._start: Snapshot | None = None
        self._sizes: list[int] = []
        self._begun = 0
        """Collectives of the run that had begun when the step did."""

    def look_again(self) -> None:
        """Before the next step, search again for all that a step may change: there may be other tensors."""
        self._start = None

    def save(self, *, gradients: bool, tensors: bool = True) -> None:
        """Keep what the coming step finds: ``gradients`` that it may read, ``tensors`` where it may fail half-way."""
        context = self._context
        optimizers = context.holdings.optimizers.values()
        sizes = [len(group["params"]) for optimizer in optimizers for group in optimizer.param_groups]
        context.writes.begun = False
        self._begun = context.peers.begun()
        if self._start is None or sizes != self._sizes:
            self._start, self._sizes = None, sizes
            self._start = Snapshot(self._step.program, everything=False, gradients=gradients and tensors)
        else:
            self._start.save(gradients=gradients and tensors, tensors=tensors)

    def has_run(self) -> None:
        """Let go of what `save` kept: the step has run to its end."""
        if self._start is not None:
            self._start.let_go()

    def guarded(self, run: Callable[[], Any], tier: Tier) -> Any:
        """Run the step without a graph; where compiled code fails before a parameter was written, run it eagerly."""
        self._step.ran = tier.name
        if not tier.other_kernels:
            return run()
        try:
            self.save(gradients=True)
            result = run()
        except Exception as error:  # noqa: BLE001 - whatever it is, the step is undone and eager asked
            failed = error
        else:
            self.has_run()
            return result
        # Out of the except clause, so that what eager raises does not carry our exception along.
        return self.recover(failed, run, tier, ours=is_compiled_codes(failed))

    @uninterrupted
    def recover(self, error: Exception, run: Callable[[], Any], tier: Tier, *, ours: bool, wrote: bool = False) -> Any:
        """Undo a step that failed in a tier and run it eagerly; return eager's result.

        Args:
            error: what the step raised.
            run: runs the step.
            tier: the tier that failed.
            ours: the exception cannot be the user's own, since none of their code was running.
            wrote: a recorded optimizer has stepped.

        Raises:
            StepLostError: the step cannot be undone.
            Exception: the user's own error, which eager raises as well.
        """
        self._check_alive(error, tier)
        peers = self._context.peers
        launched = tier.graph and self._context.device.type == "cuda"  # NCCL wants all to launch it, or none
        if not peers.alone and (launched or peers.begun() != self._begun):
            raise peers.lost(error, f"in tier {tier.name}, step {self._context.progress.steps + 1}", ours=ours)
        start = self._start
        if start is not None and start.complete:  # otherwise the step failed before it began
            self._check_unwritten(error, tier, ours=ours, wrote=wrote or start.wrote())
            try:
                start.restore()
            except Exception:  # noqa: BLE001 - no matter why: half of the step is still there
                raise self._lost(error, tier, "and could not be undone") from error
            start.let_go()
        obstacle = obstacle_of(error)
        drop_tracebacks(error)
        return self.rung_down(run, tier, obstacle)

    def rung_down(self, run: Callable[[], Any], tier: Tier, obstacle: Obstacle) -> Any:
        """Run a step eagerly that was undone; from the next step on, the tier below is in force."""
        step, context = self._step, self._context
        step.doing = "undone"
        with context.eager():
            result = interruptible(run)  # what this raises as well is the user's own, and passes
        context.reports.emit(
            ev.StepUndone(step=context.progress.steps, function=step.name, tier=tier.name, reason=obstacle.reason)
        )
        context.reports.failed(step, tier, obstacle)
        return result

    def candidate_failed(self, failed: CandidateFailedError, tier: Tier) -> Obstacle:
        """Explain why a candidate failed, and let go of what its exception keeps in memory.

        Raises:
            StepLostError: the candidate could not be undone, or the GPU is lost.
        """
        error, peers = failed.__cause__, self._context.peers
        assert isinstance(error, Exception)
        if isinstance(error, StepLostError):  # another process has ended
            raise error
        self._check_alive(error, tier)
        if not peers.alone and failed.began:  # the other processes wait in its collectives, or behind them
            ours = is_compiled_codes(error) or isinstance(error, torch.OutOfMemoryError) or not failed.undone
            raise peers.lost(error, f"in a proof of tier {tier.name}", ours=ours)
        if not failed.undone:
            raise self._lost(error, tier, "and could not be undone") from error
        obstacle = obstacle_of(error)
        drop_tracebacks(failed)
        return obstacle

    def _check_alive(self, error: Exception, tier: Tier) -> None:
        """Raise `StepLostError` where the GPU itself is lost."""
        if self._context.device.type != "cuda":
            return
        try:
            torch.cuda.synchronize(self._context.device)
        except RuntimeError as poisoned:
            raise StepLostError(
                f"the CUDA context is lost in tier {tier.name}, step {self._context.progress.steps + 1}: "
                f"{describe(poisoned)}. Start the program again from its last checkpoint, with "
                f'Loop(..., run="{self._context.base_tier.name}")'
            ) from error

    def _check_unwritten(self, error: Exception, tier: Tier, *, ours: bool, wrote: bool) -> None:
        """Refuse to undo a step after a parameter was written. The user's own exception passes."""
        begun = self._context.writes.begun
        if not begun and not wrote:
            return
        if not ours:
            self._step.program.ran.raised(error)
            raise error
        what = "the optimizer had begun to write" if begun else "a parameter had been written"
        raise self._lost(error, tier, f"after {what}") from error

    def _lost(self, error: Exception, tier: Tier, when: str) -> StepLostError:
        where = f"in tier {tier.name}, step {self._context.progress.steps + 1}, {when}"
        return StepLostError(
            f"{_cause_of(error)} {where}: the step cannot be repeated. "
            f'Go on from the last checkpoint, with Loop(..., run="{self._context.base_tier.name}")'
        )


def obstacle_of(error: Exception) -> Obstacle:
    """Explain why a capture or a compiled step failed, with the innermost line of the user's code."""
    file, line = place_of(error) or (None, None)
    cause = _cause_of(error)
    hint = "see the reason; move what it names out of the step"
    if isinstance(error, torch.OutOfMemoryError | NoRoomError):
        hint = "take a smaller batch, or train on without this tier"
    if "legacy stream" in cause:
        hint = (
            "nothing of a captured step may wait for the default stream. Before torch 2.13, the gradients of a "
            "DistributedDataParallel do, unless it was made within `with torch.cuda.stream(torch.cuda.Stream()):`, "
            "which stands around accelerator.prepare where Accelerate makes it"
        )
    elif "does not currently support double backward" in cause:
        cause = (
            "the step differentiates a gradient of compiled code, as a gradient penalty does (create_graph=True), and "
            "torch's aot_autograd, which all compiled code goes through, does not support double backward"
        )
        hint = (
            'train such a step uncompiled: run="eager+graph" captures it on a GPU; hotloop.compile() can compile the '
            "models of the program whose gradients are not differentiated again"
        )
    elif isinstance(error, CompiledRunError):
        hint = (
            "eager runs the same step without a failure, so compiled code is at fault: train on without this tier, or "
            "name another preset"
        )
    return Obstacle(cause, hint, file, line)


def is_compiled_codes(error: Exception) -> bool:
    """Return whether compiled code failed rather than the user's. Memory may run out in the frames of either."""
    if isinstance(error, CompiledRunError) or RaisedError(error).is_compile_error:
        return True
    trace = error.__traceback__ if isinstance(error, torch.OutOfMemoryError) else None
    while trace is not None:
        if str(trace.tb_frame.f_globals.get("__name__")) in _COMPILED_CODE:
            return True
        trace = trace.tb_next
    return False


def _cause_of(error: Exception) -> str:
    """Describe a failure; for compiled code its cause, since our own message advises for a step that no loop owns."""
    if isinstance(error, NoRoomError):
        return str(error)
    cause = error.__cause__ if isinstance(error, CompiledRunError) else None
    return describe(cause or error)


def drop_tracebacks(error: BaseException) -> None:
    """Drop the tracebacks of an exception and its causes: their frames hold everything the failed step computed."""
    waiting: list[BaseException | None] = [error]
    seen: set[int] = set()
    while waiting:
        current = waiting.pop()
        if current is not None and id(current) not in seen:
            seen.add(id(current))
            current.__traceback__ = None
            waiting += current.__cause__, current.__context__
