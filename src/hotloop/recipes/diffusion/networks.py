"""The networks of a latent-diffusion model, what they take, and their pipeline."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from typing import TYPE_CHECKING, Any

import torch

from hotloop.errors import ConfigError
from hotloop.train import hub
from hotloop.train.networks import count
from hotloop.train.optional import require

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

PIPELINE_STEP = 8
"""Both sides of a picture are multiples of this, or a pipeline of diffusers refuses to make it."""


@dataclasses.dataclass(frozen=True)
class Networks:
    """A latent-diffusion model: of Stable Diffusion 1.x and 2.x, or of SDXL, which has two text encoders.

    Args:
        name: as ``diffusion.model``.
        unet: predicts from noised latents, timesteps and embeddings of text.
        text_encoder: a CLIP text model.
        vae: makes latents of pictures, and pictures of latents.
        tokenizer: a transformers tokenizer.
        scheduler: a DDPM scheduler, for the amounts of noise.
        text_encoder_2: SDXL's second one, a CLIP text model with a projection; None in other models.
        tokenizer_2: its tokenizer.
        zeros: whether the pipeline takes zeros for the embeddings of no caption, and not those of the empty one.
    """

    name: str
    unet: Any
    text_encoder: Any
    vae: Any
    tokenizer: Any
    scheduler: Any
    text_encoder_2: Any = None
    tokenizer_2: Any = None
    zeros: bool = False

    @property
    def xl(self) -> bool:
        """Say whether this is an SDXL."""
        return self.text_encoder_2 is not None

    def encoders(self) -> dict[str, Any]:
        """Return the text encoders by the names that a pipeline gives them."""
        found = {"text_encoder": self.text_encoder, "text_encoder_2": self.text_encoder_2}
        return {name: one for name, one in found.items() if one is not None}

    def modules(self) -> dict[str, Any]:
        """Return the networks by the names that a pipeline gives them."""
        return {"unet": self.unet, **self.encoders(), "vae": self.vae}

    def fingerprint(self) -> str:
        """Return a text that other weights would not have."""
        return " ".join(map(weights_fingerprint, self.modules().values()))

    @property
    def factor(self) -> int:
        """How many pixels a latent has a side."""
        return int(2 ** (len(self.vae.config.block_out_channels) - 1))

    @property
    def length(self) -> int:
        """How many tokens a text has."""
        return min(
            int(min(tokenizer.model_max_length, encoder.config.max_position_embeddings))
            for tokenizer, encoder in zip(self._tokenizers().values(), self.encoders().values(), strict=True)
        )

    def _tokenizers(self) -> dict[str, Any]:
        """Return the tokenizers by the names that a batch has their tokens under."""
        found = {"input_ids": self.tokenizer, "input_ids_2": self.tokenizer_2}
        return {name: one for name, one in found.items() if one is not None}

    def cut(self, texts: Sequence[str]) -> int:
        """Return how many texts have more tokens than that."""
        with hub.quiet("diffusers"):
            each = [one(list(texts))["input_ids"] for one in self._tokenizers().values()]
        return sum(max(map(len, tokens)) > self.length for tokens in zip(*each, strict=True))

    def describe(self) -> str:
        """Say how many parameters each network has."""
        sizes = (f"{name} {count(sum(p.numel() for p in one.parameters()))}" for name, one in self.modules().items())
        return f"{self.name}: {', '.join(sizes)} parameters"

    def token_ids(self, texts: Sequence[str]) -> dict[str, Tensor]:
        """Return the tokens of texts for each text encoder, padded and cut to `length`: int64 of (texts, length)."""
        asked = {"padding": "max_length", "truncation": True, "max_length": self.length, "return_tensors": "pt"}
        return {name: one(list(texts), **asked)["input_ids"] for name, one in self._tokenizers().items()}

    def freeze_unused(self) -> None:
        """Freeze what no output rests on: of SDXL's first text encoder the last layer, whose input is what is taken."""
        if self.xl:
            layers = getattr(self.text_encoder, "text_model", self.text_encoder)
            layers.encoder.layers[-1].requires_grad_(requires_grad=False)
            layers.final_layer_norm.requires_grad_(requires_grad=False)

    def pipeline(self, prediction: str) -> Any:
        """Return the pipeline of diffusers that has these networks, which stay where they are; it samples by DDIM."""
        diffusers = require("diffusers", "recipe=diffusion", "diffusion")
        scheduler = diffusers.DDIMScheduler.from_config(self.scheduler.config, prediction_type=prediction)
        parts = {**self.modules(), "tokenizer": self.tokenizer, "scheduler": scheduler}
        with hub.quiet("diffusers"):
            if self.xl:
                found = diffusers.StableDiffusionXLPipeline(
                    **parts,
                    tokenizer_2=self.tokenizer_2,
                    force_zeros_for_empty_prompt=self.zeros,
                    add_watermarker=False,
                )
            else:
                found = diffusers.StableDiffusionPipeline(
                    **parts, safety_checker=None, feature_extractor=None, requires_safety_checker=False
                )
        found.set_progress_bar_config(disable=True)
        return found

    def check(self, sizes: Sequence[tuple[int, int]]) -> None:
        """Refuse networks that do not fit each other, and sizes of pictures that they cannot halve often enough.

        Args:
            sizes: height and width in pixels.

        Raises:
            ConfigError: naming the size, and what both of its sides have to be multiples of; or the networks.
        """
        unet, vae = self.unet.config, self.vae.config
        if not unet.in_channels == unet.out_channels == vae.latent_channels:
            raise ConfigError(
                f"diffusion.model={self.name} has a UNet from {unet.in_channels} to {unet.out_channels} channels, and "
                f"a VAE with latents of {vae.latent_channels}: expected a UNet for text to image"
            )
        moved = [name for name in ("latents_mean", "shift_factor") if vae.get(name) is not None]
        if moved:
            raise ConfigError(
                f"diffusion.model={self.name} has a VAE with {moved[0]}: expected latents that are brought to the size "
                "of noise by scaling_factor alone"
            )
        step = max(PIPELINE_STEP, self.factor * 2 ** (len(unet.block_out_channels) - 1))
        for height, width in sizes:
            if height % step or width % step:
                raise ConfigError(
                    f"pictures.size and pictures.step give pictures of {width} x {height} pixels, and "
                    f"diffusion.model={self.name} takes multiples of {step} a side: set pictures.step={step}, and a "
                    "pictures.size that is a multiple of it"
                )


def weights_fingerprint(module: Any) -> str:
    """Return a text that changes with any weight or buffer of a network, with its class, and with its configuration."""
    config = module.config.to_dict() if hasattr(module.config, "to_dict") else dict(module.config)
    # Without names of folders and versions.
    told = {name: one for name, one in config.items() if name[0] != "_" and name != "transformers_version"}
    digest = hashlib.sha256((type(module).__qualname__ + json.dumps(told, sort_keys=True, default=str)).encode())
    for name, one in [*module.named_parameters(), *module.named_buffers()]:
        digest.update(repr((name, one.dtype, tuple(one.shape))).encode())
        # NumPy has no bfloat16, so the bytes are taken as such.
        digest.update(one.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
