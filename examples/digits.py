"""A user's program with settings of its own, searched and cross-validated: handwritten digits, 1,797 of scikit-learn.

hotloop train examples/digits.py:make program.lr=3e-3 training.num_epochs=20 recipe.goal=max:accuracy
hotloop hpo   examples/digits.py:make recipe.goal=max:accuracy hpo.n_trials=20 training.num_epochs=10
hotloop kfold examples/digits.py:make program.lr=3e-3 training.num_epochs=20 recipe.goal=max:accuracy
"""

from typing import Annotated

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import hotloop


def make(
    lr: Annotated[float, hotloop.Range(0, 1), hotloop.Search(log=(1e-4, 3e-2))] = 1e-3,
    width: Annotated[int, hotloop.Search(choices=(32, 64, 128, 256))] = 64,
    dropout: Annotated[float, hotloop.Range(0, 0.5)] = 0.1,
    *,
    fold: hotloop.Fold | None = None,
) -> hotloop.Workload:
    """Train a small network to read digits.

    Args:
        lr: the learning rate of AdamW.
        width: units of the hidden layer.
        dropout: the share of hidden units that are left out of a step.
        fold: what a run of a cross-validation holds out; None holds out one row in five.
    """
    digits = load_digits()
    x, y = torch.tensor(digits.data / 16, dtype=torch.float32), torch.tensor(digits.target)
    train, held_out = (fold or hotloop.Fold()).split(len(y), labels=y)

    model = nn.Sequential(nn.Linear(64, width), nn.GELU(), nn.Dropout(dropout), nn.Linear(width, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)

    def step(images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    def metrics() -> dict[str, torch.Tensor]:
        model.eval()
        with torch.no_grad():
            output = model(x[held_out])
        right = output.argmax(1) == y[held_out]
        return {"accuracy": right.float().mean(), "loss": F.cross_entropy(output, y[held_out])}

    batches = DataLoader(TensorDataset(x[train], y[train]), batch_size=128, shuffle=True, drop_last=True)
    return hotloop.Workload(model, optimizer, step, batches, metrics=metrics)
