"""Scripts that change much between their steps, and nothing that a step reads: no recording may be dropped."""

from __future__ import annotations

import argparse
import collections
import dataclasses
import random
import time
import types

import torch
from changed_loops import Penalty, Trainer
from changed_programs import Mlp, adamw, sgd, usual_step
from torch import nn
from torch.nn import functional as F

METERS = collections.defaultdict(list)
SEEN = 0


def counting_trainer():
    class Counting(Trainer):
        def after(self):
            self.state.global_step += 1
            self.history.append(self.state.global_step)
            self.best, self.started = min(self.best, 1 / self.state.global_step), time.time()

    trainer = Counting(Mlp(), [])
    trainer.history, trainer.best = [], 1.0
    yield (trainer.model, trainer.optimizer, trainer.training_step, trainer.after)


def callbacks_that_count():
    class Progress(Penalty):
        count = 0

        def after(self):
            self.count += 1

    trainer = Trainer(Mlp(), [Progress(0.5)])
    yield (trainer.model, trainer.optimizer, trainer.training_step, trainer.callbacks[0].after)


def best_result_in_the_arguments():
    model, args = Mlp(), argparse.Namespace(alpha=0.5, best=0.0, epoch=0)
    optimizer = adamw(model.parameters())

    def after():
        args.best, args.epoch = args.best + 1, args.epoch + 1

    yield (model, optimizer, usual_step(lambda x, y: args.alpha * F.cross_entropy(model(x), y), optimizer), after)


def progress_in_a_config():
    model, config = Mlp(), {"alpha": 0.5, "epoch": 0}
    optimizer = adamw(model.parameters())

    def after():
        config["epoch"] += 1

    yield (model, optimizer, usual_step(lambda x, y: config["alpha"] * F.cross_entropy(model(x), y), optimizer), after)


def meters_in_globals():
    METERS.clear()
    model = Mlp()
    optimizer = adamw(model.parameters())

    def after():
        global SEEN
        SEEN += 6
        METERS["loss"].append(SEEN)

    yield (model, optimizer, usual_step(lambda x, y: F.cross_entropy(model(x), y), optimizer), after)


def scheduler_steps():
    model = Mlp()
    optimizer = sgd(model.parameters())
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.5 ** (epoch // 8))
    yield (model, optimizer, usual_step(lambda x, y: F.cross_entropy(model(x), y), optimizer), scheduler.step)


def average_outside_the_step():
    model, average, count = Mlp(), Mlp(), 0
    optimizer = adamw(model.parameters())

    @torch.no_grad()
    def after():
        nonlocal count
        count += 1
        for mine, theirs in zip(average.parameters(), model.parameters(), strict=True):
            mine.lerp_(theirs, 1 / count)

    yield (model, optimizer, usual_step(lambda x, y: F.cross_entropy(model(x), y), optimizer), after)


def notes_on_the_model():
    model = Mlp()
    optimizer = adamw(model.parameters())
    model.history = []

    def after():
        model.last_loss = random.random()
        model.history.append(model.last_loss)

    yield (model, optimizer, usual_step(lambda x, y: F.cross_entropy(model(x), y), optimizer), after)


@dataclasses.dataclass
class State:
    alpha: float = 0.5
    step: int = 0
    losses: list = dataclasses.field(default_factory=list)


def state_of_a_run():
    model, state = Mlp(), State()
    optimizer = adamw(model.parameters())

    def after():
        state.losses.append(state.step)
        state.step = len(state.losses)

    def train_step(x, y):
        loss = state.alpha * F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    yield (model, optimizer, train_step, after)


def method_chosen_by_name():
    class Chosen(Trainer):
        kind = "ce"

        def ce_loss(self, out, y):
            return self.loss_fn(out, y)

        def compute_loss(self, x, y):
            return getattr(self, f"{self.kind}_loss")(self.model(x), y)

        def after(self):
            self.global_step += 1

    trainer = Chosen(Mlp(), [])
    trainer.global_step = 0
    yield (trainer.model, trainer.optimizer, trainer.training_step, trainer.after)


def validation_between():
    model = Mlp(dropout=0.5)
    optimizer, rows = adamw(model.parameters()), torch.randn(8, 8)

    @torch.no_grad()
    def after():
        model.eval()
        METERS["validation"].append(float(model(rows).mean()))
        model.train()

    yield (model, optimizer, usual_step(lambda x, y: F.cross_entropy(model(x), y), optimizer), after)


def data_on_the_trainer():
    class Loading(Trainer):
        def after(self):
            self.batch = next(self.iterator, None)

    trainer = Loading(Mlp(), [])
    trainer.iterator, trainer.batch = iter(range(1000)), None
    yield (trainer.model, trainer.optimizer, trainer.training_step, trainer.after)


def checkpoints():
    model = Mlp()
    optimizer, saved = adamw(model.parameters()), types.SimpleNamespace(best=None)

    def after():
        saved.best = {name: one.clone() for name, one in model.state_dict().items()}
        nn.utils.parameters_to_vector(model.parameters())
        optimizer.state_dict()

    yield (model, optimizer, usual_step(lambda x, y: F.cross_entropy(model(x), y), optimizer), after)
