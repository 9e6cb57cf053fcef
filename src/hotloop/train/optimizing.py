"""What the optimizer of a run is told: its groups of parameters, and its learning rate at each step."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

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


class Rate:
    """The learning rate at each step, by a schedule; its state is the number of steps, which a checkpoint keeps.

    Rate and weight decay are the settings', also where they have changed since the checkpoint was written. ``rate`` is
    the highest, in units of the optimizer's; ``factor`` gives what it is multiplied by, by step from 0.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, rate: float, factor: Callable[[int], float]) -> None:
        self._optimizer, self._rate, self._factor = optimizer, rate, factor
        self._decays = [group["weight_decay"] for group in optimizer.param_groups]
        self.steps = 0

    @property
    def now(self) -> float:
        """The rate of the step that goes on, or was the last."""
        return float(self._optimizer.param_groups[0]["lr"])

    def advance(self) -> None:
        """Set the rate for the step that comes."""
        for group, decay in zip(self._optimizer.param_groups, self._decays, strict=True):
            group["lr"], group["weight_decay"] = self._rate * self._factor(self.steps), decay
        self.steps += 1

    def state_dict(self) -> dict[str, int]:
        """Return what a checkpoint keeps."""
        return {"steps": self.steps}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go on where that was given."""
        self.steps = state["steps"]


def parameter_groups(model: torch.nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Put what is trained into two groups: matrices, which decay, and biases and norms, which do not."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [one for one in trained if one.ndim > 1], "weight_decay": weight_decay},
        {"params": [one for one in trained if one.ndim <= 1], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]
