"""What happens between steps, on torch's public optimizer hook: ladders move, a compile that nothing calls is found."""

from __future__ import annotations

import ast
import inspect
import textwrap
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from hotloop import events as ev
from hotloop._torch.module import get_entry
from hotloop.compiling.control import rendezvous
from hotloop.compiling.control.component import Entry
from hotloop.compiling.fallback.lifetime import steps
from hotloop.compiling.observe import collector, explain

if TYPE_CHECKING:
    from collections.abc import Callable

    from hotloop.compiling.control.component import Component, Lane

_STEPS_BEFORE_NO_EFFECT = 2
_STEPS_LOOKED_AT = 20
"""Steps after which a component that was neither called nor trained (a cached text encoder) is left in peace."""
_live: weakref.WeakSet[Component] = weakref.WeakSet()
_installed: list[Any] = []


def install() -> None:
    """Register the hook, once a process."""
    if not _installed:
        _installed.append(register_optimizer_step_post_hook(_untraced(_after_step)))


def _untraced(hook: Callable[..., None]) -> Callable[..., None]:
    """Keep a compiled train step from tracing the hook as if it were the user's code."""
    disable: Callable[..., Callable[..., None]] = torch.compiler.disable
    return disable(hook)


def follow(component: Component) -> None:
    """Have a component looked after from now on, for as long as it lives."""
    _live.add(component)


def _after_step(optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
    collector.poll()
    rendezvous.follow()
    steps.optimizer_stepped()
    trained: set[int] | None = None
    between_steps()
    for component in tuple(_live):
        if _may_be_bypassed(component):
            if trained is None:
                trained = {id(p) for group in optimizer.param_groups for p in group["params"] if p.grad is not None}
            _look_for_no_effect(component, trained)


def between_steps() -> None:
    """Do what is due between two steps; for a replay, whose optimizers run no hook, its caller has to."""
    for component in tuple(_live):
        for lane in component.lanes:
            _move(component, lane)
            lane.tally.per_step.boundary(lane.tally.calls)


def _move(component: Component, lane: Lane) -> None:
    ladder = lane.tally.ladder
    if ladder is None or (move := ladder.at_step_boundary()) is None:
        return
    event = ev.Fallback(
        component=component.name,
        scope="component",
        from_preset=move.from_preset,
        to_preset=move.to_preset,
        stage="compile",
        reason=move.reason,
    )
    collector.emit(event, lane.tally)


def _may_be_bypassed(component: Component) -> bool:
    """Tell whether a component still waits for its first call in training, and its first steps are not over."""
    training = component.lanes[0]
    if training.eager or training.tally.calls or not component.targets or component.boundaries >= _STEPS_LOOKED_AT:
        return False
    # One that was taken off, or is set aside while a step runs eager, has no call to be entered.
    modules = [module for reference in component.targets if (module := reference()) is not None]
    entries = [entry for module in modules if isinstance(entry := get_entry(module), Entry)]
    if not any(entry.leads_to(component) for entry in entries):
        return False
    return component.inside is None or component.inside() is None


def _look_for_no_effect(component: Component, trained: set[int]) -> None:
    """Parameters of a component were trained, yet its compiled entry was never called."""
    component.boundaries += 1
    modules = [module for reference in component.targets if (module := reference()) is not None]
    if not any(id(p) in trained for module in modules for p in module.parameters()):
        return
    component.bypassed += 1
    if component.bypassed < _STEPS_BEFORE_NO_EFFECT or component.said_no_effect:
        return
    component.said_no_effect = True
    place = next((found for module in modules if (found := _forward_call(type(module)))), None)
    kind = type(modules[0]).__name__
    collector.emit(
        explain.no_effect(
            "bypassed",
            component.name,
            f"{component.bypassed} steps trained {kind}, but its compiled call was never entered: the code "
            "calls its forward() or another method directly",
            file=place[0] if place else None,
            line=place[1] if place else None,
        ),
        component.lanes[0].tally,
    )


def _forward_call(kind: type) -> tuple[str, int] | None:
    """Give file and line of a ``self.forward(...)`` in the class, if there is one."""
    try:
        source, start = inspect.getsourcelines(kind)
        file = inspect.getsourcefile(kind)
        tree = ast.parse(textwrap.dedent("".join(source)))
    except (OSError, TypeError, SyntaxError, ValueError):
        return (
            None  # a class from a notebook has no source, one inside a function may not parse: the place stays unknown
        )
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "forward":
            bypasses = isinstance(node.func.value, ast.Name | ast.Attribute)  # not super().forward(...)
            if bypasses and file:
                return file, start + node.lineno - 1
    return None
