"""What a recipe trains: a model and its loss, two sides of data, how a validation is judged, and which one is best."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import torch
    from torch import Tensor

    from hotloop.train.batches import Data

    Loss = Callable[[Tensor, Tensor], Tensor]
    """The mean loss of a model's output and the labels of a batch."""


class Judge(Protocol):
    """Judges one validation: sees what the model gives, batch by batch, and then tells."""

    def see(self, output: Tensor, labels: Tensor) -> None:
        """Record the output for some rows and their labels, on the device; without gradients."""

    def figures(self) -> dict[str, float]:
        """Return the metrics of all that was seen, by name."""


@dataclasses.dataclass(frozen=True)
class Goal:
    """The metric that says which validation is the best: for ``best.pt``, early stopping, and a search.

    Args:
        metric: its name among the metrics.
        maximize: whether more is better.
    """

    metric: str
    maximize: bool = True

    def __str__(self) -> str:
        return f"{'max' if self.maximize else 'min'}:{self.metric}"

    def of(self, metrics: Mapping[str, float]) -> float:
        """Return the goal's metric of a validation, NaN before there was any."""
        return metrics.get(self.metric, math.nan)

    def better(self, metrics: Mapping[str, float], than: Mapping[str, float]) -> bool:
        """Say whether a validation is better than the best so far, which is empty at first; NaN is never better."""
        new, old = self.of(metrics), self.of(than)
        if math.isnan(new) or math.isnan(old):
            return not math.isnan(new)
        return new > old if self.maximize else new < old


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


def _nothing(best: Mapping[str, float], measured: Mapping[str, Any]) -> Sequence[str]:  # noqa: ARG001 - a task's remarks
    return ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
    """What a recipe trains.

    Args:
        model: gives an output of a batch's inputs by name.
        parts: the components by name, as `hotloop.compile` takes them; ``loss`` gives the mean loss of an output and
            a batch's labels.
        train, validation: the two sides of the split.
        fingerprint: tells other data apart, so that no run is resumed on it.
        judge: makes what judges a validation, of the loss.
        goal: which validation is the best.
        rows: what a row of the data is, in the plural.
        per_row: what throughput counts besides rows, and how many of it a row holds: ``{"tokens": 128}``.
        context: measurements for the record that were made before training, such as baselines.
        remarks: says by what the best validation is to be judged, of its metrics and of the record's measurements.
        compiled: the components that a hot loop compiles; empty compiles all of the model.
        average: keep an exponential moving average of what is trained, with this decay, and judge that.
        show: what is made now and then, and at the end.
        told: what was said of the data and the model before training, for the record: lines by subject.
    """

    model: torch.nn.Module
    parts: dict[str, Any]
    train: Data
    validation: Data
    fingerprint: str
    judge: Callable[[Loss], Judge]
    goal: Goal
    rows: str
    per_row: Mapping[str, int] = dataclasses.field(default_factory=dict)
    context: Mapping[str, float] = dataclasses.field(default_factory=dict)
    remarks: Callable[[Mapping[str, float], Mapping[str, Any]], Sequence[str]] = _nothing
    compiled: tuple[str, ...] = ()
    average: float | None = None
    show: Show | None = None
    told: Mapping[str, Sequence[str]] = dataclasses.field(default_factory=dict)
