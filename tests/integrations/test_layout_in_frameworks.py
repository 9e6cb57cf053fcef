"""The layout of convolutions, asked for by name in each framework that hands its step over."""

import lightning.pytorch as pl
import pytest
import torch
from lightning.fabric import Fabric
from torch import nn
from torch.nn import functional as F
from trainer_fits import ARGUMENTS
from transformers import Trainer, TrainingArguments

from hotloop._torch.module import get_entry
from hotloop.integrations import fabric as hot_fabric
from hotloop.integrations import lightning as hot_lightning
from hotloop.integrations import transformers as hot_transformers
from hotloop.testing import captured_step_emulation

pytestmark = pytest.mark.filterwarnings("default")  # the frameworks warn of their own use of torch
RUN, STEPS = "channels_last+graph", 16


class Pictures(nn.Module):
    """A classifier that returns what transformers' Trainer takes, with the loss first."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(
            *(nn.Conv2d(3, 6, 3, bias=False), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 3))
        )

    def forward(self, pixel_values, labels):
        logits = self.net(pixel_values)
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


def data():
    draws = torch.Generator().manual_seed(1)
    return [
        {"pixel_values": torch.randn(3, 8, 8, generator=draws), "labels": torch.tensor(at % 3)}
        for at in range(4 * STEPS)
    ]


def batches():
    return torch.utils.data.DataLoader(data(), batch_size=4)


def by_lightning(run, seen):
    class Module(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = Pictures()

        def training_step(self, batch, batch_idx):
            return self.model(**batch)["loss"]

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.125, momentum=0.5, fused=True)

        def on_train_batch_end(self, *_):
            seen.extend(one.loop.last_ran()[0] for one in hot)

    module, hot = Module(), [hot_lightning.HotLoop(run)] if run else []
    trainer = pl.Trainer(
        accelerator="cpu", devices=1, max_epochs=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
        callbacks=hot,
    )  # fmt: skip
    trainer.fit(module, batches())
    return module.model


def by_transformers(run, seen, folder):
    class Sees(hot_transformers.HotLoop):
        def on_step_end(self, *args, model=None, **kwargs):
            seen.append(self.loop.last_ran()[0])
            return super().on_step_end(*args, model=model, **kwargs)

    arguments = TrainingArguments(
        str(folder), per_device_train_batch_size=4, num_train_epochs=1, learning_rate=0.01, **ARGUMENTS
    )
    kind = Trainer if run is None else hot_transformers.HotTrainer
    trainer = kind(
        model=Pictures(), args=arguments, train_dataset=data(), callbacks=[Sees(run)] if run is not None else []
    )
    trainer.train()
    return trainer.model


def by_fabric(run, seen):
    fabric = Fabric(accelerator="cpu", devices=1)
    model = Pictures()
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.125, momentum=0.5, fused=True))

    def train_step(pixel_values, labels):
        loss = model(pixel_values, labels)["loss"]
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    loop = hot_fabric.loop(fabric, model, optimizer, run=run) if run else None
    step = loop.step(train_step) if loop else train_step
    for batch in batches():
        step(**batch)
        if loop:
            seen.append(loop.last_ran()[0])
    if loop:
        loop.close()
    return model.module


@pytest.mark.parametrize("framework", [by_lightning, by_transformers, by_fabric])
def test_it_is_in_force_in_the_fit_and_leaves_the_model_as_it_is(framework, tmp_path):
    more = (tmp_path,) if framework is by_transformers else ()
    plain = framework(None, [], *more)
    seen = []
    with captured_step_emulation():
        ours = framework(RUN, seen, *more)
    assert seen[-1] == RUN
    assert ours.net[0].weight.is_contiguous()
    assert get_entry(ours.net[0]) is None
    torch.testing.assert_close(dict(ours.state_dict()), dict(plain.state_dict()), rtol=1e-4, atol=1e-5)
