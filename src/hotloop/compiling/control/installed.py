"""What is compiled in place on which module: puts it on, takes it off, sets it aside for a while."""

from __future__ import annotations

import contextlib
import logging
import weakref
from typing import TYPE_CHECKING, Any

from hotloop._torch.module import Method, get_entry, set_entry
from hotloop.compiling.apply import entry_points, is_lightning, offloaded
from hotloop.compiling.control import methods
from hotloop.compiling.control.component import Component, Entry
from hotloop.compiling.control.given import compiled_over

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    import torch

_log = logging.getLogger("hotloop")
MARKER = "_hotloop_compiled"
"""A plain string on a compiled module: it survives deepcopy and pickling, which drop the compile, and tells of it."""
components: weakref.WeakKeyDictionary[torch.nn.Module, Component] = weakref.WeakKeyDictionary()
"""Every module that was compiled in place, and its component."""


def attach(part: torch.nn.Module, component: Component) -> None:
    """Put a component on its module, in the place of what hotloop had put there before."""
    take_off(part)
    points = entry_points(part)
    if theirs := compiled_over(part):
        _log.warning("%s: %s", component.name, theirs)
    hooked = _offloaded_since(weakref.ref(part), offloaded(part))
    for one in component.lanes:
        one.unasked, one.tally.hindered, one.lanes = bool(theirs), hooked, component.lanes
    component.targets = tuple(weakref.ref(point) for point in points)
    _nest(part, component)
    components[part] = component
    asked = any(lane.preset.backend != "eager" for lane in component.lanes)
    if asked:
        part.__dict__[MARKER] = component.config.training.name
    eager = component.disabled or all(lane.eager for lane in component.lanes)
    for point in points:
        there = get_entry(point)
        before = there.before if isinstance(there, Entry) else there
        if not eager or before is not None:  # what is to be eager has to be led past module.compile()
            set_entry(point, (methods.RedirectableEntry if is_lightning(point) else Entry)(point, component, before))
    if eager:
        return
    component.methods = methods.make(part, component)
    methods.put(part, component.methods)


def _offloaded_since(part: weakref.ref[torch.nn.Module], before: set[str]) -> Callable[[], str]:
    """Give what says, when code is about to be compiled, that modules inside have been offloaded since they were given.

    Hooks around the whole break its code once, at their own line.
    """

    def hindered() -> str:
        module = part()
        if module is None or not offloaded(module) - before - {""}:
            return ""
        what = f"modules inside of {type(module).__name__} were offloaded after it was compiled"
        return f"{what}, and the hooks that move them break every graph: it runs eager"

    return hindered


def take_off(module: torch.nn.Module) -> None:
    """Leave a module as it was before hotloop compiled it; what is inside of it stays as it is."""
    component = components.pop(module, None)
    module.__dict__.pop(MARKER, None)
    if component is None:
        return
    methods.drop(module, component.methods)
    for reference in component.targets:
        point = reference()
        if point is not None and isinstance(entry := get_entry(point), Entry):  # else the user has compiled it since
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
    """A compile that was taken off a model and can be put back, code and account with it.

    Args:
        model: the module; it is eager afterwards, as far as hotloop compiled it.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        modules = list(model.modules())
        self._components = [(one, components[one], one.__dict__.get(MARKER)) for one in modules if one in components]
        self._entries = [(one, entry) for one in modules if isinstance(entry := get_entry(one), Entry)]
        for module, _, _ in self._components:
            take_off(module)

    def put_back(self) -> None:
        """Compile the model again as it was, which costs nothing; what was compiled since is taken off."""
        for module, component, marker in self._components:
            take_off(module)
            components[module] = component
            methods.put(module, component.methods)
            if marker is not None:
                module.__dict__[MARKER] = marker
        for module, entry in self._entries:
            set_entry(module, entry)


@contextlib.contextmanager
def paused(modules: Iterable[torch.nn.Module]) -> Iterator[None]:
    """Run modules, and what is inside them, eager while the block runs; compiled code and its account stay."""
    inside = [one for module in modules for one in module.modules()]
    held = [(one, entry) for one in inside if (entry := get_entry(one)) is not None]
    steps = [entry for one in inside if one in components for entry in components[one].methods.values()]
    for one, _ in held:
        set_entry(one, None)
    methods.switch(steps, off=True)
    try:
        yield
    finally:
        methods.switch(steps, off=False)
        for one, entry in held:
            set_entry(one, entry)


def compiles(models: Iterable[torch.nn.Module]) -> Callable[[], int]:
    """Give what tells how much code was compiled so far for modules as they are compiled now, and inside of them."""
    inside = [one for model in models for one in model.modules() if one in components]
    accounts = [tally for one in inside for tally in components[one].tallies]
    return lambda: sum(one.compiles for one in accounts)


def method_of(module: torch.nn.Module, name: str) -> Callable[..., Any]:
    """Give a method of a module's class, compiled where the module is: for who stands in front of it himself."""
    component = components.get(module)
    plain: Callable[..., Any] = Method(module, name).bound()
    return plain if component is None else component.methods.get(name, plain)
