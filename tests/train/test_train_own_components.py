"""A program of the user's own with several models: components by name, CUDA graphs tried first, and batches made ready."""

import signal

import pytest
import torch

from hotloop import recipes, record
from hotloop.testing import cudagraph_emulation
from hotloop.train import checkpoint, fit, start

PROGRAM = """
import torch

import hotloop


class Rate:
    def __init__(self, optimizer):
        self.optimizer, self.steps = optimizer, 0

    def advance(self):
        self.optimizer.param_groups[0]["lr"] = 0.1 / (1 + self.steps)
        self.steps += 1

    def state_dict(self):
        return {"steps": self.steps}

    def load_state_dict(self, state):
        self.steps = state["steps"]


def make():
    first, second = torch.nn.Linear(4, 8), torch.nn.Sequential(torch.nn.ReLU(), torch.nn.Linear(8, 1))
    optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.1)
    rate, x = Rate(optimizer), torch.randn(24, 4, generator=torch.Generator().manual_seed(0))
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x), batch_size=4, shuffle=True)

    def before(x):
        rate.advance()
        with torch.no_grad():
            surest = int(second(first(x)).argmax())  # a choice that a captured step could not make
        return x, torch.rand(len(x), 1) + x[surest].sum()

    def step(x, target):
        loss = (second(first(x)) - target).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return {"loss": loss, "target": target.mean(), "many": len(x), "said": "nothing"}

    return hotloop.Workload(MODELS, optimizer, step, loader, state=rate, before=before)
"""
PAIR = """
import numpy
import torch

import hotloop


def make():
    models = {"first": torch.nn.Linear(4, 4), "second": torch.nn.Linear(4, 1)}
    optimizers = {name: torch.optim.Adam(one.parameters(), lr=0.01) for name, one in models.items()}
    x = torch.randn(24, 4, generator=torch.Generator().manual_seed(0))

    def step(x):
        made = models["second"](models["first"](x))
        loss = made.square().mean()
        loss.backward()
        for one in optimizers.values():
            one.step()
            one.zero_grad()
        return {"loss": loss, "made": made.detach().numpy(), "one": numpy.float32(2), "gradient_norm": 3}

    return hotloop.Workload(models, optimizers, step, list(x.split(4)))
"""
AT_MODULE_LEVEL = """
import torch

import hotloop

model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
generator = torch.Generator()


def step(x):
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def workload(model, optimizer, step, **more):
    x = torch.randn(24, 4, generator=torch.Generator().manual_seed(0))
    loader = torch.utils.data.DataLoader(x, batch_size=4, shuffle=True, generator=generator)
    return hotloop.Workload({"first": model}, optimizer, step, loader, **more)


def all_of_it():
    return workload(model, optimizer, step)


def the_batches():
    model = torch.nn.Linear(4, 1)
    return workload(model, torch.optim.SGD(model.parameters(), lr=0.01), lambda x: model(x).sum().backward())
"""
NAMED = '{"first": first, "second": second}'
ON = ["training.optimization.use_torch_compile=true", "compile.measure_eager_steps=0", "compile.preset=none"]


@pytest.fixture
def train(tmp_path):
    """Train the program into ``folder``."""

    def run(*settings, folder="run", models=NAMED):
        (tmp_path / "several.py").write_text(PROGRAM.replace("MODELS", models))
        given = [f"recipe={tmp_path / 'several.py'}:make", "training.num_epochs=2", f"run.folder={tmp_path / folder}"]
        begun = start.prepare([*given, *settings])
        return recipes.load(begun.settings.recipe.name).train(begun)

    return run


def steps(folder):
    return [{key: one[key] for key in ("loss", "target", "learning_rate")} for one in record.load(folder)["steps"]]


def test_components_have_presets_of_their_own_by_name(tmp_path, train):
    outcome = train(
        *ON, "compile.components.second.training=aot_eager", "compile.components.second.inference=aot_eager"
    )
    assert {name: one["state"] for name, one in outcome.components.items()} == {"first": "eager", "second": "compiled"}
    assert outcome.components["second"]["modes"]["inference"]["compiles"] == 1
    train(folder="eager")
    assert [one["loss"] for one in steps(tmp_path / "run")] == pytest.approx(
        [one["loss"] for one in steps(tmp_path / "eager")], rel=1e-5
    )


def test_cuda_graphs_are_tried_on_the_program_made_anew_with_the_weights_of_the_run(tmp_path, train, capsys):
    train(folder="eager")
    with cudagraph_emulation():
        outcome = train(*ON, "compile.components.first.training=reduce-overhead")
    assert (
        "reduce-overhead: tried on copies of the model, training and inference, and safe here"
        in capsys.readouterr().out
    )
    assert outcome.components["first"]["modes"]["training"]["calls_per_step"] == {"1": 12}
    assert steps(tmp_path / "run") == steps(tmp_path / "eager")  # the trial has drawn none of the run's random numbers


@pytest.mark.parametrize("stop", [2, 8])
def test_a_batch_is_made_ready_once_and_a_resumed_run_is_the_one_that_was_not(tmp_path, train, monkeypatch, stop):
    train(folder="whole")
    rates = [one["learning_rate"] for one in steps(tmp_path / "whole")]
    assert rates == pytest.approx([0.1 / (1 + step) for step in range(12)])
    whole = fit._Fitting.step

    def acting(self, batch):
        whole(self, batch)
        if self.position.step == stop:
            signal.raise_signal(signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(fit._Fitting, "step", acting)
        assert train().status == "interrupted"
    begun = start.prepare([f"run.resume={tmp_path / 'run'}"])
    assert recipes.load(begun.settings.recipe.name).train(begun).status == "finished"
    assert steps(tmp_path / "run") == steps(tmp_path / "whole")
    ours, theirs = (checkpoint.load(tmp_path / name / "checkpoints" / "last.pt") for name in ("run", "whole"))
    assert ours["others"]["state[0]"] == theirs["others"]["state[0]"] == {"steps": 12}
    assert torch.equal(ours["model"]["first"]["weight"], theirs["model"]["first"]["weight"])


def test_an_optimizer_with_the_name_of_its_model_is_kept_and_resumed(tmp_path):
    (tmp_path / "pair.py").write_text(PAIR)

    def run(folder, *settings):
        name = f"recipe={tmp_path / 'pair.py'}:make"
        begun = start.prepare([name, f"run.folder={tmp_path / folder}", *settings])
        recipes.load(begun.settings.recipe.name).train(begun)
        return checkpoint.load(tmp_path / folder / "checkpoints" / "last.pt")

    whole = run("whole", "training.num_epochs=2")
    assert set(whole["others"]) == {"first", "second"}
    run("run")
    begun = start.prepare([f"run.resume={tmp_path / 'run'}", "training.num_epochs=2"])
    recipes.load(begun.settings.recipe.name).train(begun)
    resumed = checkpoint.load(tmp_path / "run" / "checkpoints" / "last.pt")
    assert torch.equal(resumed["model"]["first"]["weight"], whole["model"]["first"]["weight"])
    assert resumed["others"]["second"]["state"][0]["step"] == 12
    entry = record.load(tmp_path / "run")["steps"][0]
    assert (entry["one"], entry["gradient_norm"], "made" in entry) == (2.0, 3.0, False)  # an array is no figure


@pytest.mark.parametrize(("function", "what"), [("all_of_it", "weight"), ("the_batches", "the batches")])
def test_cuda_graphs_are_not_tried_on_what_is_the_runs_own(tmp_path, function, what):
    (tmp_path / "own.py").write_text(AT_MODULE_LEVEL)

    def run(folder, *settings):
        name = f"recipe={tmp_path / 'own.py'}:{function}"
        begun = start.prepare([name, "training.num_epochs=2", f"run.folder={tmp_path / folder}", *settings])
        return recipes.load(begun.settings.recipe.name).train(begun)

    run("eager")
    with cudagraph_emulation():
        outcome = run("run", *ON, "compile.components.first.training=reduce-overhead")
    (cause,) = outcome.components["first"]["causes"]
    assert f"made a second time, has {what} of the run's own" in cause["reason"]
    eager, tried = (checkpoint.load(tmp_path / name / "checkpoints" / "last.pt") for name in ("eager", "run"))
    assert torch.equal(eager["model"]["first"]["weight"], tried["model"]["first"]["weight"])


def test_the_figures_of_a_step_are_in_the_record(tmp_path, train):
    train("training.max_steps=2")
    document = record.load(tmp_path / "run")
    entry = document["steps"][0]
    assert document["measurements"]["before_step_ms"] > 0
    assert (entry["many"], entry["ready_seconds"] > 0, "said" in entry) == (4, True, False)
