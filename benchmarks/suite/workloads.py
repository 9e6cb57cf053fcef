"""The workloads: plain training steps as their users would write them, at the size of a GPU and at one for a CPU.

A step is forward, backward and fused AdamW; on a GPU under bfloat16 autocast, on a CPU in float32. Batches differ from
step to step and lie on the device, so that loading data is no part of what is measured.
"""

from __future__ import annotations

import itertools

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - torch's own custom

import hotloop

from . import finetuning, launch_bound, models
from .program import BATCHES, Place, Program, adamw, classifier, pictures


def tiny(place):
    """Eight encoder layers of width 256 on 8x64 places: launch-bound."""
    size = place.of(gpu=(256, 8), cpu=(32, 2))
    model = place.build(lambda: models.Scorer(*size))
    optimizer, autocast = adamw(model.parameters()), place.autocast()
    shape = place.of(gpu=(8, 64, 256), cpu=(4, 16, 32))

    def train_step(x):
        with autocast():
            loss = model(x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return Program(model, optimizer, train_step, [(place.normal(*shape),) for _ in range(BATCHES)])


def cross_encoder(place, lengths):
    """XLM-R base as a cross-encoder, as rerankers are, with its dropout; one batch for each of the lengths."""
    from transformers import XLMRobertaConfig, XLMRobertaForSequenceClassification

    small = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    words = place.of(gpu=250_002, cpu=500)
    config = XLMRobertaConfig(
        vocab_size=words, max_position_embeddings=514, type_vocab_size=1, num_labels=1, **place.of(gpu={}, cpu=small)
    )
    model = place.build(lambda: XLMRobertaForSequenceClassification(config))
    optimizer, autocast = adamw(model.parameters()), place.autocast()

    def train_step(input_ids, attention_mask, labels):
        with autocast():
            logits = model(input_ids=input_ids, attention_mask=attention_mask).logits.squeeze(-1)
        loss = F.binary_cross_entropy_with_logits(logits.float(), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    number = place.of(gpu=16, cpu=2)
    batches = []
    for length in lengths:
        ids = place.whole(5, words - 2, number, length)
        batches.append((ids, torch.ones_like(ids), place.whole(0, 2, number).float()))
    return Program(model, optimizer, train_step, batches)


def xlmr(place):
    """XLM-R base, 16 pairs of 256 tokens."""
    return cross_encoder(place, [place.of(gpu=256, cpu=16)] * BATCHES)


def xlmr_lengths(place):
    """XLM-R base, 16 pairs of 64 to 256 tokens, the length drawn anew each step."""
    low, high, steps = place.of(gpu=(64, 256, 1_000), cpu=(8, 32, 200))
    draws = torch.Generator().manual_seed(1)
    program = cross_encoder(place, torch.randint(low, high + 1, (steps,), generator=draws).tolist())
    edges = place.of(gpu=(64, 128, 192, 256), cpu=(8, 16, 24, 32))

    def padded(input_ids, attention_mask, labels):
        length = input_ids.shape[1]
        more = next(edge for edge in edges if edge >= length) - length
        return F.pad(input_ids, (0, more), value=1), F.pad(attention_mask, (0, more)), labels

    program.padded = padded
    program.buckets = {
        "input_ids": hotloop.Pad(dim=1, value=1, to=edges),
        "attention_mask": hotloop.Pad(dim=1, value=0, to=edges),
    }
    return program


def inception(place):
    """The InceptionV3 of torchvision on 16 images of 512 px, as in Lightning's guide to torch.compile."""
    import torchvision

    model = place.build(lambda: torchvision.models.inception_v3(weights=None, init_weights=False))
    return pictures(place, model, gpu=(16, 512), cpu=(2, 80))


def resnet50(place):
    """The ResNet-50 of torchvision on 64 images of 224 px, its weights and batches laid out as torch makes them."""
    import torchvision

    model = place.build(torchvision.models.resnet50)
    return pictures(place, model, gpu=(64, 224), cpu=(2, 32))


def convnext(place):
    """The ConvNeXt-T of torchvision on 64 images of 224 px, with its stochastic depth."""
    import torchvision

    model = place.build(torchvision.models.convnext_tiny)
    return pictures(place, model, gpu=(64, 224), cpu=(2, 32))


def convolutions(place):
    """A small network of convolutions, without torchvision."""
    channels = [3, 32, 64, 128]
    parts = [
        nn.Sequential(
            nn.Conv2d(wide, wider, 3, padding=1, bias=False), nn.BatchNorm2d(wider), nn.ReLU(), nn.MaxPool2d(2)
        )
        for wide, wider in itertools.pairwise(channels)
    ]
    model = place.build(lambda: nn.Sequential(*parts, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10)))
    return pictures(place, model, gpu=(64, 128), cpu=(2, 32), classes=10)


def gpt(place):
    """A model of GPT-2's shape, its head untied (163M parameters), on 16 sequences of 1,024 tokens: compute-bound."""
    words, width, depth, length = place.of(gpu=(50_304, 768, 12, 1024), cpu=(64, 32, 2, 16))
    model = place.build(lambda: models.Gpt(words, width, layers=depth, heads=depth, length=length))
    optimizer, autocast = adamw(model.parameters()), place.autocast()

    def train_step(x, y):
        with autocast():
            loss = model(x, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    texts = [place.whole(0, words, place.of(gpu=16, cpu=2), length + 1) for _ in range(BATCHES)]
    return Program(
        model, optimizer, train_step, [(text[:, :-1].contiguous(), text[:, 1:].contiguous()) for text in texts]
    )


def denoiser(place):
    """Make a UNet of Stable Diffusion 1.5's size."""
    from diffusers import UNet2DConditionModel

    small = {
        "block_out_channels": (32, 64),
        "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
        "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
        "layers_per_block": 1,
        "norm_num_groups": 8,
    }
    settings = place.of(gpu={"block_out_channels": (320, 640, 1280, 1280)}, cpu=small)
    width = place.of(gpu=768, cpu=32)
    return place.build(
        lambda: UNet2DConditionModel(sample_size=64, cross_attention_dim=width, attention_head_dim=8, **settings)
    )


def unet(place):
    """Stable Diffusion 1.5's UNet on 8 latents of 4x64x64."""
    model = denoiser(place)
    optimizer, autocast = adamw(model.parameters()), place.autocast()

    def train_step(latents, moments, text, noise):
        with autocast():
            found = model(latents, moments, text).sample
        loss = F.mse_loss(found.float(), noise)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    number, edge, width = place.of(gpu=(8, 64, 768), cpu=(2, 8, 32))
    batches = []
    for _ in range(BATCHES):
        latents, noise = place.normal(number, 4, edge, edge), place.normal(number, 4, edge, edge)
        batches.append((latents, place.whole(0, 1000, number), place.normal(number, 77, width), noise))
    return Program(model, optimizer, train_step, batches, components={"unet": model})


def diffusion(place):
    """The same UNet beside Stable Diffusion's VAE and text encoder, both frozen, as a trainer runs them."""
    from diffusers import AutoencoderKL, DDPMScheduler
    from transformers import CLIPTextConfig, CLIPTextModel

    model = denoiser(place)
    widths = place.of(gpu=(128, 256, 512, 512), cpu=(16, 16, 16, 16))
    kinds = {"down_block_types": ("DownEncoderBlock2D",) * 4, "up_block_types": ("UpDecoderBlock2D",) * 4}
    groups = place.of(gpu=32, cpu=8)
    vae = place.build(
        lambda: AutoencoderKL(
            block_out_channels=widths, layers_per_block=2, latent_channels=4, norm_num_groups=groups, **kinds
        )
    )
    width, layers, heads, words = place.of(gpu=(768, 12, 12, 49_408), cpu=(32, 2, 2, 100))
    text_config = CLIPTextConfig(
        vocab_size=words,
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        bos_token_id=0,
        eos_token_id=words - 1,
    )
    text_encoder = place.build(lambda: CLIPTextModel(text_config))
    vae.requires_grad_(False).eval()
    text_encoder.requires_grad_(False).eval()
    noising = DDPMScheduler()
    optimizer, autocast = adamw(model.parameters()), place.autocast()

    def train_step(images, tokens, moments, noise):
        with autocast():
            with torch.no_grad():
                latents = 0.18215 * vae.encode(images).latent_dist.mode()
                text = text_encoder(tokens).last_hidden_state
            found = model(noising.add_noise(latents, noise, moments), moments, text).sample
        loss = F.mse_loss(found.float(), noise)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    number, edge = place.of(gpu=(8, 64), cpu=(2, 8))
    batches = [
        (
            place.normal(number, 3, 8 * edge, 8 * edge),
            place.whole(0, words, number, 77),
            place.whole(0, 1000, number),
            place.normal(number, 4, edge, edge),
        )
        for _ in range(BATCHES)
    ]
    parts = {"unet": model, "text_encoder": text_encoder, "vae": vae}
    return Program(model, optimizer, train_step, batches, components=parts)


def vit(place):
    """A ViT-B/16 on 32 images of 224 px."""
    pixels, patch, width, depth, classes = place.of(gpu=(224, 16, 768, 12, 1000), cpu=(32, 8, 32, 2, 10))

    def make():
        return models.Vit(pixels=pixels, patch=patch, width=width, layers=depth, heads=depth, classes=classes)

    return classifier(place, make, (place.of(gpu=32, cpu=2), 3, pixels, pixels), classes)


def mlp(place):
    """Six linear layers of width 1,024 on 256 points: a step of a few kernels, each short."""
    width, depth, points = place.of(gpu=(1024, 6, 256), cpu=(32, 3, 16))
    return classifier(place, lambda: models.Mlp(width, depth, classes=10), (points, width), classes=10)


def lora(place):
    """A LoRA fine-tune of GPT-2 (124M, rank 16 on the attention) with peft, 8 sequences of 512 tokens, with dropout."""
    from peft import LoraConfig, get_peft_model
    from transformers import GPT2Config, GPT2LMHeadModel

    words, length, number = place.of(gpu=(50_257, 512, 8), cpu=(64, 16, 2))
    small = {"n_embd": 32, "n_layer": 2, "n_head": 2, "bos_token_id": 0, "eos_token_id": 0}
    config = GPT2Config(vocab_size=words, **place.of(gpu={}, cpu=small))
    adapter = LoraConfig(r=place.of(gpu=16, cpu=4), target_modules=["c_attn"], fan_in_fan_out=True, lora_dropout=0.05)
    model = place.build(lambda: get_peft_model(GPT2LMHeadModel(config), adapter))
    optimizer = adamw([one for one in model.parameters() if one.requires_grad])
    autocast = place.autocast()

    def train_step(input_ids):
        with autocast():
            loss = model(input_ids=input_ids, labels=input_ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return Program(model, optimizer, train_step, [(place.whole(0, words, number, length),) for _ in range(BATCHES)])


MAKERS = {
    "tiny": tiny,
    "xlmr": xlmr,
    "xlmr-lengths": xlmr_lengths,
    "inception": inception,
    "resnet50": resnet50,
    "convnext": convnext,
    "convolutions": convolutions,
    "gpt": gpt,
    "unet": unet,
    "vit": vit,
    "lora": lora,
    "lora-0.2b": finetuning.lora_02b,
    "lora-1b": finetuning.lora_1b,
    "lora-3b": finetuning.lora_3b,
    "mlp": mlp,
    "speech": launch_bound.speech,
    "t5": launch_bound.t5,
    "deberta": launch_bound.deberta,
    "ppo": launch_bound.ppo,
    "vae": launch_bound.vae,
    "lstm": launch_bound.lstm,
    "diffusion": diffusion,
}


def build(name, device, size):
    """Build a workload's program; two of one name are equal to the last bit.

    Raises:
        ImportError: a package that it is made of is missing.
    """
    return MAKERS[name](Place(device, size))
