"""The methods of a LightningModule that its trainer calls instead of the module, and which of them can be compiled."""

from __future__ import annotations

import functools
import inspect
import types
from typing import TYPE_CHECKING, Any

import torch

from hotloop.apply.targets import is_lightning, of_library, sharded_units

if TYPE_CHECKING:
    from collections.abc import Iterator

_STEPS = ("training_step", "validation_step", "test_step", "predict_step")
_TRAINERS = frozenset({
    "trainer", "_trainer", "fabric", "logger", "loggers", "global_step", "current_epoch", "optimizers", "lr_schedulers",
    "manual_backward", "toggle_optimizer", "untoggle_optimizer", "clip_gradients", "all_gather", "print",
})  # fmt: skip
"""Attributes of a LightningModule behind which the Trainer is: torch compiles anew for each value of its counters."""
_METRICS = ("Metric", "MetricCollection")
"""Classes of torchmetrics, by name: their counters are attributes, so that torch would compile anew at each call."""


def step_methods(component: Any) -> dict[str, str]:
    """Name the step methods that a LightningModule's class has; with each, why it is not compiled, or nothing.

    None where FSDP2 has sharded the module: a compile around the gathering of parameters would break there.
    """
    if not isinstance(component, torch.nn.Module) or not is_lightning(component) or sharded_units(component):
        return {}
    kind = type(component)
    found = [name for name in _STEPS if not of_library(getattr(kind, name, None))]
    return {name: _trainers(kind, name) or metric_updated_by(component, name) for name in found}


def metric_updated_by(module: torch.nn.Module, name: str) -> str:
    """Say which of torchmetrics' metrics a method updates; empty where it updates none."""
    metrics = {path for path, child in module.named_children() if _is_metric(child)}
    named = sorted(metrics.intersection(_named_by(type(module), name, set()))) if metrics else ()
    return f"{name} updates the metric self.{named[0]}, which counts its calls" if named else ""


def _is_metric(module: torch.nn.Module) -> bool:
    inside = (kind.__name__ for one in module.modules() for kind in type(one).__mro__)
    return any(name in _METRICS for name in inside)


def _trainers(kind: type, name: str) -> str:
    """Say what a method uses that is the Trainer's; empty where there is nothing."""
    read = sorted(_TRAINERS.intersection(_named_by(kind, name, set())))
    return f"it uses self.{read[0]}, which is the Trainer's and changes from step to step" if read else ""


def _named_by(kind: type, method: str, seen: set[str]) -> Iterator[str]:
    """Give the names in a method's code, and in that of the user's methods that it names."""
    seen.add(method)
    function = getattr(kind, method)
    code = getattr(getattr(function, "__wrapped__", function), "__code__", None)
    for name in _names(code) if isinstance(code, types.CodeType) else ():
        yield name
        inner = inspect.getattr_static(kind, name, None)
        if name not in seen and isinstance(inner, types.FunctionType) and not of_library(inner):
            yield from _named_by(kind, name, seen)


@functools.lru_cache(maxsize=256)
def _names(code: types.CodeType) -> frozenset[str]:
    inner = (constant for constant in code.co_consts if isinstance(constant, types.CodeType))
    return frozenset(code.co_names).union(*(_names(one) for one in inner))
