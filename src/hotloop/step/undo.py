"""Undoing a step that failed before it wrote a parameter: random state, buffers and gradients go back to its start.

It is saved at every step that compiled or captured code runs, so it is made to cost little: buffers are copied in one
launch into memory that is kept, gradients only where they exist and are read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from hotloop._torch.foreach import copy_all
from hotloop.step.holdings import Bindings, Holdings, RandomState

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


class StepStart:
    """What a step found at its start.

    Args:
        holdings: what it may change.
        devices: where it may draw random numbers.
    """

    def __init__(self, holdings: Holdings, devices: Sequence[torch.device]) -> None:
        self._devices = devices
        self._parameters = list(holdings.parameters().values())
        others = Holdings({}, {}, holdings.state)
        others.found = holdings.found
        self._others = others
        self._places = [
            (held, name)
            for root in holdings.modules.values()
            for module in root.modules()
            for held in (vars(module)["_buffers"],)
            for name, buffer in held.items()
            if buffer is not None
        ]
        self._with_buffers = True
        self._copies: list[torch.Tensor] = []
        self._live: list[torch.Tensor] = []
        self._gradients: list[torch.Tensor | None] = []
        self._values: list[torch.Tensor | None] = []
        self._random: RandomState | None = None
        self._bindings: Bindings | None = None

    def save(self, *, gradients: bool, buffers: bool = True) -> None:
        """Copy what the coming step may change before it writes a parameter.

        Args:
            gradients: copy those that exist; not needed where the step drops them unread.
            buffers: copy buffers and other state; not needed where the step runs as a whole or not at all.
        """
        self._with_buffers = buffers
        live = [held[name] for held, name in self._places] if buffers else []
        live += list(self._others.other_tensors().values()) if buffers else []
        if len(self._copies) != len(live) or any(not _alike(a, b) for a, b in zip(self._copies, live, strict=True)):
            self._copies = [torch.empty_like(one, requires_grad=False) for one in live]
        self._live = live
        copy_all(self._copies, live)
        self._gradients = [parameter.grad for parameter in self._parameters]
        self._values = [one.clone() if gradients and one is not None else None for one in self._gradients]
        self._random = RandomState(self._devices)
        self._bindings = Bindings(self._others)

    def restore(self) -> None:
        """Go back to the start of the step."""
        assert self._random is not None
        assert self._bindings is not None
        if self._with_buffers:
            for (held, name), buffer in zip(self._places, self._live, strict=False):
                held[name] = buffer
        copy_all(self._live, self._copies)
        kept = [(one, value) for one, value in zip(self._gradients, self._values, strict=True) if value is not None]
        with torch.no_grad():
            for one, value in kept:
                assert one is not None
                one.copy_(value)
        for parameter, gradient in zip(self._parameters, self._gradients, strict=True):
            parameter.grad = gradient
        self._bindings.restore()
        self._random.restore()


def _alike(copy: torch.Tensor, live: torch.Tensor) -> bool:
    return copy.shape == live.shape and copy.dtype == live.dtype and copy.device == live.device


class WriteWatch:
    """Tells whether one of the optimizers has stepped since the step began: from then on it cannot be undone."""

    def __init__(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        self.begun = False
        self._handles = [one.register_step_pre_hook(self._began) for one in optimizers]

    def _began(self, *_: Any) -> None:
        self.begun = True

    def close(self) -> None:
        """Stop watching."""
        for handle in self._handles:
            handle.remove()
