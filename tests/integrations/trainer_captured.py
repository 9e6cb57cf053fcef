"""transformers' Trainer in two processes, whose steps a loop captures; see `captured_ranks`."""

import contextlib

import torch
from captured_ranks import (
    CAPTURES,
    DEVICE,
    FOLDER,
    Net,
    listening,
    paced,
    shards_of,
    state_of,
    streams_noted,
    tell,
    told_of,
)
from sharding_accelerators import as_accelerators
from torch.nn import functional as F
from transformers import Trainer, TrainerCallback, TrainingArguments

from hotloop.integrations.transformers import HotLoop, HotTrainer, trainer

STEPS = 48


class Model(Net):
    """A model whose forward gives the loss, as the Trainer asks."""

    def forward(self, x, labels):
        out = super().forward(x)
        return {"loss": F.cross_entropy(out, labels), "logits": out}


def rows(count):
    draws = torch.Generator().manual_seed(3)
    return [
        {"x": torch.randn(6, generator=draws), "labels": torch.randint(3, (), generator=draws)} for _ in range(count)
    ]


class Watched(TrainerCallback):
    """Notes what ran, and ends a training that was told of more steps."""

    hot = None

    def __init__(self):
        self.ran = []

    def on_step_end(self, args, state, control, **_):
        if self.hot is not None and self.hot.loop is not None:
            self.ran.append(self.hot.loop.last_ran())
        control.should_training_stop |= state.global_step == STEPS

    on_substep_end = on_step_end


def sharded():
    """Return settings that shard the model; the Trainer changes what it is given."""
    wrap = {"auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "transformer_layer_cls_to_wrap": ["Linear"]}
    shards = {"version": 2, "state_dict_type": "SHARDED_STATE_DICT", **wrap}
    return {"fsdp": True, "fsdp_config": shards}


def train(run, *, every=1, told=STEPS, resumes=False, shards=False, **settings):
    """Train; validate, log and save on the way; without a tier by a plain Trainer."""
    torch.manual_seed(1)
    watched = Watched()
    settings |= sharded() if shards else {}
    folder = f"{FOLDER}/trainer-{run}-{every}{'-sharded' if shards else ''}"
    args = TrainingArguments(
        folder, max_steps=told, per_device_train_batch_size=6, gradient_accumulation_steps=every, seed=3,
        learning_rate=0.05, logging_steps=1, eval_strategy="steps", eval_steps=STEPS // 2, save_steps=STEPS // 2,
        save_strategy="steps", report_to=[], dataloader_pin_memory=False, disable_tqdm=True, use_cpu=DEVICE == "cpu",
        remove_unused_columns=False,
        **{"ddp_find_unused_parameters": False, **settings},
    )  # fmt: skip
    callbacks = [watched]
    if run is not None:
        callbacks.append(HotLoop(run, sentinel=0, record=f"{FOLDER}/record"))
    model = Model()
    with as_accelerators() if shards else contextlib.nullcontext():
        ours = (HotTrainer if run else Trainer)(
            model, args, train_dataset=rows(12 * STEPS * every), eval_dataset=rows(24), callbacks=callbacks
        )
    if run is not None:
        watched.hot = ours.hot
    ours.train(resume_from_checkpoint=f"{folder}/checkpoint-{STEPS // 2}" if resumes else None)
    history = [
        value
        for line in ours.state.log_history
        for name, value in line.items()
        if name in ("loss", "eval_loss", "grad_norm")
    ]
    return [*history, *state_of(ours.model), *shards_of(ours.optimizer)], watched.ran, ours.hot if run else None


def beside_eager(run="eager+graph", **how):
    eager, *_ = train(None, **how)
    with CAPTURES(), paced(), listening() as log, streams_noted(trainer) as streams:
        ours, ran, hot = train(run, **how)
    told = told_of(eager, ours, ran, run, log)
    return {**told, "streams": streams, "status": str(hot.status()), "folder": str(hot.record.folder)}


tell(
    {
        "plain": beside_eager,
        "resumed": lambda: beside_eager(resumes=True),
        "auto": lambda: beside_eager("auto", told=10_000),
        "accumulated": lambda: beside_eager(every=2),
        "unused": lambda: beside_eager(ddp_find_unused_parameters=None),
        "sharded": lambda: beside_eager(shards=True),
        "sharded, resumed": lambda: beside_eager(shards=True, resumes=True),
    }
)
