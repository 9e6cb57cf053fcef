"""One shape for a user's program: what verify, bench, doctor, the recipes and the background compile all take."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

from hotloop.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class Workload:
    """A training program: made anew by each call of a factory, which is named as ``file.py:make`` or ``module:make``.

    Args:
        model: an ``nn.Module``, or a sequence of them.
        optimizer: an optimizer, or a sequence of them.
        step: the training step, as written for `hotloop.Loop.step`; takes one batch.
        batches: an iterable of batches, or a function that gives one. A tuple or list is passed as several arguments.
        loss: gives the loss of a batch without training on it; only what compares losses needs it.
        metrics: gives a mapping of figures of the model as it is.
        state: what else the step changes.

    Raises:
        ConfigError: ``step`` cannot be called, or ``batches`` is neither iterable nor a function.
    """

    model: Any
    optimizer: Any
    step: Callable[..., Any]
    batches: Iterable[Any] | Callable[[], Iterable[Any]]
    loss: Callable[..., Any] | None = None
    metrics: Callable[..., Any] | None = None
    state: Any = ()

    def __post_init__(self) -> None:
        if not callable(self.step):
            raise ConfigError(f"Workload step {self.step!r}: expected a function of one batch")
        if not callable(self.batches) and not isinstance(self.batches, Iterable):
            raise ConfigError(f"Workload batches {self.batches!r}: expected an iterable, or a function that gives one")
