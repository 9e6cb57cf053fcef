"""Lightning's Trainer, and Fabric, in two processes: run as ``python lightning_program.py FOLDER RANK PORT``; prints JSON.

They meet by gloo on the CPU; with ``PEERS_BACKEND=nccl`` each has a GPU.
"""

import gc
import json
import os
import sys
import warnings

import lightning.pytorch as pl
import torch
from block_net import Block, Net
from fitting import small_batches
from lightning.fabric import Fabric
from lightning.fabric import strategies as of_fabric
from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy, ModelParallelStrategy
from torch import distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn import functional as F
from torch.utils.data import DataLoader

import hotloop
from hotloop import events as ev
from hotloop.integrations.fabric import setup
from hotloop.integrations.lightning import HotLoop
from hotloop.record import load

warnings.simplefilter("ignore")
FOLDER, RANK, PORT = sys.argv[1], int(sys.argv[2]), sys.argv[3]
BACKEND = os.environ.get("PEERS_BACKEND", "gloo")
DEVICE = "cpu" if BACKEND == "gloo" else "cuda"
os.environ |= {
    "RANK": str(RANK),
    "LOCAL_RANK": str(RANK),
    "WORLD_SIZE": "2",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "0",
}
os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": PORT, "TORCHELASTIC_RUN_ID": "none"}


class Task(pl.LightningModule):
    """A module with a forward of its own: under DDP, Lightning runs a step through it."""

    def __init__(self):
        super().__init__()
        self.net = Net()

    def forward(self, ids):
        return self.net(ids)

    def training_step(self, batch, batch_idx):
        ids, labels = batch
        loss = F.cross_entropy(self(ids), labels)
        self.log("train_loss", loss, batch_size=len(ids))
        return loss

    def validation_step(self, batch, batch_idx):
        ids, labels = batch
        self.log("val_loss", F.cross_entropy(self(ids), labels), batch_size=len(ids), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.125)


class Sharded(Task):
    """A model-parallel module: each block gathers its own parameters, and the network the rest."""

    def configure_model(self):
        sharded(self.net, self.device_mesh)


def sharded(net, mesh):
    for block in net.blocks:
        fully_shard(block, mesh=mesh["data_parallel"])
    return fully_shard(net, mesh=mesh["data_parallel"])


class Losses(pl.Callback):
    def __init__(self):
        self.seen = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.seen.append(float(outputs["loss"]))


class OnCpu(FSDPStrategy):
    """FSDP on a CPU: torch allows it, Lightning's own strategy takes GPUs only."""

    def _setup_model(self, model):
        return FullyShardedDataParallel(model, device_id=torch.device("cpu"), **self.kwargs)

    def lightning_module_state_dict(self):
        return self.model.state_dict()  # Lightning's own offloads to the CPU, which ends in freed memory from a CPU


KINDS = {
    "ddp": (Task, lambda: DDPStrategy(process_group_backend=BACKEND)),
    "model-parallel": (
        Sharded,
        lambda: ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1, process_group_backend=BACKEND),
    ),
    "fsdp": (
        Task,
        lambda: (OnCpu if DEVICE == "cpu" else FSDPStrategy)(auto_wrap_policy={Block}, process_group_backend=BACKEND),
    ),
}


def fit(kind, *callbacks):
    module, strategy = KINDS[kind]
    torch.manual_seed(1)
    losses, batches = Losses(), small_batches(12)
    trainer = pl.Trainer(
        accelerator=DEVICE, devices=2, strategy=strategy(), max_epochs=2, callbacks=[losses, *callbacks], logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, use_distributed_sampler=False,
    )  # fmt: skip
    mine, validation = batches[6 * RANK : 6 * RANK + 6], batches[:2]
    trainer.fit(module(), DataLoader(mine, batch_size=None), DataLoader(validation, batch_size=None))
    names = sorted(trainer.strategy.lightning_module_state_dict())
    return losses.seen, {key: float(one) for key, one in trainer.callback_metrics.items()}, names


def with_fabric(kind, how):
    """Train a few steps, compiled before Fabric sets the model up, after it, by our `setup` in or over the wrapper."""
    two = {"data_parallel_size": 2, "tensor_parallel_size": 1, "process_group_backend": BACKEND}
    ddp = of_fabric.DDPStrategy(process_group_backend=BACKEND)
    fabric = Fabric(
        accelerator=DEVICE, devices=2,
        strategy=ddp if kind == "ddp" else of_fabric.ModelParallelStrategy(sharded, **two),
    )  # fmt: skip
    fabric.launch()
    torch.manual_seed(1)
    net = Net()
    if how == "before":
        hotloop.compile(net, "aot_eager")
    if how in ("in", "over"):
        model = setup(fabric, net, preset="aot_eager", reapply=how == "over")
    else:
        model = fabric.setup_module(net)
    if how == "after":
        hotloop.compile(model, "aot_eager")
    optimizer = fabric.setup_optimizers(torch.optim.SGD(model.parameters(), lr=0.125))
    losses = []
    for ids, labels in map(fabric.to_device, small_batches(12)[RANK::2]):
        loss = F.cross_entropy(model(ids), labels)
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses, sorted(model.state_dict()), next(iter(hotloop.status(model).components.values()))


def fabrics():
    told = {}
    for kind, ways in (("ddp", ("before", "after", "in", "over")), ("model-parallel", ("after", "in"))):
        eager = with_fabric(kind, None)
        for how in ways:
            torch.compiler.reset()
            ours = with_fabric(kind, how)
            told[f"{kind}, {how}"] = {
                "same": torch.allclose(torch.tensor(ours[0]), torch.tensor(eager[0]), rtol=1e-5, atol=1e-6),
                "names": ours[1] == eager[1],
                "state": ours[2].state,
                "graphs": ours[2].frames_compiled,
                "breaks": ours[2].graph_breaks,
            }
            gc.collect()
    return told


def recorded(hot):
    """Return from this process's own record how often it was started, and its steps."""
    document = load(hot.record.folder)
    return [document["starts"], [one["step"] for one in document["steps"]]]


def main():
    told = {"fabric": fabrics()}
    for kind in KINDS:
        eager = fit(kind)
        torch.compiler.reset()
        hot = HotLoop(run="aot_eager", record=f"{FOLDER}/{kind}")
        with hotloop.watch() as events:
            ours = fit(kind, hot)
        told[kind] = {
            "same": torch.allclose(torch.tensor(ours[0]), torch.tensor(eager[0]), rtol=1e-5, atol=1e-6),
            "metrics": [ours[1], eager[1]],
            "names": [ours[2], eager[2]],
            "losses": ours[0],
            "compiles": sum(isinstance(one, ev.Compiled) for one in events),
            "breaks": sum(isinstance(one, ev.GraphBreak) for one in events),
            "state": hot.status().model.components["model"].state,
            "graphs": hot.status().model.components["model"].frames_compiled,
            "why": list(hot.status().why),
            "record": recorded(hot),
        }
        gc.collect()
    print(json.dumps(told), flush=True)
    gc.collect()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
