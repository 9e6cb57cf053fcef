"""What the optimizer of a run is told: its groups of parameters, and its learning rate at each step."""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Mapping  # noqa: TC003 - read as settings
from typing import TYPE_CHECKING, Annotated, Any

import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from hotloop.errors import ConfigError
from hotloop.train.parameters import Optimizer, Range, ScheduleName

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

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
_FUSED = ("Adam", "AdamW")
"""Optimizers that are fused by themselves: torch fuses no SGD of sharded parameters, and no Adagrad on a GPU."""


def schedule(settings: TrainingSettings | Training, steps: int) -> Callable[[int], float]:
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


def make_optimizer(
    settings: TrainingSettings | Training, groups: list[dict[str, Any]], *, fuse: bool = True
) -> torch.optim.Optimizer:
    """Make the optimizer of ``training.optimizer`` for parameter groups, which are on their device.

    Args:
        settings: its name, rate and options.
        groups: the parameters.
        fuse: have one kernel step all parameters, for Adam and AdamW where the device has it, unless the options say
            how they step.

    Raises:
        ConfigError: it does not take ``training.optimizer_options`` or these parameters, or their device does not.
    """
    name, options = settings.optimizer, dict(settings.optimizer_options)
    where = "" if isinstance(settings, Training) else "training."  # a program's parameter may have any name
    kind = getattr(torch.optim, name)
    if "weight_decay" not in inspect.signature(kind).parameters and settings.weight_decay:
        raise ConfigError(f"{where}weight_decay={settings.weight_decay}: {name} has none; set it to 0")
    parameters = (one for group in groups for one in group["params"])
    can = name in _FUSED and all(one.is_floating_point() and one.device.type in ("cpu", "cuda") for one in parameters)
    if fuse and can and not {"fused", "foreach", "differentiable"} & set(options):
        options["fused"] = True  # False elsewhere would have torch step each parameter by itself
    try:
        found: torch.optim.Optimizer = kind(groups, lr=settings.learning_rate, **options)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(f"{where}optimizer={name} with {where}optimizer_options={options}: {error}") from error
    return found


class Rate:
    """The learning rate at each step, by a schedule; its state is the number of steps, which a checkpoint keeps.

    Rate and weight decay are the settings', also where they have changed since the checkpoint was written. Before
    `begin` says how many steps there are, the rate is the highest one.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, settings: TrainingSettings | Training) -> None:
        self._optimizer, self._settings = optimizer, settings
        self._decays = [group["weight_decay"] for group in optimizer.param_groups]
        self._factor: Callable[[int], float] = lambda _: 1.0
        self.steps = 0

    def begin(self, steps: int) -> None:
        """Follow the schedule over a run of so many steps."""
        self._factor = schedule(self._settings, steps)

    @property
    def now(self) -> float:
        """The rate of the step that goes on, or was the last."""
        return float(self._optimizer.param_groups[0]["lr"])

    def advance(self) -> None:
        """Set the rate for the step that comes."""
        for group, decay in zip(self._optimizer.param_groups, self._decays, strict=True):
            group["lr"] = self._settings.learning_rate * self._factor(self.steps)
            group["weight_decay"] = decay
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Training:
    """Settings of a program's training: ``def make(training: hotloop.Training = hotloop.Training()):``.

    The fields become settings of the program, ``program.training.optimizer=SGD``. Recipes have the same names in their
    group ``training``.

    Attributes:
        optimizer: a class of torch.optim.
        optimizer_options: its arguments besides rate and weight decay.
        learning_rate: the highest rate, after the warm-up.
        weight_decay: on matrices only.
        schedule: how the rate falls after its warm-up.
        warmup_fraction: the share of the steps over which the rate rises.
        max_grad_norm: the norm that gradients are clipped to.
        ema_decay: how much of an average of the weights a step keeps.
    """

    optimizer: Optimizer = "AdamW"
    optimizer_options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    learning_rate: Annotated[float, Range(0)] = 1e-3
    weight_decay: Annotated[float, Range(0)] = 0.0
    schedule: ScheduleName = "constant"
    warmup_fraction: Annotated[float, Range(0, 1)] = 0.0
    max_grad_norm: Annotated[float, Range(0)] | None = None
    ema_decay: Annotated[float, Range(0, 1)] | None = None

    def make_optimizer(self, model: torch.nn.Module) -> torch.optim.Optimizer:
        """Make the optimizer of a model, which is on its device.

        Raises:
            ConfigError: it does not take the options, or these parameters.
        """
        return make_optimizer(self, parameter_groups(model, self.weight_decay))

    def make_rate(self, optimizer: torch.optim.Optimizer) -> Rate:
        """Make the schedule: in the Workload's ``state`` it is told the run's steps, and sets the rate before each."""
        return Rate(optimizer, self)

    def make_average(self, model: torch.nn.Module) -> AveragedModel | None:
        """Make an average of a model's weights, for the Workload's ``state``; None without ``ema_decay``."""
        if self.ema_decay is None:
            return None
        blend = get_ema_multi_avg_fn(self.ema_decay)  # type: ignore[no-untyped-call]
        return AveragedModel(model, multi_avg_fn=blend)

    def clip(self, parameters: Iterable[torch.Tensor]) -> None:
        """Clip gradients, between ``backward()`` and the optimizer's step."""
        if self.max_grad_norm is not None:
            torch.nn.utils.clip_grad_norm_(parameters, self.max_grad_norm)
