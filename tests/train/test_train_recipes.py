"""The recipes `digits` and `language`: what they learn from, that they learn, and that they are resumed and compiled."""

import json
import signal

import pytest
import torch

from hotloop import recipes, record
from hotloop.errors import ConfigError, DataError
from hotloop.recipes import digits, language
from hotloop.train import checkpoint, configure, environment, fit, start
from hotloop.train.goal import Goal
from hotloop.train.search import preparing

SMALL = {
    "digits": ["digits.hidden_size=16", "digits.layers=1", "digits.heads=2", "digits.patch_size=4", "training.num_epochs=2",
               "training.learning_rate=0.01", "data.sample_size=400"],
    "language": ["language.hidden_size=16", "language.layers=1", "language.heads=2", "language.context=16",
                 "language.vocabulary=300", "training.num_epochs=2", "training.batch_size=16", "data.sample_size=60"],
}  # fmt: skip


@pytest.fixture
def train(tmp_path):
    """Train a small one into ``folder``."""

    def run(name, *settings, folder="run"):
        begun = start.prepare([f"recipe={name}", *SMALL[name], f"run.folder={tmp_path / folder}", *settings])
        return recipes.load(name).train(begun)

    return run


def load(folder, name="last.pt"):
    return checkpoint.load(folder / "checkpoints" / name)


@pytest.mark.parametrize(("name", "decay"), [("digits", "null"), ("language", "0.5")])
def test_a_recipe_learns_and_a_checkpoint_is_judged_as_the_run_judged_it(tmp_path, train, name, decay):
    outcome = train(name, f"training.ema_decay={decay}")
    document = record.load(tmp_path / "run")
    assert document["steps"][-1]["loss"] < document["steps"][0]["loss"]
    goal = recipes.load(name).GOAL
    of = (max if goal.maximize else min)(one[goal.metric] for one in document["metrics"])
    assert outcome.best[goal.metric] == of
    assert set(outcome.best) == set(preparing.METRICS[name])
    kept = load(tmp_path / "run", "best.pt")
    assert ("model.average" in kept["others"]) == (decay != "null")
    judged = recipes.load(name).evaluate(configure.from_dict(kept["settings"]), checkpoint.weights(kept))
    assert judged == pytest.approx(outcome.best, rel=1e-5)
    assert any(word in line for line in outcome.remarks for word in ("nearest neighbour", "xz"))
    assert json.dumps(document["measurements"]).count("baseline_") >= 1


@pytest.mark.parametrize("name", ["digits", "language"])
def test_a_checkpoint_is_judged_on_the_kind_of_device_that_the_run_was_given(train, tmp_path, monkeypatch, name):
    outcome = train(name, "run.accelerator=cpu", "training.max_steps=1")
    kept = load(tmp_path / "run", "best.pt")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    judged = recipes.load(name).evaluate(configure.from_dict(kept["settings"]), kept["model"])
    assert judged == pytest.approx(outcome.best, rel=1e-5)


def test_the_setting_that_names_a_device_which_is_not_here_is_told(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    for setting in ("run.accelerator=cuda", "run.device=cuda"):
        with pytest.raises(ConfigError, match=rf"{setting}: torch \S+ sees 0 CUDA devices here"):
            environment.device_of(configure.load(["recipe=digits", setting]).run)


@pytest.mark.campaign
@pytest.mark.parametrize("name", ["digits", "language"])
def test_a_recipe_interrupted_and_resumed_is_the_one_that_was_not(tmp_path, train, monkeypatch, name):
    train(name, "training.ema_decay=0.5", folder="whole")
    whole = fit._Fitting.step

    def acting(self, batches):
        whole(self, batches)
        if self.position.step == 4:
            signal.raise_signal(signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(fit._Fitting, "step", acting)
        assert train(name, "training.ema_decay=0.5").status == "interrupted"
    recipes.load(name).train(start.prepare([f"run.resume={tmp_path / 'run'}"]))
    ours, theirs = load(tmp_path / "run"), load(tmp_path / "whole")
    assert ours["position"] == theirs["position"]
    for first, second in zip(*(checkpoint.weights(one)["model"].items() for one in (ours, theirs)), strict=True):
        assert first[0] == second[0]
        assert torch.equal(first[1], second[1])
    assert all(torch.equal(tensor, theirs["model"]["model"][key]) for key, tensor in ours["model"]["model"].items())


@pytest.mark.campaign
@pytest.mark.parametrize("name", ["digits", "language"])
def test_a_recipe_runs_compiled_without_a_graph_break_or_a_recompile(tmp_path, train, name):
    on = ["training.optimization.use_torch_compile=true", "compile.preset=aot_eager", "compile.fullgraph=true"]
    outcome = train(name, *on, "training.max_steps=6", "compile.measure_eager_steps=0")
    assert outcome.components["model"]["state"] == "compiled"
    assert outcome.components["model"]["modes"]["training"]["compiles"] == 1
    assert (outcome.components["model"]["recompiles"], outcome.components["model"]["graph_breaks"]) == (0, 0)


@pytest.mark.parametrize("name", ["digits", "language"])
def test_with_auto_a_short_run_stays_eager_and_is_the_eager_one(tmp_path, train, name):
    outcome = train(name, "training.optimization.use_torch_compile=auto", "training.max_steps=10")
    assert any("10 steps eager" in line for line in outcome.notes)
    train(name, "training.max_steps=10", folder="eager")
    steps = [[one["loss"] for one in record.load(tmp_path / folder)["steps"]] for folder in ("run", "eager")]
    assert steps[0] == steps[1]


def test_throughput_counts_images_and_tokens(tmp_path, train):
    train("language", "training.max_steps=8")
    measured = record.load(tmp_path / "run")["measurements"]
    assert measured["tokens_per_second"] == pytest.approx(16 * measured["samples_per_second"])
    assert measured["validation_blocks"] > 0


def test_digits_are_as_frequent_on_both_sides_and_no_image_is_on_both():
    images = digits.load_images(configure.load(["recipe=digits"]))
    assert not set(images.train.tolist()) & set(images.validation.tolist())
    assert (len(images.digits), float(images.pixels.min()), float(images.pixels.max())) == (1797, -1.0, 1.0)
    shares = [torch.bincount(images.digits[side]).float() / len(side) for side in (images.train, images.validation)]
    assert float((shares[0] - shares[1]).abs().max()) < 0.01


def test_too_few_digits_are_refused():
    with pytest.raises(DataError, match=r"no image of|too few"):
        digits.load_images(configure.load(["recipe=digits", "data.sample_size=20"]))


def test_no_topic_and_no_quoted_paragraph_is_on_both_sides():
    text = language.load_text(configure.load(["recipe=language"]))
    sides = [
        {" ".join(one.split()) for one in side.split("\n\n") if len(" ".join(one.split())) >= language.SHORT}
        for side in (text.train, text.validation)
    ]
    assert not sides[0] & sides[1]
    assert 0.1 < len(text.validation) / len(text.train) < 0.5
    assert min(len(set(topics)) for topics in text.topics) > 1  # Python 3.14 has long ones: two are enough to judge by
    assert not set(text.topics[0]) & set(text.topics[1])


def test_a_quoted_paragraph_stays_in_the_longest_topic_that_has_it():
    shared = "A paragraph of more than forty characters, quoted."
    topics = {
        "a": f"Alone here, and also quite a long text indeed.\n\n{shared}",
        "b": shared.replace(" ", "\n"),
        "c": "short",
    }
    assert [name for name, paragraph in language.unquoted(topics) if "quoted" in paragraph] == ["a"]


def test_every_held_out_token_is_predicted_once_and_tokens_know_their_bytes():
    text = language.Text("the cat sat on the mat. " * 40, "the mat sat on the cat ✓. " * 20, (("a",), ("b",)))
    tokens = language.Tokens(text.train, 280)
    held_out = tokens.sides(text, 8)[1]
    flat = torch.cat([held_out.inputs["input_ids"][:1, :1].flatten(), held_out.labels.flatten()])
    ids = torch.tensor(tokens._tokenizer.encode(text.validation).ids)
    assert torch.equal(flat, ids[: len(flat)])
    assert len(ids) - len(flat) < 8
    assert int(tokens.sizes[ids].sum()) == len(text.validation.encode())


def test_a_sure_model_takes_no_bits_and_a_clueless_one_log2_of_the_vocabulary():
    tokens, sizes = torch.tensor([[1, 2, 3]]), torch.tensor([1, 2, 1, 1])
    sure, clueless = language.Surprise(sizes), language.Surprise(sizes)
    sure.see(torch.nn.functional.one_hot(tokens, 4) * 100.0, tokens)
    clueless.see(torch.zeros(1, 3, 4), tokens)
    assert sure.figures()["bits_per_byte"] == pytest.approx(0, abs=1e-6)
    assert clueless.figures() == pytest.approx({"loss": 1.3862944, "perplexity": 4.0, "bits_per_byte": 6 / 4})


def test_the_baselines_of_text_without_surprise_are_near_nothing():
    found = language.baselines(b"ab" * 500, b"ab" * 200)
    assert found["baseline_unigram_bits"] == pytest.approx(1.33, abs=0.05)
    assert found["baseline_bigram_bits"] < 0.05
    assert found["baseline_xz_bits"] < 0.2


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["recipe=digits", "data.negatives=sibling"], ["recipe=digits has no data.negatives: it has data.sample_size"]),
        (["recipe=digits", "language.layers=2"], ["recipe=digits has no language.layers"]),
        (
            ["recipe=language", "model.name=x", "model.max_length=8"],
            ["no model.name: it has model.dropout", "no model.max_l"],
        ),
        (["recipe=criteria", "digits.layers=2"], ["recipe=criteria has no digits.layers"]),
        (["recipe=digits", "training.freeze_embeddings=true"], ["has no training.freeze_embeddings"]),
        (["recipe=language", "recipe.goal=max:loss"], ["has no recipe.goal"]),
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
