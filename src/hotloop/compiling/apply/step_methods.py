"""The methods of a LightningModule that its trainer calls instead of the module, and which of them can be compiled."""

from __future__ import annotations

import dis
import functools
import inspect
import types
from typing import TYPE_CHECKING, Any

import torch

from hotloop.compiling.apply.targets import is_lightning, of_library, sharded_units

if TYPE_CHECKING:
    from collections.abc import Iterator

_STEPS = ("training_step", "validation_step", "test_step", "predict_step")
_TRAINERS = frozenset({
    "trainer", "_trainer", "fabric", "logger", "loggers", "global_step", "current_epoch", "optimizers", "lr_schedulers",
    "manual_backward", "toggle_optimizer", "untoggle_optimizer", "clip_gradients", "all_gather", "print",
})  # fmt: skip
"""Attributes of a LightningModule behind which the Trainer is: torch compiles anew for each value of its counters."""
_READS = ("LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR")
_METRICS = ("Metric", "MetricCollection")
"""Classes of torchmetrics, by name: their counters are attributes, so that torch would compile anew at each call."""


def step_methods(component: Any) -> dict[str, str]:
    """Name the step methods that a LightningModule's class has; with each, why it is not compiled, or nothing.

    None where FSDP has sharded the module by parts: a compile around the gathering of parameters would break there.
    """
    if not isinstance(component, torch.nn.Module) or not is_lightning(component) or sharded_units(component):
        return {}
    kind = type(component)
    found = [name for name in _STEPS if not of_library(getattr(kind, name, None))]
    return {name: _trainers(kind, name) or metric_updated_by(component, name) for name in found}


def metric_updated_by(module: torch.nn.Module, name: str) -> str:
    """Say which of torchmetrics' metrics a method updates; empty where it updates none."""
    metrics = {path for path, child in module.named_children() if _is_metric(child)}
    named = sorted(metrics.intersection(_read_by(type(module), name, set()))) if metrics else ()
    return f"{name} updates the metric self.{named[0]}, which counts its calls" if named else ""


def _is_metric(module: torch.nn.Module) -> bool:
    inside = (kind.__name__ for one in module.modules() for kind in type(one).__mro__)
    return any(name in _METRICS for name in inside)


def _trainers(kind: type, name: str) -> str:
    """Say what a method uses that is the Trainer's; empty where there is nothing."""
    read = sorted(_TRAINERS.intersection(_read_by(kind, name, set())))
    return f"it uses self.{read[0]}, which is the Trainer's and changes from step to step" if read else ""


def _read_by(kind: type, method: str, seen: set[str]) -> Iterator[str]:
    """Give the attributes that a method reads, and that the user's methods read that it calls."""
    seen.add(method)
    for code in _codes(kind, method):
        for name in sorted(_names(code)):
            yield name
            inner = inspect.getattr_static(kind, name, None)
            if name not in seen and isinstance(inner, types.FunctionType) and not of_library(inner):
                yield from _read_by(kind, name, seen)


def _codes(kind: type, method: str) -> Iterator[types.CodeType]:
    """Give the code of a method, and of those that it overrides as far as they are called by it."""
    for base in kind.__mro__:
        function = vars(base).get(method)
        if function is None:
            continue
        code = getattr(inspect.unwrap(function), "__code__", None)
        if of_library(function) or not isinstance(code, types.CodeType):
            return
        yield code
        if "super" not in code.co_names and method not in _names(code):
            return


@functools.lru_cache(maxsize=256)
def _names(code: types.CodeType) -> frozenset[str]:
    """Give the attributes that code reads, that of functions defined inside it too; a global ``logger`` is none."""
    read = {one.argval for one in dis.get_instructions(code) if one.opname in _READS}
    inner = (constant for constant in code.co_consts if isinstance(constant, types.CodeType))
    return frozenset(read).union(*(_names(one) for one in inner))
