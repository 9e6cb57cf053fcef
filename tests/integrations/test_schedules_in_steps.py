"""Steps that read a schedule which a framework holds: a captured step never goes on with an old learning rate."""

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset

import hotloop
from hotloop import events as ev
from hotloop.integrations.lightning import HotLoop
from hotloop.testing import captured_step_emulation

pytestmark = pytest.mark.filterwarnings("default")  # the framework warns of its own use of torch


class Scheduled(pl.LightningModule):
    def __init__(self, read):
        super().__init__()
        self.net, self.read, self.losses = nn.Linear(4, 2), read, []

    def training_step(self, batch, _):
        x, y = batch
        schedule = self.lr_schedulers()
        weight = schedule.last_epoch if self.read == "last_epoch" else schedule.get_last_lr()[0]
        return F.cross_entropy(self.net(x), y) * (1 + weight)

    def on_train_batch_end(self, outputs, *_):
        self.losses.append(outputs["loss"].item())

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.125, fused=True)
        return [optimizer], [StepLR(optimizer, 2, 0.5)]


def fit(read, callbacks):
    torch.manual_seed(0)
    module = Scheduled(read)
    data = DataLoader(TensorDataset(torch.randn(64, 4), torch.randint(2, (64,))), 8)
    settings = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    pl.Trainer(max_epochs=5, accelerator="cpu", callbacks=callbacks, **settings).fit(module, data)
    return module.losses


@pytest.mark.parametrize("read", ["last_epoch", "get_last_lr"])
def test_what_lightnings_schedulers_say(read):
    eager = fit(read, [])
    with captured_step_emulation(), hotloop.watch() as seen:
        assert fit(read, [HotLoop("eager+graph")]) == eager
    reasons = [one.reason for one in seen if isinstance(one, ev.CaptureDropped)]
    assert reasons
    assert all(one.startswith("trainer[") and " has changed: " in one for one in reasons), reasons
