"""What happens between steps, on torch's public optimizer hook: ladders move, and a compile that nothing calls is found."""

from __future__ import annotations

import ast
import inspect
import textwrap
import weakref
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from hotloop import events as ev
from hotloop.control.component import Component
from hotloop.observe import collector

_STEPS_BEFORE_NO_EFFECT = 2
_live: weakref.WeakSet[Component] = weakref.WeakSet()
_installed: list[Any] = []


def install() -> None:
    """Register the hook, once a process."""
    if not _installed:
        _installed.append(register_optimizer_step_post_hook(_after_step))


def follow(component: Component) -> None:
    """Have a component looked after from now on, for as long as it lives."""
    _live.add(component)


def _after_step(optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
    collector.poll()
    for component in tuple(_live):
        for lane in component.lanes:
            ladder = lane.tally.ladder
            if ladder is not None and (move := ladder.at_step_boundary()) is not None:
                event = ev.Fallback(
                    component=component.name,
                    scope="component",
                    from_preset=move.from_preset,
                    to_preset=move.to_preset,
                    stage="compile",
                    reason=move.reason,
                )
                collector.emit_for(lane.tally, event)
        if not component.said_no_effect and not any(tally.calls for tally in component.tallies):
            _look_for_no_effect(component, optimizer)


def _look_for_no_effect(component: Component, optimizer: torch.optim.Optimizer) -> None:
    """Parameters of a component were trained, yet its compiled entry was never called."""
    if component.disabled or not component.targets or component.inside or all(lane.eager for lane in component.lanes):
        return
    trained = {id(p) for group in optimizer.param_groups for p in group["params"] if p.grad is not None}
    modules = [module for reference in component.targets if (module := reference()) is not None]
    if not any(id(p) in trained for module in modules for p in module.parameters()):
        return
    component.boundaries += 1
    if component.boundaries < _STEPS_BEFORE_NO_EFFECT:
        return
    component.said_no_effect = True
    place = next((found for module in modules if (found := _forward_call(type(module)))), None)
    kind = type(modules[0]).__name__
    collector.emit_for(
        component.lanes[0].tally,
        ev.NoEffect(
            component=component.name,
            reason=f"{component.boundaries} steps trained {kind}, but its compiled call was never entered: the code calls "
            "its forward() or another method directly",
            hint="call the module itself, model(x), or compile the method that is called: hotloop.compile(model.method)",
            file=place[0] if place else None,
            line=place[1] if place else None,
        ),
    )


def _forward_call(kind: type) -> tuple[str, int] | None:
    """Give file and line of a ``self.forward(...)`` in the class, if there is one."""
    try:
        source, start = inspect.getsourcelines(kind)
        file = inspect.getsourcefile(kind)
    except (OSError, TypeError):  # a class from a notebook or an interpreter has no source: the place stays unknown
        return None
    for node in ast.walk(ast.parse(textwrap.dedent("".join(source)))):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "forward":
            bypasses = isinstance(node.func.value, ast.Name | ast.Attribute)  # not super().forward(...)
            if bypasses and file:
                return file, start + node.lineno - 1
    return None
