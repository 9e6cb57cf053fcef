"""LoRA through peft, in place: small matrices beside frozen ones (Hu et al. 2021, arXiv:2106.09685)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hotloop.train.optional import require

if TYPE_CHECKING:
    from pathlib import Path

    from hotloop.recipes.diffusion.networks import Networks

UNET_TARGETS = ("to_q", "to_k", "to_v", "to_out.0")
TEXT_TARGETS = ("q_proj", "k_proj", "v_proj", "out_proj")
ADAPTER = "default"


def add(networks: Networks, rank: int, alpha: float, adapted: tuple[str, ...]) -> None:
    """Put adapters on the attention of frozen networks.

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


def save(networks: Networks, folder: Path, adapted: tuple[str, ...]) -> None:
    """Write the adapters as ``load_lora_weights`` of a pipeline takes them: one file of safetensors."""
    peft = require("peft", "diffusion.lora_rank", "diffusion")
    diffusers = require("diffusers", "diffusion.lora_rank", "diffusion")
    layers, told = {}, {}
    for name in adapted:
        one = networks.modules()[name]
        # No adapter changes the vocabulary, which peft would otherwise ask the hub about.
        layers[f"{name}_lora_layers"] = peft.get_peft_model_state_dict(one, save_embedding_layers=False)
        told[f"{name}_lora_adapter_metadata"] = one.peft_config[ADAPTER].to_dict()
    kind = diffusers.StableDiffusionXLPipeline if networks.xl else diffusers.StableDiffusionPipeline
    kind.save_lora_weights(folder, **layers, **told)
