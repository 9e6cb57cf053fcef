"""Autocast and gradient scaling."""

from __future__ import annotations

import functools
import math

import pytest
import torch
from step_programs import GRAPH, PROVING, STEPS, Classifier, Writer, batches, sentences
from torch import nn
from torch.nn import functional as F


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=2**-6, fused=True)


@pytest.mark.parametrize("where", ["inside", "around the call", "decorating"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(both, where, dtype):
    """Its cache of cast weights would freeze them in a recording."""

    def program(run):
        model = Writer().to(run.device)
        optimizer = adamw(model)
        cast = torch.autocast(run.device.type, dtype)

        def forward(ids):
            logits = model(ids[:, :-1])
            return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())

        if where == "decorating":
            forward = cast(forward)

        def train_step(ids):
            if where == "inside":
                with torch.autocast(ids.device.type, dtype):
                    loss = forward(ids)
            else:
                loss = forward(ids)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        train_step = run.loop(model, optimizer).step(train_step)
        for ids in sentences(run.device):
            if where == "around the call":
                with torch.autocast(run.device.type, dtype):
                    run.note(train_step(ids))
            else:
                run.note(train_step(ids))
        return model, optimizer

    assert both.equal(program, exact=True).calls() == PROVING


def test_a_weight_used_twice_under_autocast_is_cast_anew_in_each_replay(both):
    def program(run):
        model = Writer().to(run.device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5, fused=True)

        @run.loop(model, optimizer).step
        def train_step(ids):
            with torch.autocast(ids.device.type, torch.bfloat16):
                once, twice = model(ids), model(ids.flip(1))
                loss = F.cross_entropy(once.flatten(0, 1), ids.flatten()) + twice.float().square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        for ids in sentences(run.device):
            run.note(train_step(ids))
        return model, optimizer

    both.equal(program, exact=True)


def test_parameters_in_bfloat16(both):
    def program(run):
        model = Writer().to(run.device, torch.bfloat16)
        optimizer = adamw(model)

        @run.loop(model, optimizer).step
        def train_step(ids):
            logits = model(ids[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        for ids in sentences(run.device):
            run.note(train_step(ids))
        return model, optimizer

    both.equal(program, exact=True)


def scaled(step_of, *, fused=True, kind=torch.optim.AdamW, overflow=(), listed=True, steps=24, **settings):
    """A program with a GradScaler; at the given steps a batch holds an infinity, so that the step is skipped."""

    def program(run):
        model = Classifier().to(run.device)
        optimizer = kind(model.parameters(), lr=2**-6, **({"fused": fused} if kind is torch.optim.AdamW else {}))
        scaler = torch.amp.GradScaler(run.device.type, init_scale=2.0**8, growth_interval=5, **settings)
        state = {"state": scaler} if listed else {}
        train_step = run.loop(model, optimizer, **state).step(step_of(model, optimizer, scaler))
        scales, weights = [], []
        for number, (x, y) in enumerate(batches(run.device, steps)):
            if number in overflow:
                x[0, 0] = float("inf")
            run.note(train_step(x, y))
            scales.append(scaler.get_scale())
            weights.append(model.head.weight.detach().clone())
        return {"model": model, "optimizer": optimizer, "scaler": scaler, "scales": scales, "weights": weights}

    return program


def with_unscaling(model, optimizer, scaler, *, half=True):
    def train_step(x, y):
        with torch.autocast(x.device.type, torch.float16, enabled=half):
            loss = F.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        return loss

    return train_step


def without_unscaling(model, optimizer, scaler, *, half=True):
    def train_step(x, y):
        with torch.autocast(x.device.type, torch.float16, enabled=half):
            loss = F.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        return loss

    return train_step


@pytest.mark.parametrize("overflow", [(), (10,), (13, 14), (2, 4)], ids=str)
@pytest.mark.parametrize("step_of", [without_unscaling, with_unscaling])
def test_a_scaler_with_a_fused_optimizer(both, step_of, overflow):
    """The optimizer's own kernel skips a step whose gradients overflow, in survey, proof and replay."""
    run = both.equal(scaled(step_of, overflow=overflow), exact=True)
    assert run.calls() == PROVING
    assert run.outside == ()


def test_a_scaler_that_was_not_named_is_found(both):
    both.equal(scaled(without_unscaling, listed=False, overflow=(11,)), exact=True)


def test_the_scale_grows_in_replays(both):
    run = both.equal(scaled(without_unscaling, steps=32), exact=True)
    assert run.loops[0].context.holdings.state[0].get_scale() == 2.0**14


def test_a_scaler_that_is_switched_off(both):
    both.equal(scaled(with_unscaling, enabled=False), exact=True)


@pytest.mark.parametrize("overflow", [(), (0, 1, 2), (10,), (13, 14), (2, 4)], ids=str)
@pytest.mark.parametrize("step_of", [without_unscaling, with_unscaling])
def test_a_scaler_with_an_optimizer_that_is_not_fused(both, step_of, overflow):
    """The recording steps in any case, and puts back what an overflow wrote."""
    # In float32: a recording's fused kernel rounds otherwise than eager's, which float16 would magnify.
    run = both.equal(scaled(functools.partial(step_of, half=False), fused=None, overflow=overflow, steps=28))
    assert run.replays() >= 14
    assert run.outside == ()


@pytest.mark.parametrize("overflow", [(), (0, 1), (10,), (13, 14)], ids=str)
def test_a_scaler_skips_the_step_of_an_optimizer_beside_the_recording(both, overflow):
    run = both.equal(scaled(with_unscaling, kind=torch.optim.Adagrad, overflow=overflow, steps=28), exact=True)
    assert run.replays() >= 14
    assert run.outside == ("optimizer",)


def test_two_optimizers_under_one_scaler(both):
    """One overflows, the other steps; one is recorded, the other runs beside the recording."""

    def program(run):
        model = Classifier().to(run.device)
        head = torch.optim.AdamW(model.head.parameters(), lr=2**-6)
        rest = torch.optim.Adagrad([one for one in model.parameters() if one not in {*model.head.parameters()}])
        scaler = torch.amp.GradScaler(run.device.type, init_scale=2.0**8, growth_interval=5)

        @run.loop(model, [head, rest], state=scaler).step
        def train_step(x, y):
            loss = F.cross_entropy(model(x), y)
            scaler.scale(loss).backward()
            for optimizer in (head, rest):
                scaler.unscale_(optimizer)
                scaler.step(optimizer)
                optimizer.zero_grad()
            scaler.update()
            return loss

        scales = []
        for number, (x, y) in enumerate(batches(run.device, 28)):
            if number in (9, 17, 18):
                x[0, 0] = float("inf")
            run.note(train_step(x, y))
            scales.append(scaler.get_scale())
        return {"model": model, "head": head, "rest": rest, "scaler": scaler, "scales": scales}

    run = both.equal(program)
    assert run.replays() >= 14
    assert len(run.outside) == 1


def test_reading_the_scale_inside_the_step_declines(both):
    def reading(model, optimizer, scaler):
        step = without_unscaling(model, optimizer, scaler)

        def train_step(x, y):
            loss = step(x, y)
            return loss, scaler.get_scale()

        return train_step

    run = both.alike(scaled(reading, steps=STEPS), exact=True)
    assert run.declined
    assert run.replays() == 0


def capturing():
    """As code asks that runs with any build of torch."""
    try:
        return torch.cuda.is_current_stream_capturing()
    except RuntimeError:
        return False


def test_a_step_whose_dropout_takes_another_kernel_while_captured_is_compared_with_that(both, caplog):
    """As transformers does where a mask may not be looked at: another attention kernel draws other dropout masks."""
    caplog.set_level("INFO", logger="hotloop")

    def program(run):
        model = Classifier(dropout=0.25).to(run.device)
        optimizer = adamw(model)

        @run.loop(model, optimizer).step
        def train_step(x, y):
            if capturing():
                torch.rand(3, device=x.device)  # what follows draws from another place
            else:
                x.sum().item()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        for x, y in batches(run.device):
            run.note(train_step(x, y))
        return model, optimizer

    run, _ = both.run(program, GRAPH)
    assert not run.declined
    assert run.status().tier == GRAPH
    assert run.replays() == STEPS - 8
    assert "takes another path while it is captured" in caplog.text


@pytest.mark.parametrize("dropout", [0.0, 0.25])
@pytest.mark.parametrize("what", ["loss", "gradients"])
def test_a_step_that_computes_something_else_while_captured_is_declined(both, dropout, what):
    """That it draws random numbers as well is no excuse."""

    def program(run):
        model = Classifier(dropout=dropout).to(run.device)
        optimizer = adamw(model)

        @run.loop(model, optimizer).step
        def train_step(x, y):
            scale = 0.5 if capturing() or x.sum().item() == math.inf else 1.0
            loss = F.cross_entropy(model(x), y) * (scale if what == "loss" else 1.0)
            loss.backward()
            if what == "gradients":
                for parameter in model.parameters():
                    parameter.grad.mul_(0.0 if capturing() else 1.0)
            optimizer.step()
            optimizer.zero_grad()
            return loss

        for x, y in batches(run.device):
            run.note(train_step(x, y))
        return model, optimizer

    run, _ = both.run(program, GRAPH)
    assert "does not repeat itself" in run.declined[0].reason
