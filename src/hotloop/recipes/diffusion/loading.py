"""Loads the networks of ``diffusion.model``: a folder with a pipeline of diffusers, or its hub name.

Weights are read as safetensors only, and no code of a model's folder is run.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from hotloop.errors import ConfigError
from hotloop.recipes.diffusion.networks import Networks
from hotloop.train import hub
from hotloop.train.networks import align
from hotloop.train.optional import require

if TYPE_CHECKING:
    from collections.abc import Callable

ADAPTER = "adapter_config.json"
"""What transformers takes for adapters to load, or for the name of another model, in a text encoder's folder."""
PIPELINE, XL = "StableDiffusionPipeline", "StableDiffusionXLPipeline"


def load(name: str, say: Callable[[str], None]) -> Networks:
    """Load a pipeline's parts, each by its class here: whatever its folder names is not imported.

    Args:
        name: a folder, or a hub name.
        say: prints a line.

    Raises:
        ConfigError: it is no folder, of another pipeline, without one of its parts or of its weights.
    """
    diffusers, transformers = (require(one, "recipe=diffusion", "diffusion") for one in ("diffusers", "transformers"))
    if (Path(name).is_absolute() or name.startswith(".")) and not Path(name).exists():
        raise ConfigError(f"diffusion.model={name}: no such folder; expected one with a pipeline of diffusers")
    silent = None if Path(name).is_dir() else hub.unreachable(name, say, "model_index.json")
    where: dict[str, Any] = {"local_files_only": silent is not None}
    expected = "expected a pipeline's folder: model_index.json, and weights as safetensors (no .bin, no .ckpt)"
    with (
        hub.loading("diffusion.model", name, silent, expected=expected, instead="diffusion.model=FOLDER"),
        hub.quiet("diffusers"),
        warnings.catch_warnings(),
    ):
        # What diffusers still asks the hub's library for is no business of a user's.
        warnings.filterwarnings("ignore", message="The `local_dir_use_symlinks` argument", category=UserWarning)
        index = diffusers.StableDiffusionPipeline.load_config(name, **where)
        kind = str(index.get("_class_name"))
        if kind not in (PIPELINE, XL):
            raise ConfigError(f"diffusion.model={name} is a {kind}; expected a {PIPELINE} (1.x, 2.x) or a {XL}")

        def part_of(loader: Any, part: str, **more: Any) -> Any:
            return loader.from_pretrained(name, subfolder=part, **where, **more)

        def weights(loader: Any, part: str, **more: Any) -> Any:
            found, told = part_of(loader, part, use_safetensors=True, output_loading_info=True, **more)
            if wrong := [*told["missing_keys"], *told["mismatched_keys"]]:
                raise ConfigError(
                    f"diffusion.model={name}: the file of its {part} has no weights for {wrong[0]} of a "
                    f"{loader.__name__}: expected the {part} of a {kind}"
                )
            align(found)
            return found

        def text(loader: Any, part: str) -> Any:
            # The attention is said here, since a model's configuration may name a kernel of the hub, which is code.
            found = weights(loader, part, dtype=torch.float32, attn_implementation="sdpa")
            # Adapters name another model, which transformers would load instead.
            if (Path(name) / part / ADAPTER).exists() or hasattr(found, "peft_config"):
                raise ConfigError(f"diffusion.model={name} has adapters beside its {part}: merge them into it first")
            return found

        def tokenizer(part: str) -> Any:
            # Without the word, a tokenizer with code of its own has the user asked whether to run it.
            return part_of(transformers.AutoTokenizer, part, trust_remote_code=False)

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
            scheduler=part_of(diffusers.DDPMScheduler, "scheduler"),
            **more,
        )
