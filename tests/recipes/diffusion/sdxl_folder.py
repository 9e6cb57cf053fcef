"""A tiny SDXL, saved by the real classes of diffusers and transformers: what tests of SDXL share."""

from __future__ import annotations

import torch
from diffusers import AutoencoderKL, EulerDiscreteScheduler, StableDiffusionXLPipeline, UNet2DConditionModel
from small_diffusion import SCHEDULE, WORDS, tokenizer
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection


def _text(kind, tokenizer, width, **more):
    config = CLIPTextConfig(
        vocab_size=len(tokenizer), hidden_size=width, intermediate_size=2 * width, num_hidden_layers=3,
        num_attention_heads=2, max_position_embeddings=16, projection_dim=12, pad_token_id=0, bos_token_id=2,
        eos_token_id=3, **more,
    )  # fmt: skip
    return kind(config)


def parts(prediction="epsilon"):
    """A pipeline's parts, with random weights. The words of both tokenizers have different numbers."""
    torch.manual_seed(0)
    first, second = tokenizer(WORDS, 16), tokenizer(WORDS[::-1], 16)
    unet = UNet2DConditionModel(
        sample_size=8, in_channels=4, out_channels=4, block_out_channels=(8, 16), norm_num_groups=4,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"), up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        layers_per_block=1, cross_attention_dim=24, attention_head_dim=(2, 4), use_linear_projection=True,
        addition_embed_type="text_time", addition_time_embed_dim=4, projection_class_embeddings_input_dim=12 + 6 * 4,
        transformer_layers_per_block=1,
    )  # fmt: skip
    vae = AutoencoderKL(
        in_channels=3, out_channels=3, block_out_channels=(4, 4), norm_num_groups=2, latent_channels=4,
        down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2, sample_size=16,
        mid_block_add_attention=False, scaling_factor=0.13025,
    )  # fmt: skip
    return {
        "unet": unet, "vae": vae, "tokenizer": first, "tokenizer_2": second,
        "text_encoder": _text(CLIPTextModel, first, 8),
        "text_encoder_2": _text(CLIPTextModelWithProjection, second, 16, hidden_act="gelu"),
        "scheduler": EulerDiscreteScheduler(**SCHEDULE, timestep_spacing="leading", prediction_type=prediction),
    }  # fmt: skip


def write(folder, prediction="epsilon", zeros=True, **changed):
    """Save a pipeline as StableDiffusionXLPipeline saves it; ``part=other`` changes one."""
    made = {**parts(prediction), **changed}
    StableDiffusionXLPipeline(**made, force_zeros_for_empty_prompt=zeros).save_pretrained(folder)
    return folder
