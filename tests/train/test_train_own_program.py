"""A program of the user's own: trained, compiled, saved, resumed and judged as a recipe is."""

import contextlib
import dataclasses
import functools
import random
import signal
import subprocess
import sys
import textwrap

import lightning.fabric
import numpy as np
import pytest
import torch

from hotloop import recipes, record
from hotloop.errors import ConfigError, TrainingFailedError
from hotloop.train import checkpoint, configure, environment, fit, start
from hotloop.train.search import preparing, space
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


def load(folder, name="last.pt"):
    return checkpoint.load(folder / "checkpoints" / name)


def losses(folder):
    return [(one["step"], one["loss"]) for one in record.load(folder)["steps"]]


def assert_same(first, second):
    assert first["position"] == second["position"]
    for ours, theirs in (
        (first["model"]["model"], second["model"]["model"]),
        (first["others"]["state[0]"], second["others"]["state[0]"]),
    ):
        assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())
    states = zip(
        first["others"]["optimizer"]["state"].values(), second["others"]["optimizer"]["state"].values(), strict=True
    )
    assert all(torch.equal(ours[key], theirs[key]) for ours, theirs in states for key in ours)
    assert torch.equal(first["random"]["torch"], second["random"]["torch"])


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


RATE = "torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 99)"


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
    assert losses(tmp_path / "run")[-1][1] == pytest.approx(losses(tmp_path / "eager")[-1][1], rel=1e-4)


def test_what_a_program_compiles_is_shared_and_counted_for_the_runs_that_follow(train, monkeypatch):
    entered, told = [], []

    @contextlib.contextmanager
    def shared(*models):
        entered.append([type(one).__name__ for one in models])
        yield

    whole = fit.Loop
    monkeypatch.setattr(fit, "shared_compiles", shared)
    monkeypatch.setattr(fit, "Loop", lambda *one, **more: told.append(more["runs"]) or whole(*one, **more))
    train("training.optimization.use_torch_compile=auto", "training.max_steps=1", within=Within(runs=7.0))
    assert (entered, told) == ([["Sequential"]], [7.0])
    train("training.max_steps=1", folder="eager")
    assert len(entered) == 1


def test_a_search_over_what_a_program_decides_itself_is_told(tmp_path, train):
    own = [f"recipe={tmp_path / 'program.py'}:make", "hpo.metric=accuracy"]
    for one, said in (("training.learning_rate", "has no training"), ("model.dropout", "did you mean program")):
        with pytest.raises(ConfigError, match=said):
            preparing.check(configure.load([*own, f"hpo.space.{one}.float=[0.1,0.2]", f"hpo.folder={tmp_path}/study"]))
    with pytest.raises(ConfigError, match=r"hpo\.space is empty"):
        space.parse(configure.load(own))
    found = space.parse(configure.load([*own, "hpo.space.training.num_epochs.int=[1,3]"]))
    assert [one.name for one in found.searched] == ["training.num_epochs"]


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
        ({}, ["recipe.goal=max:acuracy"], r"the metrics of .* are accuracy, loss: did you mean accuracy\?"),
        ({}, ["recipe.goal=accuracy"], "expected max:<metric> or min:<metric>"),
        ({"state": "object()"}, [], "is a object without state_dict"),
        ({}, ["training.batch_size=3"], r"a program of your own has no training\.batch_size"),
        ({}, ["kfold.n_splits=3"], r"cannot be cross-validated: its function takes no fold\."),
    ],
)
def test_a_program_that_cannot_be_trained_is_told(train, changed, settings, message):
    with pytest.raises(ConfigError, match=message):
        train(*settings, **changed)


def test_a_goal_that_only_a_validation_shows_to_be_wrong_costs_no_epoch(tmp_path, train):
    computed = {"metrics": "dict(accuracy=(model(x).argmax(1) == y).float().mean())"}
    with pytest.raises(ConfigError, match="'acc'") as caught:
        train("recipe.goal=max:acc", **computed)
    command = str(caught.value).partition("Go on with: hotloop train ")[2].split()
    assert command == [f"run.resume={tmp_path / 'run'}", "recipe.goal=max:accuracy"]
    begun = start.prepare(command)
    recipes.load(begun.settings.recipe.name).train(begun)
    train("recipe.goal=max:accuracy", folder="whole", **computed)
    assert_same(load(tmp_path / "run"), load(tmp_path / "whole"))
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")
    with pytest.raises(ConfigError, match=r"recipe\.goal cannot change while a run is resumed .* kept as the best"):
        start.prepare([f"run.resume={tmp_path / 'run'}", "recipe.goal=min:accuracy"])


def test_metrics_that_fail_cost_no_epoch(tmp_path, train):
    with pytest.raises(ZeroDivisionError) as caught:
        train(metrics='{"drawn": torch.rand(()) / 1, "accuracy": 1 / 0}')
    assert caught.value.__notes__ == [
        f"Saved before this validation, at step 5. Go on with: hotloop train run.resume={tmp_path / 'run'}"
    ]
    train(folder="whole", metrics='{"drawn": torch.rand(()) / 1}')
    begun = start.prepare([f"run.resume={tmp_path / 'run'}"])
    recipes.load(begun.settings.recipe.name).train(begun)
    assert_same(load(tmp_path / "run"), load(tmp_path / "whole"))
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")


def counted(function):
    @functools.wraps(function)
    def more():
        return {**function(), "rows": 3}

    return more


def plain():
    if torch.rand(()) > 2:
        return {"loss": 1, "accuracy": 2}
    inner = lambda: {"nothing": 1}  # noqa: E731
    return {"loss": inner()}


@torch.no_grad()
def without_gradients():
    return {"loss": 1}


@counted
def decorated():
    return {"loss": 1}


def merged():
    return {"loss": 1, **plain()}


def test_state_that_a_checkpoint_cannot_give_back_is_refused_before_training(tmp_path, train):
    odd = "type('Odd', (), {'state_dict': lambda self: {'f': print.__self__.__loader__}, 'load_state_dict': lambda self, d: None})()"
    with pytest.raises(ConfigError, match=r"state\[0\] cannot be kept in a checkpoint"):
        train(state=odd)
    assert not (tmp_path / "run").exists()


def test_an_optimizer_of_something_else_is_refused(train):
    with pytest.raises(ConfigError, match="holds no parameter of its model"):
        train(batches="(setattr(optimizer, 'param_groups', []), loader)[1]")


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        (
            "training.num_epochs=2",
            r"num_epochs=2: run .* is past that, at 3\. Set .*epochs=4 ",
        ),
        ("training.max_steps=7", r"max_steps=7: run .* is past that, .*Set training\.max_steps=16 or more"),
    ],
)
def test_a_run_that_is_past_its_new_end_is_refused(tmp_path, train, setting, message):
    train()
    with pytest.raises(ConfigError, match=message):
        train(f"run.resume={tmp_path / 'run'}", setting)


def test_a_run_that_stopped_within_an_epoch_cannot_end_before_that_epoch(tmp_path, train):
    train("training.max_steps=7")
    with pytest.raises(ConfigError, match=r"is past that, at 2\. Set training\.num_epochs=2 or more"):
        train(f"run.resume={tmp_path / 'run'}", "training.num_epochs=1")


def test_epochs_do_not_end_a_run_whose_batches_have_no_length(tmp_path, train):
    batches = "lambda: (one for one in loader)"
    train("training.max_steps=12", "training.num_epochs=1", batches=batches)
    assert load(tmp_path / "run")["position"]["epoch"] > 1
    assert train(f"run.resume={tmp_path / 'run'}", "training.max_steps=14", batches=batches).step == 14


@pytest.mark.parametrize("optimizer", ["None", "optimizer"])
def test_a_program_without_a_learning_rate_is_trained(tmp_path, train, monkeypatch, capsys, optimizer):
    without = PROGRAM.replace("Workload(model, optimizer,", f"Workload(model, {optimizer},")
    without = without.replace(
        "    average =", "    [group.pop('lr') for group in optimizer.param_groups]\n    average ="
    )
    monkeypatch.setitem(globals(), "PROGRAM", without)
    train(optimize="[one.data.sub_(one.grad, alpha=0.1) for one in model.parameters()]; model.zero_grad()")
    steps = record.load(tmp_path / "run")["steps"]
    assert len(steps) == 15
    assert not any("learning_rate" in one for one in steps)
    assert steps[-1]["loss"] < steps[0]["loss"]
    assert "has changed since the start" not in capsys.readouterr().out


def test_a_loss_that_is_nan_ends_the_run_with_a_sound_checkpoint(tmp_path, train):
    with pytest.raises(TrainingFailedError, match=r"step 1: the loss is nan"):
        train(spoil=" * float('nan')")
    assert record.load(tmp_path / "run")["status"] == "failed"
    assert losses(tmp_path / "run") == [(1, "nan")]
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_a_step_whose_loss_is_nan_is_in_the_record_until_the_run_is_resumed(tmp_path, train, monkeypatch):
    at = "__import__('os').environ.get('NAN_BEHIND') == str(int(average.n_averaged))"
    spoil = f" * (float('nan') if {at} else 1)"
    train(spoil=spoil, folder="whole")
    monkeypatch.setenv("NAN_BEHIND", "6")
    with pytest.raises(TrainingFailedError, match=r"step 7: the loss is nan.*Resume with"):
        train(spoil=spoil)
    assert losses(tmp_path / "run")[5:] == [(6, pytest.approx(losses(tmp_path / "whole")[5][1])), (7, "nan")]
    assert "not finite in 1 step, first in step 7" in (tmp_path / "run" / "report.html").read_text()
    monkeypatch.delenv("NAN_BEHIND")
    train(f"run.resume={tmp_path / 'run'}", spoil=spoil)
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")


def test_metrics_that_leave_the_model_in_evaluation_do_not_stop_its_dropout(train):
    assert train(spoil=" + (0 if model.training else 1 / 0)").status == "finished"


def test_a_name_without_a_program_is_told(tmp_path):
    with pytest.raises(ConfigError, match=r"recipe=FILE\.py:function"):
        recipes.load("workload")
    with pytest.raises(ConfigError, match=r"program '.*none\.py:make': there is no file .*none\.py$"):
        start.prepare([f"recipe={tmp_path / 'none.py'}:make", f"run.folder={tmp_path / 'run'}"])
    (tmp_path / "train.py").touch()
    with pytest.raises(
        ConfigError, match=r"program '.*trian\.py:make': there is no file .*: did you mean .*train\.py\?"
    ):
        start.prepare([f"recipe={tmp_path / 'trian.py'}:make", f"run.folder={tmp_path / 'run'}"])


def test_a_program_has_a_folder_of_its_own_name(tmp_path, monkeypatch):
    (tmp_path / "some").mkdir()
    (tmp_path / "work").mkdir()
    (tmp_path / "some" / "train me.py").write_text("def make(): pass\n")
    monkeypatch.chdir(tmp_path / "work")
    begun = start.prepare(["recipe=../some/train me.py:make"])
    assert begun.folder.parts[:2] == ("runs", "train-me.py-make")


def test_a_run_is_seeded_as_lightning_does():
    drawn = []
    for seed in (environment.seed, lightning.fabric.seed_everything):
        seed(7)
        drawn.append((random.random(), np.random.rand(), float(torch.rand(()))))  # noqa: NPY002 - the one it seeds
    assert drawn[0] == drawn[1]


ALONE = """
import sys
from hotloop import recipes
from hotloop.train import start
begun = start.prepare(sys.argv[1:])
assert recipes.load(begun.settings.recipe.name).train(begun).status == "finished"
print("lightning" in sys.modules)
"""


@pytest.mark.campaign
def test_its_process_imports_no_lightning(tmp_path, train):
    """That takes longer than to import torch."""
    train("training.max_steps=1")
    settings = [f"recipe={tmp_path / 'program.py'}:make", "training.max_steps=1", f"run.folder={tmp_path / 'alone'}"]
    done = subprocess.run(
        [sys.executable, "-c", ALONE, *settings], capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "False"
