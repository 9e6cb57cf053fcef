"""Samples of a model as it stands: sheets of them over the training, and how many show what they were to show."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import torch

from hotloop.files import whole
from hotloop.train.optional import require

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from torch import Tensor

    from hotloop.recipes.diffusion.networks import Networks

FOLDER = "samples"
CELL = 96
"""Pixels that a sample has across on a sheet, at least about: smaller ones are enlarged by a whole factor."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampler:
    """Makes samples of networks as they are when it is asked; the same ones for the same seed and weights.

    Args:
        networks: sampled in the mode that they are in.
        prediction: what the UNet predicts.
        prompts: the captions to sample.
        size: height and width in pixels.
        steps: denoising steps.
        guidance: how far samples are pushed towards their caption.
        batch: samples in a forward pass.
        seed: of the noise that samples begin with.
    """

    networks: Networks
    prediction: str
    prompts: tuple[str, ...]
    size: tuple[int, int]
    steps: int
    guidance: float
    batch: int
    seed: int

    def make(self, each: int) -> Tensor:
        """Return so many samples of every prompt, by turns: of shape (samples, channels, height, width) in -1..1."""
        pipe, wanted = self.networks.pipeline(self.prediction), self.prompts * each
        # One stream for all, so that samples do not depend on how many make a batch.
        generator = [torch.Generator().manual_seed(self.seed * 1_000_003 + number) for number in range(len(wanted))]
        height, width = self.size
        made = [
            pipe(
                list(wanted[start : start + self.batch]),
                height=height,
                width=width,
                num_inference_steps=self.steps,
                guidance_scale=self.guidance,
                generator=generator[start : start + self.batch],
                output_type="pt",
            ).images.cpu()
            for start in range(0, len(wanted), self.batch)
        ]
        return torch.cat(made).float() * 2 - 1

    def sheet(self, folder: Path, step: int, each: int) -> None:
        """Write a sheet of samples, a column a prompt, into a run's folder; numbers that are not finite are black.

        Raises:
            OSError: it cannot be written.
        """
        pillow = require("PIL.Image", "Sheets of samples", "diffusion")
        utilities = require("diffusers.utils", "Sheets of samples", "diffusion")
        made = self.make(each).nan_to_num(nan=-1.0).clamp(-1, 1).permute(0, 2, 3, 1)
        factor = max(1, CELL // made.shape[2])
        large = made.repeat_interleave(factor, dim=1).repeat_interleave(factor, dim=2)
        images = [pillow.fromarray(one.numpy()) for one in ((large + 1) * (255 / 2)).round().to(torch.uint8)]
        path = folder / FOLDER / f"step-{step:06}.png"
        with whole(path, durable=False) as file:
            utilities.make_image_grid(images, each, len(self.prompts)).save(file, format="PNG")


def prompts_of(chosen: Sequence[str], captions: Sequence[str], most: int = 8) -> tuple[str, ...]:
    """Choose what to sample: what was asked for, else some captions."""
    return tuple(chosen) or tuple(dict.fromkeys(captions))[:most]
