"""A component in one mode: calls its compiled code, counts the call, and has eager answer what torch refuses."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import torch

from hotloop import events as ev
from hotloop._torch import dynamo
from hotloop._torch.autograd import in_backward
from hotloop._torch.checkpoint import region_probe
from hotloop._torch.collectives import patience
from hotloop._torch.dispatch import place_of
from hotloop._torch.module import eager_call, module_of
from hotloop.compiling.apply.roots import Roots, roots_for
from hotloop.compiling.control.before import Before
from hotloop.compiling.fallback import Ladder, LadderBackend, first_available
from hotloop.compiling.fallback.causes import chain_of, failure_of
from hotloop.compiling.fallback.step_marks import steps
from hotloop.compiling.observe import Call, Tally, active, collector, explain
from hotloop.errors import CompiledRunError, CompileFailedError, describe

if TYPE_CHECKING:
    from hotloop._torch.checkpoint import Region
    from hotloop.compiling.apply.regions import Cut
    from hotloop.compiling.apply.roots import Root
    from hotloop.config import ComponentConfig
    from hotloop.presets import Preset

COMPILING = "the first steps of compiled code"
"""Holds the long timeout of collectives: see `hotloop._torch.collectives.Patience`."""
_transform_in_force = dynamo.transform_probe()
_region_in_force = region_probe()
_EAGER = "eager"
"""Notes of a call in a checkpointed forward that no graph ran; other calls are noted by their root."""
_STAND_IN = (
    "torch.compile hands this line another value than eager does, under any preset: move what makes the value into a "
    "function under @torch.compiler.disable, and the rest compiles"
)
_REPEATED = (
    ". The call was put back and repeated: what it did beside its module and arguments (a file, say) it did twice"
)
_FIRST_STEPS = 3
"""Steps in which the code of a lane is compiled; collectives are given time for that."""
_SHAPES = 16
"""Different shapes of arguments that are counted apart, for each component and mode."""


class TargetCall(Call):
    """A call of a target (a module, method or function) in one mode; ``root`` runs the target as compiled code.

    Python between dynamo's graphs may get values that dynamo made. So a call keeps what it found where its root is in
    parts, or is about to be traced.
    """

    def __init__(self, tally: Tally, root: Root, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        super().__init__(tally)
        self.root, self.target, self.args, self.kwargs = root, target, args, kwargs
        self.before: Before | None = None
        self._unkept = "a part had run before anything was compiled"

    def compiles(self) -> None:
        """See `Call`."""
        if self.before is None and not self.root.in_parts:  # nothing of the call has run yet
            self._keep()

    def breaks(self) -> None:
        """See `Call`."""
        self.root.in_parts = True

    def _keep(self) -> None:
        if self.root.sharded:
            self._unkept = "FSDP's hooks keep state of their own"
            return
        try:
            self.before = Before(module_of(self.target), (*self.args, *self.kwargs.values()))
        except RuntimeError as error:  # no memory for copies, say, though the call itself may fit
            self._unkept = describe(error)

    def run(self) -> Any:
        """Run the target as compiled code."""
        if self.root.in_parts:
            self._keep()
        return self.root.compiled(self.target, *self.args, **self.kwargs)

    def lost(self) -> str:
        """Return why eager cannot repeat the call; empty where it can."""
        if self.before is None:
            return f"what it found was not kept ({self._unkept})"
        if module_of(self.target) is None:
            return "a part of a function has run, which may have changed anything"
        return self.before.lost()

    def run_eager(self) -> Any:
        """Run the target eagerly, and return its result."""
        return eager_call(self.target, *self.args, **self.kwargs)

    def raise_as_eager(self) -> None:
        """Run the target eagerly for its exception alone; without one, restore the module and the random streams."""
        before = Before(module_of(self.target), (*self.args, *self.kwargs.values()))
        self.run_eager()
        before.restore()

    def failed_on_stand_in(self, error: Exception) -> bool:
        """Return whether dynamo may have handed the program a value that raised this, and the call can be repeated."""
        if not isinstance(error, TypeError | AttributeError) or not (self.root.in_parts or self.before):
            return False
        if lost := self.lost():
            error.add_note(
                f"hotloop: component {self.tally.component!r} has not asked eager whether it raises this too, since "
                f"the call cannot be repeated: {lost}. HOTLOOP_DISABLE=1 shows it. If eager does not: {_STAND_IN}"
            )
        return not lost

    def strict_error(self, error: Exception) -> CompileFailedError:
        """Return the error to raise under ``strict``: the backend's own where it failed, else one for tracing."""
        for link in chain_of(error):
            if isinstance(link, CompileFailedError):
                return link
        failure = failure_of(error, None)
        raised = CompileFailedError(
            f"component {self.tally.component!r}: tracing failed: {failure.reason}. {failure.hint}"
        )
        raised.__cause__ = error
        return raised

    def stays_eager(self, error: Exception, hint: str = "") -> ev.FrameEager:
        """Return why the target stays eager, from the exception."""
        failure = failure_of(error, None)
        file, line = (failure.file, failure.line) if failure.file else place_of(error) or (None, None)
        return ev.FrameEager(
            component=self.tally.component,
            function=type(self.target).__name__,
            stage="trace",
            file=file,
            line=line,
            reason=failure.reason,
            hint=hint or failure.hint,
        )


class Lane:
    """How a component runs in one mode: ``training`` is with gradients on, ``inference`` with gradients off."""

    def __init__(self, component: str, mode: str, preset: Preset, config: ComponentConfig, cut: Cut) -> None:
        self.preset, self.config, self.mode = preset, config, mode
        self.rungs = config.ladder_of(preset)
        self.backend = LadderBackend(self.rungs, cut=cut, strict=config.strict)
        self.tally = Tally(component, mode, suppress=not (config.strict or config.fullgraph))
        self.eager = preset.backend == "eager"
        self._has_graphs = self._marks = any(rung.cudagraphs for rung in self.rungs)
        self._roots: dict[int, Roots] = {}
        self._steps = 0

    def settled(self) -> bool:
        """Count a step of an optimizer; return whether the lane's first steps are over, or it waits for none."""
        self._steps += self.tally.calls > 0
        return self.eager or not self.tally.calls or self._steps > _FIRST_STEPS

    def start(self, device: str) -> None:
        """Choose where the ladder starts on this device type, and report what is missing."""
        index, lacking = first_available(self.rungs, device, chosen=self.config.ladder is not None)
        self.tally.ladder = Ladder(self.rungs, index, lacking)
        self.eager = self.rungs[index].backend == "eager"
        self._marks = any(rung.cudagraphs for rung in self.rungs[index:])
        if lacking:
            running = self.rungs[index].name
            name = self.tally.component
            event = ev.Unavailable(component=name, preset=self.preset.name, missing=lacking, running=running)
            collector.emit(event, self.tally)

    def call(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the target as compiled code where it is compiled, and else eagerly."""
        if self._has_graphs and not self.eager:
            count_call(self.tally, args, kwargs, marks=self._marks)
        if (place := _region_in_force()) is not None:
            return self._checkpointed(*place, target, args, kwargs)
        if self._leaves_eager():
            return self._run_eager(target, args, kwargs)
        return self._compiled(*self._roots_of(target).of(args, kwargs), target, args, kwargs)

    def _roots_of(self, target: Any) -> Roots:
        roots = self._roots.get(id(target))
        if roots is None:
            roots = roots_for(
                target,
                backend=self.backend,
                mode=self.mode,
                dynamic=self.preset.dynamic,
                fullgraph=self.config.fullgraph,
            )
            self._roots[id(target)] = roots
        return roots

    def _leaves_eager(self) -> bool:
        """Return whether this call runs eager; under a transform of torch.func, dynamo would give it up for good."""
        if not self.eager and _transform_in_force() is not None:
            reason = "a call under a transform of torch.func (grad, vmap, ...) runs eager"
            if (reason, None, None) not in self.tally.causes:
                collector.emit(explain.no_effect("transform", self.tally.component, reason, partly=True), self.tally)
            return True
        return self.eager

    def _run_eager(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the target eagerly, and count the call."""
        self.tally.calls += 1
        self.tally.eager_calls += 1
        return eager_call(target, *args, **kwargs)

    def _checkpointed(
        self, region: Region, recomputation: Any, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run a call in a region of ``torch.utils.checkpoint``: recomputed as it ran in the forward.

        Compiled code saves other tensors than eager, and torch refuses the difference. In between, a recompile limit
        may have been reached, or the lane left eager.
        """
        how = region.next(recomputation, self) if recomputation is not None else None
        if how is not None and how is not _EAGER:
            return self._recomputed(how, target, args, kwargs)
        if how is _EAGER or self._leaves_eager():
            how, result = _EAGER, self._run_eager(target, args, kwargs)
        else:
            executed, (root, differs) = self.tally.executed, self._roots_of(target).of(args, kwargs)
            result = self._compiled(root, differs, target, args, kwargs)
            how = _EAGER if self.tally.executed == executed else root
        if recomputation is None:
            region.note(self, how)
        return result

    def _recomputed(self, root: Root, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a call on the root that its forward ran on, which is compiled anew even past torch's recompile limit."""
        compiles = self.tally.compiles
        try:
            with dynamo.unlimited(root.function.__code__, again=root.full):
                return self._compiled(root, "", target, args, kwargs)
        finally:
            root.recomputed += self.tally.compiles - compiles
            if root.recomputed >= dynamo.recompile_limit() and not self.eager:
                self._go_eager(explain.recomputed_limit(self.tally.component, type(target).__name__))

    def _compiled(self, root: Root, differs: str, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the target as compiled code, count the call, and settle what happened."""
        if not collector.listens():
            collector.install()
        if not self.tally.calls:
            patience.hold(COMPILING)
        call = TargetCall(self.tally, root, target, args, kwargs)
        self.tally.calls += 1
        previous = active.tally, active.call
        active.tally, active.call = self.tally, call
        refused: Exception | None = None
        try:
            result = call.run()
        except Exception as error:
            if not self._is_refusal(call, error):
                raise
            refused = error
        finally:
            if active.window is not None or collector.due():
                self._settle()
            active.tally, active.call = previous
        if differs:
            self._report_size(call, differs)
        if refused is not None:
            return self._answer_eagerly(call, refused)
        for event in call.failures():
            root.in_parts = True
            root.failures.append(event)
            collector.say(event, self.tally)
        if not call.reached_graph():
            self._ran_eager(call)
        return result

    def _settle(self) -> None:
        """Restore torch's settings after a compile in this call, and read what happened."""
        if active.window is not None:
            active.window.close()
            active.window = None
        collector.poll(force=True)

    def _report_size(self, call: TargetCall, differs: str) -> None:
        """Report that a batch size has got code of its own, as the recompile that it is."""
        compiled = [event for event in self.tally.events if isinstance(event, ev.Compiled)]
        target = call.target
        name = type(target).__name__ if isinstance(target, torch.nn.Module) else getattr(target, "__name__", "function")
        event = explain.new_size(
            call.root.function.__name__,
            differs,
            component=self.tally.component,
            function=name,
            nth=self._roots_of(target).used() - 1,
            frame=compiled[-1].frame if compiled else "",
        )
        collector.emit(event, self.tally)

    def _is_refusal(self, call: TargetCall, error: Exception) -> bool:
        """Return whether tracing or compiling raised the error, where eager can be asked instead.

        A bug in dynamo may raise any exception. The user's code may fail where dynamo hands it another value than torch
        does: eager is asked if all that the call changed can be put back. Any other error is the user's own, or
        compiled code failed as it ran.
        """
        raised = dynamo.RaisedError(error)
        # After a CompiledRunError a part of the step may have run: only its owner can run it eagerly.
        if isinstance(error, CompiledRunError) or raised.is_limit_flag or raised.is_no_failure:
            return False
        if raised.is_other_tracer:
            return not call.reached_graph()
        if raised.is_compile_error or raised.in_tracing:
            return not call.reached_graph() or not self.tally.suppress
        return call.failed_on_stand_in(error)

    def _answer_eagerly(self, call: TargetCall, error: Exception) -> Any:
        """Return eager's result of a call that dynamo refused, or raise the exception that the user should see.

        An exception that eager raises too is the user's own.
        """
        raised = dynamo.RaisedError(error)
        if raised.is_other_tracer:  # it refuses only while the other trace goes on: in torch 2.11, of any thread
            self.tally.eager_calls += 1
            return call.run_eager()
        if call.before is not None:
            call.before.restore()  # a part of the call may have run
        broke = self.config.fullgraph and raised.is_graph_break
        if self.config.strict or broke:
            call.raise_as_eager()
            raise error if broke else call.strict_error(error)
        result = call.run_eager()
        if raised.is_limit:  # code that was compiled before goes on running; the event is noted already
            self._ran_eager(call)
        elif not (raised.is_compile_error or raised.in_tracing):
            self._go_eager(call.stays_eager(error, _STAND_IN + _REPEATED))
        elif noted := call.failures():  # torch's own event knows the user's line
            self.eager = True
            collector.say(noted[0], self.tally)
        else:
            self._go_eager(call.stays_eager(error))
        return result

    def _ran_eager(self, call: TargetCall) -> None:
        """Count a call that reached no graph, and report why."""
        tally, root = self.tally, call.root
        tally.eager_calls += 1
        root.full = root.full or any(event.whole for event in tally.limited)
        for event in root.failures if not tally.failures else ():
            collector.emit(dataclasses.replace(event, component=tally.component), tally)
        if all(cause.stage == ev.GraphBreak.kind for cause in tally.causes.values()):  # breaks are logged as INFO only
            kind = type(call.target).__name__
            reason = f"no tensor operation of {kind} reached a graph in this call"
            if root.sharded and type(call.target).forward.__module__.startswith("torch."):
                reason += ": between FSDP2's hooks torch compiles no class of its own; call it in a module of yours"
            collector.emit(explain.no_effect("no_graph", tally.component, reason), tally)

    def _go_eager(self, event: ev.Event) -> None:
        """Leave this lane eager for good, for the reason that the event names."""
        self.eager = True
        collector.emit(event, self.tally)


def count_call(tally: Tally, args: tuple[Any, ...], kwargs: dict[str, Any], *, marks: bool) -> None:
    """Count a call under CUDA graphs: its shapes, and whether a backward made it.

    With ``marks`` a step is marked before the call, unless a forward waits for its backward.
    """
    if marks:
        steps.enter()
    tally.in_backward += in_backward()
    tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
    shapes = ", ".join("x".join(map(str, tensor.shape)) or "scalar" for tensor in tensors) or "no tensors"
    known = shapes in tally.shapes or len(tally.shapes) < _SHAPES
    tally.shapes[shapes if known else "others"] += 1


def inlined() -> bool:
    """Return whether an outer compile or an export, which counts for itself, traces this call.

    ``torch.compiler.is_compiling`` does not serve: it is true in every thread while any thread compiles.
    """
    return torch.compiler.is_dynamo_compiling() or torch.compiler.is_exporting()
