"""What a run leaves for other programs: a pipeline of diffusers, or adapters; each folder whole or not there."""

from __future__ import annotations

import copy
import dataclasses
import shutil
from typing import TYPE_CHECKING

from hotloop.recipes.diffusion import lora
from hotloop.train import hub

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from hotloop.recipes.diffusion.networks import Networks

PIPELINE, LORA = "pipeline", "lora"


def write(networks: Networks, prediction: str, folder: Path, *, adapters: tuple[str, ...]) -> list[Path]:
    """Write what was trained into a run's folder, and give the folders that were written.

    Args:
        networks: with the weights to write.
        prediction: what the UNet predicts; a pipeline's scheduler has to know.
        folder: the run's.
        adapters: the networks of which adapters were trained. They are written alone, with the pipeline that they
            belong to only where it was made in this run.

    Raises:
        OSError: a folder cannot be written; what was there before stays.
    """
    written = []
    with hub.quiet("diffusers"):
        if adapters:
            written.append(_whole(folder / LORA, lambda at: lora.save(networks, at, adapters)))
        if not adapters or networks.made:
            made = without_adapters(networks, adapters).pipeline(prediction)
            written.append(_whole(folder / PIPELINE, lambda at: made.save_pretrained(at, safe_serialization=True)))
    return written


def without_adapters(networks: Networks, adapters: tuple[str, ...]) -> Networks:
    """Return networks as they were before adapters were put on; those that have some are copied."""
    copies = {name: copy.deepcopy(networks.modules()[name]) for name in adapters}
    for name, one in copies.items():
        if name == "unet":
            one.unload_lora()
        else:
            one.delete_adapter(lora.ADAPTER)
    return dataclasses.replace(networks, **copies)


def _whole(folder: Path, write: Callable[[Path], object]) -> Path:
    """Write a folder beside its place and move it there, so that its name never stands for half of one."""
    part, old = (folder.with_name(f".{folder.name}.{what}") for what in ("part", "old"))
    for left in (part, old):  # of a run that was killed here
        shutil.rmtree(left, ignore_errors=True)
    try:
        write(part)
        if folder.exists():
            folder.rename(old)
        part.rename(folder)
    except RuntimeError as error:  # safetensors turns a full disk into one of its own
        raise OSError(f"{folder} cannot be written: {error}") from error
    finally:
        shutil.rmtree(part, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)
    return folder
