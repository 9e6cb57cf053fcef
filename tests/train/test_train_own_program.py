"""A program of the user's own: trained, compiled, saved, resumed and judged as a recipe is."""

import dataclasses
import signal
import textwrap

import pytest
from training_fixtures import assert_same, load, losses

from hotloop import recipes, record
from hotloop.errors import ConfigError, TrainingFailedError
from hotloop.train import fit, start
from hotloop.train.within import Within

PROGRAM = """
import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import hotloop


def make():
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(40, 4, generator=generator)
    y = (x.sum(1) > 0).long()
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Dropout(0.2), torch.nn.Linear(8, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    average = torch.optim.swa_utils.AveragedModel(model)
    loader = DataLoader(TensorDataset(x, y), batch_size=8, shuffle=True{loader})

    def step(a, b):
        loss = F.cross_entropy(model(a), b){spoil}
        loss.backward()
        {optimize}
        average.update_parameters(model)
        return loss

    def metrics():
        model.eval()
        with torch.no_grad():
            return {metrics}

    return hotloop.Workload(model, optimizer, step, {batches}, metrics=metrics, state={state})
"""
PLAIN = {
    "loader": "", "spoil": "", "optimize": "optimizer.step(); optimizer.zero_grad()", "batches": "loader", "state": "average",
    "metrics": '{"accuracy": (model(x).argmax(1) == y).float().mean(), "loss": F.cross_entropy(model(x), y)}',
}  # fmt: skip


@pytest.fixture
def train(tmp_path):
    """Train a program into ``folder``; ``changed`` parts of its text, and settings."""

    def run(*settings, folder="run", within=None, text=None, **changed):
        text = text or PROGRAM
        for name, part in {**PLAIN, **changed}.items():
            text = text.replace(f"{{{name}}}", part)
        (tmp_path / "program.py").write_text(textwrap.dedent(text))
        given = [f"recipe={tmp_path / 'program.py'}:make", "training.num_epochs=3", f"run.folder={tmp_path / folder}"]
        begun = dataclasses.replace(start.prepare([*given, *settings]), within=within or Within())
        return recipes.load(begun.settings.recipe.name).train(begun)

    return run


def test_a_program_is_trained_judged_and_recorded(tmp_path, train):
    outcome = train("recipe.goal=max:accuracy")
    document = record.load(tmp_path / "run")
    assert (outcome.status, outcome.step, document["status"]) == ("finished", 15, "finished")
    assert [one["epoch"] for one in document["metrics"]] == [1, 2, 3]
    assert outcome.best["accuracy"] == max(one["accuracy"] for one in document["metrics"])
    assert document["steps"][-1]["loss"] < document["steps"][0]["loss"]
    assert (tmp_path / "run" / "report.html").is_file()
    settings = start.prepare([f"run.resume={tmp_path / 'run'}"]).settings
    judged = recipes.load(settings.recipe.name).evaluate(settings, load(tmp_path / "run", "best.pt")["model"])
    assert judged == pytest.approx(outcome.best)


FUNCTION = "lambda: DataLoader(TensorDataset(x, y), batch_size=8, shuffle=True, generator=generator)"


@pytest.mark.parametrize("changed", [{}, {"loader": ", generator=generator"}, {"batches": FUNCTION}])
@pytest.mark.parametrize("stop", [3, 5, 9])
def test_a_program_interrupted_and_resumed_is_the_one_that_was_not(tmp_path, train, monkeypatch, stop, changed):
    train(folder="whole", **changed)
    whole = fit._Fitting.step

    def acting(self, batch):
        whole(self, batch)
        if self.position.step == stop:
            signal.raise_signal(signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(fit._Fitting, "step", acting)
        assert train(**changed).status == "interrupted"
    begun = start.prepare([f"run.resume={tmp_path / 'run'}"])
    assert recipes.load(begun.settings.recipe.name).train(begun).status == "finished"
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")
    assert_same(load(tmp_path / "whole"), load(tmp_path / "run"))


def test_a_wish_to_stop_in_a_programs_last_metrics_is_handed_on(train, monkeypatch):
    act = fit._Fitting.metrics
    monkeypatch.setattr(fit._Fitting, "metrics", lambda self: signal.raise_signal(signal.SIGTERM) or act(self))
    outcome = train("training.max_steps=1")
    assert (outcome.status, outcome.stop) == ("finished", True)


def test_a_program_runs_compiled_and_its_model_stays_as_it_is(tmp_path, train):
    on = ["training.optimization.use_torch_compile=true", "compile.preset=aot_eager", "compile.measure_eager_steps=2"]
    outcome = train(*on)
    assert outcome.components["model"]["running"] == "aot_eager"
    assert [one["running"] for one in record.load(tmp_path / "run")["steps"]] == ["none"] * 2 + ["aot_eager"] * 13
    train(folder="eager")
    assert load(tmp_path / "run")["model"]["model"].keys() == load(tmp_path / "eager")["model"]["model"].keys()
    assert losses(tmp_path / "run")[-1] == pytest.approx(losses(tmp_path / "eager")[-1], rel=1e-4)


def test_with_auto_a_hot_loop_runs_the_programs_step(tmp_path, train):
    outcome = train("training.optimization.use_torch_compile=auto")
    assert any(line.startswith("auto ran 15 steps eager") for line in outcome.notes)
    train(folder="eager")
    assert losses(tmp_path / "run") == losses(tmp_path / "eager")
    assert load(tmp_path / "run")["loop"]["steps"] == 15


@pytest.mark.parametrize(
    ("changed", "settings", "message"),
    [
        ({"batches": "iter([])"}, [], "batches have no length, so training.max_steps"),
        ({"batches": "iter([])"}, ["training.max_steps=3"], "there are no batches in epoch 1"),
        ({"batches": "[]"}, [], "its Workload has no batches"),
        ({"metrics": "3"}, [], "expected a mapping of names to numbers"),
        ({}, ["recipe.goal=max:f1"], r"the metrics of .* are accuracy, loss\. .*recipe\.goal=max:<metric>$"),
        ({}, ["recipe.goal=max:acuracy"], r"the metrics of .* are accuracy, loss\. .*recipe\.goal=max:accuracy$"),
        ({}, ["recipe.goal=accuracy"], "should match pattern"),
        ({"state": "object()"}, [], "is a object without state_dict"),
        ({}, ["training.batch_size=3"], r"a program of your own has no training\.batch_size"),
        ({}, ["kfold.n_splits=3"], r"cannot be cross-validated: its function takes no fold\."),
    ],
)
def test_a_program_that_cannot_be_trained_is_told(train, changed, settings, message):
    with pytest.raises(ConfigError, match=message):
        train(*settings, **changed)


def test_state_that_a_checkpoint_cannot_give_back_is_refused_before_training(tmp_path, train):
    odd = "type('Odd', (), {'state_dict': lambda self: {'f': print.__self__.__loader__}, 'load_state_dict': lambda self, d: None})()"
    with pytest.raises(ConfigError, match=r"state\[0\] cannot be kept in a checkpoint"):
        train(state=odd)
    assert not (tmp_path / "run").exists()


def test_an_optimizer_of_something_else_is_refused(train):
    with pytest.raises(ConfigError, match="holds no parameter of its model"):
        train(batches="(setattr(optimizer, 'param_groups', []), loader)[1]")


def test_a_loss_that_is_nan_ends_the_run_with_a_sound_checkpoint(tmp_path, train):
    with pytest.raises(TrainingFailedError, match=r"step 1: the loss is nan"):
        train(spoil=" * float('nan')")
    assert record.load(tmp_path / "run")["status"] == "failed"
    assert losses(tmp_path / "run") == ["nan"]
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_metrics_that_leave_the_model_in_evaluation_do_not_stop_its_dropout(train):
    assert train(spoil=" + (0 if model.training else 1 / 0)").status == "finished"
