"""The networks of a latent-diffusion model, what they take, and their pipeline."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from hotloop.errors import ConfigError
from hotloop.recipes.diffusion.pictures.latents import weights_fingerprint
from hotloop.train import hub
from hotloop.train.networks import count
from hotloop.train.optional import require

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

SMALL = "small"
"""The name of ``diffusion.model`` for networks that are made for the pictures, with random weights."""
PIPELINE_STEP = 8
"""Both sides of a picture are multiples of this, or a pipeline of diffusers refuses to make it."""
MOST_SMALL = 64
"""Pixels a side up to which the small networks are meant: their steps take as long as there are pixels."""
CONDITIONS = 6
"""Numbers that a UNet of SDXL is told of a picture: its original size, its cut, and its size, two each."""


def beyond(model: str, size: int) -> list[str]:
    """Say where pictures are larger than the small networks are meant for, and what to set; nothing where they fit."""
    if model != SMALL or size <= MOST_SMALL:
        return []
    said = (
        f"diffusion.model={SMALL} is meant for pictures of up to about {MOST_SMALL} pixels a side, and pictures.size="
        f"{size}: steps are slow, and three networks with random weights learn little of such pictures. For pictures "
        f"of this size name a trained model (diffusion.model=FOLDER); for this model set pictures.size={MOST_SMALL} "
        "pictures.step=8"
    )
    return [said]


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
        made: whether all weights are random, made in this run; no folder has them then.
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
    made: bool
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
        """Return a text that other weights would not have; random ones follow from the seed, and have none."""
        return "" if self.made else " ".join(map(weights_fingerprint, self.modules().values()))

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
        return f"{self.name}: {', '.join(sizes)} parameters" + (", random weights" if self.made else "")

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

    def check(self, channels: int, sizes: Sequence[tuple[int, int]]) -> None:
        """Refuse pictures that these networks do not take: colours, or sizes that they cannot halve often enough.

        Args:
            channels: of the pictures; grey ones are taken by a network for colours.
            sizes: height and width in pixels.

        Raises:
            ConfigError: naming the size, and what both of its sides have to be multiples of; or the networks do not
                fit each other.
        """
        self._check_unet()
        self._check_texts()
        taken = int(self.vae.config.in_channels)
        if channels not in (1, taken):
            raise ConfigError(
                f"diffusion.model={self.name} has a VAE for pictures of {taken} channels, and pictures.source gives "
                f"{channels}: use a model for colours, or diffusion.model={SMALL}, which is made for the pictures"
            )
        halvings = len(self.unet.config.block_out_channels) - 1
        step = max(PIPELINE_STEP, self.factor * 2**halvings)
        for height, width in sizes:
            if height % step or width % step:
                raise ConfigError(
                    f"pictures.size and pictures.step give pictures of {width} x {height} pixels, and "
                    f"diffusion.model={self.name} takes multiples of {step} a side: set pictures.step={step}, and a "
                    "pictures.size that is a multiple of it"
                )

    def _check_unet(self) -> None:
        config, latent = self.unet.config, int(self.vae.config.latent_channels)
        kinds = ("class_embed_type", "addition_embed_type", "encoder_hid_dim_type", "time_cond_proj_dim")
        more = [name for name in kinds if config.get(name)]
        if self.xl and config.get("addition_embed_type") == "text_time":
            more.remove("addition_embed_type")
        elif self.xl:
            more.append("no addition_embed_type=text_time")
        if config.in_channels != latent or config.out_channels != latent or more:
            raise ConfigError(
                f"diffusion.model={self.name} has a UNet from {config.in_channels} to {config.out_channels} channels "
                f"with {', '.join(more) or 'nothing'} besides texts, and a VAE with latents of {latent} channels: "
                "expected a UNet for text to image, from latents to latents"
            )
        moved = [name for name in ("latents_mean", "shift_factor") if self.vae.config.get(name) is not None]
        if moved:
            raise ConfigError(
                f"diffusion.model={self.name} has a VAE with {moved[0]}: expected latents that are brought to the size "
                "of noise by scaling_factor alone"
            )

    def _check_texts(self) -> None:
        """Refuse text encoders whose embeddings are not what the UNet takes."""
        config, encoders = self.unet.config, self.encoders().values()
        given = sum(one.config.hidden_size for one in encoders)
        if config.cross_attention_dim != given:
            raise ConfigError(
                f"diffusion.model={self.name} has a UNet for texts of width {config.cross_attention_dim}, and its "
                f"{' and '.join(self.encoders())} give {given}: expected the same"
            )
        if not self.xl:
            return
        wanted = config.projection_class_embeddings_input_dim
        pooled = self.text_encoder_2.config.projection_dim
        given = pooled + CONDITIONS * config.addition_time_embed_dim
        if wanted != given:
            raise ConfigError(
                f"diffusion.model={self.name} has a UNet that takes {wanted} numbers besides texts, and SDXL's are "
                f"{given}: {pooled} of the pooled text, {CONDITIONS} times {config.addition_time_embed_dim} of sizes; "
                "expected SDXL's base, and no refiner"
            )
