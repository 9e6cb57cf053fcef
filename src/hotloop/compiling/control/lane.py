"""A component in one mode: calls its compiled code, counts the call, and settles what happened in it."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import torch

from hotloop import events as ev
from hotloop._torch import cudagraphs, dynamo
from hotloop._torch.autograd import in_backward
from hotloop._torch.module import eager_call
from hotloop.compiling.apply import Cut, Root, Roots, roots_for
from hotloop.compiling.control import refusal
from hotloop.compiling.fallback import Ladder, LadderBackend, first_available
from hotloop.compiling.fallback.lifetime import steps
from hotloop.compiling.observe import Tally, active, collector, explain

if TYPE_CHECKING:
    from hotloop.config import ComponentConfig
    from hotloop.presets import Preset

_transform_in_force = dynamo.transform_probe()
_MOST_RESTS = 256
_RETRIES_AFTER_USER_ERRORS = 3
"""How often code that was given up during the user's own exception is traced anew."""
_SHAPES = 16
"""Different shapes of arguments that are counted apart, for each component and mode."""


class Lane:
    """How a component runs in one mode: ``training`` is with gradients on, ``inference`` with gradients off."""

    def __init__(self, component: str, mode: str, preset: Preset, config: ComponentConfig, cut: Cut) -> None:
        self.preset, self.config, self.mode = preset, config, mode
        self.rungs = config.ladder_of(preset)
        self.backend = LadderBackend(self.rungs, cut=cut, strict=config.strict, strict_lifetime=config.strict_lifetime)
        self.tally = Tally(component, mode, suppress=not (config.strict or config.fullgraph))
        self.eager = preset.backend == "eager"
        self._roots: dict[int, Roots] = {}
        self._private = False
        self._user_errors = 0
        self.skips_rendezvous = False
        """The component holds code that its user compiled (see `hotloop.compiling.observe.ledger.active`)."""
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
        """Run the target as compiled code, count the call, and settle what happened."""
        if self.eager or self._rests:
            self._rests -= self._rests > 0
            self.tally.calls += 1
            self.tally.eager_calls += 1
            return eager_call(target, *args, **kwargs)
        if _transform_in_force() is not None:
            return self._under_transform(target, args, kwargs)
        if not collector.listens():
            collector.install()
        tally, previous, put_off, skips_rendezvous = self.tally, active.tally, active.put_off, active.skips_rendezvous
        executed = active.executed
        root, differs = (self._roots.get(id(target)) or self.roots(target)).of(args, kwargs)
        before, failed, tally.calls = tally.executed, len(tally.failures), tally.calls + 1
        active.tally, active.put_off, active.skips_rendezvous = tally, "", self.skips_rendezvous
        active.executed = before
        refused: Exception | None = None
        try:
            result = root.compiled(target, *args, **kwargs)
        except Exception as error:
            self._settle()
            if not self._refused(error, before):
                self._forgive_user_error(failed, target, root)
                raise
            refused = error
        finally:
            if active.window is not None or collector.due():
                self._settle()
            active.tally, active.put_off, put_off = previous, put_off, active.put_off
            active.skips_rendezvous, active.executed = skips_rendezvous, executed
        if put_off and (refused is None or dynamo.RaisedError(refused).is_put_off):
            self._after_postponed(put_off, before)
            return result if refused is None else eager_call(target, *args, **kwargs)
        if differs:
            self._report_size(target, root, differs)
        if refused is not None:
            return self._after_refusal(root, refused, (failed, before), target, args, kwargs)
        self._after_success(target, root, failed, before)
        return result

    def _after_success(self, target: Any, root: Root, failed: int, before: int) -> None:
        """Log what tracing gave up in a call, keep it for components that share the root, and notice an eager call."""
        if len(self.tally.failures) > failed:
            root.failures += self.tally.failures[failed:]
            for event in self.tally.failures[failed:]:
                collector.say(event, self.tally)
        if self.tally.executed == before:
            self._ran_eager(target, root)

    def _after_postponed(self, why: str, before: int) -> None:
        """Count a call in which nothing new was compiled: other ranks would wait in vain, or no code would last."""
        if self.tally.executed == before:
            self.tally.eager_calls += 1
        if hindered := self.tally.hindered():
            for lane in self.lanes:
                lane.eager = True
            self._go_eager(explain.no_effect("offloaded_late", self.tally.component, hindered))
            return
        if not self.tally.executed:  # asking costs time too, so each attempt waits for more calls than the last
            self._postponed += 1
            self._rests = min(2**self._postponed, _MOST_RESTS) - 2
        reason = f"a call ran eager, as {why}, and a compile takes long"
        collector.emit(explain.no_effect("put_off", self.tally.component, reason, partly=True), self.tally)

    def _report_size(self, target: Any, root: Root, differs: str) -> None:
        """Report that a batch size has got code of its own, as the recompile that it is."""
        compiled = [event for event in self.tally.events if isinstance(event, ev.Compiled)]
        module = isinstance(target, torch.nn.Module)
        event = explain.new_size(
            root.function.__name__,
            compiled[-1].frame if compiled else "",
            type(target).__name__ if module else getattr(target, "__name__", "function"),
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

    def _refused(self, error: Exception, before: int) -> bool:
        """Return whether tracing or compiling raised the error, where eager can be asked instead.

        A bug in dynamo may raise any exception.
        """
        nothing_ran = self.tally.executed == before
        raised = dynamo.RaisedError(error)
        if raised.is_other_tracer:
            return nothing_ran
        if raised.is_limit_flag or not (raised.is_compile_error or raised.in_tracing):
            return False
        return nothing_ran or not self.tally.suppress

    def _settle(self) -> None:
        """Restore torch's settings after a compile in this call, and read what happened."""
        if active.window is not None:
            active.window.close()
            active.window = None
        collector.poll(force=True)

    def _after_refusal(  # noqa: PLR0913, PLR0917 - a call has a target and arguments, a refusal its history
        self,
        root: Root,
        error: Exception,
        history: tuple[int, int],
        target: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Return eager's result of a call that dynamo refused, or raise the exception that the user should see.

        An exception that eager raises too is the user's own, and the component may be compiled another time.
        ``history``: how many failures were known and how many graphs had run when the call began.
        """
        raised = dynamo.RaisedError(error)
        if raised.is_other_tracer:  # it refuses only while the other trace goes on
            return eager_call(target, *args, **kwargs)
        failed, executed = history
        strict = self.config.strict
        broke = self.config.fullgraph and raised.is_graph_break
        result = None
        try:
            if strict or broke:
                refusal.raise_as_eager(target, args, kwargs, partly_ran=self.tally.executed != executed)
            else:
                result = eager_call(target, *args, **kwargs)
        except Exception:
            self._forgive_user_error(failed, target, root)
            raise
        if broke:
            raise error
        if strict:
            raise refusal.strict_error(self.tally.component, error)
        if raised.is_limit:  # code that was compiled before goes on running; the event is noted already
            self._ran_eager(target, root)
        else:
            # torch's own event knows the user's line; the exception is the second best.
            noted = self.tally.forget_failures(failed)
            self._go_eager(noted[0] if noted else refusal.frame_eager(self.tally.component, error, target))
        return result

    def _ran_eager(self, target: Any, root: Root) -> None:
        """Count a call that reached no graph. Where other modules filled the limit, the component gets its own code."""
        tally = self.tally
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
            kind = type(target).__name__
            reason = f"no tensor operation of {kind} reached a graph in this call"
            collector.emit(explain.no_effect("no_graph", tally.component, reason), tally)

    def _forgive_user_error(self, failed: int, target: Any, root: Root) -> None:
        """Let code be compiled another time that tracing gave up on the user's own exception."""
        if len(self.tally.failures) > failed and self._user_errors < _RETRIES_AFTER_USER_ERRORS:
            self._user_errors += 1
            refusal.forget_functions(target, root, self.tally.forget_failures(failed))

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
