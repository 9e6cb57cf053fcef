"""One component that was compiled in place: its two lanes, and the entries that lead into it."""

from __future__ import annotations

import copy
import dataclasses
import functools
import sys
import weakref
from typing import TYPE_CHECKING, Any

import torch

from hotloop._torch.module import eager_call
from hotloop.compiling.control.lane import Lane, inlined

if TYPE_CHECKING:
    from collections.abc import Callable

    from hotloop.compiling.control.methods import MethodEntry
    from hotloop.config import ComponentConfig


@dataclasses.dataclass(eq=False)
class Component:
    """A named component that was asked to compile. It holds no module alive."""

    name: str
    config: ComponentConfig
    lanes: tuple[Lane, Lane]
    """Training and inference."""
    disabled: str = ""
    targets: tuple[weakref.ref[Any], ...] = ()
    """The modules whose call leads into the component."""
    inside: weakref.ref[Component] | None = None
    holds: frozenset[int] = frozenset()
    steps: int = 0
    bypassed: int = 0
    """Steps that trained it while its compiled call was never entered."""
    said_no_effect: bool = False
    left: bool = False
    """Its module is left eager, and what was compiled inside of it are components of their own."""
    methods: dict[str, MethodEntry] = dataclasses.field(default_factory=dict)
    """Entries of the module's step methods, where it has any."""

    @property
    def asks(self) -> bool:
        """Whether a compile was asked for, and is not disabled."""
        return not self.disabled and any(lane.preset.backend != "eager" for lane in self.lanes)

    def modules(self) -> list[torch.nn.Module]:
        """Return the modules whose call leads into the component, as far as they are alive."""
        return [module for target in self.targets if (module := target()) is not None]

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
