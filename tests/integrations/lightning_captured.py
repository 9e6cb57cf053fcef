"""Lightning's Trainer in two processes, whose steps a loop captures; see `captured_ranks`."""

import lightning.pytorch as pl
import torch
from captured_ranks import (
    BACKEND,
    CAPTURES,
    DEVICE,
    FOLDER,
    Net,
    batches,
    listening,
    paced,
    shards_of,
    state_of,
    tell,
    told_of,
)
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.utils.data import DataLoader

from hotloop.integrations.lightning import HotLoop

STEPS = 24
"""Of each of two epochs."""


class Task(pl.LightningModule):
    """A module that logs at each step, and over all processes."""

    def __init__(self):
        super().__init__()
        self.net = Net()

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.cross_entropy(self(x), y)
        self.log("train_loss", loss, on_step=True, on_epoch=True, sync_dist=True, batch_size=len(x))
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("val_loss", F.cross_entropy(self(x), y), batch_size=len(x), sync_dist=True)

    def configure_optimizers(self):
        optimizer, schedule = self.rates()
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def rates(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)
        return optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 2 * STEPS)


class Reading(Task):
    """A module that reads its loss on the host."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return loss * 2 if loss.item() > 100 else loss


class Sharded(Task):
    """A module that is sharded, by an optimizer with a kernel for shards and rates that are float32: equal to the bit."""

    def configure_model(self):
        for part in (self.net.first, self.net):
            fully_shard(part, mesh=self.device_mesh["data_parallel"])

    def rates(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=2**-6, fused=True)
        return optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 10, 0.5)


class Watched(pl.Callback):
    """Notes the losses, and what ran."""

    def __init__(self, hot):
        self.losses, self.ran, self.hot = [], [], hot

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.losses += [float(outputs["loss"]), float(trainer.callback_metrics["train_loss_step"])]
        if self.hot is not None and self.hot.loop is not None:
            self.ran.append(self.hot.loop.last_ran())


def fit(run, task=Task, strategy=None, resumes=None, **settings):
    pl.seed_everything(1, verbose=False)
    told = {"total_steps": 10_000} if run == "auto" else {}
    hot = HotLoop(run, sentinel=0, record=f"{FOLDER}/record", **told) if run else None
    watched, module = Watched(hot), task()
    folder = f"{FOLDER}/{run}{'-sharded' if strategy is two else ''}"
    trainer = pl.Trainer(
        accelerator=DEVICE, devices=2, strategy=strategy() if strategy else DDPStrategy(process_group_backend=BACKEND),
        max_epochs=2, callbacks=[watched, *([hot] if hot else []), ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1)],
        logger=CSVLogger(folder), log_every_n_steps=1, enable_progress_bar=False, enable_model_summary=False,
        use_distributed_sampler=False, **{"gradient_clip_val": 0.5, **settings},
    )  # fmt: skip
    loader = DataLoader(batches(STEPS), batch_size=None)
    trainer.fit(
        module, loader, DataLoader(batches(2), batch_size=None), ckpt_path=f"{folder}/epoch=0.ckpt" if resumes else None
    )
    metrics = [float(value) for value in trainer.callback_metrics.values()]
    numbers = [*watched.losses, *metrics, *state_of(module), *shards_of(trainer.optimizers[0])]
    return numbers, watched.ran, hot


def beside_eager(run="eager+graph", **how):
    eager, *_ = fit(None, **how)
    with CAPTURES(), paced(), listening() as log:
        ours, ran, hot = fit(run, **how)
    status = hot.status()
    told = {"owned": status.owned, "running": status.running, "why": list(status.why), "folder": str(hot.record.folder)}
    return {**told_of(eager, ours, ran, run, log), **told}


def two():
    return ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1, process_group_backend=BACKEND)


tell(
    {
        "plain": beside_eager,
        "resumed": lambda: beside_eager(resumes=True),
        "auto": lambda: beside_eager("auto"),
        "compiled": lambda: beside_eager("aot_eager+graph"),
        "accumulated": lambda: beside_eager(accumulate_grad_batches=2),
        "host read": lambda: beside_eager(task=Reading),
        "unused": lambda: beside_eager(
            strategy=lambda: DDPStrategy(process_group_backend=BACKEND, find_unused_parameters=True)
        ),
        "sharded": lambda: beside_eager(task=Sharded, strategy=two),
        "sharded, resumed": lambda: beside_eager(task=Sharded, strategy=two, resumes=True),
    }
)
