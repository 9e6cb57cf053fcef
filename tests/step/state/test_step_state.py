"""State beside the model that a step moves: averages, counters in tensors, a second model."""

from __future__ import annotations

import pytest
import torch
from step_programs import PROVING, Classifier, Pictures, batches, images, plain_step
from torch import nn
from torch.nn import functional as F
from torch.optim import swa_utils

from hotloop.step.state.holdings import Holdings


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


class AverageRebound(Average):
    """One that binds new tensors at every update, as many are written."""

    @torch.no_grad()
    def update(self, model):
        for name, one in model.named_parameters():
            self.shadow[name] = self.decay * self.shadow[name] + (1 - self.decay) * one.detach()


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
def test_torchs_averaged_model_that_is_not_listed_is_eagers(both, make):
    """Its update asks on the host whether it is the first: the capture is declined with that line."""
    program = averaging(make, listed=False, model=Pictures, data=images)
    run = both.alike(program, exact=True)
    assert "read on the host" in run.declined[0].reason
    assert "update(live)" in run.declined[0].source


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


@pytest.mark.parametrize("listed", [True, False])
def test_an_average_that_binds_new_tensors_is_eagers(both, listed):
    run = both.alike(averaging(AverageRebound, listed=listed), exact=True)
    assert run.replays() == 0
    assert run.declined


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


def test_a_teacher_named_as_state_moves_with_the_step(both):
    """As in self-distillation: the teacher follows the student, and its output is the target."""

    def program(run):
        student, teacher = Classifier().to(run.device), Classifier().to(run.device).requires_grad_(False)
        teacher.load_state_dict(student.state_dict())
        optimizer = adamw(student)

        @run.loop(student, optimizer, state=[teacher]).step
        def train_step(x, y):
            with torch.no_grad():
                target = teacher(x).softmax(1)
            loss = F.cross_entropy(student(x), y) + F.cross_entropy(student(x + 0.125), target)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                for theirs, ours in zip(teacher.parameters(), student.parameters(), strict=True):
                    theirs.lerp_(ours, 0.25)
            return loss

        for x, y in batches(run.device):
            run.note(train_step(x, y))
        return student, teacher, optimizer

    both.equal(program, exact=True)


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


def test_a_trained_tensor_that_no_module_holds(both):
    def program(run):
        model = Classifier().to(run.device)
        prompt = nn.Parameter(torch.zeros(8, device=run.device))
        optimizer = torch.optim.AdamW([*model.parameters(), prompt], lr=2**-5, fused=True)

        @run.loop(model, optimizer).step
        def train_step(x, y):
            loss = F.cross_entropy(model(x + prompt), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        for x, y in batches(run.device):
            run.note(train_step(x, y))
        return {"model": model, "optimizer": optimizer, "prompt": prompt}

    both.equal(program, exact=True)


def test_a_metric_that_adds_up_in_tensors(both):
    class Accuracy:
        def __init__(self, device):
            self.right, self.all = torch.zeros((), device=device), torch.zeros((), device=device)

        def add(self, logits, y):
            self.right += (logits.argmax(1) == y).sum()
            self.all += y.numel()

    def program(run):
        model = Classifier().to(run.device)
        optimizer = adamw(model)
        accuracy = Accuracy(run.device)

        @run.loop(model, optimizer).step
        def train_step(x, y):
            logits = model(x)
            loss = F.cross_entropy(logits, y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            accuracy.add(logits.detach(), y)
            return loss

        for x, y in batches(run.device):
            run.note(train_step(x, y))
        return {"model": model, "right": accuracy.right, "all": accuracy.all}

    both.equal(program, exact=True)


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


def test_what_a_program_holds_is_looked_for_once_while_nothing_is_rebound(monkeypatch):
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    held = Holdings({"model": model}, {"optimizer": adamw(model)})
    walks = {"parameters": 0, "buffers": 0}
    for kind in walks:
        plain = getattr(nn.Module, f"named_{kind}")

        def counted(self, *given, kind=kind, plain=plain, **more):
            walks[kind] += 1
            return plain(self, *given, **more)

        monkeypatch.setattr(nn.Module, f"named_{kind}", counted)
    with held.still():
        held.objects().clear()  # what is given is the caller's own
        assert len(held.tensors()) == 4 + 3
        assert len(held.buffers()) == 3
        assert held.gradients().keys() == held.parameters().keys() == {"0.weight", "0.bias", "1.weight", "1.bias"}
    assert walks == {"parameters": 1, "buffers": 1}
    model.append(nn.Linear(2, 2))
    assert len(held.parameters()) == 6
    assert "parameter 2.weight" in held.tensors()
