"""The backend that walks the ladder: each graph, its backward included, takes the first rung that compiles it.

It compiles before anything executes, so stepping down needs no undo. What fails later, while compiled code runs, cannot
be undone from here: eager is asked whether the error is the user's own; if it is not, `CompiledRunError` says so.
"""

from __future__ import annotations

import functools
import linecache
import logging
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import fx

from hotloop import events as ev
from hotloop._torch import backends, cudagraphs
from hotloop._torch.autograd import guard_backward, nodes_of
from hotloop._torch.dynamo import RaisedError
from hotloop._torch.graphs import copy_graph, first_failure, is_user_file, user_line
from hotloop._torch.settings import backward_with_forward
from hotloop.compiling.apply import Cut, split
from hotloop.compiling.fallback import headers, lifetime
from hotloop.compiling.fallback.absent import absent_of
from hotloop.compiling.fallback.causes import Failure, describe, failure_of, run_hint
from hotloop.compiling.fallback.emulation import emulation_of
from hotloop.compiling.fallback.ladder import Ladder
from hotloop.compiling.observe import NOBODY, GraphInfo, Tally, active, collector
from hotloop.errors import CompiledRunError, CompileFailedError, StaleOutputError

if TYPE_CHECKING:
    from collections.abc import Callable

    from hotloop.presets import Preset

_log = logging.getLogger("hotloop")
_SKIPPED_WHILE_RUNNING = (
    "torch passed a capture over as the graph ran: mostly it writes into an input (TORCH_LOGS=cudagraphs names it)"
)
_KEPT = "a backward that keeps its graph (retain_graph=True) runs outside of CUDA graphs"
_BACKWARD_LOOKS = 3
"""Calls with gradients in which a graph's backward is looked for; a graph that makes none is left alone after them."""


class LadderBackend:
    """A torch.compile backend for a ladder of presets; equal settings are equal backends, and share compiled code.

    Args:
        rungs: the requested preset first, ``none`` last.
        cut: where graphs are cut into pieces; by default they are compiled whole.
        strict: raise `CompileFailedError` where a rung fails.
        strict_lifetime: hand out the memory of CUDA graphs itself, not copies of it.
    """

    def __init__(
        self, rungs: tuple[Preset, ...], *, cut: Cut | None = None, strict: bool = False, strict_lifetime: bool = False
    ) -> None:
        self.rungs, self.cut, self.strict, self.strict_lifetime = rungs, cut or Cut(), strict, strict_lifetime
        self.__name__ = f"hotloop_{rungs[0].name}"
        names = tuple(rung.name for rung in rungs)
        emulation = next((found for rung in rungs if (found := emulation_of(rung)) is not None), None)
        self._key = (tuple(rung.key for rung in rungs), names, self.cut, strict, strict_lifetime, emulation)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, LadderBackend) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    def __call__(self, graph: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        """Compile one graph of dynamo's: whole, or by its blocks."""
        made: list[Preset] = []
        run = self._by_blocks(graph, inputs, made) if self.cut.blocks else None
        if run is None:
            run = self._compile(graph, inputs, "whole", made)
        copies = not self.strict_lifetime and any(rung.cudagraphs for rung in made)
        return lifetime.Outputs(run, _active_tally) if copies else run

    def reset(self) -> None:
        """Forget the CUDA graphs that were recorded: ``torch.compiler.reset`` asks each backend to."""
        if any(rung.cudagraphs for rung in self.rungs):
            cudagraphs.forget_graphs()

    def _by_blocks(self, graph: fx.GraphModule, inputs: list[Any], made: list[Preset]) -> Callable[..., Any] | None:
        """Cut the graph and compile its pieces; None where it has to be compiled whole."""
        try:
            compile_piece = functools.partial(self._compile, made=made)
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

    def _compile(self, graph: fx.GraphModule, inputs: list[Any], region: str, made: list[Preset]) -> Callable[..., Any]:
        """Compile a graph or piece on the first rung that takes it, which is noted in ``made``."""
        ladder: Ladder = active.tally.ladder or Ladder(self.rungs)
        pristine = copy_graph(graph)
        fallback: ev.Fallback | None = None
        failed: list[tuple[Preset, Failure]] = []
        for index, rung in ladder.below():
            candidate = copy_graph(pristine) if failed or rung.backend == "eager" else graph
            try:
                run = _compiled_soundly(rung, candidate, inputs, pristine)
            except Exception as error:
                if RaisedError(error).is_signal:
                    raise
                failure = failure_of(error, pristine)
                if self.strict:
                    raise CompileFailedError(_strict_message(rung, failure)) from error
                ladder.failed(index, failure.reason, systemic=failure.systemic)
                failed.append((rung, failure))
                continue
            if failed:
                fallback = _fallback(failed, rung)
                collector.emit(fallback)
            info = GraphInfo(
                self.rungs[0].name, rung.name, region, fallback or _stepped_down(self.rungs[0], rung, ladder.reason)
            )
            made.append(rung)
            around = _Around(copy=not self.strict_lifetime) if rung.cudagraphs else None
            return _Runner(info, run, pristine, around).run
        raise AssertionError("a ladder ends in none, which runs the graph as it is")


def compiler_of(preset: Preset) -> backends.Compiler:
    """Give the function that compiles a graph as a preset says."""
    if (emulation := emulation_of(preset)) is not None:
        return emulation.compile
    if preset.backend == "inductor":
        return backends.inductor(preset.mode, preset.options, preset.dynamic)
    return backends.aot_eager() if preset.backend == "aot_eager" else backends.eager


def _compiled(rung: Preset, graph: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
    if rung.backend == "eager":  # the last rung must not depend on any setting of torch's
        return backends.eager(graph, inputs)
    with backward_with_forward():
        return compiler_of(rung)(graph, inputs)


def _compiled_soundly(
    rung: Preset, graph: fx.GraphModule, inputs: list[Any], pristine: fx.GraphModule
) -> Callable[..., Any]:
    """Compile a graph; once more where it failed on what a killed compiler left in torch's folder."""
    try:
        return _compiled(rung, graph, inputs)
    except Exception as error:
        if RaisedError(error).is_signal or not headers.removed(error):
            raise
    return _compiled(rung, copy_graph(pristine), inputs)


def _strict_message(rung: Preset, failure: Failure) -> str:
    at = f" at {failure.file}:{failure.line}: {failure.source}" if failure.file else ""
    return f"preset {rung.name} failed ({failure.stage}){at}: {failure.reason}. {failure.hint}"


def _fallback(failed: list[tuple[Preset, Failure]], to: Preset) -> ev.Fallback:
    """One event for the walk, told by its first failure: the later ones are mostly its echo."""
    first, failure = failed[0]
    return ev.Fallback(
        component=active.tally.component or None,
        scope="graph",
        from_preset=first.name,
        to_preset=to.name,
        stage=failure.stage,
        reason=failure.reason,
        file=failure.file,
        line=failure.line,
        hint=failure.hint,
    )


def _stepped_down(requested: Preset, rung: Preset, reason: str) -> ev.Fallback | None:
    """A graph that started on a lower rung, since the component as a whole had stepped down."""
    if requested.name == rung.name:
        return None
    return ev.Fallback(
        scope="component", from_preset=requested.name, to_preset=rung.name, stage="compile", reason=reason
    )


def _active_tally() -> Tally:
    return active.tally


class _Around:
    """What is done around each run of a graph under CUDA graphs, forward and backward, so that its outputs last."""

    def __init__(self, *, copy: bool) -> None:
        self._copy, self._tally = copy, NOBODY

    def forward(self, compiled: Callable[..., Any]) -> Callable[..., Any]:
        """Give a graph that notes each of its runs."""

        def noted(*args: Any) -> Any:
            self._tally = active.tally
            before = cudagraphs.skips()
            outputs = compiled(*args)
            if cudagraphs.skips() != before:
                self._tally.cudagraphs_skipped[_SKIPPED_WHILE_RUNNING] += 1
            if torch.is_grad_enabled():
                lifetime.steps.waits(outputs)
            return outputs

        return noted

    def before(self, node: Any) -> None:
        """See `hotloop._torch.autograd.Around`."""
        lifetime.steps.runs_backward(node, self._tally.component)

    def after(self, node: Any, gradients: tuple[Any, ...], *, kept: bool) -> tuple[Any, ...]:
        """See `hotloop._torch.autograd.Around`."""
        lifetime.steps.ran_backward(node, kept=kept)
        if kept:
            cudagraphs.memory().backward_ran()
            self._tally.cudagraphs_skipped[_KEPT] += 1
        return lifetime.owned_gradients(node, gradients, self._tally) if self._copy else gradients


class _Runner:
    """Runs one compiled graph, counts it for whoever is active, and explains what fails while it runs."""

    def __init__(
        self, info: GraphInfo, compiled: Callable[..., Any], pristine: fx.GraphModule, around: _Around | None = None
    ) -> None:
        self._info, self._pristine, self._around = info, pristine, around
        self._absent = absent_of(pristine) if info.running != "none" else None
        self.run = self._make(info, compiled if around is None else around.forward(compiled))

    def _make(self, info: GraphInfo, compiled: Callable[..., Any]) -> Callable[..., Any]:
        looks = 0 if info.running == "none" else _BACKWARD_LOOKS
        local, explain, guard, absent = active, self._explain, self._guard, self._absent
        tally = local.tally

        def backward_failed(error: Exception) -> Exception:
            return self._run_failed(error, "backward", tally)  # whoever ran the graph last

        def run(*args: Any) -> Any:
            nonlocal looks, tally
            tally = local.tally
            tally.executed += 1
            tally.graphs[info] += 1
            before = nodes_of(args) if looks else []
            try:
                outputs = compiled(*args)
            except Exception as error:
                raised, cause = explain(error, args)
                if raised is error:
                    raise
                raise raised from cause
            if looks:
                looks = guard(outputs, list(zip(before, nodes_of(args), strict=True)), looks, backward_failed)
            if absent is not None and torch.is_grad_enabled():
                absent.watch(args, outputs)
            return outputs

        return run

    def _guard(
        self, outputs: Any, written: list[tuple[Any, Any]], looks: int, explain: Callable[[Exception], Exception]
    ) -> int:
        if not torch.is_grad_enabled():
            return looks
        return 0 if guard_backward(outputs, explain, self._around, written) else looks - 1

    def _explain(self, error: Exception, args: tuple[Any, ...]) -> tuple[Exception, BaseException | None]:
        """Give what to raise for a failure of the forward: the error itself, eager's own, or ours; and its cause."""
        if _passes(error):
            return error, None
        eager_error = self._ask_eager(args)
        if eager_error is not None:
            return eager_error, None
        if self._info.running == "none":
            return error, None
        return self._run_failed(error, "forward", active.tally), error

    def _ask_eager(self, args: tuple[Any, ...]) -> Exception | None:
        """Run the graph eagerly on copies of its inputs: what eager raises too is the user's own, with their line."""
        copies = [_copied(arg) if isinstance(arg, torch.Tensor) else arg for arg in args]
        # As the graph ran, or one that registers a hook on a tensor would fail here for a reason of ours.
        with torch.set_grad_enabled(torch.is_grad_enabled()), torch.random.fork_rng():
            found = first_failure(self._pristine, copies)
        if found is None:
            return None
        eager_error, place = found
        if place is not None:
            file, line = place
            eager_error.add_note(f"raised in compiled code, for {file}:{line}: {linecache.getline(file, line).strip()}")
        return eager_error.with_traceback(None)

    def _run_failed(self, error: Exception, phase: Literal["forward", "backward"], tally: Tally) -> Exception:
        if _passes(error):
            return error
        file, line = user_line(self._pristine) or (None, None)
        reason = describe(error)
        event = ev.RunFailed(
            component=tally.component or None,
            phase=phase,
            preset=self._info.running,
            reason=reason,
            file=file,
            line=line,
        )
        collector.emit(event, tally)
        at = f" (graph at {event.location})" if file else ""
        return CompiledRunError(
            f"compiled code of component {tally.component!r} failed in its {phase}{at} under preset "
            f"{self._info.running}: {reason}. A part of the step may have run, so it was not repeated. To go on: "
            f"{event.remedy}; {run_hint()}.",
            tally.component,
        )


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    """Copy a graph's input, a leaf as a leaf: autograd allows others what it refuses them (a write in place)."""
    if tensor.is_leaf:
        return tensor.detach().clone().requires_grad_(tensor.requires_grad)
    with torch.enable_grad():
        return tensor.detach().requires_grad_().clone()


def _passes(error: Exception) -> bool:
    """Tell whether an exception is none of ours to explain: said already, out of memory, the user's own, or a signal.

    torch.utils.checkpoint ends a recomputation early by an exception, which passes through the compiled code.
    """
    known = isinstance(error, CompiledRunError | StaleOutputError | torch.OutOfMemoryError)
    return known or type(error).__module__ == "torch.utils.checkpoint" or _is_users(error)


def _is_users(error: BaseException) -> bool:
    """Tell whether the innermost frame is user code: a custom operator or callback that compiled code called."""
    trace, innermost = error.__traceback__, ""
    while trace is not None:
        innermost = trace.tb_frame.f_code.co_filename
        trace = trace.tb_next
    return is_user_file(innermost)
