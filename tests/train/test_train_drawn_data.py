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
        model, optimizer, step, list(x.split(8)), metrics=metrics, predict=lambda rows: [x.sum().item(), offset.item()]
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
    first = recipe.predictor(settings, weights)([])
    torch.randn(3)
    assert recipe.predictor(settings, weights)([]) == first


def test_the_program_of_a_run_draws_the_same_data_again(run):
    folder, _, _ = run
    found = []
    for _ in range(2):
        torch.randn(3)
        make = program.of_run(folder)
        found += [make().batches, make().batches]
    assert all(torch.equal(one[0], found[0][0]) for one in found)


MODULE = """
import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader


class Module(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(4, 1)

    def training_step(self, batch, batch_idx):
        return self.net(batch).pow(2).mean()

    def validation_step(self, batch, batch_idx):
        self.log("error", self.net(batch).pow(2).mean())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Data(pl.LightningDataModule):
    def __init__(self):
        super().__init__()
        self.x = torch.randn(16, 4)

    def train_dataloader(self):
        return DataLoader(self.x, batch_size=8)

    def val_dataloader(self):
        return DataLoader(self.x, batch_size=8)
"""


@pytest.mark.filterwarnings("default")  # Lightning warns of its own use of torch
def test_a_lightning_module_is_judged_on_the_data_that_it_drew(tmp_path):
    (tmp_path / "drawn.py").write_text(MODULE)
    given = [f"{tmp_path / 'drawn.py'}:Module", f"data={tmp_path / 'drawn.py'}:Data", "training.num_epochs=1"]
    begun = start.prepare([*given, f"run.folder={tmp_path / 'run'}", "recipe.goal=min:error", "run.device=cpu"])
    recipe = recipes.load(begun.settings.recipe.name)
    outcome = recipe.train(begun)
    weights = checkpoint.load(tmp_path / "run" / "checkpoints" / "best.pt")
    torch.randn(3)
    assert recipe.evaluate(begun.settings, weights["model"]) == pytest.approx(outcome.best)
