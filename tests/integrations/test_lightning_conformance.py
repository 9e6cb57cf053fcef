"""Lightning's Trainer passes the conformance suite."""

import lightning.pytorch as pl
import pytest
import torch
from conformance import Conformance
from fitting import Fitted, plain_python
from python_in_steps import weighed
from torch.nn import functional as F
from torch.utils.data import DataLoader

from hotloop.integrations.lightning import HotLoop

pytestmark = pytest.mark.filterwarnings("default")  # the framework warns of its own use of torch


class Task(pl.LightningModule):
    """A LightningModule as its users write it; the network is the suite's."""

    def __init__(self, net, python=None):
        super().__init__()
        self.net, self.python = net, python or plain_python()

    def training_step(self, batch, batch_idx):
        ids, labels = batch
        loss = weighed(F.cross_entropy(self.net(ids), labels), self.python)
        self.log("train_loss", loss, batch_size=len(ids))
        return loss

    def validation_step(self, batch, batch_idx):
        ids, labels = batch
        self.log("val_loss", F.cross_entropy(self.net(ids), labels), batch_size=len(ids))

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.0625, fused=True)


class Losses(pl.Callback):
    """A callback that reports each batch to the suite, and keeps the losses as they are before accumulation."""

    def __init__(self, begin=lambda: None):
        self.seen, self.begin = [], begin

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.begin()

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.seen.append(float(outputs["loss"]) * trainer.accumulate_grad_batches)


def loader(batches):
    return DataLoader(batches, batch_size=None)


def fit_with_trainer(task, *callbacks, module=Task, **settings):
    model = module(task.model, task.python)
    settings = {"accumulate_grad_batches": task.accumulate, **settings}
    trainer = pl.Trainer(
        accelerator=task.device, devices=1, max_epochs=task.epochs, callbacks=list(callbacks), logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, **settings,
    )  # fmt: skip
    more = {"val_dataloaders": loader(task.validation)} if task.validation else {}
    trainer.fit(model, loader(task.batches), ckpt_path=task.resume, **more)
    if task.save is not None:
        trainer.save_checkpoint(task.save)
    return trainer, model


class TestTrainer(Conformance):
    limits = {}

    callbacks = ()

    def fit(self, task):
        hot, losses = [HotLoop(run=task.run)] if task.run is not None else [], Losses(task.begin)
        trainer, _ = fit_with_trainer(task, losses, *self.callbacks, *hot)
        left = {"status": hot[0].status(), "record": hot[0].record} if hot else {}
        optimizer = trainer.optimizers[0].state_dict()
        return Fitted(model=task.model, losses=losses.seen, optimizer=optimizer, **left)

    def saved(self, path):
        return torch.load(path, weights_only=True)["state_dict"]


class Looks(pl.Callback):
    """A callback with a hook inside the step, as a strategy has, so that no loop owns the step."""

    def on_after_backward(self, trainer, pl_module):
        assert any(one.grad is not None for one in pl_module.parameters())


RAISED = "raised with cause and remedy: no loop owns the step"


class TestInPlace(TestTrainer):
    callbacks = (Looks(),)
    limits = {
        "test_failing_run_of_a_forward": RAISED,
        "test_failing_run_of_a_backward": RAISED,
        "test_captured_step": "Looks.on_after_backward runs inside the step, once a batch",
    }
