"""Validation: the metrics of a model on the rows that were held out."""

from __future__ import annotations

import contextlib
import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hotloop.train.batches import in_order
from hotloop.train.optional import require

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from hotloop.train.batches import Data
    from hotloop.train.task import Judge, Loss


def evaluate(model: Any, judge: Judge, data: Data, batch_size: int, device: torch.device) -> dict[str, float]:
    """Judge a model on one side of the split; it is left in the mode, training or evaluation, that it was in.

    Args:
        model: gives an output of a batch's inputs by name.
        judge: sees the outputs.
        data: the rows.
        batch_size: rows in a forward pass; the last is filled up, and what fills it does not count.
        device: where the model is.

    Returns:
        The judge's figures, by name.
    """
    with evaluating(model):
        for batch, count in in_order(data, batch_size):
            moved = batch.to(device)
            judge.see(model(**moved.inputs)[:count], moved.labels[:count])
        return judge.figures()


@contextlib.contextmanager
def evaluating(model: Any) -> Iterator[None]:
    """Run the block with a model in evaluation mode and without gradients; then restore its mode."""
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(was_training)


class Together:
    """Judges all rows together, at the end.

    Args:
        loss: the mean loss of all outputs and labels.
        metrics: gives further metrics of them.
    """

    def __init__(self, loss: Loss, metrics: Callable[[Tensor, Tensor], Mapping[str, float]]) -> None:
        self._loss, self._metrics = loss, metrics
        self._outputs: list[Tensor] = []
        self._labels: list[Tensor] = []

    def see(self, output: Tensor, labels: Tensor) -> None:
        """Keep both, on the CPU."""
        self._outputs.append(output.float().cpu())
        self._labels.append(labels.cpu())

    def figures(self) -> dict[str, float]:
        """Return ``loss`` and the metrics."""
        outputs, labels = torch.cat(self._outputs), torch.cat(self._labels)
        return {"loss": float(self._loss(outputs, labels)), **self._metrics(outputs, labels)}


def chance(accuracy: float, rows: int, what: str) -> str:
    """Say how far chance alone moves an accuracy: Agresti and Coull's standard error, as if rows were independent."""
    share = (accuracy * rows + 2) / (rows + 4)
    error = math.sqrt(share * (1 - share) / (rows + 4))
    return f"Judged on {rows} validation {what}: chance alone moves the accuracy by about {error:.3f}"


def auc(scores: Tensor, labels: Tensor) -> float:
    """Return the AUC of any scores against labels of 0 and 1, both of shape (pairs,)."""
    functional = require("torchmetrics.functional.classification", "Validation metrics")
    # Ranks as shares of 1: torchmetrics takes others for logits, and its sigmoid rounds large ones to 1.
    ranks = torch.searchsorted(scores.sort().values, scores).double()
    return float(functional.binary_auroc(ranks / ranks.max().clamp(min=1), labels.int()))


def measure(logits: Tensor, labels: Tensor) -> dict[str, float]:
    """Return accuracy, F1, precision, recall and AUC of logits against labels of 0 and 1, both of shape (pairs,)."""
    functional = require("torchmetrics.functional.classification", "Validation metrics")
    probabilities, truth = logits.sigmoid(), labels.int()
    named = {"accuracy": "accuracy", "f1": "f1_score", "precision": "precision", "recall": "recall"}
    found = {name: float(getattr(functional, f"binary_{own}")(probabilities, truth)) for name, own in named.items()}
    return {**found, "auc": auc(logits, labels)}
