"""A recipe with an average of its weights: judged and resumed as it ran; and what a goal says."""

import signal

import pytest
import torch
from training_fixtures import load, overrides

from hotloop.errors import ConfigError
from hotloop.recipes import criteria
from hotloop.train import checkpoint, configure, fit, start
from hotloop.train.goal import Goal


@pytest.fixture
def train(tmp_path):
    """Train a small one into ``folder``."""

    def run(*settings, folder="run"):
        return criteria.train(start.prepare([*overrides(tmp_path), f"run.folder={tmp_path / folder}", *settings]))

    return run


@pytest.mark.parametrize("decay", ["null", "0.5"])
def test_a_checkpoint_is_judged_as_the_run_judged_it(tmp_path, train, decay):
    outcome = train(f"training.ema_decay={decay}")
    kept = load(tmp_path / "run", "best.pt")
    assert ("model.average" in kept["others"]) == (decay != "null")
    judged = criteria.evaluate(configure.from_dict(kept["settings"]), checkpoint.weights(kept))
    assert judged == pytest.approx(outcome.best, rel=1e-5)


def test_an_average_that_was_interrupted_and_resumed_is_the_one_that_was_not(tmp_path, train, monkeypatch):
    train("training.ema_decay=0.5", folder="whole")
    whole = fit._Fitting.step

    def acting(self, batches):
        whole(self, batches)
        if self.position.step == 4:
            signal.raise_signal(signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(fit._Fitting, "step", acting)
        assert train("training.ema_decay=0.5").status == "interrupted"
    criteria.train(start.prepare([f"run.resume={tmp_path / 'run'}"]))
    ours, theirs = load(tmp_path / "run"), load(tmp_path / "whole")
    assert ours["position"] == theirs["position"]
    for read in (checkpoint.weights, lambda kept: kept["model"]):
        first, second = (read(one)["model"] for one in (ours, theirs))
        assert first.keys() == second.keys()
        assert all(torch.equal(first[key], second[key]) for key in first)


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
