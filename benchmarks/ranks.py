"""Captured steps in several processes: equal to eager's DDP or FSDP2, and how fast.

usage: torchrun --nproc-per-node 2 benchmarks/ranks.py [--json OUT] [--steps 300] [--models gpt2,xlmr]
           [--through FRAMEWORK] [--sharded] [--compiled | --only eager,auto] [--told N] [--small]

Each model trains four times from the same weights and batches, under DistributedDataParallel, or with ``--sharded``
under FSDP2 (``fully_shard`` of each layer and of the rest; also in a single process): eager, captured
(``run="eager+graph"``), by ``run="auto"``, and eager once more, which shows how far eager is from itself. Told are the
largest difference of a loss, the relative difference of all parameters, and the steps a second of the last third of the
steps. Of auto are told, too, the tier that it chose, from which step on, whether all processes chose alike, and the
steps a second of the whole run. With ``--through fabric``, ``lightning``, ``accelerate`` or ``transformers`` the
framework makes the wrapper; the Trainers of Lightning and transformers run the steps, too. ``--compiled`` trains once
more by torch's own compile of DistributedDataParallel, in a loop that runs eager. ``--only eager,auto`` trains in these
ways alone. ``--told 100000`` tells loops that the run is so long, which decides what `auto` compiles; ``--steps`` of it
are trained. ``--small`` trains two tiny models on gloo and the CPU's emulation, where a replay is as slow as eager. One
process to each GPU; NCCL.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime as dt
import functools
import gc
import json
import os
import pathlib
import sys
import tempfile
import time

import torch
from torch import distributed as dist
from torch import nn
from torch.nn import functional as F  # noqa: N812 - torch's own custom
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "src"))

import hotloop
from hotloop.testing import captured_step_emulation

TIMEOUT = dt.timedelta(seconds=120)


class Transformer(nn.Module):
    """Eight layers of width 256 on tokens; ``--small``: two of width 32."""

    def __init__(self, small):
        super().__init__()
        width, layers, self.words = (32, 2, 64) if small else (256, 8, 8192)
        self.embed = nn.Embedding(self.words, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.1, batch_first=True, norm_first=True)
        self.body = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, self.words)

    def forward(self, input_ids, labels):
        """Return the loss."""
        out = self.head(self.body(self.embed(input_ids)))
        return F.cross_entropy(out.flatten(0, 1), labels.flatten())


class OfLibrary(nn.Module):
    """A model of transformers with random weights, which gives its loss."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, **inputs):
        """Return the loss."""
        return self.model(**inputs).loss


def transformer(small, draws):
    """Make a small transformer and its batches."""
    model, size = Transformer(small), (4, 16) if small else (16, 256)
    return model, [{name: torch.randint(model.words, size, generator=draws) for name in ("input_ids", "labels")}]


def gpt2(small, draws):
    """Make GPT-2 124M, 16 x 1024."""
    from transformers import GPT2Config, GPT2LMHeadModel

    settings = {"n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": 64, "n_positions": 16} if small else {}
    config = GPT2Config(**settings, use_cache=False)
    ids = torch.randint(config.vocab_size, (2, 16) if small else (16, 1024), generator=draws)
    return OfLibrary(GPT2LMHeadModel(config)), [{"input_ids": ids, "labels": ids}]


def xlmr(small, draws):
    """Make XLM-R base that classifies 16 texts of up to 256 tokens, padded."""
    from transformers import XLMRobertaConfig, XLMRobertaForSequenceClassification

    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    config = XLMRobertaConfig(
        **(sizes if small else {}), vocab_size=64 if small else 250002, max_position_embeddings=514, type_vocab_size=1,
        use_cache=False, num_labels=2,
    )  # fmt: skip
    rows, length = (2, 16) if small else (16, 256)
    ids = torch.randint(3, config.vocab_size, (rows, length), generator=draws)
    mask = (torch.arange(length) < torch.randint(length // 2, length, (rows, 1), generator=draws)).long()
    labels = torch.randint(2, (rows,), generator=draws)
    return OfLibrary(XLMRobertaForSequenceClassification(config)), [
        {"input_ids": ids.where(mask.bool(), 1), "attention_mask": mask, "labels": labels}
    ]


MODELS = {"transformer": transformer, "gpt2": gpt2, "xlmr": xlmr}


class Clock:
    """Times all steps, and the last third of them: in both, all processes begin together."""

    def __init__(self, device, steps):
        self.device, self.last, self.begun = device, steps - steps // 3, {}

    def begins(self, number):
        """Note that a step begins."""
        if number in (0, self.last):
            waited(self.device)
            dist.barrier()
            self.begun[number] = time.perf_counter()

    def seconds(self):
        """Return how long all steps have taken, and the last third of them."""
        waited(self.device)
        now = time.perf_counter()
        return now - self.begun[0], now - self.begun[self.last]


def by_torch(net, device):
    """Make the wrapper, and how to go backward; torch before 2.13 captures only one of another stream."""
    side = torch.cuda.stream(torch.cuda.Stream()) if device.type == "cuda" else contextlib.nullcontext()
    with side:
        model = DistributedDataParallel(net, device_ids=[device.index] if device.type == "cuda" else None)
    waited(device)
    optimizer = optimizer_of(net)
    return model, optimizer, torch.Tensor.backward, hotloop.Loop


def by_shards(net, device):  # noqa: ARG001 - as the others
    """Shard each repeated layer and the rest by FSDP2; whole layers are freed after their forward."""
    from torch.distributed.fsdp import fully_shard

    layers = max((part for part in net.modules() if isinstance(part, nn.ModuleList)), key=len)
    for layer in layers:
        fully_shard(layer)
    fully_shard(net)
    return net, optimizer_of(net), torch.Tensor.backward, hotloop.Loop


def by_fabric(net, device):
    """Make the wrapper and the loop by Fabric's integration."""
    from lightning.fabric import Fabric

    from hotloop.integrations.fabric import loop

    fabric = Fabric(accelerator=device.type, devices=dist.get_world_size(), strategy="ddp")
    fabric.launch()
    model, optimizer = fabric.setup(net, optimizer_of(net))
    return model, optimizer, fabric.backward, functools.partial(loop, fabric)


def by_accelerate(net, device):
    """Make the wrapper by Accelerate's integration, and the loop by hand, as its page says."""
    from accelerate import Accelerator

    from hotloop.integrations.accelerate import prepare

    accelerator = Accelerator(cpu=device.type == "cpu")
    model, optimizer = prepare(accelerator, net, optimizer_of(net), preset="none")
    return model, optimizer, accelerator.backward, hotloop.Loop


def optimizer_of(net):
    """Make AdamW."""
    return torch.optim.AdamW(net.parameters(), lr=3e-4, fused=next(net.parameters()).is_cuda)


def by_hand(make, net, run, device, batches, *, told=None):  # noqa: PLR0913 - what `train` gives
    """Train in a loop of our own, told of ``told`` steps; return losses, what ran, the status and seconds."""
    steps = len(batches)
    model, optimizer, backward, loop_of = make(net, device)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    if run == "compile":
        model.compile()
    loop = loop_of(model, optimizer, run="eager" if run == "compile" else run, total_steps=told or steps)

    @loop.step
    def step(batch):
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            loss = model(**batch)
        backward(loss)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    losses, ran, clock = [], [], Clock(device, steps)
    for number, batch in enumerate(batches):
        clock.begins(number)
        losses.append(step(batch))
        ran.append(loop.last_ran())
        schedule.step()
    seconds, status = clock.seconds(), loop.status()
    loop.close()
    return losses, ran, status, seconds


def by_lightning(net, run, device, batches):
    """Train in Lightning's Trainer, as `by_hand` does but for clipped gradients."""
    import lightning.pytorch as pl

    from hotloop.integrations.lightning import HotLoop

    steps, losses, ran, clock, seconds = len(batches), [], [], Clock(device, len(batches)), []

    class Task(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = net

        def training_step(self, batch):
            return self.net(**batch)

        def configure_optimizers(self):
            optimizer = optimizer_of(net)
            schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    class Watch(pl.Callback):
        def on_train_batch_start(self, *hooked):
            clock.begins(hooked[-1])

        def on_train_batch_end(self, _trainer, _module, outputs, *_):
            losses.append(outputs["loss"])
            ran.append(hot.loop.last_ran() if hot.loop is not None else ("eager", "run"))

        def on_train_epoch_end(self, *_):
            seconds.append(clock.seconds())

    hot = HotLoop(run)
    trainer = pl.Trainer(
        accelerator=device.type, devices=dist.get_world_size(), strategy="ddp", max_epochs=1, callbacks=[hot, Watch()],
        precision="bf16-mixed" if device.type == "cuda" else "32-true", logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        use_distributed_sampler=False,  # Lightning clips no gradients of a fused optimizer under mixed precision
    )  # fmt: skip
    trainer.fit(Task(), torch.utils.data.DataLoader(batches, batch_size=None))
    net.to(device)  # the Trainer leaves a module on the CPU
    return losses, ran, hot.status().loop, seconds[0]


class GivesLoss(nn.Module):
    """A model whose outputs have names, as transformers' Trainer reads them."""

    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, input_ids, labels, attention_mask=None):
        """Return the loss."""
        masks = {} if attention_mask is None else {"attention_mask": attention_mask}
        return {"loss": self.net(input_ids=input_ids, labels=labels, **masks)}


def by_transformers(net, run, device, batches):
    """Train in transformers' Trainer, as `by_hand` does; clipping, optimizer and schedule are the Trainer's."""
    from transformers import TrainerCallback, TrainingArguments

    from hotloop.integrations.transformers import HotLoop, HotTrainer

    losses, ran, clock = [], [], Clock(device, len(batches))

    class Watched(HotTrainer):
        def get_train_dataloader(self):
            return torch.utils.data.DataLoader(batches, batch_size=None)

        def training_step(self, *given, **named):
            clock.begins(len(losses))
            losses.append(super().training_step(*given, **named).detach())
            ran.append(hot.loop.last_ran() if hot.loop is not None else ("eager", "run"))
            return losses[-1]

    class Ends(TrainerCallback):
        def on_train_end(self, *_, **__):
            seconds.append(clock.seconds())

    hot, seconds = HotLoop(run), []
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, max_steps=len(batches), learning_rate=3e-4, weight_decay=0.01, lr_scheduler_type="cosine",
            optim="adamw_torch_fused" if device.type == "cuda" else "adamw_torch", bf16=device.type == "cuda",
            use_cpu=device.type == "cpu", logging_strategy="no", save_strategy="no", report_to="none",
            remove_unused_columns=False, ddp_find_unused_parameters=False, disable_tqdm=True,
        )  # fmt: skip
        Watched(GivesLoss(net), arguments, train_dataset=batches, callbacks=[hot, Ends()]).train()
    return losses, ran, None if run == "eager" else hot.status(), seconds[0]


WAYS = {
    "torch": functools.partial(by_hand, by_torch),
    "shards": functools.partial(by_hand, by_shards),
    "fabric": functools.partial(by_hand, by_fabric),
    "accelerate": functools.partial(by_hand, by_accelerate),
    "lightning": by_lightning,
    "transformers": by_transformers,
}


def train(name, run, device, steps, *, small, through):  # noqa: PLR0913 - what the command line says
    """Train a model in a tier; give its losses, parameters and figures."""
    rank = dist.get_rank()
    torch.manual_seed(0)
    draws = torch.Generator().manual_seed(1000 + rank)
    net, found = MODELS[name](small, draws)
    net.to(device)
    data = [{key: value.to(device) for key, value in found[0].items()}]
    data += [{key: value.roll(number, 0) for key, value in data[0].items()} for number in range(1, 8)]
    torch.manual_seed(100 + rank)
    batches = [data[number % len(data)] for number in range(steps)]
    losses, ran, loop, (whole, seconds) = through(net, run, device, batches)  # no loop: a Trainer ran the steps
    tier = ran[-1][0] if loop is None else loop.tier
    told = {
        "steps_per_second": (steps // 3) / seconds,
        "steps_per_second_of_all": steps / whole,
        "replays": sum(one.endswith("+graph") and what == "run" for one, what in ran),
        "in_force_from": next((place for place in range(steps) if {one[0] for one in ran[place:]} == {tier}), steps),
        "tier": tier,
        "decided": [] if loop is None else list(loop.decisions),
        "status": str(loop or ""),
        "gib": torch.cuda.max_memory_reserved() / 2**30 if device.type == "cuda" else None,
    }
    left = torch.cat([whole_of(parameter).detach().double().flatten().cpu() for parameter in net.parameters()])
    return torch.stack(losses).double().cpu(), left, told


def whole_of(parameter):
    """Gather a parameter that is sharded."""
    return parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter


def waited(device):
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def apart(one, other):
    """Return how far two trainings are apart: the largest difference of a loss, and the parameters' relative one."""
    losses, left = one[0] - other[0], one[1] - other[1]
    return {
        "loss": float(losses.abs().max()),
        "parameters": float(left.norm() / other[1].norm()),
    }


TIERS = {"eager": "eager", "captured": "eager+graph", "auto": "auto", "again": "eager", "compiled": "compile"}


def compared(name, device, steps, *, small, through, runs):  # noqa: PLR0913 - what the command line says
    """Train a model in each of the ways, and compare them with the first one, which is eager."""
    made = {}
    for run in runs:
        torch.compiler.reset()  # what torch has learnt of other models' shapes
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        made[run] = train(name, TIERS[run], device, steps, small=small, through=through)
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
        dist.barrier()
    best = max(made[run][2]["steps_per_second"] for run in runs if TIERS[run] == "eager")
    told = {run: one[2] for run, one in made.items()}
    told["last_losses"] = [float(one[0][-1]) for one in made.values()]
    for run in runs[1:]:
        told[f"{run}_from_eager"] = apart(made[run], made["eager"])
        told[f"{run}_faster"] = told[run]["steps_per_second"] / best
    for run in runs:
        told[f"{run}_ms"] = 1e3 / told[run]["steps_per_second"]
    auto = told["auto"]
    told["auto_tier"] = auto["tier"]
    chosen = torch.tensor([auto["in_force_from"], auto["replays"]], device=device)
    told["chosen_alike"] = equal_everywhere(chosen)
    # parameters are the same on all ranks, or the replicas have parted
    sums = [torch.stack([one[1].sum(), one[1].norm()]).to(device) for one in made.values()]
    told["replicas_equal"] = all(equal_everywhere(one) for one in sums)
    return told


def equal_everywhere(value):
    """Return whether a tensor is the same in all processes."""
    least, most = value.clone(), value.clone()
    dist.all_reduce(least, dist.ReduceOp.MIN)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    return bool(torch.equal(least, most))


def parsed():
    """Read the command line; return what was asked for, and the ways to train."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=pathlib.Path)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--models")
    parser.add_argument("--through", choices=[way for way in WAYS if way != "shards"], default="torch")
    parser.add_argument("--sharded", action="store_true")
    parser.add_argument("--compiled", action="store_true")
    parser.add_argument("--only", type=lambda names: names.split(","))
    parser.add_argument("--told", type=int)
    parser.add_argument("--small", action="store_true")
    asked = parser.parse_args()
    if asked.sharded and asked.through != "torch":
        parser.error("--sharded shards by torch's own fully_shard: leave --through out")
    if asked.told and asked.through in ("lightning", "transformers"):
        parser.error(f"--told: the Trainer of {asked.through} says itself how many steps it runs")
    if unknown := [name for name in (asked.models or "").split(",") if name and name not in MODELS]:
        parser.error(f"--models {', '.join(unknown)}: expected some of {', '.join(MODELS)}")
    if unknown := [name for name in asked.only or () if name not in TIERS]:
        parser.error(f"--only {', '.join(unknown)}: expected eager,auto and more of {', '.join(TIERS)}")
    if asked.only and (asked.only[0] != "eager" or "auto" not in asked.only):
        parser.error(f"--only {','.join(asked.only)}: eager has to be the first, and auto among them")
    if "LOCAL_RANK" not in os.environ:
        parser.error("start it by torchrun: torchrun --nproc-per-node 2 benchmarks/ranks.py")
    runs = asked.only or [run for run in TIERS if asked.compiled or run != "compiled"]
    if "compiled" in runs and (asked.sharded or asked.through != "torch"):
        parser.error("torch's own compile is of DistributedDataParallel: leave --sharded and --through out")
    asked.through = "shards" if asked.sharded else asked.through
    return asked, runs


def main():
    """Run under torchrun."""
    asked, runs = parsed()
    small, local = asked.small, int(os.environ["LOCAL_RANK"])
    device = torch.device("cpu") if small else torch.device("cuda", local)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    dist.init_process_group("gloo" if small else "nccl", timeout=TIMEOUT)
    steps = asked.steps or (60 if small else 300)
    through = functools.partial(WAYS[asked.through], told=asked.told) if asked.told else WAYS[asked.through]
    told = {"ranks": dist.get_world_size(), "torch": torch.__version__, "steps": steps}
    told |= {"through": asked.through, "told": asked.told or steps, "models": {}}
    if not small:
        told["device"] = torch.cuda.get_device_name(device)
    with captured_step_emulation() if small else contextlib.nullcontext():
        for name in asked.models.split(",") if asked.models else (["transformer", "gpt2"] if small else MODELS):
            told["models"][name] = found = compared(
                name, device, steps, small=small, through=through, runs=runs
            )  # fmt: skip
            if dist.get_rank() == 0:
                print(name, json.dumps({key: value for key, value in found.items() if key not in runs}))
                for run in [run for run in runs if run in ("captured", "auto")]:
                    print(found[run]["status"], flush=True)
                if asked.json:
                    asked.json.write_text(json.dumps(told, indent=1))
    gc.collect()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
