"""State beside the model that a step moves: averages, counters in tensors, a second model."""

from __future__ import annotations

import pytest
import torch
from step_programs import PROVING, Classifier, Pictures, batches, images, plain_step
from torch.nn import functional as F
from torch.optim import swa_utils


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=2**-5, fused=True)


class Average:
    """A hand-written one: a dict of tensors, moved in place."""

    def __init__(self, model):
        self.decay = 0.75
        self.shadow = {name: one.detach().clone() for name, one in model.named_parameters()}

    @torch.no_grad()
    def update(self, model):
        for name, one in model.named_parameters():
            self.shadow[name].lerp_(one, 1 - self.decay)

    def state_dict(self):
        return {"decay": self.decay, **self.shadow}


def averaging(make, *, listed, model=Classifier, data=batches, **settings):
    def program(run):
        live = model().to(run.device)
        optimizer = adamw(live)
        average = make(live)
        update = getattr(average, "update", None) or average.update_parameters

        @run.loop(live, optimizer, **({"state": average} if listed else {}), **settings).step
        def train_step(x, y):
            loss = F.cross_entropy(live(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            update(live)
            return loss

        for x, y in data(run.device, 24):
            run.note(train_step(x, y))
        return live, optimizer, average

    return program


@pytest.mark.parametrize("listed", [True, False])
def test_a_hand_written_average_updated_in_the_step(both, listed):
    assert both.equal(averaging(Average, listed=listed), exact=True).calls() == PROVING


def device_of(model):
    """Without a device an average counts on the host: see test_step_averages.py."""
    return next(model.parameters()).device


def moving(model):
    return swa_utils.AveragedModel(model, device_of(model), multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.75))


def moving_with_buffers(model):
    ema = swa_utils.get_ema_multi_avg_fn(0.75)
    return swa_utils.AveragedModel(model, device_of(model), multi_avg_fn=ema, use_buffers=True)


def equally(model):
    return swa_utils.AveragedModel(model, device_of(model))


@pytest.mark.parametrize("make", [moving, moving_with_buffers, equally])
def test_torchs_averaged_model_updated_in_the_step_is_captured(both, make):
    both.equal(averaging(make, listed=True, model=Pictures, data=images), exact=True)


class Unbiased(Pictures):
    """Compiled code rounds otherwise, and the gradient of a bias before a BatchNorm is nothing but rounding."""

    def __init__(self):
        super().__init__()
        self.first = torch.nn.Conv2d(2, 4, 3, padding=1, bias=False)


@pytest.mark.parametrize("make", [moving, moving_with_buffers])
def test_torchs_averaged_model_is_captured_with_compiled_code_too(both, make):
    """Compiled code is proven from the first step on, in which the average is a copy: that shows once."""
    program = averaging(make, listed=True, model=Unbiased, data=images)
    run = both.alike(program, asked="aot_eager+graph")
    assert not run.declined, run.declined
    assert run.status().tier == "aot_eager+graph"
    assert run.replays() > 6


def test_an_average_updated_outside_the_step(both):
    def program(run):
        model = Classifier().to(run.device)
        optimizer = adamw(model)
        average = moving(model)
        train_step = run.loop(model, optimizer).step(plain_step(model, optimizer))
        for x, y in batches(run.device):
            run.note(train_step(x, y))
            average.update_parameters(model)
        return model, optimizer, average

    assert both.equal(program, exact=True).calls() == PROVING


def test_tensors_of_nobody_that_the_step_writes_are_found(both):
    """A running mean and a queue of keys in plain tensors: proofs must not count twice."""

    def program(run):
        model = Classifier().to(run.device)
        optimizer = adamw(model)
        mean, steps = torch.zeros((), device=run.device), torch.zeros((), dtype=torch.long, device=run.device)
        queue = torch.zeros(24, 4, device=run.device)

        @run.loop(model, optimizer).step
        def train_step(x, y):
            logits = model(x)
            loss = F.cross_entropy(logits, y) + (logits @ queue.T).logsumexp(1).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            mean.lerp_(loss.detach(), 0.125)
            steps.add_(1)
            queue.copy_(torch.cat([queue[6:], logits.detach()]))
            return loss, steps.clone()

        for x, y in batches(run.device):
            run.note(train_step(x, y))
        return {"model": model, "optimizer": optimizer, "mean": mean, "steps": steps, "queue": queue}

    run = both.equal(program, exact=True)
    assert run.calls() == PROVING


def test_a_loop_can_be_saved_and_go_on(both):
    def program(run):
        model = Classifier().to(run.device)
        optimizer = adamw(model)
        first = run.loop(model, optimizer)
        train_step = first.step(plain_step(model, optimizer))
        data = list(batches(run.device, 40))
        for x, y in data[:20]:
            run.note(train_step(x, y))
        saved = first.owner.state_dict() if first.owner is not None else {}
        if first.owner is not None:
            first.owner.close()
        second = run.loop(model, optimizer)
        if second.owner is not None:
            second.owner.load_state_dict(saved)
            assert second.owner.steps == 20
        train_step = second.step(plain_step(model, optimizer))
        for x, y in data[20:]:
            run.note(train_step(x, y))
        return model, optimizer

    run = both.alike(program, exact=True)
    assert run.replays() == 2 * 14
    assert run.status(1).step == 40
