"""The program that `benchmarks.kills` kills: ``benchmarks/killed_program.py:make``.

It has what a resumed run has to bring back: a `DataLoader` that shuffles (or torchdata's ``StatefulDataLoader``), a
schedule of the learning rate, an average of the weights (EMA), momentum, dropout, and noise that is drawn in the step.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, TensorDataset

import hotloop

ROWS, COLUMNS, STEPS = 640, 12, 2000


def loader_of(kind: str, rows: TensorDataset) -> Any:
    """Return a loader that shuffles, of torch or of torchdata, and with a worker process where its name says so."""
    workers = 1 if kind.endswith("worker") else 0
    if kind.startswith("stateful"):
        from torchdata.stateful_dataloader import StatefulDataLoader

        return StatefulDataLoader(rows, batch_size=16, shuffle=True, num_workers=workers)
    return DataLoader(rows, batch_size=16, shuffle=True, num_workers=workers)


def make(
    lr: Annotated[float, hotloop.Search(log=(1e-3, 1e-1))] = 1e-2,
    dropout: Annotated[float, hotloop.Search(float=(0.0, 0.5))] = 0.2,
    loader: Literal["plain", "plain-worker", "stateful", "stateful-worker"] = "plain",
    *,
    fold: hotloop.Fold | None = None,
) -> hotloop.Workload:
    """Train a classifier of rows that it draws."""
    x = torch.randn(ROWS, COLUMNS)
    y = (x[:, 0] * x[:, 1] > 0).long()
    learn, held_out = (fold or hotloop.Fold()).split(ROWS, labels=y)
    model = nn.Sequential(nn.Linear(COLUMNS, 48), nn.ReLU(), nn.Dropout(dropout), nn.Linear(48, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.99))

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = F.cross_entropy(model(x + 0.1 * torch.randn_like(x)), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        average.update_parameters(model)
        return loss

    def metrics() -> dict[str, torch.Tensor]:
        average.eval()
        with torch.no_grad():
            output = average(x[held_out])
        return {
            "loss": F.cross_entropy(output, y[held_out]),
            "accuracy": (output.argmax(1) == y[held_out]).float().mean(),
        }

    rows = TensorDataset(x[learn], y[learn])
    return hotloop.Workload(model, optimizer, step, loader_of(loader, rows), metrics=metrics, state=[schedule, average])
