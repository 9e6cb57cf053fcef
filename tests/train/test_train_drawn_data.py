"""A program that draws its data is judged, resumed and verified on the data that it was trained on."""

import pytest
import torch

from hotloop import recipes
from hotloop.recipes import program
from hotloop.train import checkpoint, start

PROGRAM = """
import torch

import hotloop

offset = torch.randn(())


def make():
    x = torch.randn(16, 4)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step(batch):
        loss = (model(batch) - offset).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    def metrics():
        with torch.no_grad():
            return {"error": (model(x) - offset).pow(2).mean()}

    return hotloop.Workload(
        model, optimizer, step, list(x.split(8)), metrics=metrics
    )
"""


@pytest.fixture
def run(tmp_path):
    (tmp_path / "drawn.py").write_text(PROGRAM)
    given = [f"recipe={tmp_path / 'drawn.py'}:make", "training.num_epochs=2", f"run.folder={tmp_path / 'run'}"]
    begun = start.prepare([*given, "recipe.goal=min:error"])
    recipe = recipes.load(begun.settings.recipe.name)
    return tmp_path / "run", recipe, recipe.train(begun)


def test_a_program_that_draws_its_data_is_judged_on_those_it_was_trained_on(run):
    folder, recipe, outcome = run
    settings = start.prepare([f"run.resume={folder}", "training.num_epochs=3"]).settings
    weights = checkpoint.load(folder / "checkpoints" / "best.pt")["model"]
    for _ in range(2):
        torch.randn(3)  # another state of the random numbers than before
        assert recipe.evaluate(settings, weights) == pytest.approx(outcome.best)


def test_the_program_of_a_run_draws_the_same_data_again(run):
    folder, _, _ = run
    found = []
    for _ in range(2):
        torch.randn(3)
        make = program.of_run(folder)
        found += [make().batches, make().batches]
    assert all(torch.equal(one[0], found[0][0]) for one in found)
