"""What is trained: a program with its goal, checked before its first step; and what a validation is judged by."""

from __future__ import annotations

import dataclasses
import functools
import io
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import torch

from hotloop.errors import ConfigError, TrainingFailedError, describe
from hotloop.presets import Preset
from hotloop.step.workload import call, check_takes
from hotloop.train import checkpoint, sharding
from hotloop.train.optimizing import Rate
from hotloop.train.ranks import Ranks

if TYPE_CHECKING:
    from torch import Tensor

    from hotloop.step import Workload
    from hotloop.train.goal import Goal
    from hotloop.train.settings import TrainingSettings

    Loss = Callable[[Tensor, Tensor], Tensor]
    """The mean loss of a model's output and the labels of a batch."""

Plan = Mapping[str, tuple[Preset, Preset]]  # the presets of each component to be compiled: training, inference
_TAKEN = {"loss", "step", "seconds", "learning_rate", "running", "ready_seconds"}
"""Names that an entry of the record has anyway."""


def generators_of(batches: Any) -> list[torch.Generator]:
    """Return the generators that the order of a loader's samples is drawn from."""
    batch_sampler = getattr(batches, "batch_sampler", None)
    holders = [batches, getattr(batches, "sampler", None), batch_sampler, getattr(batch_sampler, "sampler", None)]
    found = [getattr(holder, "generator", None) for holder in holders]
    return list({id(one): one for one in found if isinstance(one, torch.Generator)}.values())


class Judge(Protocol):
    """Judges one validation: sees what the model gives, batch by batch, and then tells."""

    def see(self, output: Tensor, labels: Tensor) -> None:
        """Record the output for some rows and their labels, on the device; without gradients."""

    def figures(self) -> dict[str, float]:
        """Return the metrics of all that was seen, by name."""


@dataclasses.dataclass(frozen=True)
class Show:
    """What is made now and then of the model as it stands, such as samples.

    Args:
        make: makes it after so many steps, and gives measurements for the record. It runs in evaluation mode, with
            the average of the weights where there is one, without gradients, and as eager code or in
            ``compile.inference``, as validations do; random numbers that it draws are put back.
        every: how many steps are between two; None makes none on the way.
        end: makes what is made at the end of the run, after its last validation.
    """

    make: Callable[[int], Mapping[str, float]]
    every: int | None = None
    end: Callable[[int], Mapping[str, float]] | None = None

    def due(self, step: int, *, last: bool) -> Callable[[int], Mapping[str, float]] | None:
        """Return what is to be made after a step, the ``last`` of the run or another; None where nothing is."""
        if last:
            return self.end
        return self.make if self.every is not None and step % self.every == 0 else None


@dataclasses.dataclass(kw_only=True, eq=False)
class Task:
    """A program to train; `Supervised` makes the task of a recipe that learns from rows.

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
        remarks: says how to judge the best validation by its metrics, measurements and the components' status.
        told: what was said of the data before training, for the record: lines by subject.
        lines: what is said before the first step.
        files: texts by the names of the files in the run's folder that they go into.
        show: what is made now and then, and at the end.
        compiled: the models of a hot loop, where they are only parts of the workload's.
        ranks: the processes that train together.
        wrappers: what averages gradients over them.
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
    remarks: Callable[[Mapping[str, float], Mapping[str, Any], Mapping[str, Any]], Sequence[str]] = lambda *_: ()
    told: Mapping[str, Sequence[str]] = dataclasses.field(default_factory=dict)
    lines: Sequence[str] = ()
    files: Mapping[str, str] = dataclasses.field(default_factory=dict)
    show: Show | None = None
    compiled: Mapping[str, torch.nn.Module] = dataclasses.field(default_factory=dict)
    ranks: Ranks = dataclasses.field(default_factory=Ranks)
    wrappers: Sequence[torch.nn.Module] = ()
    generators: Sequence[torch.Generator] = dataclasses.field(default=(), init=False)
    """Those that the order of the batches is drawn from. A function that makes a loader may give each the same one."""
    smaller: ClassVar[str] = "smaller batches in the program, or bfloat16 autocast in its step"
    """What takes less memory."""

    @functools.cached_property
    def parts(self) -> dict[str, Any]:
        """The components by name, as `hotloop.compile` takes them."""
        return dict(self.workload.models())

    def plan(self, chosen: Plan) -> Plan:
        """Return a plan for the components of a program as one for its parts."""
        if isinstance(self.workload.model, Mapping) or "model" not in chosen:
            return chosen
        return dict.fromkeys(self.parts, chosen["model"])

    def amount(self, batch: Any) -> int:  # noqa: ARG002 - of other tasks it says
        """Return how much there is to compute in a step, to compare batches of several sizes by."""
        return 1

    def take(self, batch: Any, step: Callable[..., Any] | None) -> dict[str, float]:
        """Do a step and return its figures, ``loss`` among them where it has one; this waits for the device.

        ``step`` is the workload's as a hot loop runs it, None where none does.

        Raises:
            ConfigError: the step does not take the batch.
        """
        result = call("step", self.workload.step, batch, step)
        named = result if isinstance(result, Mapping) else {"loss": result}
        return _numbers({name: value for name, value in named.items() if name == "loss" or name not in _TAKEN})

    def check_figures(self, figures: Mapping[str, float]) -> None:
        """Check a step's figures after the step.

        Raises:
            TrainingFailedError: the loss is not finite.
        """
        loss, rate = figures.get("loss"), figures.get("learning_rate")
        if loss is not None and not math.isfinite(loss):
            at = "" if rate is None else f" at learning rate {rate:.3g}"
            raise TrainingFailedError(
                f"the loss is {loss}{at}; the step was applied, so the parameters are lost, and no checkpoint holds "
                "them. Try a lower learning rate, or clipped gradients, in the program"
            )

    def judged(self) -> dict[str, float]:
        """Return the metrics of the models as they are."""
        return judge(self.workload)

    def probe(self, batch: Any) -> None:
        """Try what a dry run can: whether the program takes a batch, and the metrics.

        Raises:
            ConfigError: it does not take it, or the goal is none of the metrics.
        """
        first = "before" if self.workload.before else "step"
        check_takes(first, getattr(self.workload, first), batch)
        if self.workload.metrics is not None:
            found = self.judged()
            if self.goal is not None:
                self.goal.check(found, self.name)

    def trial(self, names: Sequence[str]) -> Workload:  # noqa: ARG002 - others copy these components
        """Return the program made anew with the weights of this one, on which presets are tried.

        Raises:
            ConfigError: both have something in common that a trial would change.
        """
        assert self.make is not None
        workload, models = self.make(), self.workload.models()
        if shared := next(_shared(workload, self.workload), None):
            raise ConfigError(
                f"the program, made a second time, has {shared} of the run's own, which a trial would change: make the "
                "models, optimizers, state and batches inside of the function that gives the Workload"
            )
        for name, model in workload.models().items():
            model.load_state_dict(models[name].state_dict())
        return workload

    def checked(self, training: TrainingSettings) -> str:
        """Say what the program is, once it is one that can be trained, saved and resumed.

        Raises:
            ConfigError: its optimizers hold no parameter of its models, it has no metric for ``recipe.goal``, its
                state cannot be kept in a checkpoint, or nothing says how many steps it takes.
        """
        models, held = self.workload.models(), self.workload.holdings()
        trained = [one for model in models.values() for one in model.parameters() if one.requires_grad]
        if held.optimizers:  # else the step updates by hand
            groups = (group for each in held.optimizers.values() for group in each.param_groups)
            stepped = {id(one) for group in groups for one in group["params"]}
            trained = [one for one in trained if id(one) in stepped]
        if not trained:
            raise ConfigError(f"recipe={self.name}: its optimizer holds no parameter of its model that is trained")
        if self.goal is not None and self.workload.metrics is None:
            raise ConfigError(f"recipe.goal={self.goal}: recipe={self.name} has no metrics: give its Workload metrics=")
        for name, one in [*models.items(), *self.others().items()]:
            if not hasattr(one, "state_dict") or not hasattr(one, "load_state_dict"):
                raise ConfigError(
                    f"recipe={self.name}: its {name} is a {type(one).__name__} without state_dict() and "
                    "load_state_dict(), so no checkpoint can keep it"
                )
            check_plain(self.name, name, one.state_dict())
        self.steps_per_epoch(training)
        numbers_ = sum(one.numel() for one in trained)
        return f"Program: {', '.join(models)} with {numbers_:,} trained parameters, {len(held.optimizers)} optimizer(s)"

    @functools.cached_property
    def rates(self) -> list[Rate]:
        """The schedules of the learning rate: those in the Workload's state."""
        return [one for one in self.workload.holdings().state if isinstance(one, Rate)]

    def begin(self, training: TrainingSettings) -> int:
        """Begin the schedules with the most steps that the run may have, and return these."""
        steps = self.steps(training)
        for one in self.rates:
            one.begin(steps)
        return steps

    def advance(self) -> None:
        """Set the learning rate for the step that comes, where a schedule does that."""
        for one in self.rates:
            one.advance()

    def others(self) -> dict[str, Any]:
        """Return what a checkpoint keeps beside the models, by name: optimizers, and what the Workload calls state.

        An optimizer may have the name of the model that it trains.
        """
        held = self.workload.holdings()
        return {**held.optimizers, **{f"{checkpoint.STATE}{place}]": one for place, one in enumerate(held.state)}}

    def steps_per_epoch(self, training: TrainingSettings) -> int | None:
        """Count the batches of an epoch; None where only reading them would tell.

        Raises:
            ConfigError: then ``training.max_steps`` has to say when the run ends.
        """
        batches = self.workload.batches() if callable(self.workload.batches) else self.workload.batches
        self.generators = generators_of(batches)
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

    def load_models(self, weights: Mapping[str, Any]) -> None:
        """Load a checkpoint's weights into the models.

        Raises:
            ConfigError: they are of another program.
        """
        models = self.workload.models()
        if set(weights) != set(models):
            raise ConfigError(
                f"the checkpoint holds {', '.join(weights)}; recipe={self.name} makes {', '.join(models)}"
            )
        for name, model in models.items():
            checkpoint.fit_weights(model, sharding.shares_of(model, weights[name]), f"{self.name} ({name})", "recipe")

    def load_judged(self, held: Mapping[str, Any]) -> None:
        """Load what a checkpoint's validation judged (`checkpoint.judged`): models, and the state that is there.

        Raises:
            ConfigError: it is of another program.
        """
        state = {name: one for name, one in held.items() if name.startswith(checkpoint.STATE)}
        self.load_models({name: one for name, one in held.items() if name not in state})
        for name, one in self.others().items():
            if name in state:
                self.load_other(name, one, state[name])

    def load_other(self, name: str, one: Any, held: Any) -> None:
        """Load what a checkpoint has of an optimizer, or of something that the Workload calls state.

        Raises:
            ConfigError: it is of another program.
        """
        keys = [tuple(each) for each in one.param_groups] if isinstance(one, torch.optim.Optimizer) else []
        try:
            one.load_state_dict(sharding.shares_of(one, held))
            for needed, group in zip(keys, one.param_groups if keys else (), strict=True):
                operator.itemgetter(*needed)(group)  # torch takes the state of another class, which lacks some
        except (RuntimeError, ValueError, LookupError, TypeError) as error:
            raise ConfigError(
                f"the checkpoint's {name} does not fit the {type(one).__name__} that recipe={self.name} makes "
                f"({describe(error)})"
            ) from error


def components(workload: Workload) -> tuple[str, ...]:
    """Return the names by which ``compile.components`` knows a program's models.

    Those of a mapping have their own; one, or several without names, are ``model``.
    """
    return tuple(workload.models()) if isinstance(workload.model, Mapping) else ("model",)


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
    numbers = _numbers(found) if isinstance(found, Mapping) else {}
    if not isinstance(found, Mapping) or len(numbers) < len(found):
        raise ConfigError(f"Workload metrics gave {found!r}: expected a mapping of names to numbers")
    return numbers


def rate_of(optimizers: Iterable[torch.optim.Optimizer]) -> dict[str, float]:
    """Return the learning rate of the first parameter group that has one, as the record names it; empty without one."""
    groups = (group for optimizer in optimizers for group in optimizer.param_groups)
    rate = next((rate for group in groups if (rate := _number(group.get("lr"))) is not None), None)
    return {} if rate is None else {"learning_rate": rate}


def _numbers(values: Mapping[Any, Any]) -> dict[str, float]:
    """Return what is a number of some values, by name."""
    return {str(name): number for name, value in values.items() if (number := _number(value)) is not None}


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


def check_plain(program: str, name: str, state: Any) -> None:
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
        raise ConfigError(
            f"recipe={program}: the state_dict() of its {name} cannot be kept in a checkpoint, which holds tensors and "
            f"plain values alone ({describe(error)})"
        ) from error


def _without_tensors(state: Any) -> Any:
    if isinstance(state, torch.Tensor):
        return torch.empty(0)
    if isinstance(state, Mapping):
        return {key: _without_tensors(value) for key, value in state.items()}
    return [_without_tensors(one) for one in state] if isinstance(state, list | tuple) else state


def _shared(one: Workload, other: Workload) -> Iterator[str]:
    """Name what two programs have in common of what a step, or reading batches, changes."""
    ours, theirs = one.holdings(), other.holdings()
    held = {id(tensor) for tensor in (*theirs.parameters().values(), *theirs.buffers().values())}
    yield from (name for name, tensor in {**ours.parameters(), **ours.buffers()}.items() if id(tensor) in held)
    objects = {id(each) for each in (*theirs.optimizers.values(), *theirs.state)}
    yield from (f"a {type(each).__name__}" for each in (*ours.optimizers.values(), *ours.state) if id(each) in objects)
    generators = {id(each) for each in generators_of(other.batches)}
    used_up = one.batches is other.batches and isinstance(one.batches, Iterator)
    if used_up or any(id(each) in generators for each in generators_of(one.batches)):
        yield "the batches"
