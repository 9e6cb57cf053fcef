"""Adapters (LoRA) through peft, and what a run leaves for other programs: a pipeline of diffusers, or adapters."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hotloop.train import hub
from hotloop.train.optional import require

if TYPE_CHECKING:
    from pathlib import Path

    from hotloop.recipes.diffusion.networks import Networks

UNET_TARGETS = ("to_q", "to_k", "to_v", "to_out.0")
TEXT_TARGETS = ("q_proj", "k_proj", "v_proj", "out_proj")
ADAPTER = "default"


def add_adapters(networks: Networks, rank: int, alpha: float, adapted: tuple[str, ...]) -> None:
    """Put small matrices beside those of the attention of frozen networks (Hu et al. 2021, arXiv:2106.09685).

    Args:
        networks: changed in place; none of their parameters requires gradients.
        rank: of the added matrices.
        alpha: what they add is scaled by ``alpha / rank``.
        adapted: the networks that get some: ``unet``, and text encoders.
    """
    peft = require("peft", "diffusion.lora_rank", "diffusion")
    for name in adapted:
        targets = list(UNET_TARGETS if name == "unet" else TEXT_TARGETS)
        config = peft.LoraConfig(r=rank, lora_alpha=alpha, target_modules=targets, init_lora_weights="gaussian")
        networks.modules()[name].add_adapter(config, ADAPTER)


def write(networks: Networks, prediction: str, folder: Path, *, adapters: tuple[str, ...]) -> Path:
    """Write what was trained into a run's folder: ``pipeline``, or ``lora``, which ``load_lora_weights`` takes.

    Args:
        networks: with the weights to write.
        prediction: what the UNet predicts; a pipeline's scheduler has to know.
        folder: the run's.
        adapters: the networks of which adapters were trained; they are written alone.

    Returns:
        The folder that was written.

    Raises:
        OSError: it cannot be written.
    """
    place = folder / ("lora" if adapters else "pipeline")
    try:
        with hub.quiet("diffusers"):
            if adapters:
                _write_adapters(networks, place, adapters)
            else:
                networks.pipeline(prediction).save_pretrained(place, safe_serialization=True)
    except RuntimeError as error:  # safetensors turns a full disk into one of its own
        raise OSError(f"{place} cannot be written: {error}") from error
    return place


def _write_adapters(networks: Networks, place: Path, adapted: tuple[str, ...]) -> None:
    peft = require("peft", "diffusion.lora_rank", "diffusion")
    diffusers = require("diffusers", "diffusion.lora_rank", "diffusion")
    layers, told = {}, {}
    for name in adapted:
        one = networks.modules()[name]
        # No adapter changes the vocabulary, which peft would otherwise ask the hub about.
        layers[f"{name}_lora_layers"] = peft.get_peft_model_state_dict(one, save_embedding_layers=False)
        told[f"{name}_lora_adapter_metadata"] = one.peft_config[ADAPTER].to_dict()
    kind = diffusers.StableDiffusionXLPipeline if networks.xl else diffusers.StableDiffusionPipeline
    kind.save_lora_weights(place, **layers, **told)
