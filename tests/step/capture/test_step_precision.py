"""Autocast and gradient scaling."""

from __future__ import annotations

import functools

import pytest
import torch
from step_programs import PROVING, Classifier, Writer, batches, sentences
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
