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
"""Attributes of a LightningModule that lead to the Trainer: torch compiles anew for each value of its counters."""


def step_methods(component: Any) -> dict[str, str]:
    """Return the step methods that a LightningModule's class has, each with the reason not to compile it, or "".

    There are none where FSDP has sharded the module: a compile around the gathering of parameters would break there.
    """
    if not isinstance(component, torch.nn.Module) or not is_lightning(component) or sharded_units(component):
        return {}
    kind = type(component)
    reasons = {}
    for name in _STEPS:
        if of_library(getattr(kind, name, None)):
            continue
        read = sorted(_TRAINERS.intersection(_read_by(kind, name, set())))
        if read:
            reasons[name] = f"it uses self.{read[0]}, which is the Trainer's and changes from step to step"
        else:
            reasons[name] = metric_updated_by(component, name)
    return reasons


def metric_updated_by(module: torch.nn.Module, name: str) -> str:
    """Return a sentence that names a torchmetrics metric which a method updates; empty where it updates none.

    The counters of metrics are attributes, so that torch would compile anew at each call.
    """
    metrics = set()
    for path, child in module.named_children():
        classes = {kind.__name__ for part in child.modules() for kind in type(part).__mro__}
        if classes & {"Metric", "MetricCollection"}:
            metrics.add(path)
    named = sorted(metrics.intersection(_read_by(type(module), name, set()))) if metrics else ()
    return f"{name} updates the metric self.{named[0]}, which counts its calls" if named else ""


def _read_by(kind: type, method: str, seen: set[str]) -> Iterator[str]:
    """Yield the attributes that a method reads, and those read by the user's methods that it calls."""
    seen.add(method)
    for code in _codes(kind, method):
        for name in sorted(_names(code)):
            yield name
            inner = inspect.getattr_static(kind, name, None)
            if name not in seen and isinstance(inner, types.FunctionType) and not of_library(inner):
                yield from _read_by(kind, name, seen)


def _codes(kind: type, method: str) -> Iterator[types.CodeType]:
    """Yield the code of a method, and of the methods that it overrides and calls."""
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
    """Return the attributes that code reads, in inner functions too; a global ``logger`` is no attribute."""
    reads = ("LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR")
    names = {instruction.argval for instruction in dis.get_instructions(code) if instruction.opname in reads}
    inner = (constant for constant in code.co_consts if isinstance(constant, types.CodeType))
    return frozenset(names).union(*map(_names, inner))
