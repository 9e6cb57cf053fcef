"""What the optimizer of a run is told: its groups of parameters, and its learning rate at each step."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from hotloop.train.settings import TrainingSettings


def schedule(settings: TrainingSettings, steps: int) -> Callable[[int], float]:
    """Give the factor on the learning rate at each step: up linearly over the warm-up, then down to 0 at the end."""
    warm_up = math.ceil(settings.warmup_fraction * steps)

    def factor(step: int) -> float:
        if step < warm_up:
            return (step + 1) / warm_up
        return max(0.0, (steps - step) / max(1, steps - warm_up))

    return factor


def parameter_groups(model: torch.nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Put what is trained into two groups: matrices, which decay, and biases and norms, which do not."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [one for one in trained if one.ndim > 1], "weight_decay": weight_decay},
        {"params": [one for one in trained if one.ndim <= 1], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]
