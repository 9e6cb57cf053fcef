"""Gradients that eager leaves absent: of what only outputs depend on that the loss does not use."""

import copy
import random

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import hotloop


class Heads(nn.Module):
    """A trunk and two heads, as InceptionV3 and encoders with a pooler have them."""

    def __init__(self, width=4):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.ReLU(inplace=True)) for _ in range(3))
        self.norm, self.head, self.auxiliary = nn.BatchNorm1d(width), nn.Linear(width, 2), nn.Linear(width, 3)

    def forward(self, x):
        first = self.blocks[0](x)
        auxiliary = F.relu(self.auxiliary(first), inplace=True)
        for block in self.blocks[1:]:
            first = block(first)
        return self.head(self.norm(first)), auxiliary


def compiled(model, preset="aot_eager", **more):
    ours = copy.deepcopy(model)
    hotloop.compile(ours, preset, **more)
    return ours


def gradients(model):
    return {name: one.grad for name, one in model.named_parameters()}


def alike(ours, theirs):
    assert [name for name, one in ours.items() if one is None] == [name for name, one in theirs.items() if one is None]
    for name, one in ours.items():
        if one is not None:
            torch.testing.assert_close(one, theirs[name], msg=lambda said, name=name: f"{name}: {said}")


@pytest.mark.parametrize("regions", ["whole", "blocks"])
@pytest.mark.parametrize("used", [(0,), (1,), (0, 1)])
def test_a_head_that_the_loss_does_not_use_has_no_gradient(used, regions):
    eager = Heads()
    ours = compiled(eager, regions=regions)
    x = torch.randn(5, 4)
    for model in (eager, ours):
        found = model(x)
        sum(found[one].square().sum() for one in used).backward()
    alike(gradients(ours), gradients(eager))
    assert (eager.auxiliary.weight.grad is None) == (1 not in used)
    assert hotloop.status(ours).components["model"].state == "compiled"


def test_adamw_decays_no_head_that_is_not_trained():
    eager = Heads()
    ours = compiled(eager)
    for model in (eager, ours):
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
        draws = torch.Generator().manual_seed(3)
        for step in range(6):
            logits, auxiliary = model(torch.randn(5, 4, generator=draws))
            loss = logits.square().mean() + (auxiliary.mean() if step == 3 else 0)  # now and then it is
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    for (name, mine), theirs in zip(ours.named_parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, msg=lambda said, name=name: f"{name}: {said}")


def test_two_backwards_of_one_graph_from_different_outputs():
    eager = Heads()
    ours = compiled(eager)
    x = torch.randn(5, 4)
    for model in (eager, ours):
        logits, auxiliary = model(x)
        logits.sum().backward(retain_graph=True)
        first = gradients(model)
        assert first["auxiliary.weight"] is None
        auxiliary.square().sum().backward()
    alike(gradients(ours), gradients(eager))


class Writes(nn.Module):
    """One head's result reaches the other output through memory that both have by another name."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two, self.three = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        held = self.one(x)
        part = held[:, :2]
        held[:, :2] = self.two(x)[:, :2]
        return part * 2, self.three(x)


def test_what_is_written_into_memory_reaches_all_that_reads_it():
    eager = Writes()
    ours = compiled(eager)
    x = torch.randn(5, 4)
    for model in (eager, ours):
        model(x)[0].square().sum().backward()
    assert eager.two.weight.grad is not None
    alike(gradients(ours), gradients(eager))


class IntoAnInput(nn.Module):
    """Writes what a layer makes into a tensor of the caller's, of which the loss is made."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two, self.writes = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x, into):
        into[:, 1] = self.writes(x)
        return self.one(x), self.two(x)


def test_a_gradient_that_comes_through_an_input_is_kept():
    eager = IntoAnInput()
    ours = compiled(eager)
    x = torch.randn(5, 4)
    for model in (eager, ours):
        into = torch.zeros(5, 2, 4)
        outputs = model(x, into)
        (into.square().sum() + outputs[0].sum()).backward()
    assert eager.writes.weight.grad is not None
    torch.testing.assert_close(ours.writes.weight.grad, eager.writes.weight.grad)


@pytest.mark.parametrize("kind", ["tensor", "accumulated"])
def test_hooks_of_the_users_are_never_called_with_none(kind):
    ours = compiled(Heads())
    heard = []
    weight = ours.auxiliary.weight
    if kind == "tensor":
        weight.register_hook(lambda gradient: heard.append(gradient) or gradient.clamp(-1, 1))
    else:
        weight.register_post_accumulate_grad_hook(lambda one: heard.append(one.grad))
    ours(torch.randn(5, 4))[0].square().sum().backward()
    assert all(one is not None for one in heard)


class Tied(Heads):
    """The auxiliary head has the trunk's weight."""

    def forward(self, x):
        first = self.blocks[0](x)
        return self.head(first), F.linear(first, self.head.weight)


def test_a_weight_that_both_heads_share_keeps_its_gradient():
    eager = Tied()
    ours = compiled(eager)
    x = torch.randn(5, 4)
    for model in (eager, ours):
        model(x)[1].square().sum().backward()
    assert eager.head.weight.grad is not None
    assert eager.head.bias.grad is None
    alike(gradients(ours), gradients(eager))


class Drawn(nn.Module):
    """A program drawn at random: linear layers, writes in place, views, and two outputs."""

    def __init__(self, seed, layers=5):
        super().__init__()
        torch.manual_seed(seed)
        self.seed = seed
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(layers))

    def forward(self, x):
        draws = random.Random(self.seed)
        values = [x * 1.0]
        for layer in self.layers:
            made = layer(draws.choice(values).clone())  # which backward needs as it was
            kind = draws.choice(["new", "double", "add", "part", "columns", "mix"])
            if kind == "double":
                made = made.mul_(2)
            elif kind == "add":
                draws.choice(values).add_(made)
            elif kind == "part":
                draws.choice(values)[:, :2] = made[:, 2:]
            elif kind == "columns":
                made = made[:, [1, 0, 3, 2]].view(-1, 4)
            elif kind == "mix":
                made = made.view(-1, 2, 2).transpose(1, 2).reshape(-1, 4) + draws.choice(values)
            values.append(made)
        return draws.choice(values[1:]) * 2, draws.choice(values[1:]).sigmoid()


@pytest.mark.parametrize("seed", range(24))
def test_drawn_programs_lose_no_gradient_that_eager_has(seed):
    eager = Drawn(seed)
    ours = compiled(eager)
    x = torch.randn(3, 4)
    for model in (eager, ours):
        outputs = model(x.clone())
        outputs[seed % 2].square().sum().backward()
    mine, theirs = gradients(ours), gradients(eager)
    for name, one in theirs.items():
        assert (one is None) or (mine[name] is not None), name
        expected = one if one is not None else torch.zeros_like(mine[name]) if mine[name] is not None else None
        if expected is not None:
            torch.testing.assert_close(mine[name], expected)


def test_a_loop_accepts_a_tier_of_a_model_with_an_unused_head():
    model = Heads()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    with hotloop.Loop(model, optimizer, run="aot_eager") as loop:

        @loop.step
        def step(x):
            loss = model(x)[0].square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        for _ in range(10):
            step(torch.randn(8, 4))
        assert loop.status().tier == "aot_eager"
    assert not optimizer.state[model.auxiliary.weight]


@pytest.mark.campaign
@pytest.mark.inductor
def test_inductor_leaves_them_absent_too():
    eager = Heads()
    ours = compiled(eager, "default")
    x = torch.randn(5, 4)
    for model in (eager, ours):
        model(x)[0].square().sum().backward()
    alike(gradients(ours), gradients(eager))
