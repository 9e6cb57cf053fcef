"""Remedies for how a step trains: optimizers, gradients, buffers, compiled models. Each is followed, and then works."""

from __future__ import annotations

import copy

import pytest
import torch
from step_programs import GRAPH, Both, engines
from step_remedies import OFTEN, STEPS, check, rows, trained
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint


@pytest.fixture
def cpu():
    with engines("cpu"):
        yield Both("cpu")


def a_sparse_buffer(run, followed):
    model = nn.Linear(4, 3)
    ring = torch.eye(5).roll(1, 0).to_sparse().coalesce()
    if followed:
        model.register_buffer("indices", ring.indices())
        model.register_buffer("entries", ring.values())
    else:
        model.register_buffer("ring", ring)

    def loss_of(model, x):
        ring = (
            torch.sparse_coo_tensor(model.indices, model.entries, (5, 5), is_coalesced=True) if followed else model.ring
        )
        return torch.sparse.mm(ring, model(x)).square().mean()

    return trained(run, loss_of, rows, model=model)


def a_sparse_gradient(run, followed):
    model = nn.Sequential(nn.EmbeddingBag(7, 4, sparse=not followed), nn.Linear(4, 3))
    return trained(run, lambda model, x: model(x).square().mean(), lambda _: (torch.randint(7, (5, 2)),), model=model)


def a_sparse_gradient_that_is_left(run, followed):
    embedding, head = nn.EmbeddingBag(7, 4, sparse=True), nn.Linear(4, 3)
    optimizers = [
        torch.optim.SparseAdam(embedding.parameters(), lr=2**-6),
        torch.optim.AdamW(head.parameters(), lr=2**-6, fused=True),
    ]

    @run.loop([embedding, head], optimizers).step
    def train_step(x):
        loss = head(embedding(x)).square().mean()
        for optimizer in optimizers if not followed else ():
            optimizer.zero_grad()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        for optimizer in optimizers if followed else ():
            optimizer.zero_grad()
        return loss

    for _ in range(STEPS):
        run.note(train_step(torch.randint(7, (5, 2))))
    return embedding, head


def a_schedule_in_the_step(run, followed):
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=2**-6)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)

    def train_step(x):
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    def scheduled(x):
        loss = train_step(x)
        scheduler.step()
        return loss

    step = run.loop(model, optimizer).step(train_step if followed else scheduled)
    for _ in range(STEPS):
        run.note(step(*rows()))
        if followed:
            scheduler.step()
    return model


def averaged(*, within):
    """An average of a model (BYOL, Mean Teacher) that gets other memory at each step, in the step or after it."""

    def program(run, followed):
        online = nn.Linear(4, 3)
        both = nn.ModuleList([online, copy.deepcopy(online).requires_grad_(False)])

        def move():
            with torch.no_grad():
                for mine, its in zip(both[0].parameters(), both[1].parameters(), strict=True):
                    if followed:
                        its.data.lerp_(mine.data, 0.25)
                    else:
                        its.data = its.data * 0.75 + mine.data * 0.25

        def loss_of(both, x):
            if within:
                move()
            return F.mse_loss(both[0](x), both[1](x + 1))

        return trained(run, loss_of, rows, model=both, around=lambda _: None if within else move(), steps=OFTEN)

    program.__name__ = f"an_average_moved_{'in' if within else 'outside'}_the_step"
    return program


def a_closure(run, followed):
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=2**-6)

    @run.loop(model, optimizer).step
    def train_step(x):
        def closure():
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            return loss

        if not followed:
            return optimizer.step(closure)
        loss = closure()
        optimizer.step()
        return loss

    for _ in range(STEPS):
        run.note(train_step(*rows()).detach())
    return model


class Sharp(torch.optim.Optimizer):
    """SAM as it is published: it has another optimizer inside, and its own `step` is never called."""

    def __init__(self, parameters, **settings):
        super().__init__(parameters, settings)
        self.base_optimizer = torch.optim.SGD(self.param_groups, **settings)
        self.param_groups = self.base_optimizer.param_groups

    @torch.no_grad()
    def move(self, scale):
        for one in self.param_groups[0]["params"]:
            one.add_(one.grad, alpha=scale)


def an_optimizer_in_another(run, followed):
    model = nn.Linear(4, 3)
    sharp = Sharp(model.parameters(), lr=2**-6, momentum=0.5)

    @run.loop(model, [sharp, sharp.base_optimizer] if followed else sharp).step
    def train_step(x):
        loss = model(x).square().mean()
        loss.backward()
        sharp.move(0.25)
        sharp.zero_grad()
        model(x).square().mean().backward()
        sharp.base_optimizer.step()
        sharp.zero_grad()
        return loss

    for _ in range(STEPS):
        run.note(train_step(*rows()))
    return model


def an_optimizer_of_another_model(run, followed):
    models = [nn.Linear(4, 4), nn.Linear(4, 3)]
    optimizers = [torch.optim.SGD(one.parameters(), lr=2**-6) for one in models]

    @run.loop(*(models, optimizers) if followed else (models[0], optimizers[0])).step
    def train_step(x):
        loss = models[1](models[0](x)).square().mean()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        return loss

    for _ in range(STEPS):
        run.note(train_step(*rows()))
    return models


def a_weight_norm_of_old(run, followed):
    made = nn.utils.parametrizations.weight_norm if followed else nn.utils.weight_norm
    return trained(run, lambda model, x: model(x).square().mean(), rows, model=nn.Sequential(made(nn.Linear(4, 3))))


class Checkpointed(nn.Module):
    def __init__(self, *layers):
        super().__init__()
        self.inner = nn.Sequential(*layers)

    def forward(self, x):
        return checkpoint(self.inner, x, use_reentrant=False)


def a_checkpointed_norm(run, followed):
    model = Checkpointed(nn.Linear(4, 3), nn.BatchNorm1d(3))
    if followed:
        model = nn.Sequential(Checkpointed(model.inner[0]), model.inner[1])
    return trained(run, lambda model, x: model(x).exp().mean(), rows, model=model)


def a_checkpointed_norm_with_statistics(run, followed):
    model = Checkpointed(nn.Linear(4, 3), nn.BatchNorm1d(3, track_running_stats=not followed))
    return trained(run, lambda model, x: model(x).exp().mean(), rows, model=model)


def a_model_that_is_not_called(run, followed):
    encoder, head = model = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 3)])
    optimizer = torch.optim.SGD(model.parameters(), lr=2**-6)

    @run.loop([encoder, head] if followed else model, optimizer).step
    def train_step(x):
        loss = head(encoder(x)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    for _ in range(STEPS):
        run.note(train_step(*rows()))
    return model


def a_gradient_penalty(run, followed):
    def loss_of(model, x):
        x = x.clone().requires_grad_()
        made = model(x).exp().mean()
        (slope,) = torch.autograd.grad(made, x, create_graph=True)
        return made + slope.square().sum()

    return trained(run, loss_of, rows)


REMEDIES = {
    a_sparse_buffer: ("has layout torch.sparse_coo", "keep its indices and values as dense buffers"),
    a_sparse_gradient: ("is sparse, which no recording keeps", "nn.Embedding(sparse=False)"),
    a_sparse_gradient_that_is_left: ("is sparse, which no recording keeps", "zero_grad() after the step"),
    a_schedule_in_the_step: ("", "call scheduler.step() outside the step"),
    averaged(within=True): ("`.data = ` in the step gives", ".lerp_()"),
    averaged(within=False): ("ModuleList.1._parameters.items has changed", ".lerp_()"),
    a_closure: ("through a closure", "without a closure"),
    an_optimizer_in_another: ("does not know steps: SGD", "Loop(model, [optimizer, optimizer.base_optimizer])"),
    an_optimizer_of_another_model: ("does not know steps: SGD", "Loop([model, other], [optimizer, its_optimizer])"),
    a_weight_norm_of_old: ("the step changes Python state", "torch.nn.utils.parametrizations"),
}


@pytest.mark.filterwarnings("ignore:.*weight_norm.*is deprecated:FutureWarning")
@pytest.mark.parametrize("program", REMEDIES, ids=lambda program: program.__name__)
def test_a_program_is_declined_and_captured_once_it_does_what_the_remedy_says(cpu, program):
    reason, hint = REMEDIES[program]
    check(cpu, program, reason, hint)


COMPILED = {
    a_checkpointed_norm: ("where a checkpoint recomputes its forward", "out of what torch.utils.checkpoint wraps"),
    a_checkpointed_norm_with_statistics: (
        "eager writes buffer inner.1.num_batches_tracked",
        "track_running_stats=False",
    ),
    a_model_that_is_not_called: ("nothing of the model was compiled", "Loop([encoder, head], optimizer)"),
    a_gradient_penalty: ("does not support double backward", 'run="eager+graph"'),
}


@pytest.mark.parametrize("program", COMPILED, ids=lambda program: program.__name__)
def test_a_program_is_declined_and_compiled_once_it_does_what_the_remedy_says(cpu, program):
    reason, hint = COMPILED[program]
    then = GRAPH if program is a_gradient_penalty else "aot_eager"
    check(cpu, program, reason, hint, asked="aot_eager", then=then)
