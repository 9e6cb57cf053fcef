"""What happens between steps, on torch's public optimizer hook: ladders move, a compile that nothing calls is found."""

from __future__ import annotations

import ast
import inspect
import logging
import textwrap
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from hotloop._torch.module import get_entry
from hotloop.compiling.control.component import Entry
from hotloop.compiling.control.rendezvous import current
from hotloop.compiling.fallback.step_marks import steps
from hotloop.compiling.observe import collector, explain
from hotloop.errors import HotloopError, describe

if TYPE_CHECKING:
    from collections.abc import Callable

    from hotloop.compiling.control.component import Component

_STEPS_BEFORE_NO_EFFECT = 2
_MOST_STEPS = 20
"""Steps after which a component that was neither called nor trained (a cached text encoder) is no longer checked."""
_live: weakref.WeakSet[Component] = weakref.WeakSet()
_installed: list[Any] = []
_failed: set[str] = set()
"""What failed after an optimizer's step, each of which is news only once."""
_log = logging.getLogger("hotloop")


def install() -> None:
    """Register the hook, once a process."""
    if not _installed:
        # Disabled, or a compiled train step would trace the hook as if it were the user's code.
        disable: Callable[..., Callable[..., None]] = torch.compiler.disable
        _installed.append(register_optimizer_step_post_hook(disable(_after_step)))


def follow(component: Component) -> None:
    """Do what is due between steps for a component from now on, as long as it lives."""
    _live.add(component)


def _after_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    try:
        _between_steps_of(optimizer)
    except HotloopError:
        raise
    except Exception as error:  # noqa: BLE001 - the step is done, and right
        if describe(error) not in _failed:
            _failed.add(describe(error))
            _log.warning("hotloop failed after an optimizer's step; training goes on", exc_info=True)


def _between_steps_of(optimizer: torch.optim.Optimizer) -> None:
    collector.poll()
    current.follow()
    steps.optimizer_stepped()
    between_steps()
    trained: set[int] | None = None
    for component in tuple(_live):
        if _may_be_bypassed(component):
            if trained is None:
                trained = {id(p) for group in optimizer.param_groups for p in group["params"] if p.grad is not None}
            _check_bypassed(component, trained)


def between_steps() -> None:
    """Do what is due between two steps; a replay, whose optimizers run no hook, calls this itself."""
    for component in tuple(_live):
        for lane in component.lanes:
            tally = lane.tally
            if tally.ladder is not None and (fallback := tally.ladder.at_step_boundary(component.name)) is not None:
                collector.emit(fallback, tally)
            tally.per_step.boundary(tally.calls)


def _may_be_bypassed(component: Component) -> bool:
    """Return whether a component still waits for its first call in training, within its first steps."""
    training = component.lanes[0]
    if training.eager or training.tally.calls or not component.targets or component.boundaries >= _MOST_STEPS:
        return False
    # A component that was taken off, or is paused while a step runs eager, has no entry that could be called.
    entries = [entry for module in component.modules() if isinstance(entry := get_entry(module), Entry)]
    if not any(entry.leads_to(component) for entry in entries):
        return False
    return component.inside is None or component.inside() is None


def _check_bypassed(component: Component, trained: set[int]) -> None:
    """Report a component whose parameters were trained while its compiled entry was never called.

    Args:
        component: the component.
        trained: ids of the parameters that the optimizer has stepped.
    """
    component.boundaries += 1
    modules = component.modules()
    if not any(id(p) in trained for module in modules for p in module.parameters()):
        return
    component.bypassed += 1
    if component.bypassed < _STEPS_BEFORE_NO_EFFECT or component.said_no_effect:
        return
    component.said_no_effect = True
    file, line = next((place for module in modules if (place := _forward_call(type(module)))), (None, None))
    event = explain.no_effect(
        "bypassed",
        component.name,
        f"{component.bypassed} steps trained {type(modules[0]).__name__}, but its compiled call was never entered: the "
        "code calls its forward() or another method directly",
        file=file,
        line=line,
    )
    collector.emit(event, component.lanes[0].tally)


def _forward_call(kind: type) -> tuple[str, int] | None:
    """Return file and line of a ``self.forward(...)`` in the class; None where there is none, or no readable source."""
    try:
        source, start = inspect.getsourcelines(kind)
        file = inspect.getsourcefile(kind)
        tree = ast.parse(textwrap.dedent("".join(source)))
    except (OSError, TypeError, SyntaxError, ValueError):  # a class from a notebook, or one inside a function
        return None
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "forward":
            bypasses = isinstance(node.func.value, ast.Name | ast.Attribute)  # not super().forward(...)
            if bypasses and file:
                return file, start + node.lineno - 1
    return None
