"""Learning rates and other settings that change between steps are in force in the very next one, replayed or not."""

from __future__ import annotations

import copy

import pytest
import torch
from step_programs import PROVING, STEPS, Classifier, batches, plain_step
from torch.optim import lr_scheduler


def warm_up(optimizer):
    return lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 16))


def cosine(optimizer):
    return lr_scheduler.CosineAnnealingLR(optimizer, T_max=16)


def warm_up_then_cosine(optimizer):
    first = lr_scheduler.LinearLR(optimizer, start_factor=0.125, total_iters=8)
    return lr_scheduler.SequentialLR(optimizer, [first, cosine(optimizer)], milestones=[8])


def plateau(optimizer):
    return lr_scheduler.ReduceLROnPlateau(optimizer, patience=1, factor=0.5)


def training(schedule, make, **settings):
    """A program whose schedule steps after every step."""

    def program(run):
        model = Classifier().to(run.device)
        optimizer = make(model)
        scheduler = schedule(optimizer)
        train_step = run.loop(model, optimizer, **settings).step(plain_step(model, optimizer))
        rates = []
        for number, (x, y) in enumerate(batches(run.device)):
            run.note(train_step(x, y))
            scheduler.step(*[float(number)] * isinstance(scheduler, lr_scheduler.ReduceLROnPlateau))
            rates += [group["lr"] for group in optimizer.param_groups]
        return {"model": model, "optimizer": optimizer, "scheduler": scheduler.state_dict(), "rates": rates}

    return program


def adamw(model, **settings):
    return torch.optim.AdamW(model.parameters(), lr=2**-5, **settings)


@pytest.mark.parametrize("schedule", [warm_up, cosine, warm_up_then_cosine, plateau])
@pytest.mark.filterwarnings("ignore:The epoch parameter in `scheduler.step:UserWarning")
def test_a_schedule_is_followed_by_a_step_that_is_replayed(both, schedule):
    run = both.equal(training(schedule, adamw))
    assert run.calls() == PROVING
    assert run.dropped == []


@pytest.mark.parametrize("kind", ["betas", "momentum"])
def test_one_cycle_moves_the_optimizer_outside_and_the_rest_stays_captured(both, kind):
    """Its betas or momentum change at every step, which a recording would freeze."""

    def make(model):
        if kind == "betas":
            return adamw(model)
        return torch.optim.SGD(model.parameters(), lr=2**-5, momentum=0.9)

    def one_cycle(optimizer):
        return lr_scheduler.OneCycleLR(optimizer, max_lr=0.125, total_steps=2 * STEPS)

    def program(run):
        model = Classifier().to(run.device)
        optimizer = make(model)
        scheduler = one_cycle(optimizer)
        train_step = run.loop(model, optimizer).step(plain_step(model, optimizer))
        for x, y in batches(run.device, 2 * STEPS - 1):
            run.note(train_step(x, y))
            scheduler.step()
        return model, optimizer, scheduler

    run = both.equal(program)
    assert run.outside == ("optimizer",)
    assert len(run.dropped) <= 3
    assert any(kind in reason for reason in run.dropped)


CHANGES = {
    "weight_decay": (0.5, "AdamW"),
    "betas": ((0.5, 0.75), "Adam"),
    "eps": (0.125, "AdamW"),
    "momentum": (0.25, "SGD"),
    "nesterov": (True, "SGD"),
    "maximize": (True, "SGD"),
    "lr": (0.125, "SGD"),
    "dampening": (0.5, "SGD"),
}


@pytest.mark.parametrize("setting", CHANGES)
def test_a_changed_setting_is_in_force_in_the_very_next_step(both, setting):
    value, kind = CHANGES[setting]

    def program(run):
        model = Classifier().to(run.device)
        own = {"momentum": 0.5} if kind == "SGD" else {}
        optimizer = getattr(torch.optim, kind)(model.parameters(), lr=2**-6, fused=True, **own)
        train_step = run.loop(model, optimizer).step(plain_step(model, optimizer))
        after = []
        for number, (x, y) in enumerate(batches(run.device, 24)):
            if number == 12:
                optimizer.param_groups[0][setting] = value
            run.note(train_step(x, y))
            after += [one.detach().clone() for one in model.parameters()] if number in (11, 12, 13) else []
        return model, optimizer, after

    run = both.equal(program, exact=True)
    assert run.calls() == (PROVING if setting == "lr" else 2 * PROVING - 1)
    assert [setting in reason for reason in run.dropped] == ([] if setting == "lr" else [True])


@pytest.mark.parametrize("flags", [{}, {"fused": True}, {"foreach": True}, {"foreach": False}])
def test_groups_and_checkpoints_keep_python_values(both, flags):
    """What a capture needs (fused kernels, rates in device tensors) is on loan while it is recorded, and no longer."""
    seen = []

    def program(run):
        model = Classifier().to(run.device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=2**-5, **flags)
        train_step = run.loop(model, optimizer).step(plain_step(model, optimizer))
        groups, checkpoints = [], []
        for x, y in batches(run.device):
            run.note(train_step(x, y))
            groups.append({key: one for key, one in optimizer.param_groups[0].items() if key != "params"})
            checkpoints.append(copy.deepcopy(optimizer.state_dict()))
        seen.append(groups)
        return {"model": model, "optimizer": optimizer, "groups": groups, "checkpoints": checkpoints}

    both.equal(program, exact=flags == {"fused": True})
    for groups in seen:
        assert {type(group["lr"]) for group in groups} == {float}
        assert [(one["fused"], one["foreach"], one["capturable"]) for one in groups] == [
            (flags.get("fused"), flags.get("foreach"), False)
        ] * STEPS


def test_a_run_can_go_on_from_a_checkpoint_that_a_captured_run_made(both):
    """The second half is eager in both runs: what the captured first half left is all that it needs."""

    def program(run):
        model = Classifier().to(run.device)
        optimizer = adamw(model, fused=True)
        train_step = run.loop(model, optimizer).step(plain_step(model, optimizer))
        data = list(batches(run.device, 2 * STEPS))
        for x, y in data[:STEPS]:
            run.note(train_step(x, y))
        model_2 = Classifier().to(run.device)
        optimizer_2 = adamw(model_2, fused=True)
        model_2.load_state_dict(model.state_dict())
        optimizer_2.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        go_on = plain_step(model_2, optimizer_2)
        for x, y in data[STEPS:]:
            go_on(x, y)
        return model, optimizer, model_2, optimizer_2

    both.equal(program, exact=True)
