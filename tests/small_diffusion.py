"""A tiny Stable Diffusion and tiny captioned pictures, each a folder: what tests of the recipe `diffusion` share."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path

WORDS = ("a", "handwritten", "digit", "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
SCHEDULE = {"beta_schedule": "scaled_linear", "beta_start": 0.00085, "beta_end": 0.012}


def tokenizer(words=WORDS, length=8):
    """A tokenizer of whole words: padding, unknown, begin and end are its first four numbers."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    numbers = {word: number for number, word in enumerate(("[PAD]", "[UNK]", "[BEGIN]", "[END]", *words))}
    made = Tokenizer(models.WordLevel(numbers, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    ends = [("[BEGIN]", 2), ("[END]", 3)]
    made.post_processor = processors.TemplateProcessing(single="[BEGIN] $A [END]", special_tokens=ends)
    names = {"pad_token": "[PAD]", "unk_token": "[UNK]", "bos_token": "[BEGIN]", "eos_token": "[END]"}
    return PreTrainedTokenizerFast(
        tokenizer_object=made, model_max_length=length, model_input_names=["input_ids"], **names
    )


@functools.cache
def model() -> Path:
    """Save a pipeline of random weights; both sides of its pictures are multiples of 8."""
    import torch
    from diffusers import AutoencoderKL, DDPMScheduler, StableDiffusionPipeline, UNet2DConditionModel
    from transformers import CLIPTextConfig, CLIPTextModel

    torch.manual_seed(0)
    words, width = tokenizer(), 8
    text = CLIPTextConfig(
        vocab_size=len(words), hidden_size=width, intermediate_size=2 * width, num_hidden_layers=2,
        num_attention_heads=2, max_position_embeddings=8, pad_token_id=0, bos_token_id=2, eos_token_id=3,
    )  # fmt: skip
    vae = AutoencoderKL(
        block_out_channels=(8, 8), norm_num_groups=4, latent_channels=4, mid_block_add_attention=False, sample_size=8,
        down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2,
    )  # fmt: skip
    unet = UNet2DConditionModel(
        sample_size=4, block_out_channels=(width, 2 * width), layers_per_block=1, norm_num_groups=8,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"), up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=width, attention_head_dim=4,
    )  # fmt: skip
    folder = Path(tempfile.mkdtemp(prefix="small-diffusion-")) / "model"
    StableDiffusionPipeline(
        unet=unet, vae=vae, text_encoder=CLIPTextModel(text), tokenizer=words, safety_checker=None,
        scheduler=DDPMScheduler(**SCHEDULE, clip_sample=False, steps_offset=1), feature_extractor=None, requires_safety_checker=False,
    ).save_pretrained(folder)  # fmt: skip
    return folder


def write_pictures(folder: Path, many: int, sizes=((8, 8),)) -> Path:
    """Write plain pictures, each a colour of its own, with one of ten captions; ``sizes`` are width and height."""
    from PIL import Image

    folder.mkdir(parents=True, exist_ok=True)
    for number in range(many):
        colour = (number * 37 % 256, number * 101 % 256, number * 11 % 256)
        Image.new("RGB", sizes[number % len(sizes)], colour).save(folder / f"{number:03}.png")
        (folder / f"{number:03}.txt").write_text(f"a handwritten {WORDS[3 + number % 10]}")
    return folder


@functools.cache
def pictures(many: int = 160) -> Path:
    """Write pictures of 8 x 8 pixels into a folder of their own."""
    return write_pictures(Path(tempfile.mkdtemp(prefix="small-pictures-")), many)


def small(**more: object) -> list[str]:
    """The settings of a run that takes a second, on the CPU; ``a__b=value`` changes one."""
    chosen = {
        "recipe": "diffusion", "run.device": "cpu", "diffusion.model": model(), "pictures.path": pictures(),
        "pictures.size": 8, "pictures.step": 8, "pictures.min_size": 8, "training.batch_size": 16,
        "training.eval_batch_size": 64, "training.num_epochs": 1, "training.learning_rate": 0.005,
        "training.ema_decay": 0.8, "diffusion.sample_steps": 2, "diffusion.samples": 1, "diffusion.output": "false",
    }  # fmt: skip
    chosen.update({name.replace("__", "."): value for name, value in more.items()})
    return [f"{name}={value}" for name, value in chosen.items()]
