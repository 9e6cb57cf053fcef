"""What a recording freezes of an optimizer's settings."""

from __future__ import annotations

from typing import Any

import torch

from hotloop.step.guard import fingerprint

_OF_SCHEDULERS = ("initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum", "swa_lr")
"""Entries of a parameter group that the step does not read."""


def frozen(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
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


def rates(optimizer: torch.optim.Optimizer) -> list[Any]:
    """Return the learning rate of each parameter group, to compare; None where a group has none (a sign optimizer)."""
    found = (group.get("lr") for group in optimizer.param_groups)
    return [rate.tolist() if isinstance(rate, torch.Tensor) else _comparable(rate) for rate in found]


def _comparable(value: Any) -> Any:
    """Return a comparable copy of a setting, since a list may be changed in place; tensors compare by identity."""
    if isinstance(value, torch.Tensor):
        return id(value)
    if fingerprint.is_array(value):
        content = fingerprint.content_of(value)  # a large one is too much to read before each replay
        return id(value) if isinstance(content, fingerprint.Unwatchable) else content
    if isinstance(value, dict):
        return {key: _comparable(one) for key, one in value.items()}
    return type(value)(map(_comparable, value)) if type(value) in (list, tuple, set) else value
