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


def test_a_step_without_dropout_leaves_the_random_stream_alone(both):
    def program(run):
        model = Classifier().to(run.device)
        optimizer = adamw(model)
        train_step = run.loop(model, optimizer).step(plain_step(model, optimizer))
        drawn = []
        for x, y in batches(run.device):
            run.note(train_step(x, y))
            drawn.append(torch.rand(2, device=run.device))
        return {"model": model, "drawn": drawn}

    both.equal(program, exact=True)


def test_random_numbers_drawn_between_steps_and_inside_come_from_one_stream(both):
    def program(run):
        model = Classifier(dropout=0.25).to(run.device)
        optimizer = adamw(model)

        @run.loop(model, optimizer).step
        def train_step(x, y):
            loss = F.cross_entropy(model(x + 0.125 * torch.randn_like(x)), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        for x, y in batches(run.device):
            run.note(train_step(x + torch.rand_like(x), y))
        return model, optimizer

    both.equal(program, exact=True)


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


def test_batchnorm_with_a_cumulative_average_is_not_replayed_wrongly(both):
    """momentum=None divides by num_batches_tracked, read on the host."""

    def program(run):
        model = Classifier(norm=lambda width: nn.BatchNorm1d(width, momentum=None)).to(run.device)
        optimizer = adamw(model)
        train_step = run.loop(model, optimizer).step(plain_step(model, optimizer))
        for x, y in batches(run.device):
            run.note(train_step(x, y))
        return model, optimizer

    assert both.alike(program, exact=True).replays() == 0


def test_channels_last_images_are_copied_in_their_layout(both):
    def program(run):
        model = Pictures().to(run.device, memory_format=torch.channels_last)
        optimizer = adamw(model)
        train_step = run.loop(model, optimizer).step(plain_step(model, optimizer))
        for x, y in images(run.device):
            run.note(train_step(x.to(memory_format=torch.channels_last), y))
        return model, optimizer

    both.equal(program, exact=True)


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


def test_torchs_own_transformer_layers(both):
    def program(run):
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.125, batch_first=True)
        model = nn.ModuleDict({"layers": nn.TransformerEncoder(layer, 2), "head": nn.Linear(8, 4)}).to(run.device)
        optimizer = adamw(model)

        @run.loop(model, optimizer).step
        def train_step(x, y):
            loss = F.cross_entropy(model["head"](model["layers"](x.unflatten(0, (2, 3))).mean(1)), y[:2])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        for x, y in batches(run.device):
            run.note(train_step(x, y))
        return model, optimizer

    both.equal(program, exact=True)


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


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_attention_that_drops_nothing_may_be_checkpointed(both, use_reentrant):
    """torch marks attention as random whatever it is told to drop."""

    def program(run):
        model = nn.ModuleDict({"into": nn.Linear(8, 24), "out": nn.Linear(8, 4)}).to(run.device)
        optimizer = adamw(model)

        def attend(x):
            heads = model["into"](x).unflatten(0, (2, 3)).unflatten(2, (3, 2, 4)).permute(2, 0, 3, 1, 4)
            return F.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2).flatten(0, 1)

        @run.loop(model, optimizer).step
        def train_step(x, y):
            x = x.clone().requires_grad_()
            loss = F.cross_entropy(model["out"](checkpoint(attend, x, use_reentrant=use_reentrant)), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        for x, y in batches(run.device):
            run.note(train_step(x, y))
        return model, optimizer

    both.equal(program, exact=True)


def test_checkpointing_that_need_not_keep_the_random_state_may_drop_out(both):
    """preserve_rng_state=False draws the recomputed mask anew, in eager too."""

    def program(run):
        model, first = Classifier(dropout=0.5).to(run.device), nn.Linear(8, 8).to(run.device)
        optimizer = adamw(first, model)

        @run.loop([first, model], optimizer).step
        def train_step(x, y):
            hidden = checkpoint(model, first(x), use_reentrant=False, preserve_rng_state=False)
            loss = F.cross_entropy(hidden, y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        for x, y in batches(run.device):
            run.note(train_step(x, y))
        return first, model, optimizer

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


def test_a_buffer_that_forward_replaces_by_another_tensor(both):
    """self.mean = ... binds a new tensor at every step, as many hand-written statistics do."""

    class Replacing(Classifier):
        def __init__(self):
            super().__init__()
            self.register_buffer("mean", torch.zeros(8))

        def forward(self, x):
            self.mean = 0.75 * self.mean + 0.25 * x.detach().mean(0)
            return super().forward(x - self.mean)

    def program(run):
        model = Replacing().to(run.device)
        optimizer = adamw(model)
        train_step = run.loop(model, optimizer).step(plain_step(model, optimizer))
        for x, y in batches(run.device):
            run.note(train_step(x, y))
        return model, optimizer

    run = both.alike(program, exact=True)
    assert run.replays() == 0
    assert run.declined


def test_gradient_hooks_and_a_custom_function_run_in_replays(both):
    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return 2 * x

        @staticmethod
        def backward(ctx, gradient):
            return 0.5 * gradient

    def halve(parameter):
        parameter.grad.mul_(0.5)

    def program(run):
        model = Classifier().to(run.device)
        model.head.weight.register_hook(lambda gradient: gradient.clamp(-0.0625, 0.0625))
        model.inner.bias.register_post_accumulate_grad_hook(halve)
        optimizer = adamw(model)

        @run.loop(model, optimizer).step
        def train_step(x, y):
            loss = F.cross_entropy(Scaled.apply(model(x)), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        for x, y in batches(run.device):
            run.note(train_step(x, y))
        return model, optimizer

    both.equal(program, exact=True)


def test_a_gradient_penalty_differentiates_twice(both):
    def program(run):
        model = Classifier().to(run.device)
        optimizer = adamw(model)

        @run.loop(model, optimizer).step
        def train_step(x, y):
            x = x.clone().requires_grad_()
            loss = F.cross_entropy(model(x), y)
            (slope,) = torch.autograd.grad(loss, x, create_graph=True)
            loss = loss + slope.square().sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        for x, y in batches(run.device):
            run.note(train_step(x, y))
        return model, optimizer

    both.equal(program, exact=True)


class Recurrent(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.body, self.head = kind(4, 8, num_layers=2, batch_first=True), nn.Linear(8, 4)

    def forward(self, x):
        return self.head(self.body(x.unflatten(1, (-1, 4)))[0][:, -1])


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_keep_what_their_backward_needs(both, kind):
    def program(run):
        model = Recurrent(kind).to(run.device)
        optimizer = adamw(model)
        train_step = run.loop(model, optimizer).step(plain_step(model, optimizer))
        for x, y in batches(run.device):
            run.note(train_step(x, y))
        return model, optimizer

    both.equal(program, exact=both.device.type == "cpu")
