"""The settings of optimizers, as a recording freezes them."""

from __future__ import annotations

from typing import Any

import torch

from hotloop.step.watch.plain import mark

_OF_SCHEDULERS = ("initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum", "swa_lr")
"""Entries of a parameter group that the step does not read."""


def frozen_settings(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Return what a recording freezes of each parameter group: all but the learning rate, which is a tensor there."""
    left_out = {"params", "lr", *_OF_SCHEDULERS}
    return [
        {
            **{key: _comparable(value) for key, value in group.items() if key not in left_out},
            "params": tuple(id(one) for one in group["params"]),
            "lr": id(group["lr"]) if isinstance(group.get("lr"), torch.Tensor) else None,
        }
        for group in optimizer.param_groups
    ]


def learning_rates(optimizer: torch.optim.Optimizer) -> list[Any]:
    """Return the learning rate of each parameter group, to compare; None where a group has none (a sign optimizer)."""
    found = (group.get("lr") for group in optimizer.param_groups)
    return [rate.tolist() if isinstance(rate, torch.Tensor) else _comparable(rate) for rate in found]


def _comparable(value: Any) -> Any:
    """Return a comparable copy of a setting, since a list may be changed in place; tensors compare by identity."""
    if isinstance(value, torch.Tensor):
        return id(value)
    if isinstance(value, dict):
        return {key: _comparable(one) for key, one in value.items()}
    if type(value) in (list, tuple, set):
        return type(value)(map(_comparable, value))
    return mark(value) if type(value).__module__ == "numpy" else value
