"""Lightning's Trainer as a run has it: made by the run's settings, quiet, and resumed without its errors."""

from __future__ import annotations

import contextlib
import copy
import logging
import signal
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
from lightning.pytorch.loops.loop import _Loop

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    import torch

    from hotloop.train.resumable import Place
    from hotloop.train.settings import Settings


def make_trainer(settings: Settings, device: torch.device, **more: Any) -> pl.Trainer:
    """Return a Trainer as the settings say; what is logged goes into the record alone."""
    training = settings.training
    return pl.Trainer(
        accelerator=device.type,
        devices=[device.index or 0] if device.type == "cuda" else 1,
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
