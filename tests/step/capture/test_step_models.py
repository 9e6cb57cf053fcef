"""What models hold and do: dropout, statistics, tied weights, attention, checkpointing, hooks."""

from __future__ import annotations

import pytest
import torch
from step_programs import PROVING, Classifier, Pictures, Writer, batches, images, plain_step, sentences
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint


def adamw(*modules):
    return torch.optim.AdamW([one for module in modules for one in module.parameters()], lr=2**-6, fused=True)


def test_dropout_draws_fresh_masks_from_the_stream_that_eager_draws_from(both):
    """That the ends agree shows that the masks did; that they differ from step to step is looked at on equal inputs."""

    def program(run):
        model = Classifier(dropout=0.5).to(run.device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0, fused=True)

        @run.loop(model, optimizer).step
        def train_step(x):
            kept = model.dropout(x)
            loss = model(kept).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return kept

        x = torch.ones(6, 8, device=run.device)
        for _ in range(20):
            run.note(train_step(x))
        after = torch.rand(3, device=run.device)
        return {"model": model, "after": after}

    run = both.equal(program, exact=True)
    masks = {tuple((mask != 0).flatten().tolist()) for (mask,) in run.results}
    assert len(masks) == 20


def test_batchnorm_statistics_count_every_step_once(both):
    """Audit, warm-up and proof run forward more often than there are steps: none of that may stay."""

    def program(run):
        model = Pictures().to(run.device)
        optimizer = adamw(model)
        train_step = run.loop(model, optimizer).step(plain_step(model, optimizer))
        counts = []
        for x, y in images(run.device):
            run.note(train_step(x, y))
            counts.append(model.norm.num_batches_tracked.clone())
        return {"model": model, "optimizer": optimizer, "counts": counts}

    run = both.equal(program, exact=True)
    assert run.calls() == PROVING


@pytest.mark.parametrize("dropout", [0.0, 0.25])
def test_attention_and_a_head_tied_to_its_embedding(both, dropout):
    def program(run):
        model = Writer(dropout=dropout).to(run.device)
        optimizer = adamw(model)

        @run.loop(model, optimizer).step
        def train_step(ids):
            logits = model(ids[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        for ids in sentences(run.device):
            run.note(train_step(ids))
        assert model.head.weight is model.embedding.weight
        return model, optimizer

    assert both.equal(program, exact=True).calls() == PROVING


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_activation_checkpointing(both, use_reentrant):
    def program(run):
        model, head = Classifier(width=8).to(run.device), nn.Linear(4, 4).to(run.device)
        first = nn.Linear(8, 8).to(run.device)
        optimizer = adamw(first, model, head)

        @run.loop([first, model, head], optimizer).step
        def train_step(x, y):
            loss = F.cross_entropy(head(checkpoint(model, first(x), use_reentrant=use_reentrant)), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        for x, y in batches(run.device):
            run.note(train_step(x, y))
        return first, model, head, optimizer

    both.equal(program, exact=True)


def test_a_buffer_that_the_step_writes_is_the_models(both):
    class Counting(Classifier):
        def __init__(self):
            super().__init__()
            self.register_buffer("seen", torch.zeros((), dtype=torch.long), persistent=False)
            self.register_buffer("mean", torch.zeros(8))

        def forward(self, x):
            self.seen += 1
            self.mean.lerp_(x.detach().mean(0), 0.25)
            return super().forward(x - self.mean) * (1 + self.seen / 64)

    def program(run):
        model = Counting().to(run.device)
        optimizer = adamw(model)
        train_step = run.loop(model, optimizer).step(plain_step(model, optimizer))
        for x, y in batches(run.device):
            run.note(train_step(x, y))
        return {"model": model, "seen": model.seen, "optimizer": optimizer}

    both.equal(program, exact=True)
