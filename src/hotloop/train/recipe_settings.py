"""The groups of settings that one recipe alone has, as frozen pydantic models."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from hotloop.errors import ConfigError
from hotloop.train.schema import Group


class PicturesSettings(Group):
    """Which captioned pictures, and the sizes that they are brought to."""

    path: str | None
    size: int = Field(ge=8, le=4096)
    step: int = Field(ge=1, le=512)
    buckets: int = Field(ge=1, le=64)
    min_size: int = Field(ge=1)
    skip_bad: bool

    @model_validator(mode="after")
    def check(self) -> Self:
        """Refuse a size that is no multiple of its step."""
        if self.size % self.step:
            raise ConfigError(f"pictures.size={self.size} is no multiple of pictures.step={self.step}")
        return self


class DiffusionSettings(Group):
    """The networks of the recipe `diffusion`, how they are trained, and what is sampled of them."""

    model: str = Field(pattern=r"\S")
    train_text_encoder: bool
    train_text_encoder_2: bool
    lora_rank: int | None = Field(ge=1)
    lora_alpha: float | None = Field(gt=0)
    prediction: Literal["epsilon", "v_prediction"] | None
    min_snr_gamma: float | None = Field(gt=0)
    noise_offset: float = Field(ge=0, le=1)
    caption_dropout: float = Field(ge=0, le=0.9)
    gradient_checkpointing: bool
    cache: bool
    output: bool
    sample_every: int | None = Field(ge=1)
    sample_steps: int = Field(ge=1, le=1000)
    guidance: float = Field(ge=1)
    prompts: tuple[str, ...]
    samples: int = Field(ge=1, le=64)


class FocusSettings(Group):
    """The texts, the working context and the networks of the recipe `focus`."""

    hidden_size: int = Field(ge=8)
    layers: int = Field(ge=1)
    heads: int = Field(ge=1)
    files: int = Field(ge=1)
    vocabulary: int = Field(ge=257, le=65536)
    documents: int = Field(ge=1)
    held_out: int = Field(ge=1)
    blocks: int = Field(ge=2)
    protected: int = Field(ge=1)
    budget: int = Field(ge=64)
    contexts: int = Field(ge=3)
    rounds: int = Field(ge=1)
    edits: int = Field(ge=1)
    lens_size: int = Field(ge=8)
    lens_layers: int = Field(ge=1)

    @model_validator(mode="after")
    def check(self) -> Self:
        """Refuse a text that cannot be taken from so many documents, and widths that the heads cannot share."""
        for size in ("hidden_size", "lens_size"):
            if getattr(self, size) % self.heads:
                raise ConfigError(
                    f"focus.{size}={getattr(self, size)} cannot be shared by focus.heads={self.heads}: "
                    "expected a multiple of it"
                )
        shared = self.blocks - self.protected
        if shared < 1:
            raise ConfigError(f"focus.protected={self.protected}: expected fewer than focus.blocks={self.blocks}")
        if shared % self.documents:
            raise ConfigError(
                f"focus.documents={self.documents}: expected a divisor of focus.blocks less focus.protected, {shared}"
            )
        return self
