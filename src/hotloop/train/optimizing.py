"""What the optimizer of a run is told: its groups of parameters, and its learning rate at each step."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from hotloop.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from hotloop.train.settings import TrainingSettings


DECAY = 0.2
"""The share of the steps behind the warm-up over which ``wsd`` falls."""
_FALLS: Mapping[str, Callable[[float], float]] = {
    "linear": lambda left: left,
    "cosine": lambda left: (1 - math.cos(math.pi * left)) / 2,
    "constant": lambda _: 1.0,
    "wsd": lambda left: min(1.0, left / DECAY),
}
"""The factor on the rate, by the share of the steps behind the warm-up that is left."""


def schedule(settings: TrainingSettings, steps: int) -> Callable[[int], float]:
    """Return the factor on the learning rate at each step: up over the warm-up, then as ``training.schedule`` says."""
    if settings.schedule == "one_cycle":
        return lambda step: _one_cycle(step, settings.warmup_fraction * steps - 1, steps - 1)
    warm_up, falls = math.ceil(settings.warmup_fraction * steps), _FALLS[settings.schedule]

    def factor(step: int) -> float:
        if step < warm_up:
            return (step + 1) / warm_up
        return falls(max(0.0, (steps - step) / max(1, steps - warm_up)))

    return factor


def _one_cycle(step: int, top: float, last: int) -> float:
    """Return the factor of torch's ``OneCycleLR``: cosines from 1/25 up to 1 at the top, and down to 1/250,000."""
    if step <= top:
        begin, end, share = 1 / 25, 1.0, step / max(top, 1e-9)
    else:
        begin, end, share = 1.0, 1 / 250_000, (step - top) / max(last - top, 1e-9)
    return end + (begin - end) / 2 * (1 + math.cos(math.pi * min(share, 1.0)))


def make_optimizer(settings: TrainingSettings, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """Make the optimizer of ``training.optimizer`` for parameter groups.

    Raises:
        ConfigError: it does not take ``training.optimizer_options``, or its device does not.
    """
    options = settings.optimizer_options
    try:
        found: torch.optim.Optimizer = getattr(torch.optim, settings.optimizer)(
            groups, lr=settings.learning_rate, **options
        )
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(
            f"training.optimizer_options={dict(options)}: {error}; expected arguments of torch.optim."
            f"{settings.optimizer}, other than lr and weight_decay, which have settings of their own"
        ) from error
    return found


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
