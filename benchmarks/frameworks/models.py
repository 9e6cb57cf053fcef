"""Models and batches of the rows, at a GPU's size and at a CPU's; each is made anew from the same seed."""

from __future__ import annotations

import torch

from benchmarks.suite.models import Gpt, Scorer

_SEED = 1


def bert(size, device):
    """XLM-R base's shape, 16 texts of 256 tokens; no dropout, whose masks differ between kernels."""
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(_SEED)
    shape = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
    words, batch, length = 100, 4, 16
    if size == "gpu":
        shape, words, batch, length = {}, 250_002, 16, 256
    config = BertConfig(
        vocab_size=words, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        problem_type="single_label_classification", **shape,
    )  # fmt: skip
    ids = torch.randint(1, words, (batch, length))
    return BertForSequenceClassification(config).to(device), (ids, torch.arange(batch) % 2)


def scorer(size, device):
    """Many small kernels: launches are most of its step."""
    torch.manual_seed(_SEED)
    width, layers, batch, length = (256, 8, 8, 64) if size == "gpu" else (32, 2, 4, 8)
    return Scorer(width, layers).to(device), (torch.randn(batch, length, width, device=device),)


def gpt(size, device):
    """GPT-2's shape."""
    torch.manual_seed(_SEED)
    words, width, layers, heads, batch, length = (
        (50_304, 768, 12, 12, 8, 1024) if size == "gpu" else (64, 32, 2, 2, 4, 16)
    )
    tokens = torch.randint(words, (batch, length + 1), device=device)
    return Gpt(words, width, layers, heads, length).to(device), (tokens[:, :-1], tokens[:, 1:])


def inception(size, device):  # noqa: ARG001 - a GPU's size only
    """Lightning's guide: InceptionV3, batch 16 of 3x512x512."""
    from torchvision.models import inception_v3

    torch.manual_seed(_SEED)
    model = inception_v3(weights=None, aux_logits=False, init_weights=False).to(device)
    return model, (torch.randn(16, 3, 512, 512, device=device), torch.randint(1000, (16,), device=device))


def unet(size, device):
    """Stable Diffusion 1.5's UNet and batch 8 of its latents; on a CPU a small one."""
    from diffusers import UNet2DConditionModel

    torch.manual_seed(_SEED)
    small = {
        "sample_size": 8, "block_out_channels": (16,), "down_block_types": ("CrossAttnDownBlock2D",),
        "up_block_types": ("CrossAttnUpBlock2D",), "mid_block_type": None, "layers_per_block": 1,
        "cross_attention_dim": 16, "attention_head_dim": 8, "norm_num_groups": 4,
    }  # fmt: skip
    config = {"sample_size": 64, "cross_attention_dim": 768} if size == "gpu" else small
    side, wide, batch = config["sample_size"], config["cross_attention_dim"], 8 if size == "gpu" else 2
    model = UNet2DConditionModel(in_channels=4, out_channels=4, **config).to(device)
    noise = torch.randn(batch, 4, side, side, device=device)
    return model, (noise, torch.arange(batch, device=device), torch.randn(batch, 8, wide, device=device))
