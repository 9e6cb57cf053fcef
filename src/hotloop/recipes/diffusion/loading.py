"""Make or load the networks of ``diffusion.model``: small ones, ones of Stable Diffusion 1.5's sizes, or a folder's.

Weights from elsewhere are read as safetensors only, and no code of a model's folder is run.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from hotloop.errors import ConfigError
from hotloop.recipes.diffusion.networks import SMALL, Networks
from hotloop.train import hub
from hotloop.train.networks import align
from hotloop.train.optional import require

if TYPE_CHECKING:
    from collections.abc import Callable

SD15 = "sd15"
"""The name of ``diffusion.model`` for networks of Stable Diffusion 1.5's sizes, with random weights."""
ADAPTER = "adapter_config.json"
"""What transformers takes for adapters to load, or for the name of another model, in a text encoder's folder."""
PIPELINE, XL, REFINER = "StableDiffusionPipeline", "StableDiffusionXLPipeline", "StableDiffusionXLImg2ImgPipeline"
PARTS = {
    PIPELINE: ("unet", "vae", "text_encoder", "tokenizer", "scheduler"),
    XL: ("unet", "vae", "text_encoder", "text_encoder_2", "tokenizer", "tokenizer_2", "scheduler"),
}
"""The pipelines that are taken, each with the parts that it has to have."""
_SCHEDULE = {
    "num_train_timesteps": 1000, "beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear",
    "clip_sample": False, "steps_offset": 1,
}  # fmt: skip
_LATENT_CHANNELS = 4


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
    """Load a pipeline's parts, each by its class here: whatever its folder names is not imported.

    Raises:
        ConfigError: it is no folder, of another pipeline, without one of its parts or of its weights.
    """
    diffusers, transformers = _packages()
    if (Path(name).is_absolute() or name.startswith(".")) and not Path(name).exists():
        raise ConfigError(f"diffusion.model={name}: no such folder; expected one with a pipeline of diffusers")
    silent = None if Path(name).is_dir() else hub.unreachable(name, say, "model_index.json")
    where: dict[str, Any] = {"local_files_only": silent is not None}
    expected = "expected a pipeline's folder: model_index.json, and weights as safetensors (no .bin, no .ckpt)"
    with (
        hub.loading("diffusion.model", name, silent, expected=expected, instead=f"diffusion.model={SMALL}"),
        hub.quiet("diffusers"),
        warnings.catch_warnings(),
    ):
        # What diffusers still asks the hub's library for is no business of a user's.
        warnings.filterwarnings("ignore", message="The `local_dir_use_symlinks` argument", category=UserWarning)
        index = diffusers.StableDiffusionPipeline.load_config(name, **where)
        kind = _checked_kind(name, index)

        def load(loader: Any, part: str, **more: Any) -> Any:
            return loader.from_pretrained(name, subfolder=part, **where, **more)

        def weights(loader: Any, part: str, **more: Any) -> Any:
            found, told = load(loader, part, use_safetensors=True, output_loading_info=True, **more)
            if wrong := [*told["missing_keys"], *(str(one) for one in told["mismatched_keys"])]:
                more_of_them = f" and {len(wrong) - 1} more" if len(wrong) > 1 else ""
                raise ConfigError(
                    f"diffusion.model={name}: the file of its {part} has no weights for {wrong[0]}{more_of_them} of a "
                    f"{loader.__name__}: expected the {part} of a {kind}"
                )
            align(found)
            return found

        def text(loader: Any, part: str) -> Any:
            # Adapters name another model, which transformers would load instead.
            if (Path(name) / part / ADAPTER).exists():
                raise ConfigError(_adapters(name, part))
            # The attention is said here, since a model's configuration may name a kernel of the hub, which is code.
            found = weights(loader, part, dtype=torch.float32, attn_implementation="sdpa")
            if hasattr(found, "peft_config"):
                raise ConfigError(_adapters(name, part))
            return found

        def tokenizer(part: str) -> Any:
            # Without the word, a tokenizer with code of its own has the user asked whether to run it.
            return load(transformers.AutoTokenizer, part, trust_remote_code=False)

        more: dict[str, Any] = {}
        if kind == XL:
            more = {
                "text_encoder_2": text(transformers.CLIPTextModelWithProjection, "text_encoder_2"),
                "tokenizer_2": tokenizer("tokenizer_2"),
                "zeros": bool(index.get("force_zeros_for_empty_prompt", True)),
            }
        return Networks(
            name=name,
            text_encoder=text(transformers.CLIPTextModel, "text_encoder"),
            unet=weights(diffusers.UNet2DConditionModel, "unet", torch_dtype=torch.float32),
            vae=weights(diffusers.AutoencoderKL, "vae", torch_dtype=torch.float32),
            tokenizer=tokenizer("tokenizer"),
            scheduler=load(diffusers.DDPMScheduler, "scheduler"),
            made=False,
            **more,
        )


def _checked_kind(name: str, index: dict[str, Any]) -> str:
    """Return the class of a pipeline, of its ``model_index.json``; it has all its parts.

    Raises:
        ConfigError: it is another pipeline, or a part is not there.
    """
    kind = str(index.get("_class_name"))
    if kind not in PARTS:
        refiner = ", SDXL's refiner, which goes on with pictures that another model made" if kind == REFINER else ""
        raise ConfigError(
            f"diffusion.model={name} is a {kind}{refiner}; expected a {PIPELINE} (1.x, 2.x) or a {XL}: a UNet, one or "
            "two CLIP text encoders and a VAE"
        )
    local = Path(name).is_dir()
    for part in PARTS[kind]:
        if not any(index.get(part) or ()) or (local and not (Path(name) / part).is_dir()):
            raise ConfigError(
                f"diffusion.model={name} is a {kind} without its {part}: expected the folder {part}, named in "
                f"model_index.json, beside {', '.join(one for one in PARTS[kind] if one != part)}"
            )
    return kind


def _adapters(name: str, part: str) -> str:
    return f"diffusion.model={name} has adapters beside its {part} ({ADAPTER}): merge them into its weights first"


def _packages() -> tuple[Any, Any]:
    what = "recipe=diffusion"
    return require("diffusers", what, "diffusion"), require("transformers", what, "diffusion")
