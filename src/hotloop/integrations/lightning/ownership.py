"""Decides whether Lightning's hooks leave a training step to a loop: not where code of the program runs inside it.

Lightning calls ``optimizer_step`` of the module for each batch under automatic optimization, and lets it run forward,
backward and optimizer in any way. The program may have put code of its own between these three, which the Trainer runs
once a batch. Then the step stays the Trainer's, and the model is compiled in place at most.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.plugins import DoublePrecision, HalfPrecision, MixedPrecision, Precision
from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy, ModelParallelStrategy, SingleDeviceStrategy
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature

from hotloop._torch.hooks import every_optimizers_pre_hooks, optimizer_hooks
from hotloop._torch.wrappers import why_not_at_first
from hotloop.compiling.apply import metric_updated_by
from hotloop.compiling.control import compiled_by_user, status
from hotloop.integrations.several import FLAT, UNCOMPILED

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hotloop.step.tiers import Tier

_STEPS = ("training_step", "validation_step", "test_step", "predict_step")


def obstacles(trainer: pl.Trainer, module: pl.LightningModule, tier: Tier | None) -> list[str]:
    """List why a loop cannot own the step of this fit; empty where it can.

    Args:
        trainer: the Trainer.
        module: its module.
        tier: what was asked for; None for ``"auto"``.
    """
    callbacks: list[Any] = list(vars(trainer)["callbacks"])
    # The hooks between forward, backward and optimizer step.
    between = ("on_before_zero_grad", "on_before_backward", "on_after_backward", "on_before_optimizer_step")
    hooks = [
        f"{type(owner).__name__}.{name} runs inside the step, once a batch"
        for owner in (*callbacks, module)
        for name in between
        if is_overridden(name, owner)
    ]
    return [*_of_strategy(trainer.strategy, tier), *_of_trainer(trainer, callbacks), *_of_module(module), *hooks]


def _of_strategy(strategy: Any, tier: Tier | None) -> Iterator[str]:
    name = type(strategy).__name__
    agrees = tier is None or tier.graph  # several processes agree on no other tier
    if agrees and type(strategy) is DDPStrategy:
        wrapper: Any = strategy.model
        if why := why_not_at_first(wrapper):
            yield f"{why} ({name}(...) takes the arguments of DistributedDataParallel)"
    elif agrees and type(strategy) is ModelParallelStrategy:
        if tier is not None and tier.compiles:  # in place the module is compiled at least
            yield f"{name}: {UNCOMPILED}"
    elif agrees and isinstance(strategy, FSDPStrategy):
        yield f"{name}: {FLAT}, by ModelParallelStrategy"
    elif type(strategy) is not SingleDeviceStrategy:
        yield f"{name} runs the step on several devices, or in a way of its own"


def _of_trainer(trainer: pl.Trainer, callbacks: list[Any]) -> Iterator[str]:
    if type(trainer.precision_plugin) not in (Precision, MixedPrecision, HalfPrecision, DoublePrecision):
        yield f"{type(trainer.precision_plugin).__name__} has a backward and an optimizer step of its own"
    schedulers = [
        callback for callback in callbacks if isinstance(callback, pl.callbacks.GradientAccumulationScheduler)
    ]
    if trainer.accumulate_grad_batches != 1 or schedulers:
        yield (
            "gradients are accumulated: the Trainer asks optimizer_step of the module for some batches only (a larger "
            "batch with accumulate_grad_batches=1 is a step that a loop can own)"
        )


def _of_module(module: pl.LightningModule) -> Iterator[str]:
    if not module.automatic_optimization:
        yield "manual optimization: training_step steps the optimizers itself, with the Trainer's counters in between"
    if is_param_in_hook_signature(module.training_step, "dataloader_iter", explicit=True):
        yield "training_step takes the dataloader_iter: the batches that it reads are not known before the step"
    if updated := metric_updated_by(module, "training_step"):
        yield f"{updated}: a step that runs twice would be counted twice"
    kind = type(module).__name__
    for name in ("optimizer_step", "optimizer_zero_grad"):
        if is_overridden(name, module):
            yield f"{kind}.{name} is overridden"
    # A loop calls these of the class, or puts its own in front, so it would pass by what is set on the object.
    for name in ("training_step", "backward", "configure_gradient_clipping", "log", "log_dict"):
        if name in vars(module):
            yield f"{name} was set on this one {kind}, in front of what its class defines"


def optimizer_obstacles(trainer: pl.Trainer) -> list[str]:
    """List why a loop cannot own a step with this Trainer's optimizers, which exist only once the fit has begun."""
    optimizers = trainer.optimizers
    if len(optimizers) != 1:
        return [f"there are {len(optimizers)} optimizers"]
    if getattr(trainer.precision_plugin, "scaler", None) is not None:
        return []  # the Trainer itself runs the closure first then, and calls step() without one
    return [why] if (why := closure_obstacle(optimizers[0])) else []


def closure_obstacle(optimizer: torch.optim.Optimizer) -> str:
    """Say why a step without the Trainer's closure, which runs forward and backward, may train otherwise."""
    kind = type(optimizer)
    try:
        hooked = bool(optimizer_hooks(optimizer)[0] or every_optimizers_pre_hooks())
    except AttributeError:  # a wrapper around another optimizer that never called torch's __init__ has no hooks
        hooked = False
    if hooked:
        return (
            f"{kind.__name__} has a step pre-hook, which the Trainer runs before its closure, so before forward and "
            "backward"
        )
    step = _without_torch(kind.step)
    replaced = _without_torch(vars(optimizer).get("step", step)) is not step
    if replaced or not step.__module__.startswith("torch.optim.") or issubclass(kind, torch.optim.LBFGS):
        return (
            f"{kind.__name__}.step may run its closure late or several times, or compute with its loss (as SAM does): "
            "torch's own optimizers run it first, and once"
        )
    return ""


def _without_torch(function: Any) -> Any:
    """Return the function inside torch's own wrappers: its profiler's, ``no_grad``, a scheduler's."""
    while hasattr(function, "__wrapped__"):
        if not getattr(function, "__globals__", {}).get("__name__", "").startswith("torch."):
            break
        function = function.__wrapped__
    return function


def compiled_already(module: pl.LightningModule) -> str:
    """Return by what the user has compiled a module or a part of it: ``torch``, ``hotloop``, or nothing."""
    methods = [getattr(module, name, None) for name in _STEPS]
    by_lightning = getattr(module, "_compiler_ctx", None) is not None
    if by_lightning or compiled_by_user(module) or any(hasattr(one, "get_compiler_config") for one in methods):
        return "torch"
    parts = status(module).components.values()
    return "hotloop" if any(part.requested != "none" for part in parts) else ""
