"""Validation: the metrics of a model on the pairs that were held out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hotloop.train.batches import Dataset, in_order
from hotloop.train.optional import require

if TYPE_CHECKING:
    from collections.abc import Callable

METRICS = ("accuracy", "f1", "precision", "recall", "auc")


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
    logits = []
    with torch.no_grad():
        for batch, count in in_order(dataset, batch_size):
            logits.append(model(**batch.to(device).inputs)[:count].float().cpu())
        scores = torch.cat(logits)
        total = float(loss(scores, dataset.labels))
    model.train(was_training)
    return {"loss": total, **measure(scores, dataset.labels)}


def measure(logits: Tensor, labels: Tensor) -> dict[str, float]:
    """Give accuracy, F1, precision, recall and AUC of logits against labels of 0 and 1, both of shape (pairs,)."""
    functional = require("torchmetrics.functional.classification", "Validation metrics")
    probabilities, truth = logits.sigmoid(), labels.int()
    named = {"f1": "f1_score", "auc": "auroc"}
    return {
        name: float(getattr(functional, f"binary_{named.get(name, name)}")(probabilities, truth)) for name in METRICS
    }
