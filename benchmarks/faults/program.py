"""The program that is trained: the same model, batches and seed in each way, with one trait that a fault needs."""

from __future__ import annotations

import json
import os
import pathlib
import time

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop
from torch.utils.data import DataLoader, TensorDataset

import hotloop

STEPS = 12
CHECKPOINT_EVERY = 5
"""Steps between two checkpoints, the first of which is before the first step but for ``hotloop train``."""
RAISES_AT = 7
"""The step in which the hook of the trait "hook" raises, once."""
PLACE = pathlib.Path(os.environ.get("FAULTS_FOLDER", "."))
STOP_AT = int(os.environ.get("FAULTS_STOP_AT", "-1"))
"""The step of the process, from 0, before which it waits."""
SECONDS = float(os.environ.get("FAULTS_SECONDS", "0"))
"""How long it waits before each step."""


class PlantedError(Exception):
    """Raised by the user's own hook."""


class Counting(nn.Module):
    """Counts its calls in an attribute that it reads, so that each call is other code to dynamo.

    With a period of 2, a forward and its recompute are other code each, and a step leaves the count as it found it: a
    loop declines no tier for what the step changes.
    """

    def __init__(self, period):
        super().__init__()
        self.body, self.calls, self.period = nn.Linear(16, 16), 0, period

    def forward(self, x):
        x = torch.tanh(self.body(x))
        if self.calls >= 0:
            x = nn.functional.gelu(x)
        self.calls = (self.calls + 1) % self.period
        return x.sin()


class Net(nn.Module):
    """A small network with buffers, random numbers, and the trait."""

    def __init__(self, trait):
        super().__init__()
        self.trait = trait
        # The gradient of a bias in front of BatchNorm is rounding alone, of which AdamW makes steps.
        self.into = nn.Linear(6, 16, bias=False)
        self.norm, self.drop = nn.BatchNorm1d(16), nn.Dropout(0.25)
        periods = {"counts": 1_000_000, "checkpointed": 2}
        self.body = Counting(periods[trait]) if trait in periods else nn.Linear(16, 16)
        self.out = nn.Linear(16, 3)

    def forward(self, x):
        if self.trait == "stand-in late":
            x = x * 2
        if self.trait.startswith("stand-in"):
            size = torch._shape_as_tensor(x)[1:2]
            torch._dynamo.graph_break()
            x = x * int(torch.prod(size))
        x = self.drop(self.norm(self.into(x)).relu())
        if self.trait == "breaks":
            torch._dynamo.graph_break()
        if self.trait == "deep":
            x = deep(x, 400)
        x = checkpoint(self.body, x, use_reentrant=False) if self.trait == "checkpointed" else self.body(x)
        return self.out(x.sigmoid())


def deep(x, levels):
    """Call itself, as a model that walks a tree does."""
    return deep(x, levels - 1) if levels else x


class WithoutRate(torch.optim.Optimizer):
    """An optimizer that has no ``lr`` in its groups."""

    def __init__(self, parameters):
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure=None):
        with torch.enable_grad():
            loss = closure() if closure else None
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.add_(parameter.grad, alpha=-0.125)
                    self.state[parameter]["step"] = self.state[parameter].get("step", 0) + 1
        return loss


class Batches:
    """Batches of one round; a list would be several loaders to Lightning, and a DataLoader draws a random number."""

    def __init__(self, batches):
        self.batches = batches

    def __iter__(self):
        return iter(self.batches)

    def __len__(self):
        return len(self.batches)


def data():
    draws = torch.Generator().manual_seed(7)
    return torch.randn(STEPS * 8, 6, generator=draws), torch.randint(3, (STEPS * 8,), generator=draws)


class Program:
    """Model, optimizer, batches and step; and where the run is.

    Attributes:
        compiled: the modules that a user compiles, by name.
        rounds: how many times the batches are gone through: 12 steps in all.
        raises: the hook raises in the step that is next, or under way.
        begun: steps that this process has begun.
    """

    def __init__(self, trait="plain", lr=2**-6):
        torch.manual_seed(0)
        self.trait, self.raises, self.begun = trait, False, 0
        self.model = Net(trait)
        self.compiled = {"body": self.model.body} if trait == "checkpointed" else {"model": self.model}
        parameters = self.model.parameters()
        self.optimizer = WithoutRate(parameters) if trait == "no rate" else torch.optim.AdamW(parameters, lr=lr)
        self.x, self.y = data()
        self.batches = list(zip(self.x.split(8), self.y.split(8), strict=True))
        self.rounds = 1
        if trait == "workers":
            rows = TensorDataset(self.x[:32], self.y[:32])
            self.batches, self.rounds = DataLoader(rows, batch_size=8, num_workers=2), 3
        if trait == "checkpointed":  # compiled code counts at its end, which an early stop leaves out
            self.whole = set_checkpoint_early_stop(False)
            self.whole.__enter__()
        if trait == "hook":
            self.model.into.weight.register_hook(self.hook)

    def hook(self, gradient):
        if self.raises:
            raise PlantedError("the user's own hook raised")
        return gradient * 0.5

    def step(self, x, y):
        loss = F.cross_entropy(self.model(x), y)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def final(self):
        """Return the loss of the trained model on all rows; write ``state.json``, of model and optimizer."""
        state = dict(self.model.state_dict())
        for index, values in self.optimizer.state_dict()["state"].items():
            state |= {f"optimizer {index} {name}": value for name, value in values.items()}
        plain = {name: torch.as_tensor(value).tolist() for name, value in state.items()}
        (PLACE / "state.json").write_text(json.dumps(plain), encoding="utf-8")
        self.model.eval()
        with torch.no_grad():
            return F.cross_entropy(self.model(self.x), self.y)

    def done(self):
        """Return how many steps the optimizer has done."""
        states = self.optimizer.state.values()
        return int(next(iter(states))["step"]) if states else 0

    def save(self, losses):
        objects = self.model.state_dict(), self.optimizer.state_dict()
        torch.save([*objects, torch.get_rng_state(), losses], PLACE / "checkpoint.pt")

    def load(self, losses):
        model, optimizer, random, before = torch.load(PLACE / "checkpoint.pt")
        self.model.load_state_dict(model)
        self.optimizer.load_state_dict(optimizer)
        torch.set_rng_state(random)
        losses |= before

    def before(self, number):
        """Wait, before one step, until whoever runs this has planted the fault."""
        raised = PLACE / "raised"
        self.raises = number == RAISES_AT and not raised.exists()
        if self.raises:
            raised.touch()
        self.begun += 1
        time.sleep(SECONDS)
        if self.begun - 1 == STOP_AT:
            (PLACE / "reached").touch()
            while not (PLACE / "go").exists():
                time.sleep(0.02)


def make(trait: str = "plain", lr: float = 2**-6) -> hotloop.Workload:
    """Make the program for ``hotloop train``."""
    program = Program(trait, lr)

    def before(*batch):
        program.before(program.done())
        return batch

    return hotloop.Workload(
        program.compiled if trait == "checkpointed" else program.model,
        program.optimizer,
        program.step,
        program.batches,
        metrics=lambda: {"loss": program.final()},
        before=before,
    )
