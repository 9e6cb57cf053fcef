"""A component in one mode: calls its compiled code, counts the call, and settles what happened in it."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import torch

from hotloop import events as ev
from hotloop._torch import cudagraphs, dynamo
from hotloop._torch.autograd import in_backward
from hotloop._torch.checkpoint import region_probe
from hotloop._torch.module import eager_call
from hotloop.compiling.apply.roots import Roots, roots_for
from hotloop.compiling.control.call import TargetCall
from hotloop.compiling.fallback import Ladder, LadderBackend, first_available
from hotloop.compiling.fallback.step_marks import steps
from hotloop.compiling.observe import Tally, active, collector, explain
from hotloop.errors import CompiledRunError

if TYPE_CHECKING:
    from hotloop._torch.checkpoint import Region
    from hotloop.compiling.apply.regions import Cut
    from hotloop.compiling.apply.roots import Root
    from hotloop.config import ComponentConfig
    from hotloop.presets import Preset

_transform_in_force = dynamo.transform_probe()
_region_in_force = region_probe()
_EAGER, _UNKNOWN = object(), object()
"""How a call in a checkpointed forward ran: eager; or, for a recomputation, not known. Else it is noted by its root."""
_MOST_RESTS = 256
_RETRIES_AFTER_USER_ERRORS = 3
"""How often code that was given up during the user's own exception is traced anew."""
_STAND_IN = (
    "torch.compile hands this line another value than eager does, under any preset: move what makes the value into a "
    "function under @torch.compiler.disable, and the rest compiles"
)
_REPEATED = (
    ". The call was put back and repeated: what it did beside its module and arguments (a file, say) it did twice"
)
_SHAPES = 16
"""Different shapes of arguments that are counted apart, for each component and mode."""


class Lane:
    """How a component runs in one mode: ``training`` is with gradients on, ``inference`` with gradients off."""

    def __init__(self, component: str, mode: str, preset: Preset, config: ComponentConfig, cut: Cut) -> None:
        self.preset, self.config, self.mode = preset, config, mode
        self.rungs = config.ladder_of(preset)
        self.backend = LadderBackend(self.rungs, cut=cut, strict=config.strict, strict_lifetime=config.strict_lifetime)
        self.tally = Tally(component, mode, component, suppress=not (config.strict or config.fullgraph))
        self.eager = preset.backend == "eager"
        self._roots: dict[int, Roots] = {}
        self._private = False
        self._user_errors = 0
        self.skips_rendezvous = False
        """The component holds code that its user compiled (see `hotloop.compiling.observe.Call`)."""
        self.lanes: tuple[Lane, ...] = (self,)
        """All lanes of the component."""
        self._postponed = 0
        """Calls that were postponed before anything was compiled."""
        self._rests = 0
        """Calls that still run eager before the next attempt to compile."""

    def start(self, device: str) -> None:
        """Choose where the ladder starts on this device type, and report what is missing."""
        index, lacking = first_available(self.rungs, device, chosen=self.config.ladder is not None)
        self.tally.ladder = Ladder(self.rungs, index, lacking)
        self.eager = self.rungs[index].backend == "eager"
        if lacking:
            event = ev.Unavailable(
                component=self.tally.component,
                preset=self.preset.name,
                missing=lacking,
                running=self.rungs[index].name,
            )
            collector.emit(event, self.tally)

    def roots(self, target: Any) -> Roots:
        """Return the roots that this lane calls for a target."""
        roots = self._roots.get(id(target))
        if roots is None:
            roots = self._roots[id(target)] = roots_for(
                target,
                backend=self.backend,
                mode=self.mode,
                dynamic=self.preset.dynamic,
                fullgraph=self.config.fullgraph,
                private_to=self if self._private else None,
            )
        return roots

    def call(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the target as compiled code where it is compiled, and else eagerly."""
        if (place := _region_in_force()) is not None:
            return self._checkpointed(*place, target, args, kwargs)
        if self.eager or self._rests:
            return self._plain(target, args, kwargs)
        if _transform_in_force() is not None:
            return self._under_transform(target, args, kwargs)
        return self._compiled(*self._root_of(target, args, kwargs), target, args, kwargs)

    def _root_of(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Root, str]:
        """Return the root for a call, and what of its size is new; see `Roots.of`."""
        return (self._roots.get(id(target)) or self.roots(target)).of(args, kwargs)

    def _plain(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the target eagerly, and count the call."""
        self._rests -= self._rests > 0
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
        how: Any = _UNKNOWN if recomputation is None else region.next(recomputation, self, _UNKNOWN)
        if how is _EAGER or (how is _UNKNOWN and (self.eager or self._rests)):
            how, result = _EAGER, self._plain(target, args, kwargs)
        elif how is _UNKNOWN and _transform_in_force() is not None:
            how, result = _EAGER, self._under_transform(target, args, kwargs)
        elif how is _UNKNOWN:
            executed, (root, differs) = self.tally.executed, self._root_of(target, args, kwargs)
            if root.recomputed and root.recomputed >= dynamo.recompile_limit():
                self._go_eager(explain.recomputed_limit(self.tally.component, type(target).__name__))
                result = self._plain(target, args, kwargs)
            else:
                result = self._compiled(root, differs, target, args, kwargs)
            how = _EAGER if self.tally.executed == executed else root
        else:
            return self._recomputed(how, target, args, kwargs)
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

    def _compiled(self, root: Root, differs: str, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the target as compiled code, count the call, and settle what happened."""
        if not collector.listens():
            collector.install()
        call = TargetCall(
            tally=self.tally, skips_rendezvous=self.skips_rendezvous, root=root, target=target, args=args, kwargs=kwargs
        )
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
        if call.put_off and (refused is None or dynamo.RaisedError(refused).is_put_off):
            self._after_postponed(call)
            return result if refused is None else call.run_eager()
        if differs:
            self._report_size(call, differs)
        if refused is not None:
            return self._after_refusal(call, refused)
        self._after_success(call)
        return result

    def _after_success(self, call: TargetCall) -> None:
        """Log what tracing gave up in a call, keep it for components that share the root, and notice an eager call."""
        for event in call.failures():
            call.root.failures.append(event)
            collector.say(event, self.tally)
        if not call.reached_graph():
            self._ran_eager(call)

    def _after_postponed(self, call: TargetCall) -> None:
        """Count a call in which nothing new was compiled: other ranks would wait in vain, or no code would last."""
        if not call.reached_graph():
            self.tally.eager_calls += 1
        if hindered := self.tally.hindered():
            for lane in self.lanes:
                lane.eager = True
            self._go_eager(explain.no_effect("offloaded_late", self.tally.component, hindered))
            return
        if not self.tally.executed:  # asking costs time too, so each attempt waits for more calls than the last
            self._postponed += 1
            self._rests = min(2**self._postponed, _MOST_RESTS) - 2
        reason = f"a call ran eager, as {call.put_off}, and a compile takes long"
        collector.emit(explain.no_effect("put_off", self.tally.component, reason, partly=True), self.tally)

    def _report_size(self, call: TargetCall, differs: str) -> None:
        """Report that a batch size has got code of its own, as the recompile that it is."""
        compiled = [event for event in self.tally.events if isinstance(event, ev.Compiled)]
        target = call.target
        name = type(target).__name__ if isinstance(target, torch.nn.Module) else getattr(target, "__name__", "function")
        event = explain.new_size(
            call.root.function.__name__,
            compiled[-1].frame if compiled else "",
            name,
            self.tally.component,
            reason=differs,
            nth=len(self.roots(target).all()) - 1,
        )
        collector.emit(event, self.tally)

    def _under_transform(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a call eagerly under a transform of torch.func: dynamo would give the code up for good."""
        tally = self.tally
        tally.calls += 1
        tally.healed_calls += 1
        if tally.healed_calls == 1:
            reason = "a call under a transform of torch.func (grad, vmap, ...) runs eager"
            collector.emit(explain.no_effect("transform", tally.component, reason, partly=True), tally)
        return eager_call(target, *args, **kwargs)

    def _is_refusal(self, call: TargetCall, error: Exception) -> bool:
        """Return whether tracing or compiling raised the error, where eager can be asked instead.

        A bug in dynamo may raise any exception. The user's code may fail where dynamo hands it another value than torch
        does: eager is asked if all that the call changed can be put back. Any other error is the user's own, or
        compiled code failed as it ran.
        """
        if isinstance(error, CompiledRunError):  # a part of the step may have run: only its owner can run it eagerly
            return False
        self._settle()
        raised = dynamo.RaisedError(error)
        if raised.is_other_tracer:
            refused = not call.reached_graph()
        elif raised.is_limit_flag or raised.is_no_failure:
            refused = False
        elif not (raised.is_compile_error or raised.in_tracing):
            refused = self._may_fail_on_stand_in(call, error)
        else:
            refused = not call.reached_graph() or not self.tally.suppress
        if not refused:
            self._forgive_user_error(call)
        return refused

    def _may_fail_on_stand_in(self, call: TargetCall, error: Exception) -> bool:
        """Return whether dynamo may have handed the program a value that raised this, and the call can be repeated."""
        if not isinstance(error, TypeError | AttributeError) or not (call.root.in_parts or call.before):
            return False
        if lost := call.lost():
            error.add_note(
                f"hotloop: component {self.tally.label!r} has not asked eager whether it raises this too, since "
                f"the call cannot be repeated: {lost}. HOTLOOP_DISABLE=1 shows it. If eager does not: {_STAND_IN}"
            )
        return not lost

    def _settle(self) -> None:
        """Restore torch's settings after a compile in this call, and read what happened."""
        if active.window is not None:
            active.window.close()
            active.window = None
        collector.poll(force=True)

    def _after_refusal(self, call: TargetCall, error: Exception) -> Any:
        """Return eager's result of a call that dynamo refused, or raise the exception that the user should see.

        An exception that eager raises too is the user's own, and the component may be compiled another time.
        """
        raised = dynamo.RaisedError(error)
        if raised.is_other_tracer:  # it refuses only while the other trace goes on: in torch 2.11, of any thread
            self.tally.healed_calls += 1
            return call.run_eager()
        strict = self.config.strict
        broke = self.config.fullgraph and raised.is_graph_break
        result = None
        on_stand_in = not (raised.is_compile_error or raised.in_tracing)
        if call.before is not None:
            call.before.restore()  # a part of the call may have run
        try:
            if strict or broke:
                call.raise_as_eager()
            else:
                result = call.run_eager()
        except Exception:
            self._forgive_user_error(call)
            raise
        if broke:
            raise error
        if strict:
            raise call.strict_error(error)
        if raised.is_limit:  # code that was compiled before goes on running; the event is noted already
            self._ran_eager(call)
        else:
            event = call.stays_eager(error)
            if on_stand_in:
                event = dataclasses.replace(event, hint=_STAND_IN + _REPEATED)
            self._go_eager(event)
        return result

    def _ran_eager(self, call: TargetCall) -> None:
        """Count a call that reached no graph. Where other modules filled the limit, the component gets its own code."""
        tally, root = self.tally, call.root
        root.full = root.full or any(event.whole for event in tally.limited)
        if root.full and not self._private:
            self._private = True
            self._roots.clear()
            tally.heal_limit()
            return
        tally.eager_calls += 1
        for event in root.failures if not tally.failures else ():
            collector.emit(dataclasses.replace(event, component=tally.component), tally)
        if all(cause.stage == ev.GraphBreak.kind for cause in tally.causes.values()):  # breaks are logged as INFO only
            kind = type(call.target).__name__
            reason = f"no tensor operation of {kind} reached a graph in this call"
            if root.sharded and type(call.target).forward.__module__.startswith("torch."):
                reason += ": between FSDP2's hooks torch compiles no class of its own; call it in a module of yours"
            collector.emit(explain.no_effect("no_graph", tally.component, reason), tally)

    def _forgive_user_error(self, call: TargetCall) -> None:
        """Let code be compiled another time that tracing gave up on the user's own exception."""
        if call.failures() and self._user_errors < _RETRIES_AFTER_USER_ERRORS:
            self._user_errors += 1
            call.retrace()

    def _go_eager(self, event: ev.Event) -> None:
        """Leave this lane eager for good, for the reason that the event names."""
        self.eager = True
        collector.emit(event, self.tally)


class MarkingLane(Lane):
    """A lane of a preset with CUDA graphs: a call marks a step where that is safe, and is counted by its shapes."""

    _marks = False

    def start(self, device: str) -> None:
        """See `Lane`; on a machine that cannot run CUDA graphs there is nothing to mark."""
        super().start(device)
        ladder = self.tally.ladder
        self._marks = any(rung.cudagraphs for _, rung in ladder.below())
        if self._marks and self.config.strict_lifetime:
            steps.strict.add(self)

    def call(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """See `Lane`.

        Raises:
            StaleOutputError: under ``strict_lifetime``, an output is held that the call may overwrite.
        """
        if not self.eager:
            count_call(self.tally, args, kwargs, marks=self._marks)
        return super().call(target, args, kwargs)


def count_call(tally: Tally, args: tuple[Any, ...], kwargs: dict[str, Any], *, marks: bool) -> None:
    """Count a call under CUDA graphs: its shapes, its pace, and whether a backward made it.

    With ``marks`` a step is marked before the call, unless a forward waits for its backward.

    Raises:
        StaleOutputError: under ``strict_lifetime``, an output is held that the call may overwrite.
    """
    if marks:
        steps.enter()
        tally.per_mark.at(cudagraphs.marked(), tally.calls)
    if in_backward():
        tally.in_backward += 1
    tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
    shapes = ", ".join("x".join(map(str, tensor.shape)) or "scalar" for tensor in tensors) or "no tensors"
    if shapes in tally.shapes or len(tally.shapes) < _SHAPES:
        tally.shapes[shapes] += 1
    else:
        tally.shapes["others"] += 1


def lane(component: str, mode: str, preset: Preset, config: ComponentConfig, cut: Cut) -> Lane:
    """Make the lane of one mode; only a lane with CUDA graphs pays for counting shapes and marking steps."""
    kind = MarkingLane if any(rung.cudagraphs for rung in config.ladder_of(preset)) else Lane
    return kind(component, mode, preset, config, cut)


def inlined() -> bool:
    """Return whether an outer compile or an export, which counts for itself, traces this call.

    ``torch.compiler.is_compiling`` does not serve: it is true in every thread while any thread compiles.
    """
    return torch.compiler.is_dynamo_compiling() or torch.compiler.is_exporting()
