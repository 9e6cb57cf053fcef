"""Many trials of a search in one process: what was compiled for one trial is there for the next."""

import pytest
import torch
from compiling_models import one, rows, total
from test_batch_sizes import Graphs
from torch import nn

import hotloop
from hotloop import events as ev
from hotloop._torch import backends

RATES = [(1e-3, 0.0), (3e-3, 0.01), (1e-2, 0.1), (3e-2, 0.0), (1e-3, 0.05), (1e-4, 0.01)]


class Attention(nn.Module):
    """Keeps its dropout as a plain number and a setting of torch's function, as transformers' attention does."""

    def __init__(self, p=0.0):
        super().__init__()
        self.project, self.attention_dropout = nn.Linear(8, 24), p

    def forward(self, x):
        query, key, value = self.project(x).reshape(-1, 1, 8, 3).unbind(-1)
        dropout = self.attention_dropout if self.training else 0.0
        return nn.functional.scaled_dot_product_attention(query, key, value, dropout_p=dropout).squeeze(1)


class Weighted(nn.Module):
    """A loss whose class weights differ from trial to trial."""

    def __init__(self, weight):
        super().__init__()
        self.register_buffer("weight", torch.tensor([weight]))

    def forward(self, logits):
        return nn.functional.binary_cross_entropy_with_logits(logits, logits.gt(0).to(logits.dtype), self.weight)


@pytest.fixture
def graphs(monkeypatch):
    found = Graphs()
    monkeypatch.setattr(backends, "aot_eager", lambda: found)
    return found


def network(p=0.1):
    return nn.Sequential(nn.Linear(8, 8), nn.Dropout(p), nn.Linear(8, 8))


def compiled_in(events):
    return sum(isinstance(event, ev.Compiled) for event in events)


def by_hand(model, batch, rate, decay, steps=3):
    """A trial as one writes it around `hotloop.compile`; gives the component's status."""
    hotloop.compile(model, "aot_eager")
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=decay)
    warm_up = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=1 + round(100 * decay))
    for seed in range(steps):
        total(model(rows(batch, seed=seed))).backward()
        optimizer.step()
        optimizer.zero_grad()
        warm_up.step()
    status = one(model)
    assert (status.state, status.frames_compiled, status.frames_eager) == ("compiled", steps, 0)
    return status


def by_loop(model, batch, rate, decay, steps=12):
    """A trial whose step a loop owns; gives its status."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=decay, fused=True)
    with hotloop.Loop(model, optimizer, run="aot_eager", sentinel=None) as loop:

        @loop.step
        def step(x):
            loss = total(model(x))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        for seed in range(steps):
            step(rows(batch, seed=seed))
        status = loop.status()
    assert status.tier == "aot_eager", status
    assert not status.undone
    return status


TRIALS = pytest.mark.parametrize("trial", [by_hand, by_loop])


@TRIALS
def test_rate_decay_and_warm_up_compile_nothing_after_the_first_trial(trial, graphs):
    with hotloop.watch() as events:
        for number, (rate, decay) in enumerate(RATES):
            model = network()
            kind, names = type(model), list(model.state_dict())
            trial(model, 4, rate, decay)
            assert (type(model), list(model.state_dict())) == (kind, names)  # the model is the user's own, as before
            assert compiled_in(events) == 1, number
    assert graphs.made == [4]


def test_loss_weights_compile_nothing_after_the_first_trial(graphs):
    with hotloop.watch() as events:
        for weight in (0.5, 1.0, 2.0, 3.5):
            loss = hotloop.compile(Weighted(weight), "aot_eager")
            for seed in range(2):
                logits = rows(seed=seed).requires_grad_()
                loss(logits).backward()
            assert one(loss).state == "compiled"
            assert compiled_in(events) == 1


@TRIALS
def test_each_batch_size_compiles_once_static(trial, graphs):
    """Six sizes in nine trials: one size must not make the code of another dynamic, or find a limit."""
    sizes = [16, 32, 64, 16, 8, 32, 128, 4, 64]
    for size in sizes:
        trial(network(), size, 1e-3, 0.0)
    assert graphs.made == [16, 32, 64, 8, 128, 4]
    assert None not in graphs.made
    assert all(graphs.made[number] == size for number, size in graphs.ran)


@pytest.mark.campaign
@TRIALS
@pytest.mark.parametrize("kind", [network, Attention])
def test_each_dropout_value_compiles_once_and_the_twentieth_trial_is_compiled(kind, trial, graphs):
    values = [number / 40 for number in range(20 if trial is by_hand else 10)]  # torch's limit is 8
    for value in (*values, *values[:3]):
        trial(kind(value), 4, 1e-3, 0.0)
    assert len(graphs.made) == len(values)
