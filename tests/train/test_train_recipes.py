"""The recipe `digits`: what it learns from, that it learns, and that it is resumed and compiled."""

import json
import signal

import pytest
import torch

from hotloop import record
from hotloop.errors import ConfigError, DataError
from hotloop.recipes import digits
from hotloop.train import checkpoint, configure, environment, fit, start
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


def load(folder, name="last.pt"):
    return checkpoint.load(folder / "checkpoints" / name)


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


def test_a_checkpoint_is_judged_on_the_kind_of_device_that_the_run_was_given(train, tmp_path, monkeypatch):
    outcome = train("run.accelerator=cpu", "training.max_steps=1")
    kept = load(tmp_path / "run", "best.pt")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    judged = digits.evaluate(configure.from_dict(kept["settings"]), kept["model"])
    assert judged == pytest.approx(outcome.best, rel=1e-5)


def test_the_setting_that_names_a_device_which_is_not_here_is_told(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    for setting in ("run.accelerator=cuda", "run.device=cuda"):
        with pytest.raises(ConfigError, match=rf"{setting}: torch \S+ sees 0 CUDA devices here"):
            environment.device_of(configure.load(["recipe=digits", setting]).run)


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


def test_with_auto_a_short_run_stays_eager_and_is_the_eager_one(tmp_path, train):
    outcome = train("training.optimization.use_torch_compile=auto", "training.max_steps=10")
    assert any("10 steps eager" in line for line in outcome.notes)
    train("training.max_steps=10", folder="eager")
    steps = [[one["loss"] for one in record.load(tmp_path / folder)["steps"]] for folder in ("run", "eager")]
    assert steps[0] == steps[1]


def test_digits_are_as_frequent_on_both_sides_and_no_image_is_on_both():
    images = digits.load_images(configure.load(["recipe=digits"]))
    assert not set(images.train.tolist()) & set(images.validation.tolist())
    assert (len(images.digits), float(images.pixels.min()), float(images.pixels.max())) == (1797, -1.0, 1.0)
    shares = [torch.bincount(images.digits[side]).float() / len(side) for side in (images.train, images.validation)]
    assert float((shares[0] - shares[1]).abs().max()) < 0.01


def test_too_few_digits_are_refused():
    with pytest.raises(DataError, match=r"no image of|too few"):
        digits.load_images(configure.load(["recipe=digits", "data.sample_size=20"]))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["recipe=digits", "data.negatives=sibling"], ["recipe=digits has no data.negatives: "]),
        (["recipe=digits", "focus.layers=2"], ["recipe=digits has no focus.layers"]),
        (
            ["recipe=digits", "model.name=x", "model.max_length=8"],
            ["no model.name: ", "no model.max_l"],
        ),
        (["recipe=criteria", "digits.layers=2"], ["recipe=criteria has no digits.layers"]),
        (["recipe=digits", "training.freeze_embeddings=true"], ["has no training.freeze_embeddings"]),
        (["recipe=digits", "recipe.goal=max:loss"], ["has no recipe.goal"]),
    ],
)
def test_settings_that_a_recipe_does_not_read_are_refused(settings, message):
    with pytest.raises(ConfigError) as caught:
        start.prepare(settings)
    assert all(one in str(caught.value) for one in message)


def test_a_recipe_brings_its_defaults_and_the_user_has_the_last_word():
    chosen = configure.load(["recipe=digits"])
    assert (chosen.training.num_epochs, chosen.data.sample_size, chosen.model.dropout) == (30, None, 0.1)
    assert configure.load(["recipe=digits", "training.num_epochs=2"]).training.num_epochs == 2
    assert configure.load(["training=default", "recipe=digits"]).training.num_epochs == 1


def test_heads_that_do_not_share_the_width_are_refused():
    with pytest.raises(ConfigError, match=r"digits\.hidden_size=10 cannot be shared by digits\.heads=4"):
        configure.load(["recipe=digits", "digits.hidden_size=10"])


@pytest.mark.parametrize(
    ("goal", "cure"),
    [
        (Goal("lss", of_search=True), "min:loss"),  # hpo.metric=lss was taken for one that is good where it is high
        (Goal("los", maximize=False, of_search=True), "min:loss"),
        (Goal("lss"), "max:loss"),  # somebody wrote max
    ],
)
def test_the_direction_of_a_misspelt_metric_is_that_of_the_one_that_is_meant(goal, cure):
    with pytest.raises(ConfigError, match=rf"did you mean loss\? Set: recipe\.goal={cure}"):
        goal.check(["loss", "accuracy"], "train.py:make")


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
