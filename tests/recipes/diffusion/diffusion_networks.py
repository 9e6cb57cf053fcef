"""Networks of a few thousand parameters: what the tests of the diffusion trainer's parts share."""

from __future__ import annotations

import torch
from diffusers import AutoencoderKL, DDPMScheduler, UNet2DConditionModel
from small_diffusion import SCHEDULE, tokenizer
from transformers import CLIPTextConfig, CLIPTextModel

from hotloop.recipes.diffusion import networks
from hotloop.recipes.diffusion.denoiser import Denoiser
from hotloop.recipes.diffusion.noise import Noise


def tiny_networks():
    """Networks of a few thousand parameters, in evaluation mode as loaded ones are."""
    torch.manual_seed(0)
    words = tokenizer(("a", "digit"), length=4)
    unet = UNet2DConditionModel(
        sample_size=4, in_channels=2, out_channels=2, block_out_channels=(8,), norm_num_groups=4,
        down_block_types=("CrossAttnDownBlock2D",), up_block_types=("UpBlock2D",), mid_block_type=None,
        layers_per_block=1, cross_attention_dim=8, attention_head_dim=4,
    )  # fmt: skip
    text = CLIPTextModel(
        CLIPTextConfig(
            vocab_size=len(words), hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2,
            max_position_embeddings=8, pad_token_id=0, bos_token_id=2, eos_token_id=3,
        )
    )  # fmt: skip
    vae = AutoencoderKL(
        in_channels=1, out_channels=1, block_out_channels=(4,), norm_num_groups=2, latent_channels=2,
        mid_block_add_attention=False,
    )  # fmt: skip
    found = networks.Networks("tiny", unet, text, vae, words, DDPMScheduler(**SCHEDULE))
    for one in found.modules().values():
        one.eval().requires_grad_(requires_grad=False)
    return found


def tiny_denoiser(text=False, **more):
    found = tiny_networks()
    found.unet.requires_grad_(requires_grad=True)
    found.text_encoder.requires_grad_(requires_grad=text)
    return Denoiser(found, Noise(found.scheduler, "epsilon", 5.0), embedded=False, **more), found
