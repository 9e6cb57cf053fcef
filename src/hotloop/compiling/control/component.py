"""One component that was compiled in place: its two lanes, its tally, and the entries that lead into it."""

from __future__ import annotations

import collections
import copy
import dataclasses
import functools
import sys
import weakref
from typing import TYPE_CHECKING, Any

import torch

from hotloop._torch.module import eager_call
from hotloop.compiling.control.component_status import ComponentStatus, State
from hotloop.compiling.control.lane import Lane, inlined
from hotloop.compiling.observe import Cause

if TYPE_CHECKING:
    from collections.abc import Callable

    from hotloop.compiling.control.methods import MethodEntry
    from hotloop.compiling.observe import GraphInfo, Tally
    from hotloop.config import ComponentConfig


@dataclasses.dataclass(eq=False)
class Component:
    """A named component that was asked to compile, and its tally. It holds no module alive."""

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
        """Whether a compile was asked for, and is not disabled."""
        return not self.disabled and any(lane.preset.backend != "eager" for lane in self.lanes)

    @property
    def tallies(self) -> tuple[Tally, Tally]:
        """The tallies of training and inference."""
        return self.lanes[0].tally, self.lanes[1].tally

    @property
    def label(self) -> str:
        """The name in all that people read; see `hotloop.compiling.control.installed.attach`."""
        return self.lanes[0].tally.label

    @label.setter
    def label(self, label: str) -> None:
        for tally in self.tallies:
            tally.label = label

    def modules(self) -> list[torch.nn.Module]:
        """Return the modules whose call leads into the component, as far as they are alive."""
        return [module for target in self.targets if (module := target()) is not None]

    def status(self, name: str) -> ComponentStatus:
        """Return the component's status under the given name, from its two tallies.

        A component that was called only inside another has the status of that other one.
        """
        outer = self.inside() if self.inside is not None else None
        if outer is not None and not any(tally.calls for tally in self.tallies):
            reason = f"it runs inside component {outer.label!r}, and is compiled with it"
            cause = Cause(reason, "inside", hint=f"see the status of {outer.label!r}")
            return dataclasses.replace(outer.status(name), requested=self.config.training.name, causes=(cause,))
        graphs: collections.Counter[GraphInfo] = collections.Counter()
        recompiled = {}
        for tally in self.tallies:
            graphs.update(tally.graphs)
            recompiled.update(tally.recompiled)
        state, running = self._state(graphs)
        counts = ("compiles", "recompiles", "graph_breaks", "cache_hits", "cache_misses", "compile_seconds")
        totals: dict[str, Any] = {count: sum(getattr(tally, count) for tally in self.tallies) for count in counts}
        modes = {tally.mode: tally.to_dict() for tally in self.tallies}
        return ComponentStatus(
            name=self.label if name == self.name else name,
            requested=self.config.training.name,
            inference=self.config.inference.name,
            running=running,
            state=state,
            frames_compiled=sum(mode["frames_compiled"] for mode in modes.values()),
            frames_eager=sum(mode["frames_eager"] for mode in modes.values()),
            fallbacks=sum(info.fallback is not None for info in graphs),
            causes=tuple(self._causes(graphs)),
            recompiled=tuple(recompiled.values()),
            regions=tuple(sorted({info.region for info in graphs})),
            outputs_copied=sum(tally.copied for tally in self.tallies),
            bytes_copied=sum(tally.copied_bytes for tally in self.tallies),
            cudagraphs_skipped=tuple(
                dict.fromkeys(reason for tally in self.tallies for reason in tally.cudagraphs_skipped)
            ),
            modes=modes,
            **totals,
        )

    def _state(self, graphs: collections.Counter[GraphInfo]) -> tuple[State, str]:
        """Return the state and the preset in force, from the graphs that were executed."""
        asked = [lane for lane in self.lanes if lane.preset.backend != "eager"]
        if self.disabled or not asked or all(lane.eager for lane in asked):
            return "eager", "none"
        tallies = [lane.tally for lane in asked]
        if not any(tally.calls for tally in tallies):
            return ("eager", "none") if self.said_no_effect else ("pending", asked[0].tally.ladder.current.name)
        compiled = collections.Counter[str]()
        for info, count in graphs.items():
            if info.running != "none":
                compiled[info.running] += count
        if not compiled:
            return "eager", "none"
        requested = {lane.preset.name for lane in asked}
        running = next((name for name in compiled if name in requested), compiled.most_common(1)[0][0])
        whole = (
            all(info.running == info.requested for info in graphs)
            and not any(tally.eager_calls or tally.limited or tally.failures for tally in tallies)
            and not any(lane.eager for lane in asked)
            and not self.said_no_effect
        )
        return ("compiled" if whole else "partial"), running

    def _causes(self, graphs: collections.Counter[GraphInfo]) -> list[Cause]:
        """Return why the component does not run as asked, each reason at a place once."""
        causes: dict[tuple[Any, ...], Cause] = {}
        if self.disabled:
            causes["disabled",] = Cause(self.disabled, "disabled", hint="unset it to compile")
        for info in graphs:  # another component may have compiled the graph, and noted the fallback
            if (event := info.fallback) is not None:
                cause = Cause(event.reason, event.stage, event.file, event.line, hint=event.hint)
                causes[event.reason, event.file, event.line] = cause
        for tally in self.tallies:
            causes.update(tally.causes)
        return list(causes.values())

    def put_methods(self, module: torch.nn.Module) -> None:
        """Put the entries in front of a module's step methods; another object that stands there stays."""
        for name, entry in self.methods.items():
            vars(module).setdefault(name, entry)

    def drop_methods(self, module: torch.nn.Module) -> None:
        """Take the entries away from in front of a module's step methods."""
        for name, entry in self.methods.items():
            if vars(module).get(name) is entry:
                del vars(module)[name]


class Entry:
    """The callable that a module's call is routed to. It holds the module weakly, as eager would.

    A copy of a module whose class copies ``__dict__`` itself would lead into the original: an entry copies to None.

    Args:
        target: the module.
        component: the component that the call leads into.
        before: what the module's own ``compile()`` had put here; it returns when this entry is taken off.
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
        """Return whether this is an entry of the component."""
        return self._training is component.lanes[0]

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        return None

    def __reduce__(self) -> Any:
        return type(None), ()


class RedirectableEntry(Entry):
    """The entry of a LightningModule that has a forward of its own.

    For a step under DDP, Lightning puts a function in the place of ``forward`` and calls the module, which leads to
    ``training_step``. That call is not the forward's: it goes through, to the entry of the method.
    """

    __slots__ = ()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module in the mode that is in force, or the function that was put in the place of its forward."""
        module = self._module()
        forward = vars(module).get("forward")
        if forward is not None and getattr(forward, "__self__", None) is not module:
            return eager_call(module, *args, **kwargs)
        return super().__call__(*args, **kwargs)


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
        """Return an attribute of the callable itself: a callable object keeps its attributes and methods."""
        if name == "__wrapped__":
            raise AttributeError(name)
        return getattr(self.__wrapped__, name)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Return itself for a function; for a bound method or a callable object, a plain copy bound to its own copy."""
        copied = copy.deepcopy(self.__wrapped__, memo)
        return self if copied is self.__wrapped__ else copied

    def __reduce__(self) -> Any:
        """Pickle by name where it replaced its function, as a decorator does; else as the plain function."""
        found: Any = sys.modules.get(self.__module__)
        for part in self.__qualname__.split("."):
            found = getattr(found, part, None)
        return self.__qualname__ if found is self else (_unpickle, (self.__wrapped__,))


def _unpickle(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the plain function: compiled code does not travel."""
    return function
