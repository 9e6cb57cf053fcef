"""Validation: the metrics of a model on the pairs that were held out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hotloop.train.batches import Dataset, in_order
from hotloop.train.optional import require

if TYPE_CHECKING:
    from collections.abc import Callable


def evaluate(
    model: Any, loss: Callable[[Tensor, Tensor], Tensor], dataset: Dataset, batch_size: int, device: torch.device
) -> dict[str, float]:
    """Judge a model on a data set; it is left in the mode, training or evaluation, that it was in.

    Args:
        model: gives logits, shape (batch,), of tokenised inputs by name.
        loss: the mean loss of logits and labels.
        dataset: the pairs.
        batch_size: pairs in a forward pass; the last is filled up, and what fills it does not count.
        device: where the model is.

    Returns:
        ``loss`` and accuracy, F1, precision, recall (at probability 0.5) and AUC by name.
    """
    was_training = model.training
    model.eval()
    logits, labels = [], []
    with torch.no_grad():
        for batch, count in in_order(dataset, batch_size):
            logits.append(model(**batch.to(device).inputs)[:count].float().cpu())
            labels.append(batch.labels[:count])
        scores, truth = torch.cat(logits), torch.cat(labels)
        total = float(loss(scores, truth))
    model.train(was_training)
    return {"loss": total, **measure(scores, truth)}


def auc(scores: Tensor, labels: Tensor) -> float:
    """Give the AUC of any scores against labels of 0 and 1, both of shape (pairs,)."""
    functional = require("torchmetrics.functional.classification", "Validation metrics")
    # Ranks as shares of 1: torchmetrics takes others for logits, and its sigmoid rounds large ones to 1.
    ranks = torch.searchsorted(scores.sort().values, scores).double()
    return float(functional.binary_auroc(ranks / ranks.max().clamp(min=1), labels.int()))


def measure(logits: Tensor, labels: Tensor) -> dict[str, float]:
    """Give accuracy, F1, precision, recall and AUC of logits against labels of 0 and 1, both of shape (pairs,)."""
    functional = require("torchmetrics.functional.classification", "Validation metrics")
    probabilities, truth = logits.sigmoid(), labels.int()
    named = {"accuracy": "accuracy", "f1": "f1_score", "precision": "precision", "recall": "recall"}
    found = {name: float(getattr(functional, f"binary_{own}")(probabilities, truth)) for name, own in named.items()}
    return {**found, "auc": auc(logits, labels)}
