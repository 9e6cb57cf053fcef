"""Lightning's Trainer as a run has it: made by the run's settings, quiet, and resumed without its errors."""

from __future__ import annotations

import contextlib
import copy
import logging
import signal
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
from lightning.pytorch.loops.loop import _Loop

from hotloop.errors import TrainingFailedError
from hotloop.train.task import rate_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    import torch

    from hotloop.train.ranks import Ranks
    from hotloop.train.resumable import Place
    from hotloop.train.settings import Settings

SHARED_OUT = (
    "Return a DataLoader of a data set with a length from train_dataloader, which the Trainer shares out, or share the "
    "rows by self.trainer.global_rank"
)
"""How the data of a module are shared out."""


def make_trainer(settings: Settings, device: torch.device, *, several: int = 1, **more: Any) -> pl.Trainer:
    """Return a Trainer as the settings say, for one device or for ``several``; what is logged goes into the record."""
    training = settings.training
    if several > 1:
        more["strategy"] = _sharded(several) if settings.run.strategy == "fsdp2" else "ddp"
    one: Any = [device.index or 0] if device.type == "cuda" else 1
    return pl.Trainer(
        accelerator=device.type,
        devices=several if several > 1 else one,
        precision=settings.precision,  # type: ignore[arg-type]
        max_epochs=training.num_epochs,
        max_steps=training.max_steps or -1,
        accumulate_grad_batches=training.gradient_accumulation,
        gradient_clip_val=training.max_grad_norm,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        **more,
    )


def _sharded(several: int) -> Any:
    """Return the strategy of a module that shards itself; its checkpoints have whole tensors."""
    kind = pl.strategies.ModelParallelStrategy
    return kind(data_parallel_size=several, tensor_parallel_size=1, save_distributed_checkpoint=False)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Leave out what Lightning says of the machine and of itself, and put back what its Trainer does to SIGINT."""
    log, handler = logging.getLogger("lightning.pytorch"), signal.getsignal(signal.SIGINT)
    level = log.level
    log.setLevel(logging.WARNING)
    try:
        yield
    finally:
        log.setLevel(level)
        with contextlib.suppress(ValueError):  # in another thread than the main one no signal was caught either
            signal.signal(signal.SIGINT, handler)


def check_rates(ranks: Ranks, trainer: pl.Trainer) -> None:
    """Check that all processes go on with one learning rate.

    Raises:
        TrainingFailedError: a schedule goes by a metric of each process's own.
    """
    rates = ranks.gathered(rate_of(trainer.optimizers).get("learning_rate"))
    if len(set(rates)) > 1:
        raise TrainingFailedError(
            f"the learning rates of the devices differ from here on ({', '.join(map(str, rates))}): a schedule goes by "
            "a metric that each device has of its own share. Log it by self.log(..., sync_dist=True)"
        )


def numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return logged metrics as numbers."""
    return {name: float(value) for name, value in metrics.items()}


def completed(progress: dict[str, Any]) -> dict[str, Any]:
    """Return the Trainer's progress at the end of an epoch as it is once all that belongs to the epoch is done."""
    found = copy.deepcopy(progress)
    for counts in found["epoch_progress"].values():
        counts["completed"] = counts["processed"]
    return found


def is_no_restart(trainer: pl.Trainer) -> None:
    """Let the Trainer go on as from an epoch of its own. Its setter turns False into True where it has max_steps."""
    _Loop.restarting.fset(trainer.fit_loop, False)  # type: ignore[attr-defined]


def following(make: Any, place: Place) -> Any:
    """Return the data's ``train_dataloader`` whose loader keeps its place."""

    def train_dataloader() -> Any:
        return place.follow(make())

    return train_dataloader
