"""The batches of a run that goes on: within an epoch, at the start of one, with loaders that keep their state."""

import signal
import textwrap

import pytest
from training_fixtures import losses

from hotloop import recipes
from hotloop.errors import ConfigError
from hotloop.train import checkpoint, start

PROGRAM = """
import pathlib
import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import hotloop

READ = pathlib.Path(__file__).with_name("read")


class Rows(TensorDataset):
    def __getitem__(self, row):
        with READ.open("a") as file:
            file.write("x")
        return super().__getitem__(row)


class Stateful:
    '''The protocol of torchdata's StatefulDataLoader: an order of its own, drawn from torch's random numbers.'''

    def __init__(self, rows, size):
        self.rows, self.size, self.order, self.done = rows, size, [], 0

    def __len__(self):
        return len(self.rows) // self.size

    def __iter__(self):
        if self.done == len(self.order):
            self.order, self.done = torch.randperm(len(self.rows)).tolist(), 0
        while self.done < len(self.order):
            taken = self.order[self.done : self.done + self.size]
            self.done += self.size
            yield [torch.stack(part) for part in zip(*(self.rows[row] for row in taken))]

    def state_dict(self):
        return {"order": self.order, "done": self.done}

    def load_state_dict(self, state):
        self.order, self.done = state["order"], state["done"]


def make():
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(40, 4, generator=generator)
    model = torch.nn.Sequential(torch.nn.Linear(4, 2), torch.nn.Dropout(0.2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    rows = Rows(x, (x.sum(1) > 0).long())

    def step(a, b):
        loss = F.cross_entropy(model(a), b)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return hotloop.Workload(model, optimizer, step, {batches})
"""
OWN_GENERATOR = "DataLoader(rows, 8, shuffle=True, generator=generator)"
TORCHDATA = "__import__('torchdata.stateful_dataloader').stateful_dataloader.StatefulDataLoader(rows, 8, shuffle=True)"
LOADERS = {
    "plain": "DataLoader(rows, 8, shuffle=True)",
    "own generator": OWN_GENERATOR,
    "keeps its state": "Stateful(rows, 8)",
    "made anew by a function": "lambda: Stateful(rows, 8)",
    "torchdata": TORCHDATA,
    "torchdata with a generator": TORCHDATA.replace("=True)", "=True, generator=generator)"),
}


@pytest.fixture
def train(tmp_path):
    def run(batches, folder="run", *settings):
        (tmp_path / "program.py").write_text(textwrap.dedent(PROGRAM).replace("{batches}", batches))
        given = [f"recipe={tmp_path / 'program.py'}:make", "training.num_epochs=3", f"run.folder={tmp_path / folder}"]
        begun = start.prepare([*given, "training.checkpoint_every_steps=1", *settings])
        return recipes.load(begun.settings.recipe.name).train(begun)

    return run


def interrupted_behind(monkeypatch, name, wanted):
    """Interrupt the run right behind a checkpoint, as a kill there would; ``wanted`` is said of its position."""
    save = checkpoint.save

    def saving(path, document):
        save(path, document)
        if path.name == name and wanted(document["position"]):
            monkeypatch.setattr(checkpoint, "save", lambda *_: None)
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(checkpoint, "save", saving)


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata 0.11 with torch 2.13
@pytest.mark.parametrize("epoch_is_over", [False, True])
@pytest.mark.parametrize("loader", LOADERS)
def test_a_run_goes_on_with_the_batches_that_it_would_have_had(tmp_path, train, monkeypatch, loader, epoch_is_over):
    if "torchdata" in loader:
        pytest.importorskip("torchdata")
    train(LOADERS[loader], "whole")
    with monkeypatch.context() as patch:
        interrupted_behind(
            patch, "last.pt", lambda at: at["step"] == 5 and (at["validated_step"] == 5) == epoch_is_over
        )
        assert train(LOADERS[loader]).status == "interrupted"
    assert checkpoint.load(tmp_path / "run" / "checkpoints" / "last.pt")["position"]["step"] == 5
    begun = start.prepare([f"run.resume={tmp_path / 'run'}"])
    assert recipes.load(begun.settings.recipe.name).train(begun).status == "finished"
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")


@pytest.mark.parametrize(("loader", "read"), [("plain", 40 + 40), ("keeps its state", 24 + 40)])
def test_a_loader_that_keeps_its_state_reads_nothing_again(tmp_path, train, monkeypatch, loader, read):
    with monkeypatch.context() as patch:
        interrupted_behind(patch, "last.pt", lambda at: at["step"] == 7)
        train(LOADERS[loader])
    (tmp_path / "read").unlink()
    begun = start.prepare([f"run.resume={tmp_path / 'run'}"])
    recipes.load(begun.settings.recipe.name).train(begun)
    assert len((tmp_path / "read").read_text()) == read


def test_a_run_that_ended_with_an_epoch_goes_on_with_more_steps(tmp_path, train):
    train(LOADERS["keeps its state"], "run", "training.max_steps=5")
    begun = start.prepare([f"run.resume={tmp_path / 'run'}", "training.max_steps=10"])
    assert recipes.load(begun.settings.recipe.name).train(begun).step == 10
    train(LOADERS["keeps its state"], "whole", "training.max_steps=10")
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")


def test_a_checkpoint_of_a_program_that_has_changed_since_is_refused(tmp_path, train):
    train(LOADERS["plain"], "run", "training.max_steps=2")
    text = (tmp_path / "program.py").read_text()
    (tmp_path / "program.py").write_text(text.replace("(model, optimizer, step", "(model, {'other': optimizer}, step"))
    begun = start.prepare([f"run.resume={tmp_path / 'run'}", "training.max_steps=4"])
    with pytest.raises(ConfigError, match=r"holds optimizer beside the models; .* makes other"):
        recipes.load(begun.settings.recipe.name).train(begun)
