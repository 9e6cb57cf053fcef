"""LoRA through peft, in place: small matrices beside frozen ones (Hu et al. 2021, arXiv:2106.09685)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hotloop.train.optional import require

if TYPE_CHECKING:
    from pathlib import Path

    from hotloop.recipes.diffusion.networks import Networks

UNET_TARGETS = ("to_q", "to_k", "to_v", "to_out.0")
TEXT_TARGETS = ("q_proj", "k_proj", "v_proj", "out_proj")
ADAPTER = "default"


def add(networks: Networks, rank: int, alpha: float, *, text: bool) -> None:
    """Freeze the networks and put adapters on the attention of the UNet, and of the text encoder with ``text``.

    Args:
        networks: changed in place.
        rank: of the added matrices.
        alpha: what they add is scaled by ``alpha / rank``.
        text: whether the text encoder gets some as well.
    """
    networks.unet.requires_grad_(requires_grad=False)
    networks.text_encoder.requires_grad_(requires_grad=False)
    networks.unet.add_adapter(_config(rank, alpha, UNET_TARGETS), ADAPTER)
    if text:
        networks.text_encoder.add_adapter(_config(rank, alpha, TEXT_TARGETS), ADAPTER)


def _config(rank: int, alpha: float, targets: tuple[str, ...]) -> Any:
    peft = require("peft", "diffusion.lora_rank", "diffusion")
    return peft.LoraConfig(r=rank, lora_alpha=alpha, target_modules=list(targets), init_lora_weights="gaussian")


def save(networks: Networks, folder: Path, *, text: bool) -> None:
    """Write the adapters as ``load_lora_weights`` of a pipeline takes them: one file of safetensors."""
    peft = require("peft", "diffusion.lora_rank", "diffusion")
    diffusers = require("diffusers", "diffusion.lora_rank", "diffusion")
    layers, told = {}, {}
    for name, one in (("unet", networks.unet), ("text_encoder", networks.text_encoder)):
        if name == "unet" or text:
            # No adapter changes the vocabulary, which peft would otherwise ask the hub about.
            layers[f"{name}_lora_layers"] = peft.get_peft_model_state_dict(one, save_embedding_layers=False)
            told[f"{name}_lora_adapter_metadata"] = one.peft_config[ADAPTER].to_dict()
    diffusers.StableDiffusionPipeline.save_lora_weights(folder, **layers, **told)
