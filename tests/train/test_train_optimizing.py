"""Optimizers, schedules and precisions by name."""

import inspect
import math
import typing

import pytest
import torch
from training_fixtures import load, losses

from hotloop import recipes, record
from hotloop.errors import ConfigError
from hotloop.train import checkpoint, configure, optimizing, start
from hotloop.train.parameters import Optimizer


def settings(**changed):
    """The settings of training, with some changed."""
    return configure.load([f"training.{name}={value}" for name, value in changed.items()]).training


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


def test_every_optimizer_of_torch_that_steps_by_gradients_alone_may_be_named():
    kinds = (
        one for one in vars(torch.optim).values() if isinstance(one, type) and "lr" in inspect.signature(one).parameters
    )
    named = {one.__name__ for one in kinds} - {"LBFGS", "SparseAdam"}
    assert named <= set(typing.get_args(Optimizer))
    for name in ("LBFGS", "SparseAdam", "sgd"):
        with pytest.raises(ConfigError, match=rf"training\.optimizer='{name}': Input should be .* or 'SGD'$"):
            settings(optimizer=name)


@pytest.mark.parametrize("name", typing.get_args(Optimizer))
def test_each_optimizer_steps(name):
    if not hasattr(torch.optim, name):
        pytest.skip(f"this torch has no {name}")
    weight, decay = torch.nn.Parameter(torch.ones(2, 2)), 0.0 if name == "Rprop" else 0.1
    named = settings(optimizer=name, weight_decay=decay)
    optimizer = optimizing.make_optimizer(named, [{"params": [weight], "weight_decay": decay}])
    weight.square().sum().backward()
    optimizer.step()
    assert not torch.equal(weight, torch.ones(2, 2))


OWN = """
import torch, hotloop

def make(size: int = 4, training: hotloop.Training = hotloop.Training(learning_rate=0.1)):
    x = torch.randn(24, size, generator=torch.Generator().manual_seed(0))
    model = torch.nn.Linear(size, 1)
    optimizer, average = training.make_optimizer(model), training.make_average(model)

    def step(x):
        loss = (model(x) - 1).square().mean()
        loss.backward()
        training.clip(model.parameters())
        optimizer.step()
        optimizer.zero_grad()
        if average is not None:
            average.update_parameters(model)
        return loss

    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x), batch_size=4, shuffle=True)
    state = [one for one in (training.make_rate(optimizer), average) if one is not None]
    return hotloop.Workload(model, optimizer, step, loader, state=state)
"""


@pytest.mark.parametrize("compiled", ["false", "auto"])
def test_a_program_that_asks_for_them_has_optimizer_schedule_clipping_and_average_by_name(tmp_path, compiled):
    (tmp_path / "own.py").write_text(OWN)

    def run(folder, *more):
        given = [] if more[0].startswith("run.resume") else [
            f"{tmp_path / 'own.py'}:make", f"run.folder={tmp_path / folder}", "program.training.schedule=linear",
            "program.training.warmup_fraction=0.25", "program.training.ema_decay=0.5", "training.num_epochs=2",
            "program.training.optimizer=SGD", "program.training.optimizer_options={momentum: 0.9}",
            "program.training.max_grad_norm=0.1", f"training.optimization.use_torch_compile={compiled}",
        ]  # fmt: skip
        begun = start.prepare([*given, *more])
        recipes.load(begun.settings.recipe.name).train(begun)
        return checkpoint.load(tmp_path / folder / "checkpoints" / "last.pt")

    whole = run("whole", "run.seed=0")
    steps = record.load(tmp_path / "whole")["steps"]
    rise, fall = [1 / 3, 2 / 3], [left / 9 for left in range(9, 0, -1)]
    assert [one["learning_rate"] for one in steps] == pytest.approx([0.1 * one for one in (*rise, 1, *fall)])
    assert whole["others"]["optimizer"]["param_groups"][0]["momentum"] == 0.9
    moved = [
        whole["others"]["state[1]"][f"module.{name}"] - whole["model"]["model"][name] for name in ("weight", "bias")
    ]
    assert all(one.abs().max() > 0 for one in moved)

    run("parts", "training.checkpoint_every_steps=1", "training.max_steps=5")
    parts = run("parts", f"run.resume={tmp_path / 'parts'}", "training.max_steps=null")
    again = record.load(tmp_path / "parts")["steps"]
    assert [one["learning_rate"] for one in again[5:]] == [one["learning_rate"] for one in steps[5:]]
    assert parts["others"]["state[0]"] == {"steps": 12}


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
    with pytest.raises(ConfigError, match=r"training\.optimizer=.* cannot change while a run is resumed"):
        start.prepare([f"run.resume={tmp_path / 'run'}", "training.optimizer=Adam"])


def test_parameters_are_in_bfloat16_where_that_is_asked_for(tmp_path, train):
    outcome = train(run__precision="bf16-true", training__num_epochs=1)
    assert {one.dtype for one in load(tmp_path / "run")["model"]["model"].values()} == {torch.bfloat16}
    assert 0 < outcome.best["auc"] <= 1
