"""The GPUs of this machine, shared out among the workers of a search or of a cross-validation."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hotloop.train.settings import Settings

VISIBLE = "CUDA_VISIBLE_DEVICES"


def names() -> list[str]:
    """Return the GPUs that this process may use, each as CUDA_VISIBLE_DEVICES names it."""
    import torch  # noqa: PLC0415 - a command that shares nothing out does without

    count = torch.cuda.device_count()
    given = [one.strip() for one in os.environ.get(VISIBLE, "").split(",") if one.strip()]
    return given[:count] if given else [str(number) for number in range(count)]


def shares(settings: Settings) -> list[list[str]]:
    """Return the GPUs of each worker, as many as runs have devices; empty where the settings name other devices."""
    run = settings.run
    if run.device != "auto" or run.accelerator not in ("auto", "cuda"):
        return []
    there, many = names(), run.devices
    return [there[at : at + many] for at in range(0, len(there) - many + 1, many)]


def workers(asked: int | str, settings: Settings) -> int:
    """Return how many workers ``auto`` stands for: one for each share of the GPUs, and one where there are none."""
    return max(1, len(shares(settings))) if isinstance(asked, str) else asked


def environment(settings: Settings, workers: int, number: int) -> dict[str, str]:
    """Return what a worker's environment has beside this process's: its share of the GPUs, by turns.

    Args:
        settings: of the runs.
        workers: how many there are; one alone has all.
        number: the worker's, from 1.
    """
    there = shares(settings) if workers > 1 else []
    return {VISIBLE: ",".join(there[(number - 1) % len(there)])} if there else {}
