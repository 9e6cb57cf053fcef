"""What is compiled in place on which module: puts it on, takes it off, sets it aside for a while."""

from __future__ import annotations

import contextlib
import logging
import weakref
from typing import TYPE_CHECKING, Any

from hotloop._torch.module import Method, get_entry, set_entry
from hotloop.compiling.apply.targets import entry_points, is_lightning
from hotloop.compiling.control.component import Component, Entry, RedirectableEntry
from hotloop.compiling.control.methods import make_entries
from hotloop.compiling.control.precompiled import compiled_by_user

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    import torch

_log = logging.getLogger("hotloop")
components: weakref.WeakKeyDictionary[torch.nn.Module, Component] = weakref.WeakKeyDictionary()
"""Every module that was compiled in place, and its component."""


def attach(part: torch.nn.Module, component: Component) -> None:
    """Put a component on its module, in the place of what hotloop had put there before."""
    take_off(part)
    points = entry_points(part)
    component.targets = tuple(weakref.ref(point) for point in points)
    if (over := compiled_by_user(part)) is not None:
        _log.warning("%s: hotloop.compile compiles over it: %s (%s)", component.name, over.reason, over.hint)
    _nest(part, component)
    components[part] = component
    eager = component.disabled or all(lane.eager for lane in component.lanes)
    for point in points:
        entry = get_entry(point)
        before = entry.before if isinstance(entry, Entry) else entry
        if not eager or before is not None:  # an eager component too has to bypass the user's module.compile()
            set_entry(point, (RedirectableEntry if is_lightning(point) else Entry)(point, component, before))
    if not eager:
        component.methods = make_entries(part, component.lanes)
        component.put_methods(part)


def take_off(module: torch.nn.Module) -> None:
    """Leave a module as it was before hotloop compiled it; components inside of it stay as they are."""
    component = components.pop(module, None)
    if component is None:
        return
    component.drop_methods(module)
    for point in component.modules():
        if isinstance(entry := get_entry(point), Entry):  # else the user has compiled it since
            set_entry(point, entry.before)


def _nest(part: torch.nn.Module, component: Component) -> None:
    """Note which components run inside which: an outer compile inlines the inner one's code."""
    component.holds = frozenset(id(module) for module in part.modules())
    for module, other in list(components.items()):
        if module is part:
            continue
        if id(module) in component.holds:
            other.inside = None if component.left else weakref.ref(component)
        elif component.inside is None and id(part) in other.holds and not other.left:
            component.inside = weakref.ref(other)


class Installed:
    """A compile that was taken off a model and can be put back, code and tally with it.

    Args:
        model: the module; it is eager afterwards, as far as hotloop compiled it.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        modules = list(model.modules())
        self._components = [(part, components[part]) for part in modules if part in components]
        self._entries = [(part, entry) for part in modules if isinstance(entry := get_entry(part), Entry)]
        for module, _ in self._components:
            take_off(module)

    def put_back(self) -> None:
        """Compile the model again as it was, which costs nothing; a later compile of it is taken off."""
        for module, component in self._components:
            take_off(module)
            components[module] = component
            component.put_methods(module)
        for module, entry in self._entries:
            set_entry(module, entry)


@contextlib.contextmanager
def paused(modules: Iterable[torch.nn.Module]) -> Iterator[None]:
    """Run modules, and the modules inside them, eager while the block runs; compiled code and its tally stay."""
    inside = [part for module in modules for part in module.modules()]
    entries = [(part, entry) for part in inside if (entry := get_entry(part)) is not None]
    methods = [method for part in inside if part in components for method in components[part].methods.values()]
    for part, _ in entries:
        set_entry(part, None)
    for method in methods:
        method.off = True
    try:
        yield
    finally:
        for method in methods:
            method.off = False
        for part, entry in entries:
            set_entry(part, entry)


def compiles(models: Iterable[torch.nn.Module]) -> Callable[[], int]:
    """Return a function that counts the compiles so far of the components that models have now, or have inside."""
    compiled = [components[part] for model in models for part in model.modules() if part in components]
    return lambda: sum(lane.tally.compiles for component in compiled for lane in component.lanes)


def method_of(module: torch.nn.Module, name: str) -> Callable[..., Any]:
    """Return a method of a module's class, compiled where the module is, for a caller that puts itself in front."""
    component = components.get(module)
    plain: Callable[..., Any] = Method(module, name).bound()
    return plain if component is None else component.methods.get(name, plain)
