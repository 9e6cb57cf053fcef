"""The backend that walks the ladder: each graph, its backward included, takes the first rung that compiles it.

It compiles before anything executes, so stepping down needs no undo. A failure while compiled code runs cannot be
undone from here: `CompiledRunError` says so.
"""

from __future__ import annotations

import functools
import logging
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import fx

from hotloop import events as ev
from hotloop._torch import backends, cudagraphs
from hotloop._torch.autograd import guard_backward
from hotloop._torch.dispatch import drawing_apart
from hotloop._torch.dynamo import RaisedError
from hotloop._torch.graphs import copy_graph, is_user_file, user_line
from hotloop._torch.settings import backward_with_forward
from hotloop.compiling.apply.regions import Cut, split
from hotloop.compiling.fallback import step_marks
from hotloop.compiling.fallback.causes import Failure, failure_of
from hotloop.compiling.fallback.emulation import emulation_of
from hotloop.compiling.fallback.rungs import Ladder
from hotloop.compiling.observe import NOBODY, GraphInfo, Tally, active, collector
from hotloop.errors import CompiledRunError, CompileFailedError, StaleOutputError, describe

if TYPE_CHECKING:
    from collections.abc import Callable

    from hotloop.presets import Preset

_log = logging.getLogger("hotloop")
_BACKWARD_TRIES = 3
"""Calls with gradients in which a graph's backward is looked for; a graph that makes none is left alone after them."""


class LadderBackend:
    """A torch.compile backend for a ladder of presets; equal settings are equal backends, and share compiled code.

    Args:
        rungs: the requested preset first, ``none`` last.
        cut: where graphs are cut into pieces; by default they are compiled whole.
        strict: raise `CompileFailedError` where a rung fails.
    """

    def __init__(self, rungs: tuple[Preset, ...], *, cut: Cut | None = None, strict: bool = False) -> None:
        self.rungs, self.cut, self.strict = rungs, cut or Cut(), strict
        self.__name__ = f"hotloop_{rungs[0].name}"
        names = tuple(rung.name for rung in rungs)
        emulation = next((found for rung in rungs if (found := emulation_of(rung)) is not None), None)
        self._key = (tuple(rung.key for rung in rungs), names, self.cut, strict, emulation)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, LadderBackend) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    def __call__(self, graph: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        """Compile one graph of dynamo's: whole, or by its blocks."""
        used: list[Preset] = []
        run = self._by_blocks(graph, inputs, used) if self.cut.blocks else None
        if run is None:
            run = self._compile(graph, inputs, "whole", used)
        return step_marks.Outputs(run) if any(rung.cudagraphs for rung in used) else run

    def reset(self) -> None:
        """Forget the CUDA graphs that were recorded: ``torch.compiler.reset`` calls this on each backend."""
        if any(rung.cudagraphs for rung in self.rungs):
            cudagraphs.forget_graphs()

    def _by_blocks(self, graph: fx.GraphModule, inputs: list[Any], used: list[Preset]) -> Callable[..., Any] | None:
        """Cut the graph and compile its pieces; None where it has to be compiled whole."""
        try:
            compile_piece = functools.partial(self._compile, used=used)
            joined = split(copy_graph(graph), inputs, self.cut, compile_piece)
        except Exception as error:
            if RaisedError(error).is_signal or isinstance(error, CompileFailedError):
                raise
            joined = describe(error)  # cutting is our own doing, and no reason not to compile
        if not isinstance(joined, str):
            return joined
        if joined:
            _log.warning("%s: compiled whole, not by blocks: %s", active.tally.component, joined)
        return None

    def _compile(self, graph: fx.GraphModule, inputs: list[Any], region: str, used: list[Preset]) -> Callable[..., Any]:
        """Compile a graph or piece on the first rung that takes it, which is added to ``used``."""
        ladder: Ladder = active.tally.ladder or Ladder(self.rungs)
        pristine = copy_graph(graph)
        failed: list[tuple[Preset, Failure]] = []
        for index, rung in ladder.below():
            candidate = copy_graph(pristine) if failed or rung.backend == "eager" else graph
            collector.hung()  # what hung before is no reason of what fails from here on
            try:
                run = _compile_on(rung, candidate, inputs)
            except Exception as error:
                if RaisedError(error).is_signal:
                    raise
                failure = failure_of(error, pristine, hung=collector.hung())
                if self.strict:
                    raise CompileFailedError(failure.strict_message(rung.name)) from error
                ladder.failed(index, failure.reason, systemic=failure.systemic)
                failed.append((rung, failure))
                continue
            info = GraphInfo(self.rungs[0].name, rung.name, region, self._fallback(failed, rung, ladder))
            used.append(rung)
            around = _Around() if rung.cudagraphs else None
            return _runner(info, run, pristine, around)
        raise AssertionError("a ladder ends in none, which runs the graph as it is")

    def _fallback(self, failed: list[tuple[Preset, Failure]], rung: Preset, ladder: Ladder) -> ev.Fallback | None:
        """Return why a graph runs on another rung than the requested one; None where it does not.

        Where rungs failed for this graph, the first failure is emitted: later ones are mostly its consequence.
        """
        if failed:
            first, failure = failed[0]
            fallback = failure.fallback(active.tally.component, first, rung)
            collector.emit(fallback)
            return fallback
        requested = self.rungs[0]
        return None if rung.name == requested.name else ladder.stepped_down(requested, rung)


def _compile_on(rung: Preset, graph: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
    """Compile a graph on one rung."""
    if rung.backend == "eager":  # the last rung must not depend on any setting of torch's
        return backends.eager(graph, inputs)
    with backward_with_forward(), drawing_apart():
        if (emulation := emulation_of(rung)) is not None:
            return emulation.backend(graph, inputs)
        if rung.backend == "inductor":
            return backends.inductor(rung.mode, rung.options, rung.dynamic)(graph, inputs)
        return backends.aot_eager()(graph, inputs)


class _Around:
    """Surrounds each run of a graph under CUDA graphs, forward and backward, so that its outputs last."""

    def __init__(self) -> None:
        self._tally = NOBODY

    def forward(self, compiled: Callable[..., Any]) -> Callable[..., Any]:
        """Return the graph as a function that notes each of its runs."""

        def noted(*args: Any) -> Any:
            self._tally = active.tally
            before = cudagraphs.skips()
            outputs = compiled(*args)
            if cudagraphs.skips() != before:
                self._tally.cudagraphs_skipped[
                    "torch passed a capture over as the graph ran: mostly it writes into an input "
                    "(TORCH_LOGS=cudagraphs names it)"
                ] += 1
            if torch.is_grad_enabled():
                step_marks.steps.waits(outputs)
            return outputs

        return noted

    def before(self, node: Any) -> None:
        """See `hotloop._torch.autograd.guard_backward`."""
        step_marks.steps.runs_backward(node, self._tally.component)

    def after(self, node: Any, gradients: tuple[Any, ...], *, kept: bool) -> tuple[Any, ...]:
        """See `hotloop._torch.autograd.guard_backward`."""
        step_marks.steps.ran_backward(node, kept=kept)
        if kept:
            cudagraphs.memory().backward_ran()
            self._tally.cudagraphs_skipped[
                "a backward that keeps its graph (retain_graph=True) runs outside of CUDA graphs"
            ] += 1
        return step_marks.owned_gradients(gradients, self._tally)


def _runner(
    info: GraphInfo, compiled: Callable[..., Any], pristine: fx.GraphModule, around: _Around | None
) -> Callable[..., Any]:
    """Return the function that runs a compiled graph, counts it for the active component, and explains failures."""
    tries = 0 if info.running == "none" else _BACKWARD_TRIES
    local = active
    tally = local.tally
    forward = compiled if around is None else around.forward(compiled)

    def explain(error: Exception, phase: Literal["forward", "backward"]) -> Exception:
        if info.running == "none" or _passes(error):
            return error
        return _run_failed(error, phase, info.running, pristine, tally)  # of the component that ran the graph last

    def run(*args: Any) -> Any:
        nonlocal tries, tally
        tally = local.tally
        tally.executed += 1
        tally.graphs[info] += 1
        try:
            outputs = forward(*args)
        except Exception as error:
            raised = explain(error, "forward")
            if raised is error:
                raise
            raise raised from error
        if tries and torch.is_grad_enabled():
            found = guard_backward(outputs, lambda error: explain(error, "backward"), around)
            tries = 0 if found else tries - 1
        return outputs

    return run


def _run_failed(
    error: Exception, phase: Literal["forward", "backward"], preset: str, pristine: fx.GraphModule, tally: Tally
) -> Exception:
    """Return the `CompiledRunError` for a graph that failed as it ran, and emit its event."""
    file, line = user_line(pristine) or (None, None)
    reason = describe(error)
    event = ev.RunFailed(
        component=tally.component or None, phase=phase, preset=preset, reason=reason, file=file, line=line
    )
    collector.emit(event, tally)
    at = f" (graph at {event.location})" if file else ""
    return CompiledRunError(
        f"compiled code of component {tally.component!r} failed in its {phase}{at} under preset "
        f"{preset}: {reason}. A part of the step may have run, so it was not repeated. To go on: "
        f"{event.remedy}; rerun with HOTLOOP_DISABLE=1 to see whether eager fails as well.",
        tally.component,
    )


def _passes(error: Exception) -> bool:
    """Return whether an exception is not ours to explain: said already, out of memory, a signal, or the user's own.

    It is the user's own where the innermost frame is user code: a custom operator or callback that compiled code
    called. torch.utils.checkpoint ends a recomputation early by an exception, which passes through the compiled code.
    """
    if isinstance(error, CompiledRunError | StaleOutputError | torch.OutOfMemoryError):
        return True
    trace, innermost = error.__traceback__, ""
    while trace is not None:
        innermost = trace.tb_frame.f_code.co_filename
        trace = trace.tb_next
    return type(error).__module__ == "torch.utils.checkpoint" or is_user_file(innermost)
