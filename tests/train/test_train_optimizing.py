"""Optimizers, schedules and precisions by name."""

import math
import typing

import pytest
import torch
from test_train_fit import load, losses

from hotloop import record
from hotloop.errors import ConfigError
from hotloop.train import configure, optimizing, start
from hotloop.train.settings import TrainingSettings


def settings(**changed):
    """The settings of training, with some changed."""
    return configure.load([f"training.{name}={value}" for name, value in changed.items()]).training


def test_the_rate_rises_and_falls_linearly():
    factor = optimizing.schedule(settings(warmup_fraction=0.2), 10)
    assert [round(factor(step), 3) for step in range(11)] == [0.5, 1, 1, 0.875, 0.75, 0.625, 0.5, 0.375, 0.25, 0.125, 0]


def test_biases_and_norms_do_not_decay():
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.LayerNorm(3))
    decayed, others = optimizing.parameter_groups(model, 0.1)
    assert (decayed["weight_decay"], [p.ndim for p in decayed["params"]]) == (0.1, [2])
    assert (others["weight_decay"], [p.ndim for p in others["params"]]) == (0.0, [1, 1, 1])


@pytest.mark.parametrize("steps", [20, 37])
@pytest.mark.parametrize("fraction", [0.1, 0.3])
def test_one_cycle_is_torchs(steps, fraction):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    theirs = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, 1.0, total_steps=steps, pct_start=fraction, cycle_momentum=False
    )
    ours = optimizing.schedule(settings(schedule="one_cycle", warmup_fraction=fraction), steps)
    for step in range(steps):
        assert ours(step) == pytest.approx(theirs.get_last_lr()[0], rel=1e-6), step
        optimizer.step()
        if step < steps - 1:
            theirs.step()


@pytest.mark.parametrize(
    ("name", "at_half", "at_nine_tenths"),
    [("linear", 0.5, 0.1), ("cosine", 0.5, (1 - math.cos(0.1 * math.pi)) / 2), ("constant", 1, 1), ("wsd", 1, 0.5)],
)
def test_a_schedule_warms_up_and_goes_on_by_its_name(name, at_half, at_nine_tenths):
    factor = optimizing.schedule(settings(schedule=name, warmup_fraction=0.2), 125)
    assert factor(0) == pytest.approx(1 / 25)
    assert factor(25) == 1.0
    assert factor(75) == pytest.approx(at_half)
    assert factor(115) == pytest.approx(at_nine_tenths)
    assert factor(125) == (1 if name == "constant" else 0)


@pytest.mark.parametrize("name", typing.get_args(TrainingSettings.model_fields["optimizer"].annotation))
def test_each_optimizer_steps(name):
    weight = torch.nn.Parameter(torch.ones(2, 2))
    optimizer = optimizing.make_optimizer(settings(optimizer=name), [{"params": [weight], "weight_decay": 0.1}])
    weight.square().sum().backward()
    optimizer.step()
    assert not torch.equal(weight, torch.ones(2, 2))


def test_a_run_has_the_optimizer_the_schedule_and_the_precision_that_it_names(tmp_path, train):
    named = {
        "training__optimizer": "SGD", "training__optimizer_options": "{momentum: 0.9, fused: true}",
        "training__schedule": "wsd", "run__precision": "bf16-mixed", "training__max_steps": 10,
    }  # fmt: skip
    train(**named, training__warmup_fraction=0)
    (group, _) = load(tmp_path / "run")["others"]["optimizer"]["param_groups"]
    steps = record.load(tmp_path / "run")["steps"]
    assert (group["momentum"], group["fused"]) == (0.9, True)
    assert [one["learning_rate"] for one in steps] == pytest.approx([0.01] * 9 + [0.005])
    train(**{**named, "run__precision": "32-true"}, training__warmup_fraction=0, run__folder=tmp_path / "other")
    assert losses(tmp_path / "run") != losses(tmp_path / "other")
    with pytest.raises(
        ConfigError, match=r"training\.optimizer cannot change while a run is resumed .* state of the for"
    ):
        start.prepare([f"run.resume={tmp_path / 'run'}", "training.optimizer=Adam"])


def test_options_that_an_optimizer_does_not_take_are_refused_by_their_setting(train):
    with pytest.raises(
        ConfigError, match=r"training\.optimizer_options=\{'momentum': 0\.9\}: .*of torch\.optim\.AdamW"
    ):
        train(training__optimizer_options="{momentum: 0.9}")


def test_a_precision_and_the_short_form_of_another_are_refused(train):
    with pytest.raises(
        ConfigError, match=r"run\.precision=16-mixed and .*use_bf16=true, which is short for bf16-mixed"
    ):
        train(run__precision="16-mixed", training__optimization__use_bf16="true")


def test_parameters_are_in_bfloat16_where_that_is_asked_for(tmp_path, train):
    outcome = train(run__precision="bf16-true", training__num_epochs=1)
    assert {one.dtype for one in load(tmp_path / "run")["model"]["model"].values()} == {torch.bfloat16}
    assert 0 < outcome.best["auc"] <= 1
