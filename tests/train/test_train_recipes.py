"""The recipe `digits`: what it learns from, that it learns, and that it is resumed and compiled."""

import json
import signal

import pytest
import torch
from training_fixtures import load

from hotloop import record
from hotloop.errors import ConfigError
from hotloop.recipes import digits
from hotloop.train import checkpoint, configure, fit, start
from hotloop.train.goal import Goal
from hotloop.train.search import preparing

SMALL = {
    "digits": ["digits.hidden_size=16", "digits.layers=1", "digits.heads=2", "digits.patch_size=4", "training.num_epochs=2",
               "training.learning_rate=0.01", "data.sample_size=400"],
}  # fmt: skip


@pytest.fixture
def train(tmp_path):
    """Train a small one into ``folder``."""

    def run(*settings, folder="run"):
        begun = start.prepare(["recipe=digits", *SMALL["digits"], f"run.folder={tmp_path / folder}", *settings])
        return digits.train(begun)

    return run


@pytest.mark.parametrize("decay", ["null", "0.5"])
def test_a_recipe_learns_and_a_checkpoint_is_judged_as_the_run_judged_it(tmp_path, train, decay):
    outcome = train(f"training.ema_decay={decay}")
    document = record.load(tmp_path / "run")
    assert document["steps"][-1]["loss"] < document["steps"][0]["loss"]
    goal = digits.GOAL
    of = (max if goal.maximize else min)(one[goal.metric] for one in document["metrics"])
    assert outcome.best[goal.metric] == of
    assert set(outcome.best) == set(preparing.METRICS["digits"])
    kept = load(tmp_path / "run", "best.pt")
    assert ("model.average" in kept["others"]) == (decay != "null")
    judged = digits.evaluate(configure.from_dict(kept["settings"]), checkpoint.weights(kept))
    assert judged == pytest.approx(outcome.best, rel=1e-5)
    assert any(word in line for line in outcome.remarks for word in ("nearest neighbour",))
    assert json.dumps(document["measurements"]).count("baseline_") >= 1


@pytest.mark.campaign
def test_a_recipe_interrupted_and_resumed_is_the_one_that_was_not(tmp_path, train, monkeypatch):
    train("training.ema_decay=0.5", folder="whole")
    whole = fit._Fitting.step

    def acting(self, batches):
        whole(self, batches)
        if self.position.step == 4:
            signal.raise_signal(signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(fit._Fitting, "step", acting)
        assert train("training.ema_decay=0.5").status == "interrupted"
    digits.train(start.prepare([f"run.resume={tmp_path / 'run'}"]))
    ours, theirs = load(tmp_path / "run"), load(tmp_path / "whole")
    assert ours["position"] == theirs["position"]
    for first, second in zip(*(checkpoint.weights(one)["model"].items() for one in (ours, theirs)), strict=True):
        assert first[0] == second[0]
        assert torch.equal(first[1], second[1])
    assert all(torch.equal(tensor, theirs["model"]["model"][key]) for key, tensor in ours["model"]["model"].items())


@pytest.mark.campaign
def test_a_recipe_runs_compiled_without_a_graph_break_or_a_recompile(tmp_path, train):
    on = ["training.optimization.use_torch_compile=true", "compile.preset=aot_eager", "compile.fullgraph=true"]
    outcome = train(*on, "training.max_steps=6", "compile.measure_eager_steps=0")
    assert outcome.components["model"]["state"] == "compiled"
    assert outcome.components["model"]["modes"]["training"]["compiles"] == 1
    assert (outcome.components["model"]["recompiles"], outcome.components["model"]["graph_breaks"]) == (0, 0)


def test_digits_are_as_frequent_on_both_sides_and_no_image_is_on_both():
    images = digits.load_images(configure.load(["recipe=digits"]))
    assert not set(images.train.tolist()) & set(images.validation.tolist())
    assert (len(images.digits), float(images.pixels.min()), float(images.pixels.max())) == (1797, -1.0, 1.0)
    shares = [torch.bincount(images.digits[side]).float() / len(side) for side in (images.train, images.validation)]
    assert float((shares[0] - shares[1]).abs().max()) < 0.01


def test_a_recipe_brings_its_defaults_and_the_user_has_the_last_word():
    chosen = configure.load(["recipe=digits"])
    assert (chosen.training.num_epochs, chosen.data.sample_size, chosen.model.dropout) == (30, None, 0.1)
    assert configure.load(["recipe=digits", "training.num_epochs=2"]).training.num_epochs == 2
    assert configure.load(["training=default", "recipe=digits"]).training.num_epochs == 1


@pytest.mark.parametrize(("goal", "cure"), [("acc", "accuracy"), ("wer", "<metric>")])
def test_a_goal_is_answered_with_a_metric_that_is_near_or_with_none(goal, cure):
    with pytest.raises(ConfigError, match=rf"Set: recipe\.goal=max:{cure}$"):
        Goal(goal).check(["train_loss", "accuracy"], "train.py:make")


def test_a_goal_knows_its_direction_and_that_nan_is_never_better():
    nan = float("nan")
    assert Goal("f1").better({"f1": 0.5}, {})
    assert Goal("f1").better({"f1": 0.5}, {"f1": 0.4})
    assert not Goal("loss", maximize=False).better({"loss": 0.5}, {"loss": 0.4})
    assert not Goal("f1").better({"f1": nan}, {})
    assert Goal("f1").better({"f1": 0.1}, {"f1": nan})
