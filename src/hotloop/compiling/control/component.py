"""One component that was compiled in place: its entry, its two lanes, and what happens when a call ends."""

from __future__ import annotations

import copy
import dataclasses
import functools
import sys
import weakref
from typing import TYPE_CHECKING, Any

import torch

from hotloop import events as ev
from hotloop._torch import dynamo
from hotloop._torch.module import eager_call
from hotloop.compiling.apply import Cut, Root, Roots, roots_for
from hotloop.compiling.control import rescue
from hotloop.compiling.control.lifetime import count_call
from hotloop.compiling.fallback import Ladder, LadderBackend, first_available
from hotloop.compiling.fallback.lifetime import steps
from hotloop.compiling.observe import Tally, active, collector, explain

if TYPE_CHECKING:
    from collections.abc import Callable

    from hotloop.compiling.control.methods import MethodEntry
    from hotloop.config import ComponentConfig
    from hotloop.presets import Preset

_transform_in_force = dynamo.transform_probe()
_MOST_RESTS = 256
_RETRIES_AFTER_USER_ERRORS = 3
"""How often code that was given up during the user's own exception is traced anew."""


class Lane:
    """How a component runs in one mode. ``training`` is with gradients on, ``inference`` with gradients off."""

    def __init__(self, component: str, mode: str, preset: Preset, config: ComponentConfig, cut: Cut) -> None:
        self.preset, self.config, self.mode = preset, config, mode
        self.rungs = config.ladder_of(preset)
        self.backend = LadderBackend(self.rungs, cut=cut, strict=config.strict, strict_lifetime=config.strict_lifetime)
        self.tally = Tally(component, mode, suppress=not (config.strict or config.fullgraph))
        self.eager = preset.backend == "eager"
        self._roots: dict[int, Roots] = {}
        self._private = False
        self._user_errors = 0
        self.unasked = False
        """The component holds what its user compiled (`hotloop.compiling.observe.ledger.active.unasked`)."""
        self.lanes: tuple[Lane, ...] = (self,)
        """All of the component."""
        self._put_off = self._rests = 0
        """How often a call was put off before anything was compiled, and the calls that run eager before the next."""

    def start(self, device: str) -> None:
        """Settle where the ladder starts on this machine, and say what is missing."""
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
        """Give the roots that this lane calls for a target."""
        found = self._roots.get(id(target))
        if found is None:
            found = self._roots[id(target)] = roots_for(
                target,
                backend=self.backend,
                mode=self.mode,
                dynamic=self.preset.dynamic,
                fullgraph=self.config.fullgraph,
                private_to=self if self._private else None,
            )
        return found

    def call(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the target as compiled code, counted, and settle what happened."""
        if self.eager or self._rests:
            self._rests -= self._rests > 0
            self.tally.calls += 1
            self.tally.eager_calls += 1
            return eager_call(target, *args, **kwargs)
        if _transform_in_force() is not None:
            return self._under_transform(target, args, kwargs)
        if not collector.listens():
            collector.install()
        tally, previous, put_off, unasked = self.tally, active.tally, active.put_off, active.unasked
        executed = active.executed
        root, differs = (self._roots.get(id(target)) or self.roots(target)).of(args, kwargs)
        before, failed, tally.calls = tally.executed, len(tally.failures), tally.calls + 1
        active.tally, active.put_off, active.unasked, active.executed = tally, "", self.unasked, before
        refused: Exception | None = None
        try:
            result = root.compiled(target, *args, **kwargs)
        except Exception as error:
            self._settle()
            if not self._refused(error, before):
                self.users_own(failed, target, root)
                raise
            refused = error
        finally:
            if active.window is not None or collector.due():
                self._settle()
            active.tally, active.put_off, put_off = previous, put_off, active.put_off
            active.unasked, active.executed = unasked, executed
        if put_off and (refused is None or dynamo.is_put_off(refused)):
            self._waits(put_off, before)
            return result if refused is None else eager_call(target, *args, **kwargs)
        if differs:
            self._tell_size(target, root, differs)
        if refused is not None:
            return rescue.from_refusal(self, root, refused, (failed, before), target, args, kwargs)
        self._look_at(target, root, failed, before)
        return result

    def _waits(self, why: str, before: int) -> None:
        """Nothing new was compiled in a call: others would have waited in vain, or no code would stand."""
        if self.tally.executed == before:
            self.tally.eager_calls += 1
        if hindered := self.tally.hindered():
            for one in self.lanes:
                one.eager = True
            self.go_eager(explain.no_effect("offloaded_late", self.tally.component, hindered))
            return
        if not self.tally.executed:  # to ask costs time as well
            self._put_off += 1
            self._rests = min(2**self._put_off, _MOST_RESTS) - 2
        reason = f"a call ran eager, as {why}, and a compile takes long"
        collector.emit(explain.no_effect("put_off", self.tally.component, reason, partly=True), self.tally)

    def _look_at(self, target: Any, root: Root, failed: int, before: int) -> None:
        """After a call: tell what tracing gave up in it, or that no graph ran."""
        if len(self.tally.failures) > failed:
            self._tell(root, failed)
        if self.tally.executed == before:
            self.ran_eager(target, root)

    def _tell_size(self, target: Any, root: Root, differs: str) -> None:
        """A batch size has got code of its own, which is told as the recompile that it is."""
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

    def _tell(self, root: Root, failed: int) -> None:
        """Say what tracing gave up in this call, and keep it for the next component that shares the root."""
        root.failures += self.tally.failures[failed:]
        for event in self.tally.failures[failed:]:
            collector.say(event, self.tally)

    def _under_transform(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A transform of torch.func is in force: dynamo would give the code up for good, so this call is eager."""
        tally = self.tally
        tally.calls += 1
        tally.healed_calls += 1
        if tally.healed_calls == 1:
            reason = "a call under a transform of torch.func (grad, vmap, ...) runs eager"
            collector.emit(explain.no_effect("transform", tally.component, reason, partly=True), tally)
        return eager_call(target, *args, **kwargs)

    def _refused(self, error: Exception, before: int) -> bool:
        """Tell whether tracing or compiling raised this, where eager can be asked; a bug in dynamo raises anything."""
        nothing_ran = self.tally.executed == before
        if dynamo.is_other_tracer(error):
            return nothing_ran
        if dynamo.is_limit_flag(error) or not (dynamo.is_compile_error(error) or dynamo.in_tracing(error)):
            return False
        return nothing_ran or not self.tally.suppress

    def _settle(self) -> None:
        """After a compile in this call: restore torch's settings, read what happened."""
        if active.window is not None:
            active.window.close()
            active.window = None
        collector.poll(force=True)

    def ran_eager(self, target: Any, root: Root) -> None:
        """A call reached no graph. Where a limit that others filled is why, this component gets code of its own."""
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
        if all(cause.stage == ev.GraphBreak.kind for cause in tally.causes.values()):  # these are told, not warned of
            kind = type(target).__name__
            reason = f"no tensor operation of {kind} reached a graph in this call"
            collector.emit(explain.no_effect("no_graph", tally.component, reason), tally)

    def users_own(self, failed: int, target: Any, root: Root) -> None:
        """The user's own exception passed, after tracing had met it: the code itself can be compiled another time."""
        if len(self.tally.failures) > failed and self._user_errors < _RETRIES_AFTER_USER_ERRORS:
            self._user_errors += 1
            rescue.forget_functions(target, root, self.tally.forget_failures(failed))

    def go_eager(self, event: ev.Event) -> None:
        """Leave this lane eager for good, for the reason that the event gives."""
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


def lane(component: str, mode: str, preset: Preset, config: ComponentConfig, cut: Cut) -> Lane:
    """Make the lane of one mode; only those under CUDA graphs do more than a call needs."""
    kind = MarkingLane if any(rung.cudagraphs for rung in config.ladder_of(preset)) else Lane
    return kind(component, mode, preset, config, cut)


@dataclasses.dataclass(eq=False)
class Component:
    """A named component that was asked to compile, and its account. It holds no module alive."""

    name: str
    config: ComponentConfig
    lanes: tuple[Lane, Lane]
    targets: tuple[weakref.ref[Any], ...] = ()
    disabled: str = ""
    inside: weakref.ref[Component] | None = None
    holds: frozenset[int] = frozenset()
    boundaries: int = 0
    bypassed: int = 0
    said_no_effect: bool = False
    left: bool = False
    """Its module is left eager, and what was compiled inside of it are components of their own."""
    methods: dict[str, MethodEntry] = dataclasses.field(default_factory=dict)
    """Entries of the module's step methods, where it has any."""

    @property
    def asks(self) -> bool:
        """Tell whether a compile was asked for, and is not disabled."""
        return not self.disabled and any(lane.preset.backend != "eager" for lane in self.lanes)

    @property
    def tallies(self) -> tuple[Tally, Tally]:
        """The accounts of training and inference."""
        return self.lanes[0].tally, self.lanes[1].tally


def inlined() -> bool:
    """Tell whether an outer compile or an export, which has its own ledger, traces this call.

    ``torch.compiler.is_compiling`` is true in every thread while one of them compiles.
    """
    return torch.compiler.is_dynamo_compiling() or torch.compiler.is_exporting()


class Entry:
    """What a module's call is routed to. It holds the module weakly, as eager would.

    A copy of a module whose class copies ``__dict__`` itself would lead into the original: an entry copies to None.

    Args:
        target: the module.
        component: that it is an entry of.
        before: what the module's own ``compile()`` had put in its place, which is there again once this is taken off.
    """

    __slots__ = ("__weakref__", "_inference", "_module", "_training", "before")

    def __init__(self, target: Any, component: Component, before: Callable[..., Any] | None = None) -> None:
        self._module, self.before = weakref.ref(target), before
        self._training, self._inference = component.lanes

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module in the mode that is in force."""
        module = self._module()
        if inlined():
            return eager_call(module, *args, **kwargs)
        return (self._training if torch.is_grad_enabled() else self._inference).call(module, args, kwargs)

    def leads_to(self, component: Component) -> bool:
        """Tell whether it is an entry of a component."""
        return self._training is component.lanes[0]

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        return None

    def __reduce__(self) -> Any:
        return type(None), ()


class CompiledFunction:
    """A plain callable that was compiled: a new callable with the same signature, name and documentation."""

    def __init__(self, function: Callable[..., Any], component: Component) -> None:
        functools.update_wrapper(self, function, updated=())
        self.__wrapped__ = function
        self.component = component

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function in the mode that is in force."""
        if inlined():
            return self.__wrapped__(*args, **kwargs)
        lane = self.component.lanes[0 if torch.is_grad_enabled() else 1]
        return lane.call(self.__wrapped__, args, kwargs)

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        return self if instance is None else functools.partial(self, instance)

    def __getattr__(self, name: str) -> Any:
        """Give what the callable itself has: a callable object keeps its attributes and methods."""
        if name == "__wrapped__":
            raise AttributeError(name)
        return getattr(self.__wrapped__, name)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """A function copies to itself; a bound method or a callable object to a plain copy, which leads to its own."""
        copied = copy.deepcopy(self.__wrapped__, memo)
        return self if copied is self.__wrapped__ else copied

    def __reduce__(self) -> Any:
        if _found_by_name(self):
            return self.__qualname__
        return _unpickle, (self.__wrapped__,)


def _found_by_name(compiled: CompiledFunction) -> bool:
    """Tell whether the compiled callable stands where its function was defined, as a decorated one does."""
    found: Any = sys.modules.get(compiled.__module__)
    for part in compiled.__qualname__.split("."):
        found = getattr(found, part, None)
    return found is compiled


def _unpickle(function: Callable[..., Any]) -> Callable[..., Any]:
    """A pickled compiled function comes back plain: compiled code does not travel."""
    return function
