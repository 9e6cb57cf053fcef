"""One optimizer step as plain PyTorch: what `fit` runs in two parts, and a hot loop as a whole."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from hotloop.train.average import Average
    from hotloop.train.batches import Batch


class Update:
    """Turns batches into gradients, and gradients into parameters. Nothing in it waits for the device.

    Args:
        fabric: runs the backward.
        model: gives an output of a batch's inputs by name; Fabric's wrapper, for precision.
        parts: the components by name; ``loss`` gives the mean loss of an output and labels. A loss that is a
            function is replaced there once it is compiled, so it is looked up in each step.
        optimizer: Fabric's wrapper of it.
        parameters: what is trained.
        max_norm: gradients are scaled down to this norm; None leaves them as they are.
        scaler: scales losses for float16, by Fabric; a step whose gradients overflow is left out by it.
        average: of the parameters, brought up to date after each step.
    """

    def __init__(  # noqa: PLR0913 - what a step is made of
        self,
        fabric: Any,
        model: torch.nn.Module,
        parts: Mapping[str, Any],
        *,
        optimizer: torch.optim.Optimizer,
        parameters: Sequence[torch.nn.Parameter],
        max_norm: float | None,
        scaler: torch.amp.GradScaler | None = None,
        average: Average | None = None,
    ) -> None:
        self._fabric, self._model, self._parts, self._optimizer = fabric, model, parts, optimizer
        self._parameters, self._max_norm = list(parameters), max_norm or math.inf
        self.scaler, self.average = scaler, average

    def gradients(self, batches: Sequence[Batch]) -> Tensor:
        """Sum the batches' gradients up, and clip them.

        Returns:
            The mean loss and the gradients' norm before clipping: shape (2,), float32, on the batches' device.
        """
        total = torch.zeros((), device=batches[0].labels.device)
        for batch in batches:
            loss = self._parts["loss"](self._model(**batch.inputs), batch.labels) / len(batches)
            self._fabric.backward(loss)
            total += loss.detach()
        if self.scaler is not None:
            self.scaler.unscale_(self._optimizer.optimizer)  # type: ignore[attr-defined] # Fabric's wrapper has it
        norm = torch.nn.utils.clip_grad_norm_(self._parameters, self._max_norm)
        return torch.stack([total, norm])

    def apply(self) -> None:
        """Step the optimizer, drop the gradients, and take the parameters into the average."""
        self._optimizer.step()
        self._optimizer.zero_grad()
        if self.average is not None:
            self.average.update()

    def drop(self) -> None:
        """Drop the gradients without a step."""
        self._optimizer.zero_grad()

    def overflows(self) -> bool:
        """Say whether gradients that are not finite are float16's overflow, for which the scaler leaves steps out.

        While it looks for its scale that is usual; where even gradients that were scaled down are not finite, it is not
        the scale.
        """
        return self.scaler is not None and self.scaler.get_scale() >= 1

    def optimizer_step(self, batches: Sequence[Batch]) -> Tensor:
        """Do both, `gradients` and `apply`; gives what `gradients` gives."""
        seen = self.gradients(batches)
        self.apply()
        return seen
