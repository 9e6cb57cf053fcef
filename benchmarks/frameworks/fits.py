"""A fit of each framework: eager, with its own compile, and with ours. Each returns the state that would be saved."""

from __future__ import annotations

import contextlib
import dataclasses
import tempfile
from typing import TYPE_CHECKING

import torch
from torch.nn import functional as F  # noqa: N812 - torch's own custom

import hotloop

from . import models
from .plan import THEIRS

if TYPE_CHECKING:
    from collections.abc import Callable

    from .marks import Marks


@dataclasses.dataclass
class Ready:
    """A program that is set up one way.

    Args:
        go: trains so many steps, told to `Marks`; again and again.
        state: returns the state that its user would save.
        status: returns the status of ours; None for another way.
    """

    go: Callable[[Marks, int], None]
    state: Callable[[], dict]
    status: Callable[[], str | None]


def make(row, way, run):
    """Set a row's program up one way."""
    return {"accelerate-regional": accelerate, "lightning-inception": lightning}.get(row, globals().get(row))(
        row, way, run
    )


def ours(way):
    """Return the tier or preset of ours; None for another way."""
    kind, _, run = way.partition(":")
    return run if kind == "ours" else None


def owns(way):
    """Return whether a way gives the step to a loop."""
    return ours(way) not in (None, "default")


def transformers(row, way, run):  # noqa: ARG001 - one row
    """The Trainer; ours in place is its callback, a tier is `HotTrainer`."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from hotloop.integrations.transformers import HotLoop, HotTrainer

    class Noting(TrainerCallback):
        marks = None

        def on_train_begin(self, args, state, control, **_):
            self.marks.begin()

        def on_step_end(self, args, state, control, **_):
            self.marks.done()

    model, (ids, labels) = models.bert(run.size, "cpu")
    data = [{"input_ids": one, "labels": label} for one, label in zip(ids, labels, strict=True)]
    more = {"torch_compile": True, "torch_compile_backend": run.backend} if way == THEIRS else {}
    args = TrainingArguments(
        tempfile.mkdtemp(), per_device_train_batch_size=len(ids), max_steps=1, report_to=[], disable_tqdm=True,
        save_strategy="no", logging_strategy="no", use_cpu=run.size == "cpu", bf16=run.size == "gpu",
        dataloader_pin_memory=run.size == "gpu", logging_nan_inf_filter=False, **more,
    )  # fmt: skip
    run.pin()
    noting = Noting()
    hot = HotLoop(ours(way)) if ours(way) else None
    kind = HotTrainer if owns(way) else Trainer
    trainer = kind(model, args, train_dataset=data, callbacks=[noting, *([hot] if hot else [])])

    def go(marks, steps):
        noting.marks, args.max_steps = marks, steps
        trainer.train()

    return Ready(go, model.state_dict, lambda: hot and str(hot.status()))  # `Trainer.save_model` saves this


def lightning(row, way, run):
    """Lightning's Trainer; its guide's InceptionV3, or a small model whose launches take most of the step."""
    import lightning.pytorch as pl

    from hotloop.integrations.lightning import HotLoop

    big = row == "lightning-inception"
    model, batch = (models.inception if big else models.scorer)(run.size, "cpu")

    class Module(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = model

        def training_step(self, batch, _index):
            return F.cross_entropy(self.model(batch[0]), batch[1]) if big else self.model(batch[0])

        def configure_optimizers(self):
            if big:
                return torch.optim.SGD(self.parameters(), lr=0.01)
            return torch.optim.AdamW(self.parameters(), lr=1e-4, fused=True)

    class Noting(pl.Callback):
        def __init__(self, marks):
            self.marks = marks

        def on_train_start(self, trainer, module):
            self.marks.begin()

        def on_train_batch_end(self, trainer, module, outputs, batch, index):
            self.marks.done()

    module = Module()
    hot = HotLoop(ours(way)) if ours(way) else None
    run.pin()
    given = torch.compile(module, backend=run.backend) if way == THEIRS else module

    def go(marks, steps):
        trainer = pl.Trainer(
            accelerator="gpu" if run.size == "gpu" else "cpu", devices=1, max_steps=steps, logger=False,
            precision="bf16-mixed" if run.size == "gpu" and not big else "32-true", enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False, callbacks=[Noting(marks), *([hot] if hot else [])],
        )  # fmt: skip
        trainer.fit(given, torch.utils.data.DataLoader([batch] * steps, batch_size=None))

    return Ready(go, module.state_dict, lambda: hot and str(hot.status()))


def own_loop(model, optimizer, backward, way, batch, left=contextlib.nullcontext):  # noqa: PLR0913, PLR0917
    """Return a user's own loop; a tier gives its step to a `hotloop.Loop`."""

    def step(*batch):
        with left():
            loss = model(*batch)
        backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    loop = hotloop.Loop(model, optimizer, run=ours(way), total_steps=1_000) if owns(way) else None
    train_step = loop.step(step) if loop else step

    def go(marks, steps):
        marks.begin()
        for _ in range(steps):
            marks.done(train_step(*batch))

    return go, loop


def fabric(row, way, run):  # noqa: ARG001 - one row
    """Fabric's setup."""
    from lightning.fabric import Fabric

    from hotloop.integrations.fabric import setup

    model, batch = models.scorer(run.size, run.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    kind = Fabric(accelerator="gpu" if run.size == "gpu" else "cpu", devices=1,
                  precision="bf16-mixed" if run.size == "gpu" else "32-true")  # fmt: skip
    run.pin()
    if way == THEIRS:
        prepared, optimizer = kind.setup(torch.compile(model, backend=run.backend), optimizer)
    elif ours(way) == "default":
        prepared, optimizer = setup(kind, model, optimizer)
    else:
        prepared, optimizer = kind.setup(model, optimizer)
    go, loop = own_loop(prepared, optimizer, kind.backward, way, batch)
    return Ready(go, prepared.state_dict, lambda: said(way, loop, model))


def accelerate(row, way, run):
    """Accelerate's prepare, with a plugin for the whole model or by regions."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState
    from accelerate.utils import TorchDynamoPlugin

    from hotloop.integrations.accelerate import prepare

    AcceleratorState._reset_state(reset_partial_state=True)  # noqa: SLF001 - one process, several accelerators
    regional = row == "accelerate-regional"
    plugin = TorchDynamoPlugin(backend=run.backend, use_regional_compilation=regional) if way == THEIRS else None
    accelerator = Accelerator(
        cpu=run.size == "cpu", dynamo_plugin=plugin, mixed_precision="bf16" if run.size == "gpu" else "no"
    )
    run.pin()
    model, batch = models.gpt(run.size, run.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    if ours(way):
        preset = "none" if owns(way) else "default"
        prepared, optimizer = prepare(
            accelerator, model, optimizer, preset=preset, regions="blocks" if regional else "auto"
        )
    else:
        prepared, optimizer = accelerator.prepare(model, optimizer)
    go, loop = own_loop(prepared, optimizer, accelerator.backward, way, batch)
    return Ready(go, lambda: accelerator.get_state_dict(prepared), lambda: said(way, loop, model))


class Denoise(torch.nn.Module):
    """The loss of a UNet on noise."""

    def __init__(self, unet):
        super().__init__()
        self.unet = unet

    def forward(self, noise, at, texts):
        """Return the loss."""
        return F.mse_loss(self.unet(noise, at, texts).sample.float(), noise)


def diffusers(row, way, run):  # noqa: ARG001 - one row
    """A diffusion trainer's loop."""
    from hotloop.integrations.diffusers import Parts, compile  # noqa: A004 - hotloop.compile's name

    unet, batch = models.unet(run.size, run.device)
    run.pin()
    if way == THEIRS:
        unet.compile_repeated_blocks(backend=run.backend)
    elif ours(way) == "default":
        compile(Parts(unet=unet))
    model = Denoise(unet)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def precision():
        return torch.autocast("cuda", torch.bfloat16, enabled=run.size == "gpu")

    go, loop = own_loop(model, optimizer, torch.Tensor.backward, way, batch, precision)
    return Ready(go, unet.state_dict, lambda: said(way, loop, unet))


def said(way, loop, model):
    """Return the status of ours."""
    return None if ours(way) is None else str(loop.status() if loop else hotloop.status(model))
