"""What happens between steps, on torch's public optimizer hook: a compile that nothing calls is found."""

from __future__ import annotations

import logging
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from hotloop._torch.collectives import patience
from hotloop._torch.module import get_entry
from hotloop.compiling.control.component import Entry
from hotloop.compiling.control.lane import COMPILING
from hotloop.compiling.fallback.step_marks import steps
from hotloop.compiling.observe import collector, explain
from hotloop.errors import HotloopError, describe

if TYPE_CHECKING:
    from collections.abc import Callable

    from hotloop.compiling.control.component import Component

_STEPS_BEFORE_NO_EFFECT = 2
"""Steps that train a component whose compiled call is never entered, before that is reported."""
_MOST_STEPS = 20
"""Steps after which a component that was neither called nor trained (a cached text encoder) is no longer checked."""
_live: weakref.WeakSet[Component] = weakref.WeakSet()
_installed: list[Any] = []
_failed: set[str] = set()
"""Failures after an optimizer's step that were logged."""
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
    if component.asks:
        patience.hold(COMPILING)


def _after_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    try:
        collector.poll()
        steps.optimizer_stepped()
        between_steps()
        for component in tuple(_live):
            if _may_be_bypassed(component):
                _check_bypassed(component, optimizer)
    except HotloopError:
        raise
    except Exception as error:  # noqa: BLE001 - the step is done, and right
        if describe(error) not in _failed:
            _failed.add(describe(error))
            _log.warning("hotloop failed after an optimizer's step; training goes on", exc_info=True)


def between_steps() -> None:
    """Do what is due between two steps; a replay, whose optimizers run no hook, calls this itself."""
    lanes = [lane for component in tuple(_live) for lane in component.lanes]
    settled = [lane.settled() for lane in lanes]
    if all(settled):
        patience.drop(COMPILING)
    for lane in lanes:
        lane.tally.per_step.boundary(lane.tally.calls)


def _may_be_bypassed(component: Component) -> bool:
    """Return whether a component still waits for its first call in training, within its first steps."""
    training = component.lanes[0]
    if training.eager or training.tally.calls or component.steps >= _MOST_STEPS or component.said_no_effect:
        return False
    if component.inside is not None and component.inside() is not None:
        return False
    # A component that was taken off, or is paused while a step runs eager, has no entry that could be called.
    entries = map(get_entry, component.modules())
    return any(isinstance(entry, Entry) and entry.leads_to(component) for entry in entries)


def _check_bypassed(component: Component, optimizer: torch.optim.Optimizer) -> None:
    """Report a component whose parameters were trained while its compiled entry was never called."""
    component.steps += 1
    trained = {id(p) for group in optimizer.param_groups for p in group["params"] if p.grad is not None}
    modules = component.modules()
    component.bypassed += any(id(p) in trained for module in modules for p in module.parameters())
    if component.bypassed < _STEPS_BEFORE_NO_EFFECT:
        return
    component.said_no_effect = True
    reason = (
        f"{component.bypassed} steps trained {type(modules[0]).__name__}, but its compiled call was never entered: the "
        "code calls its forward() or another method directly"
    )
    collector.emit(explain.no_effect("bypassed", component.name, reason), component.lanes[0].tally)
