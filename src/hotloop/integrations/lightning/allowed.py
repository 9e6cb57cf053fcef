"""Whether Lightning's hooks leave a training step to a loop: not where something of the program runs inside it.

Lightning calls ``optimizer_step`` of the module for each batch under automatic optimization, and lets it run forward,
backward and optimizer in any way. What else the program has put between those three runs as the Trainer runs it, once a
batch, so the step is then the Trainer's own and the model is compiled in place at most.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.plugins import DoublePrecision, HalfPrecision, MixedPrecision, Precision
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature

from hotloop.compiling.apply import metric_updated_by
from hotloop.integrations.lightning.shadow import STOOD_IN_FOR

if TYPE_CHECKING:
    from collections.abc import Iterator

_BETWEEN = ("on_before_zero_grad", "on_before_backward", "on_after_backward", "on_before_optimizer_step")
"""Hooks that run between forward, backward and optimizer step."""
_PRECISIONS = (Precision, MixedPrecision, HalfPrecision, DoublePrecision)


def why_not(trainer: pl.Trainer, module: pl.LightningModule) -> list[str]:
    """Say why a loop cannot own the step of this fit; empty where it can."""
    return [*_of_the_trainer(trainer), *_of_the_module(module), *_hooks(trainer, module)]


def _of_the_trainer(trainer: pl.Trainer) -> Iterator[str]:
    if type(trainer.strategy) is not SingleDeviceStrategy:
        yield f"{type(trainer.strategy).__name__} runs the step on several devices, or in a way of its own"
    if type(trainer.precision_plugin) not in _PRECISIONS:
        yield f"{type(trainer.precision_plugin).__name__} has a backward and an optimizer step of its own"
    if trainer.accumulate_grad_batches != 1 or _schedules_accumulation(trainer):
        yield "gradients are accumulated: the Trainer asks optimizer_step of the module for some batches only"


def _schedules_accumulation(trainer: pl.Trainer) -> bool:
    callbacks: list[Any] = list(vars(trainer)["callbacks"])
    return any(isinstance(one, pl.callbacks.GradientAccumulationScheduler) for one in callbacks)


def _of_the_module(module: pl.LightningModule) -> Iterator[str]:
    if not module.automatic_optimization:
        yield "manual optimization: training_step steps the optimizers itself, with the Trainer's counters in between"
    if is_param_in_hook_signature(module.training_step, "dataloader_iter", explicit=True):
        yield "training_step takes the dataloader_iter: what it reads in a step is not known before"
    if updated := metric_updated_by(module, "training_step"):
        yield f"{updated}: it would count a step twice that runs twice"
    for name in ("optimizer_step", "optimizer_zero_grad"):
        if is_overridden(name, module):
            yield f"{type(module).__name__}.{name} is overridden"
    for name in STOOD_IN_FOR:
        if name in vars(module):
            yield f"{name} was set on this one {type(module).__name__}, in front of what its class defines"


def _hooks(trainer: pl.Trainer, module: pl.LightningModule) -> Iterator[str]:
    callbacks: list[Any] = list(vars(trainer)["callbacks"])
    for one in (*callbacks, module):
        for name in _BETWEEN:
            if is_overridden(name, one):
                yield f"{type(one).__name__}.{name} runs inside the step, once a batch"


def why_not_with(optimizers: list[torch.optim.Optimizer]) -> list[str]:
    """Say the same of the optimizers, which exist only once the fit has begun."""
    if len(optimizers) != 1:
        return [f"there are {len(optimizers)} optimizers"]
    if isinstance(optimizers[0], torch.optim.LBFGS):
        return ["LBFGS runs forward and backward several times a step, by a closure"]
    return []
