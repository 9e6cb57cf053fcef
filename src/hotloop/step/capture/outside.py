"""Optimizers that step outside of a recording, between two of its segments."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import functools
    from collections.abc import Callable, Sequence

    import torch

    from hotloop.step.engine import Recording, Segment

AS_FOUND: Any = object()
"""In place of a gradient that the step found and left alone: another model's, which a replay must not put back."""


@dataclasses.dataclass
class OutsideCall:
    """An optimizer step between two segments: the gradients that it reads, its arguments, and a GradScaler's values."""

    optimizer: torch.optim.Optimizer
    gradients: list[Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    attributes: dict[str, Any]
    found: torch.Tensor | None = None
    """Above 0 where a GradScaler found an infinity: then it skips the step."""

    def run(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        """Step the optimizer on the gradients that the segment before has left."""
        bind(parameters, self.gradients)
        if self.found is not None and self.found.item() > 0:
            return
        try:
            for name, value in self.attributes.items():
                setattr(self.optimizer, name, value)
            self.optimizer.step(*self.args, **self.kwargs)
        finally:
            for name in self.attributes:
                vars(self.optimizer).pop(name, None)


class _Gradients(Protocol):
    """The captured step, of which only the gradients are asked for."""

    def gradients(self) -> list[Any]: ...


class OutsideHooks:
    """The hooks of an optimizer outside of the recording: a segment ends before its step, and the next begins after it.

    A subclass may call ``super().step()``, and torch runs the hooks of both calls: only the outermost call counts.
    """

    def __init__(
        self,
        captured: _Gradients,
        recording: Recording,
        parts: list[Segment | OutsideCall],
        note_gradients: Callable[..., None],
        executes: Callable[[], None],
    ) -> None:
        self._captured, self._recording, self._parts = captured, recording, parts
        self._note_gradients, self._executes = note_gradients, executes
        self._depth = 0

    def enter(
        self,
        optimizer: torch.optim.Optimizer,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        found: torch.Tensor | None = None,
    ) -> None:
        """End a segment, and note the call."""
        self._depth += 1
        if self._depth > 1:
            return
        self._note_gradients(optimizer, args, kwargs)
        self._parts.append(self._recording.cut(self._executes))
        # A GradScaler hands these to a fused optimizer as attributes, for the time of the call.
        scaler = {name: getattr(optimizer, name) for name in ("grad_scale", "found_inf") if hasattr(optimizer, name)}
        self._parts.append(OutsideCall(optimizer, self._captured.gradients(), args[1:], dict(kwargs), scaler, found))

    def scaled(self, optimizer: torch.optim.Optimizer, step: functools.partial[Any], found: torch.Tensor) -> Any:
        """Take or skip the step that a GradScaler takes of the optimizer: between two segments the host may ask."""
        self.enter(optimizer, (optimizer, *step.args), step.keywords, found)
        result = None if found.item() > 0 else step()
        self.leave()
        return result

    def leave(self, *_: Any) -> None:
        """Begin the next segment."""
        self._depth -= 1
        if self._depth == 0:
            self._recording.resume()


def bind(parameters: Sequence[torch.nn.Parameter], gradients: Sequence[Any]) -> None:
    """Set the parameters' gradients: to a tensor, to None, or not at all (``AS_FOUND``)."""
    for parameter, gradient in zip(parameters, gradients, strict=True):
        if gradient is not AS_FOUND and parameter.grad is not gradient:
            parameter.grad = gradient
