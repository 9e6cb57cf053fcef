"""What the optimizer of a run is told: its groups of parameters, and its learning rate at each step."""

from __future__ import annotations

import math
import warnings
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from hotloop.train.settings import TrainingSettings


def schedule(settings: TrainingSettings, steps: int) -> Callable[[int], float]:
    """Return the factor on the learning rate at each step: up linearly over the warm-up, then down to 0 at the end."""
    warm_up = math.ceil(settings.warmup_fraction * steps)

    def factor(step: int) -> float:
        if step < warm_up:
            return (step + 1) / warm_up
        return max(0.0, (steps - step) / max(1, steps - warm_up))

    return factor


def advance(scheduler: torch.optim.lr_scheduler.LRScheduler, *, left_out: bool) -> None:
    """Take the rate to the next step; ``left_out`` says that the optimizer did not step, as float16 has it.

    The rate goes by the number of steps all the same. Where the first step is left out, torch takes that for calls in
    the wrong order, and warns of it.
    """
    if not left_out:
        scheduler.step()
        return
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step", category=UserWarning)
        scheduler.step()


def parameter_groups(model: torch.nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Put what is trained into two groups: matrices, which decay, and biases and norms, which do not."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [one for one in trained if one.ndim > 1], "weight_decay": weight_decay},
        {"params": [one for one in trained if one.ndim <= 1], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]
