"""Two processes under Lightning or Fabric: prints what came of it as JSON. `test_guide_ranks` sets their environment."""

import json
import os

import lightning
import lightning.pytorch as pl
import torch
from guide_programs import Classifier, batches
from lightning.fabric import strategies as of_fabric
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch import distributed
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.utils.data import DataLoader

import hotloop
from hotloop.integrations.fabric import setup
from hotloop.integrations.lightning import HotLoop

TWO = {"data_parallel_size": 2, "tensor_parallel_size": 1, "process_group_backend": "gloo"}
MINE = batches(12)[int(os.environ["RANK"]) :: 2]


class Module(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = Classifier()

    def training_step(self, batch, batch_idx):
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        self.log("train_loss", loss, batch_size=len(batch[1]))
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.125)


class Sharded(Module):
    def configure_model(self):
        fully_shard(self.net, mesh=self.device_mesh["data_parallel"])


class Losses(pl.Callback):
    def __init__(self):
        self.seen = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.seen.append(float(outputs["loss"]))


STRATEGIES = {
    "ddp": (Module, lambda: DDPStrategy(process_group_backend="gloo")),
    "fsdp": (Sharded, lambda: ModelParallelStrategy(**TWO)),
}


def in_lightning(kind, *callbacks):
    module, strategy = STRATEGIES[kind]
    torch.manual_seed(1)
    losses = Losses()
    trainer = pl.Trainer(
        accelerator="cpu", devices=2, strategy=strategy(), max_epochs=1, callbacks=[losses, *callbacks], logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, use_distributed_sampler=False,
    )  # fmt: skip
    trainer.fit(module(), DataLoader(MINE, batch_size=None))
    return losses.seen


def in_fabric(kind, how):
    ddp = of_fabric.DDPStrategy(process_group_backend="gloo")
    shards = of_fabric.ModelParallelStrategy(lambda model, mesh: fully_shard(model, mesh=mesh["data_parallel"]), **TWO)
    fabric = lightning.Fabric(accelerator="cpu", devices=2, strategy=ddp if kind == "ddp" else shards)
    fabric.launch()
    torch.manual_seed(1)
    model = Classifier()
    if how == "before":
        hotloop.compile(model, "aot_eager")
    if how in ("by setup", "over"):
        model = setup(fabric, model, preset="aot_eager", reapply=how == "over")
    else:
        model = fabric.setup_module(model)
    if how == "after":
        hotloop.compile(model, "aot_eager")
    optimizer = fabric.setup_optimizers(torch.optim.SGD(model.parameters(), lr=0.125))
    losses = []
    for ids, labels in MINE:
        loss = F.cross_entropy(model(ids), labels)
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def main():
    told = {}
    cases = {f"lightning {kind}": (in_lightning, kind, ()) for kind in STRATEGIES}
    cases |= {f"fabric ddp {how}": (in_fabric, "ddp", how) for how in ("before", "after", "by setup", "over")}
    cases |= {f"fabric fsdp {how}": (in_fabric, "fsdp", how) for how in ("after", "by setup")}
    for name, (train, kind, how) in cases.items():
        eager = train(kind, None) if train is in_fabric else train(kind)
        torch.compiler.reset()
        with hotloop.watch() as events:
            ours = train(kind, how) if train is in_fabric else train(kind, HotLoop("aot_eager"))
        compiled = [one for one in events if one.kind == "compiled"]
        told[name] = [eager, ours, len(compiled), len([one for one in events if one.kind == "graph_break"])]
    print(json.dumps(told), flush=True)
    distributed.barrier()
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
