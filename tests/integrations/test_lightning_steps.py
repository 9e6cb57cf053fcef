"""The *_step methods of a LightningModule are compiled with their calls of self.log."""

import copy

import pytest
import torch
import torchmetrics
from fitting import SmallClassifier, inventory
from test_lightning import Sgd, fit, same
from torch.nn import functional as F

import hotloop
from hotloop import events as ev
from hotloop.integrations.lightning import HotLoop

pytestmark = pytest.mark.filterwarnings("default")  # the framework warns of its own use of torch


class Logs(Sgd):
    """A module that logs in the middle of its step, also a number that changes afterwards, and predicts."""

    def training_step(self, batch, batch_idx):
        logits, labels = self.net(batch[0]), batch[1]
        loss = F.cross_entropy(logits, labels)
        self.log("early", loss, on_epoch=True, batch_size=len(labels))
        loss = loss + self.scaled(logits)
        self.log_dict({"late": loss, "plain": 0.5}, batch_size=len(labels))
        return {"loss": loss, "logits": logits.detach()}

    def scaled(self, logits):
        return logits.square().mean() / 4

    def predict_step(self, batch, batch_idx):
        return self.net(batch[0]).argmax(1)


def compiles(events):
    return sum(isinstance(one, ev.Compiled) for one in events)


def test_a_copy_has_plain_methods_and_what_is_taken_off_leaves_nothing():
    torch.manual_seed(1)
    model = Logs(SmallClassifier())
    before = inventory(model)
    hotloop.compile(model, "aot_eager")
    copied = copy.deepcopy(model)
    assert copied.training_step.__func__ is Logs.training_step
    assert copied.training_step.__self__ is copied
    hotloop.uncompile(model)
    assert inventory(model) == before


class Counts(Logs):
    def __init__(self, net):
        super().__init__(net)
        self.accuracy = torchmetrics.Accuracy("multiclass", num_classes=3)

    def training_step(self, batch, batch_idx):
        found = super().training_step(batch, batch_idx)
        self.accuracy(found["logits"], batch[1])
        self.log("accuracy", self.accuracy, on_epoch=True)
        return found


def test_a_step_that_updates_a_metric_counts_it_once_and_its_network_is_compiled():
    eager, hot = fit(Counts, epochs=2), HotLoop(run="aot_eager")
    same(eager, fit(Counts, hot, epochs=2))
    assert "updates the metric self.accuracy" in str(hot.status())
    part = hot.status().model.components["model"]
    assert (part.state, part.modes["training"]["frames_compiled"]) == ("compiled", 16)
