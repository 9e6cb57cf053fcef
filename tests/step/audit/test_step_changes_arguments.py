"""A step that changes what it is handed must not run twice: the second run would find it changed."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import hotloop
from hotloop.testing import captured_step_emulation


def labels_popped(batch):
    return batch["x"], batch.pop("labels")


def labels_popped_from_a_list(batch):
    return batch["x"], batch["more"].pop()


def put_into_it(batch):
    batch["x"] = batch["x"] * 0.5
    return batch["x"], batch["labels"]


def written_into(batch):
    batch["x"].mul_(0.5)
    return batch["x"], batch["labels"]


def noted_on_it(batch):
    batch["x"].seen = getattr(batch["x"], "seen", 0) + 1
    return batch["x"] * batch["x"].seen, batch["labels"]


def train(take, run):
    """Give the parameters, what became of each batch, and the loop's status."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.125)
    left = []

    def step(batch):
        x, labels = take(batch)
        loss = F.cross_entropy(model(x), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    draws = torch.Generator().manual_seed(0)
    with captured_step_emulation():
        loop = hotloop.Loop(model, optimizer, run=run) if run else None
        step = loop.step(step) if loop is not None else step
        for _ in range(12):
            labels = torch.randint(3, (4,), generator=draws)
            batch = {"x": torch.randn(4, 4, generator=draws), "labels": labels, "more": [labels]}
            step(batch)
            left.append((sorted(batch), len(batch["more"]), batch["x"].tolist(), vars(batch["x"])))
        status = loop.status() if loop is not None else None
    return [one.detach().clone() for one in model.parameters()], left, status


@pytest.mark.parametrize("run", ["aot_eager", "eager+graph"])
@pytest.mark.parametrize(
    ("take", "why"),
    [
        (labels_popped, "the step changes the dict or list that holds its argument labels"),
        (labels_popped_from_a_list, "the step changes the dict or list that holds its argument more[0]"),
        (put_into_it, "the step changes the dict or list that holds its argument x"),
        (written_into, "the step writes into its own argument"),
        (noted_on_it, "the step changes seen, which is an attribute of its argument x"),
    ],
)
def test_a_step_that_changes_what_it_is_handed_trains_as_eager_and_says_so(take, why, run):
    parameters, batches, _ = train(take, None)
    ours, left, status = train(take, run)
    for one, other in zip(ours, parameters, strict=True):
        assert torch.equal(one, other)
    assert left == batches
    assert status.tier == "eager"
    (tier,) = [one for one in status.tiers if one.name == run]
    assert tier.why.startswith(why), tier
    assert ("return what has to be noted" if take is noted_on_it else "work on a copy") in tier.why
