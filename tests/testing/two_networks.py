"""Two networks as a ranking system has them: trained in one batched call each, asked many times between the steps.

A gist encoder sums up what was chosen so far; a lens scores every item in its light. A greedy allocator chooses one item
after another, so that it calls both again and again without gradients, and keeps what they gave for its best choice.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

import hotloop

ITEMS, WIDTH, PICKS = 12, 16, 4


class Gist(nn.Module):
    """An encoder of the chosen items of each row: (rows, items, width) and a mask (rows, items) -> (rows, width)."""

    def __init__(self, width=WIDTH):
        super().__init__()
        self.into = nn.Linear(width, 2 * width)
        self.norm = nn.LayerNorm(2 * width)
        self.out = nn.Linear(2 * width, width)

    def forward(self, items, chosen):
        hidden = torch.relu(self.norm(self.into(items)))
        return self.out((hidden * chosen.unsqueeze(-1)).sum(1) / chosen.sum(1, keepdim=True).clamp(min=1))


class Lens(nn.Module):
    """A scorer of each item, given a gist: (rows, width) and (rows, items, width) -> (rows, items)."""

    def __init__(self, width=WIDTH):
        super().__init__()
        self.see = nn.Linear(2 * width, width)
        self.score = nn.Linear(width, 1)

    def forward(self, gist, items):
        seen = torch.cat([gist.unsqueeze(1).expand_as(items), items], -1)
        return self.score(F.gelu(self.see(seen))).squeeze(-1)


class Ranker:
    """Both networks, their optimizer, and the two ways in which they are called."""

    def __init__(self, device="cpu", seed=0):
        torch.manual_seed(seed)
        self.gist, self.lens = Gist().to(device), Lens().to(device)
        self.optimizer = torch.optim.AdamW([*self.gist.parameters(), *self.lens.parameters()], lr=1e-2)
        self.device = device

    def compile(self, preset="reduce-overhead", **settings):
        hotloop.compile({"gist": self.gist, "lens": self.lens}, preset, **settings)
        return self

    def step(self, items, chosen, target):
        """Train on a batch: after ``chosen``, the items ``target`` (rows,) should score highest."""
        loss = F.cross_entropy(self.lens(self.gist(items, chosen), items), target)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss

    def allocate(self, items):
        """Call `allocate`."""
        return allocate(self.gist, self.lens, items)


@torch.no_grad()
def allocate(gist, lens, items, picks=PICKS):
    """Choose ``picks`` items of one row greedily; return them, and the gist and scores of the surest choice."""
    chosen = torch.zeros(1, items.shape[1], device=items.device)
    order, best = [], None
    for _ in range(picks):
        summed = gist(items, chosen)
        scores = lens(summed, items).masked_fill(chosen.bool(), -torch.inf)
        pick = int(scores.argmax())
        sure = scores.softmax(-1).max().item()
        if best is None or sure > best[0]:
            best = (sure, summed, scores)
        order.append(pick)
        chosen = chosen.index_fill(1, torch.tensor([pick], device=items.device), 1.0)
    return order, best[1], best[2]


def batches(many, device="cpu", rows=8):
    """Return batches: items, which of them were chosen, and the item that fits these best."""
    generator = torch.Generator().manual_seed(1)
    made = []
    for _ in range(many):
        items = torch.randn(rows, ITEMS, WIDTH, generator=generator)
        chosen = (torch.rand(rows, ITEMS, generator=generator) < 0.3).float()
        wanted = (items * chosen.unsqueeze(-1)).sum(1, keepdim=True)
        target = ((items * wanted).sum(-1) - 1e3 * chosen).argmax(-1)
        made.append(tuple(one.to(device) for one in (items, chosen, target)))
    return made


def run(ranker, given, *, every=1):
    """Train on the batches, and allocate the first row of each ``every``-th batch; return all results."""
    losses, orders, gists = [], [], []
    for number, batch in enumerate(given):
        losses.append(ranker.step(*batch))
        if number % every == 0:
            order, gist, scores = ranker.allocate(batch[0][:1])
            orders.append(order)
            gists += [gist, scores]
    return [loss.item() for loss in losses], orders, gists


def allocator(workload):
    """Make the inference call of a workload: it asks the networks for one row of a batch, between steps."""
    gist, lens = workload.model
    return lambda batch: allocate(gist, lens, batch[0][:1])


def make(device="cpu"):
    """Return the training as a workload."""
    ranker = Ranker(device)
    return hotloop.Workload((ranker.gist, ranker.lens), ranker.optimizer, ranker.step, batches(16, device))
