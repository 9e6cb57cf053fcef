"""A user's own program as what is trained: what it made, checked before anything is trained, and its metrics."""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from typing import TYPE_CHECKING, Any

import torch

from hotloop.errors import ConfigError
from hotloop.train import checkpoint

if TYPE_CHECKING:
    from hotloop.step import Workload
    from hotloop.train.rehearse import Plan
    from hotloop.train.settings import TrainingSettings
    from hotloop.train.task import Goal

_TAKEN = {"loss", "step", "seconds", "learning_rate", "running", "ready_seconds"}
"""Names that an entry of the record has anyway."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class OwnTask:
    """A program to train.

    Args:
        name: of the program or the recipe.
        workload: what it made.
        device: where it computes.
        goal: which validation is its best.
        make: makes it anew, for what is tried on a copy of it; None where it cannot be.
        factory: the name by which another process makes it anew.
        fingerprint: tells other data apart: no run is resumed on them. Empty where that is the program's own affair.
        per_step: what a step takes, and how many of it.
        context: what needs no training, by name: measurements for the record.
        remarks: gives the lines to say at the end, by the components' status.
        told: what was said of the data before training, for the record: lines by subject.
    """

    name: str
    workload: Workload
    device: torch.device
    goal: Goal | None = None
    make: Callable[[], Workload] | None = None
    factory: str | None = None
    fingerprint: str = ""
    per_step: Mapping[str, int] = dataclasses.field(default_factory=dict)
    context: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    remarks: Callable[[Mapping[str, Any]], list[str]] = lambda _: []
    told: Mapping[str, Sequence[str]] = dataclasses.field(default_factory=dict)

    def checked(self, training: TrainingSettings) -> str:
        """Say what the program is, once it is one that can be trained, saved and resumed.

        Raises:
            ConfigError: its optimizers hold no parameter of its models, it has no metrics for ``recipe.goal``, its
                state cannot be kept in a checkpoint, or nothing says how many steps it takes.
        """
        models, held = self.workload.models(), self.workload.holdings()
        trained = [one for model in models.values() for one in model.parameters() if one.requires_grad]
        if held.optimizers:  # else the step updates by hand
            groups = (group for each in held.optimizers.values() for group in each.param_groups)
            stepped = {id(one) for group in groups for one in group["params"]}
            trained = [one for one in trained if id(one) in stepped]
        if not trained:
            whose = "its optimizer holds no" if held.optimizers else "there is no"
            raise ConfigError(f"recipe={self.name}: {whose} parameter of its model that requires gradients")
        if self.goal is not None and self.workload.metrics is None:
            raise ConfigError(
                f"recipe.goal={self.goal.metric}: recipe={self.name} has no metrics: give its Workload metrics="
            )
        for name, one in [*models.items(), *self.others().items()]:
            if not hasattr(one, "state_dict") or not hasattr(one, "load_state_dict"):
                raise ConfigError(
                    f"recipe={self.name}: its {name} is a {type(one).__name__} without state_dict() and "
                    "load_state_dict(), so no checkpoint can keep it"
                )
            _check_plain(self.name, name, one.state_dict())
        self.steps_per_epoch(training)
        numbers_ = sum(one.numel() for one in trained)
        return f"Program: {', '.join(models)} with {numbers_:,} trained parameters, {len(held.optimizers)} optimizer(s)"

    def others(self) -> dict[str, Any]:
        """Return what a checkpoint keeps beside the models, by name: optimizers, and what the Workload calls state.

        An optimizer may have the name of the model that it trains.
        """
        held = self.workload.holdings()
        return {**held.optimizers, **{f"state[{place}]": one for place, one in enumerate(held.state)}}

    def steps_per_epoch(self, training: TrainingSettings) -> int | None:
        """Count the batches of an epoch; None where only reading them would tell.

        Raises:
            ConfigError: then ``training.max_steps`` has to say when the run ends.
        """
        batches = self.workload.batches() if callable(self.workload.batches) else self.workload.batches
        many = len(batches) if isinstance(batches, Sized) else None
        if many == 0:
            raise ConfigError(f"recipe={self.name}: its Workload has no batches")
        if many is None and training.max_steps is None:
            raise ConfigError(
                f"recipe={self.name}: its batches have no length, so training.max_steps has to say when the run ends: "
                "set it, or give the Workload a list or a DataLoader"
            )
        return many

    def steps(self, training: TrainingSettings) -> int:
        """Return the steps of the whole run, at most."""
        return min((self.steps_per_epoch(training) or 2**62) * training.num_epochs, training.max_steps or 2**62)

    def check_goal(self, metrics: Mapping[str, float]) -> None:
        """Check that the metric of ``recipe.goal`` is among the program's metrics.

        Raises:
            ConfigError: it is not.
        """
        if self.goal is not None and self.goal.metric not in metrics:
            raise ConfigError(
                f"recipe.goal names {self.goal.metric!r}; the metrics of recipe={self.name} are "
                f"{', '.join(metrics) or 'none'}"
            )

    def load_models(self, weights: Mapping[str, Any]) -> None:
        """Load a checkpoint's weights into the models.

        Raises:
            ConfigError: they are of another program.
        """
        models = self.workload.models()
        if set(weights) != set(models):
            raise ConfigError(
                f"the checkpoint holds {', '.join(weights)}; recipe={self.name} makes {', '.join(models)}: its program "
                "has changed since"
            )
        for name, model in models.items():
            checkpoint.fit_weights(model, weights[name], f"{self.name} ({name})")


def components(workload: Workload) -> tuple[str, ...]:
    """Return the names by which ``compile.components`` knows a program's models.

    Those of a mapping have their own; one, or several without names, are ``model``.
    """
    return tuple(workload.models()) if isinstance(workload.model, Mapping) else ("model",)


def by_model(chosen: Plan, workload: Workload) -> Plan:
    """Return a plan for the components of a program as one for its models."""
    if isinstance(workload.model, Mapping) or "model" not in chosen:
        return chosen
    return dict.fromkeys(workload.models(), chosen["model"])


def judge(workload: Workload) -> dict[str, float]:
    """Return the program's metrics; each model is left in the mode, training or evaluation, that it was in.

    Raises:
        ConfigError: they are no mapping of names to numbers.
    """
    modules = [one for model in workload.models().values() for one in model.modules()]
    modes = [one.training for one in modules]
    assert workload.metrics is not None
    try:
        found = workload.metrics()
    finally:
        for one, mode in zip(modules, modes, strict=True):
            one.training = mode
    figures = {str(name): _number(value) for name, value in found.items()} if isinstance(found, Mapping) else {"": None}
    numbers = {name: value for name, value in figures.items() if value is not None}
    if len(numbers) < len(figures):
        raise ConfigError(f"Workload metrics gave {found!r}: expected a mapping of names to numbers")
    return numbers


def loss_of(result: Any) -> float | None:
    """Return the loss that a step returned: a number, a tensor of one, or ``loss`` of a mapping; else None."""
    return _number(result.get("loss") if isinstance(result, Mapping) else result)


def rate_of(optimizers: Iterable[torch.optim.Optimizer]) -> dict[str, float]:
    """Return the learning rate of the first parameter group that has one, as the record names it; empty without one."""
    groups = (group for optimizer in optimizers for group in optimizer.param_groups)
    rate = next((rate for group in groups if (rate := _number(group.get("lr"))) is not None), None)
    return {} if rate is None else {"learning_rate": rate}


def figures_of(result: Any) -> dict[str, float]:
    """Return the other figures of a step that returned a mapping: each number, or tensor of one, by its name."""
    if not isinstance(result, Mapping):
        return {}
    others = {str(name): _number(value) for name, value in result.items() if name not in _TAKEN}
    return {name: value for name, value in others.items() if value is not None}


def _number(value: Any) -> float | None:
    """Return a number, or what holds a single one, as such; None for all else, such as text or an array of several."""
    if isinstance(value, torch.Tensor):
        return float(value.detach()) if value.numel() == 1 and not value.is_complex() else None
    if isinstance(value, str) or not hasattr(value, "__float__"):
        return None
    try:
        return float(value)
    except (TypeError, ValueError):  # an array of several
        return None


def _check_plain(program: str, name: str, state: Any) -> None:
    """Refuse state that a checkpoint could keep and not give back: reading one executes nothing.

    Raises:
        ConfigError: something in it is neither a tensor nor a plain value.
    """
    buffer = io.BytesIO()
    try:
        torch.save(_without_tensors(state), buffer)
        buffer.seek(0)
        torch.load(buffer, weights_only=True)
    except Exception as error:
        reason = " ".join(str(error).split())[:200]
        raise ConfigError(
            f"recipe={program}: the state_dict() of its {name} cannot be kept in a checkpoint, which holds tensors and "
            f"plain values alone ({reason})"
        ) from error


def _without_tensors(state: Any) -> Any:
    if isinstance(state, torch.Tensor):
        return torch.empty(0)
    if isinstance(state, Mapping):
        return {key: _without_tensors(value) for key, value in state.items()}
    return [_without_tensors(one) for one in state] if isinstance(state, list | tuple) else state
