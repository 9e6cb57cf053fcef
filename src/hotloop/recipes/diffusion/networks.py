"""The networks of a latent-diffusion model: small ones, ones of Stable Diffusion 1.5's sizes, or a folder's.

Weights from elsewhere are read as safetensors only, and no code of a model's folder is run.
"""

from __future__ import annotations

import contextlib
import dataclasses
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from hotloop.errors import ConfigError
from hotloop.recipes.diffusion.pictures.latents import weights_fingerprint
from hotloop.train import hub
from hotloop.train.networks import align, count
from hotloop.train.optional import require

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import nn

SMALL, SD15 = "small", "sd15"
"""Names of ``diffusion.model`` that are made here, with random weights."""
ADAPTER = "adapter_config.json"
"""What transformers takes for adapters to load, or for the name of another model, in a text encoder's folder."""
PIPELINE_STEP = 8
"""Both sides of a picture are multiples of this, or a pipeline of diffusers refuses to make it."""
_SCHEDULE = {
    "num_train_timesteps": 1000, "beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear",
    "clip_sample": False, "steps_offset": 1,
}  # fmt: skip
_LATENT_CHANNELS = 4
MOST_SMALL = 64
"""Pixels a side up to which the small networks are meant: their steps take as long as there are pixels."""


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
    """A latent-diffusion model.

    Args:
        name: as ``diffusion.model``.
        unet: predicts from noised latents, timesteps and embeddings of text.
        text_encoder: a CLIP text model.
        vae: makes latents of pictures, and pictures of latents.
        tokenizer: a transformers tokenizer.
        scheduler: a DDPM scheduler, for the amounts of noise.
        made: whether all weights are random, made in this run; no folder has them then.
    """

    name: str
    unet: Any
    text_encoder: Any
    vae: Any
    tokenizer: Any
    scheduler: Any
    made: bool

    def modules(self) -> dict[str, nn.Module]:
        """Return the networks by the names that a pipeline gives them."""
        return {"unet": self.unet, "text_encoder": self.text_encoder, "vae": self.vae}

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
        return int(min(self.tokenizer.model_max_length, self.text_encoder.config.max_position_embeddings))

    def cut(self, texts: Sequence[str]) -> int:
        """Return how many texts have more tokens than that."""
        with quiet():
            return sum(len(one) > self.length for one in self.tokenizer(list(texts))["input_ids"])

    def describe(self) -> str:
        """Say how many parameters each network has."""
        sizes = (f"{name} {count(sum(p.numel() for p in one.parameters()))}" for name, one in self.modules().items())
        return f"{self.name}: {', '.join(sizes)} parameters" + (", random weights" if self.made else "")

    def token_ids(self, texts: Sequence[str]) -> torch.Tensor:
        """Return the tokens of texts, padded and cut to the tokenizer's length: int64 of shape (texts, length)."""
        found: torch.Tensor = self.tokenizer(
            list(texts), padding="max_length", truncation=True, max_length=self.length, return_tensors="pt"
        )["input_ids"]
        return found

    def check(self, channels: int, sizes: Sequence[tuple[int, int]]) -> None:
        """Refuse pictures that these networks do not take: colours, or sizes that they cannot halve often enough.

        Args:
            channels: of the pictures; grey ones are taken by a network for colours.
            sizes: height and width in pixels.

        Raises:
            ConfigError: naming the size, and what both of its sides have to be multiples of; or the UNet wants more
                than latents, timesteps and texts.
        """
        self._check_kind()
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

    def _check_kind(self) -> None:
        config, latent = self.unet.config, int(self.vae.config.latent_channels)
        more = [name for name in ("class_embed_type", "addition_embed_type") if config.get(name)]
        if config.in_channels != latent or config.out_channels != latent or more:
            raise ConfigError(
                f"diffusion.model={self.name} has a UNet from {config.in_channels} to {config.out_channels} channels "
                f"with {', '.join(more) or 'nothing'} besides texts, and a VAE with latents of {latent} channels: "
                "expected a UNet for text to image, from latents to latents"
            )


def load(
    name: str, tokenizer: Callable[[], Any], shape: tuple[int, int], width: int, say: Callable[[str], None]
) -> Networks:
    """Make or load the networks of ``diffusion.model``.

    Args:
        name: ``small``, ``sd15``, a folder with a pipeline of diffusers, or a hub name.
        tokenizer: gives what networks that are made here read captions with; others have their own.
        shape: channels of the pictures, and their ``pictures.size``.
        width: ``diffusion.width``, of a small UNet.
        say: prints a line.

    Raises:
        ConfigError: the model cannot be loaded, or is of another kind; the message names the setting.
    """
    if name == SMALL:
        return _small(tokenizer(), shape, width)
    if name == SD15:
        return _sd15(tokenizer(), shape)
    return _from_elsewhere(name, say)


def _small(tokenizer: Any, shape: tuple[int, int], width: int) -> Networks:
    """Make three small networks; how often the VAE halves a picture goes by its size."""
    diffusers, transformers = _packages()
    channels, size = shape
    halvings = 1 if size < 16 else 2 if size < 64 else 3  # noqa: PLR2004 - latents of 4 to 8 a side up to 64 pixels
    text_encoder = transformers.CLIPTextModel(
        _clip(tokenizer, hidden_size=width, intermediate_size=2 * width, num_hidden_layers=2, num_attention_heads=2)
    )
    vae = diffusers.AutoencoderKL(
        in_channels=channels,
        out_channels=channels,
        down_block_types=("DownEncoderBlock2D",) * (halvings + 1),
        up_block_types=("UpDecoderBlock2D",) * (halvings + 1),
        block_out_channels=(16,) + (32,) * halvings,
        layers_per_block=1,
        latent_channels=_LATENT_CHANNELS,
        norm_num_groups=8,
        sample_size=size,
        mid_block_add_attention=False,
    )
    unet = diffusers.UNet2DConditionModel(
        sample_size=size // 2**halvings,
        in_channels=_LATENT_CHANNELS,
        out_channels=_LATENT_CHANNELS,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        block_out_channels=(width, 2 * width),
        layers_per_block=1,
        norm_num_groups=8,
        cross_attention_dim=width,
        attention_head_dim=4,  # with this class, how many heads there are
    )
    return Networks(SMALL, unet, text_encoder, vae, tokenizer, diffusers.DDPMScheduler(**_SCHEDULE), made=True)


def _sd15(tokenizer: Any, shape: tuple[int, int]) -> Networks:
    """Make networks of Stable Diffusion 1.5's sizes (its published configs), to measure what training them takes."""
    diffusers, transformers = _packages()
    text_encoder = transformers.CLIPTextModel(
        _clip(
            tokenizer, hidden_size=768, intermediate_size=3072, num_hidden_layers=12, num_attention_heads=12,
            vocab_size=49408, max_position_embeddings=77, projection_dim=768,
        )
    )  # fmt: skip
    tokenizer.model_max_length = 77
    vae = diffusers.AutoencoderKL(
        in_channels=shape[0],
        out_channels=shape[0],
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        block_out_channels=(128, 256, 512, 512),
        layers_per_block=2,
        latent_channels=_LATENT_CHANNELS,
        sample_size=512,
    )
    unet = diffusers.UNet2DConditionModel(
        sample_size=64,
        block_out_channels=(320, 640, 1280, 1280),
        layers_per_block=2,
        cross_attention_dim=768,
        attention_head_dim=8,
    )
    return Networks(SD15, unet, text_encoder, vae, tokenizer, diffusers.DDPMScheduler(**_SCHEDULE), made=True)


def _clip(tokenizer: Any, **sizes: Any) -> Any:
    return _packages()[1].CLIPTextConfig(
        **{"vocab_size": len(tokenizer), "max_position_embeddings": tokenizer.model_max_length, **sizes},
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )


def _from_elsewhere(name: str, say: Callable[[str], None]) -> Networks:
    """Load a Stable Diffusion pipeline's parts, each by its class here: whatever its folder names is not imported."""
    diffusers, transformers = _packages()
    if (Path(name).is_absolute() or name.startswith(".")) and not Path(name).exists():
        raise ConfigError(f"diffusion.model={name}: no such folder; expected one with a pipeline of diffusers")
    if (Path(name) / "text_encoder" / ADAPTER).exists():
        raise ConfigError(_adapters(name))  # they name another model, which transformers would load instead
    silent = None if Path(name).is_dir() else hub.unreachable(name, say, "model_index.json")
    where: dict[str, Any] = {"local_files_only": silent is not None}
    with _named(name, silent):
        kind = diffusers.StableDiffusionPipeline.load_config(name, **where).get("_class_name")
        if kind != "StableDiffusionPipeline":
            raise ConfigError(
                f"diffusion.model={name} is a {kind}; expected a StableDiffusionPipeline: a UNet, one CLIP text "
                "encoder and a VAE"
            )
        weights = {**where, "use_safetensors": True}
        unet = diffusers.UNet2DConditionModel.from_pretrained(
            name, subfolder="unet", torch_dtype=torch.float32, **weights
        )
        vae = diffusers.AutoencoderKL.from_pretrained(name, subfolder="vae", torch_dtype=torch.float32, **weights)
        text_encoder = transformers.CLIPTextModel.from_pretrained(
            # Said here, since a model's configuration may name a kernel of the hub, which is code.
            name,
            subfolder="text_encoder",
            dtype=torch.float32,
            attn_implementation="sdpa",
            **weights,
        )
        if hasattr(text_encoder, "peft_config"):
            raise ConfigError(_adapters(name))
        # Without the word, a tokenizer with code of its own has the user asked whether to run it.
        tokenizer = transformers.AutoTokenizer.from_pretrained(
            name, subfolder="tokenizer", trust_remote_code=False, **where
        )
        scheduler = diffusers.DDPMScheduler.from_pretrained(name, subfolder="scheduler", **where)
    for one in (unet, vae, text_encoder):
        align(one)
    return Networks(name, unet, text_encoder, vae, tokenizer, scheduler, made=False)


def _adapters(name: str) -> str:
    return f"diffusion.model={name} has adapters beside its text encoder ({ADAPTER}): merge them into its weights first"


@contextlib.contextmanager
def _named(name: str, silent: str | None) -> Iterator[None]:
    """Say of any failure which setting it comes from; three libraries raise many classes for one thing."""
    try:
        with quiet(), warnings.catch_warnings():
            # What diffusers still asks the hub's library for is no business of a user's.
            warnings.filterwarnings("ignore", message="The `local_dir_use_symlinks` argument", category=UserWarning)
            yield
    except (OSError, ValueError, ImportError, RuntimeError, TypeError, KeyError) as error:
        if isinstance(error, ConfigError):
            raise
        hint = "expected a pipeline's folder: model_index.json, and weights as safetensors (no .bin, no .ckpt)"
        if silent:
            hint = (
                f"it is no folder here, the Hugging Face hub does not answer ({silent}), and its cache on this machine "
                f"does not hold it; use a local folder or diffusion.model={SMALL}"
            )
        raise ConfigError(
            f"diffusion.model={name!r} cannot be loaded: {hint}. {type(error).__name__}: "
            f"{' '.join(str(error).split())[:300]}"
        ) from error


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep the bars and reports of diffusers and transformers off the terminal while the block runs."""
    kinds = [
        require(f"{name}.utils.logging", "recipe=diffusion", "diffusion") for name in ("diffusers", "transformers")
    ]
    before = [(one, one.get_verbosity(), one.is_progress_bar_enabled()) for one in kinds]
    for one in kinds:
        one.set_verbosity_error()
        one.disable_progress_bar()
    try:
        yield
    finally:
        for one, verbosity, bars in before:
            one.set_verbosity(verbosity)
            if bars:
                one.enable_progress_bar()


def _packages() -> tuple[Any, Any]:
    return require("diffusers", "recipe=diffusion", "diffusion"), require("transformers", "recipe=diffusion")
