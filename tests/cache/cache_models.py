"""A module and workloads that a child process can import by name."""

import torch
from torch import nn

from hotloop.step.workload import Workload


class Net(nn.Module):
    """Embedding tied to the head, BatchNorm and dropout."""

    def __init__(self, width=16):
        super().__init__()
        self.embed = nn.Embedding(50, width)
        self.inner = nn.Linear(width, width)
        self.norm = nn.BatchNorm1d(width)
        self.drop = nn.Dropout(0.1)
        self.head = nn.Linear(width, 50, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("positions", torch.arange(4), persistent=False)

    def forward(self, ids):
        x = torch.nn.functional.gelu(self.inner(self.drop(self.embed(ids + self.positions[: ids.shape[1]]))))
        return self.head(self.norm(x.mean(1)))


def make():
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(ids):
        loss = model(ids).logsumexp(-1).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return Workload(model, optimizer, step, [(torch.randint(40, (8, 4)),)])


def fails():
    raise ValueError("two lines\nof trouble")
