"""Which models of transformers train in a captured step as transformers writes them, and what keeps the others out.

usage: python benchmarks/families.py [FAMILY ...] [--out benchmarks/results/DATE-HARDWARE-families.json]

Each family is built in small, from its configuration, and trained for 12 steps by ``run="eager+graph"``: forward with
the model's own loss, backward, AdamW. On a GPU the forward is under bfloat16 autocast; on a CPU the captured step is
stood in for, which sees no tensor that moves between the host and the device.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime as dt
import json
import logging
import pathlib
import platform
import re

import torch
import transformers
from torch import nn
from torch.nn import functional as F  # noqa: N812 - as everybody calls it

import hotloop
from hotloop.testing import captured_step_emulation

STEPS = 12
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ENCODER = {
    "vocab_size": 100,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
}
DECODER = {**ENCODER, "num_key_value_heads": 2}
BART = {
    "vocab_size": 100,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
}
T5 = {
    "vocab_size": 100,
    "d_model": 32,
    "d_kv": 16,
    "d_ff": 64,
    "num_layers": 2,
    "num_heads": 2,
    "decoder_start_token_id": 0,
}
VISION = {**{key: ENCODER[key] for key in ENCODER if key != "vocab_size"}, "image_size": 32, "patch_size": 8}


def words(*shape):
    return torch.randint(3, 100, shape)


def labelled():
    texts = words(2, 8)
    return {"input_ids": texts, "attention_mask": torch.ones_like(texts), "labels": torch.tensor([0, 1])}


def generated():
    texts = words(2, 8)
    return {"input_ids": texts, "attention_mask": torch.ones_like(texts), "labels": texts.clone()}


def answered():
    return {**generated(), "labels": words(2, 6)}


def spoken():
    return {"input_features": torch.randn(2, 8, 40), "labels": words(2, 8)}


def seen():
    return {"pixel_values": torch.randn(2, 3, 32, 32), "labels": torch.tensor([0, 1])}


def boxes():
    target = {"class_labels": torch.tensor([1]), "boxes": torch.rand(1, 4)}
    return {"pixel_values": torch.randn(2, 3, 64, 64), "labels": [target, dict(target)]}


class OwnLoss(nn.Module):
    """A classifier whose loss the program computes, as most fine-tuning scripts do."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, labels, **inputs):
        """Return the model's output with a loss."""
        out = self.model(**inputs)
        out.loss = F.cross_entropy(out.logits.float(), labels)
        return out


FAMILIES = {
    "BERT": ("BertForSequenceClassification", "BertConfig", ENCODER, labelled),
    "BERT, eager attention": ("BertForSequenceClassification", "BertConfig", ENCODER, labelled),
    "DistilBERT": (
        "DistilBertForSequenceClassification",
        "DistilBertConfig",
        {"vocab_size": 100, "dim": 32, "n_layers": 2, "n_heads": 2, "hidden_dim": 64},
        labelled,
    ),
    "ELECTRA": ("ElectraForSequenceClassification", "ElectraConfig", {**ENCODER, "embedding_size": 32}, labelled),
    "MPNet": ("MPNetForSequenceClassification", "MPNetConfig", ENCODER, labelled),
    "DeBERTa-v3": (
        "DebertaV2ForSequenceClassification",
        "DebertaV2Config",
        {**ENCODER, "relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 8},
        labelled,
    ),
    "DeBERTa-v3, own loss": (
        "DebertaV2ForSequenceClassification",
        "DebertaV2Config",
        {**ENCODER, "relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 8},
        labelled,
    ),
    "ModernBERT": (
        "ModernBertForSequenceClassification",
        "ModernBertConfig",
        {**ENCODER, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 1, "cls_token_id": 1, "sep_token_id": 1},
        labelled,
    ),
    "Longformer": (
        "LongformerForSequenceClassification",
        "LongformerConfig",
        {**ENCODER, "attention_window": 8, "max_position_embeddings": 64},
        labelled,
    ),
    "GPT-2": (
        "GPT2LMHeadModel",
        "GPT2Config",
        {"vocab_size": 100, "n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 2},
        generated,
    ),
    "GPT-2, eager attention": (
        "GPT2LMHeadModel",
        "GPT2Config",
        {"vocab_size": 100, "n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 2},
        generated,
    ),
    "Llama": ("LlamaForCausalLM", "LlamaConfig", DECODER, generated),
    "Llama, eager attention": ("LlamaForCausalLM", "LlamaConfig", DECODER, generated),
    "Qwen2": ("Qwen2ForCausalLM", "Qwen2Config", DECODER, generated),
    "Gemma 2": ("Gemma2ForCausalLM", "Gemma2Config", {**DECODER, "head_dim": 16}, generated),
    "OPT": (
        "OPTForCausalLM",
        "OPTConfig",
        {
            "vocab_size": 100,
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "ffn_dim": 64,
            "word_embed_proj_dim": 32,
        },
        generated,
    ),
    "BLOOM": (
        "BloomForCausalLM",
        "BloomConfig",
        {"vocab_size": 100, "hidden_size": 32, "n_layer": 2, "n_head": 2},
        generated,
    ),
    "Falcon": (
        "FalconForCausalLM",
        "FalconConfig",
        {"vocab_size": 100, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2},
        generated,
    ),
    "Mixtral": ("MixtralForCausalLM", "MixtralConfig", {**DECODER, "num_local_experts": 4}, generated),
    "Mamba": (
        "MambaForCausalLM",
        "MambaConfig",
        {"vocab_size": 100, "hidden_size": 32, "num_hidden_layers": 2},
        generated,
    ),
    "T5": ("T5ForConditionalGeneration", "T5Config", T5, answered),
    "mT5": ("MT5ForConditionalGeneration", "MT5Config", T5, answered),
    "BART": ("BartForConditionalGeneration", "BartConfig", BART, answered),
    "BART, eager attention": ("BartForConditionalGeneration", "BartConfig", BART, answered),
    "Marian": ("MarianMTModel", "MarianConfig", BART, answered),
    "Whisper": (
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        {**BART, "max_source_positions": 20, "max_target_positions": 32, "num_mel_bins": 8},
        spoken,
    ),
    "Speech2Text, no layer drop": (
        "Speech2TextForConditionalGeneration",
        "Speech2TextConfig",
        {**BART, "input_feat_per_channel": 40, "conv_channels": 32, "encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0},
        spoken,
    ),
    "wav2vec 2.0, no layer drop": (
        "Wav2Vec2ForCTC",
        "Wav2Vec2Config",
        {
            **ENCODER,
            "conv_dim": (16, 16),
            "conv_stride": (5, 2),
            "conv_kernel": (10, 3),
            "num_feat_extract_layers": 2,
            "num_conv_pos_embeddings": 8,
            "num_conv_pos_embedding_groups": 2,
            "layerdrop": 0.0,
            "mask_time_prob": 0.0,
        },
        lambda: {"input_values": torch.randn(2, 800), "labels": words(2, 5)},
    ),
    "ViT": ("ViTForImageClassification", "ViTConfig", VISION, seen),
    "Swin": (
        "SwinForImageClassification",
        "SwinConfig",
        {"image_size": 32, "patch_size": 2, "embed_dim": 16, "depths": [1, 1], "num_heads": [1, 2], "window_size": 4},
        seen,
    ),
    "SegFormer": (
        "SegformerForSemanticSegmentation",
        "SegformerConfig",
        {
            "depths": [1, 1, 1, 1],
            "hidden_sizes": [16, 16, 16, 16],
            "num_attention_heads": [1, 1, 1, 1],
            "decoder_hidden_size": 16,
        },
        lambda: {"pixel_values": torch.randn(2, 3, 64, 64), "labels": torch.randint(0, 2, (2, 64, 64))},
    ),
    "CLIP": (
        "CLIPModel",
        "CLIPConfig",
        {"text_config": {**ENCODER, "eos_token_id": 1}, "vision_config": VISION},
        lambda: {"input_ids": words(2, 8), "pixel_values": torch.randn(2, 3, 32, 32), "return_loss": True},
    ),
    "DETR": (
        "DetrForObjectDetection",
        "DetrConfig",
        {
            "d_model": 32,
            "encoder_layers": 1,
            "decoder_layers": 1,
            "encoder_attention_heads": 2,
            "decoder_attention_heads": 2,
            "encoder_ffn_dim": 64,
            "decoder_ffn_dim": 64,
            "num_queries": 5,
            "use_timm_backbone": False,
            "use_pretrained_backbone": False,
            "backbone": None,
        },
        boxes,
    ),
}
"""By name: the class, its configuration's class and arguments, and what makes a batch."""


def build(name):
    """Build a family's model; return it with what makes its batches."""
    kind, config, arguments, batch = FAMILIES[name]
    if name == "DETR":
        backbone = {"embedding_size": 16, "hidden_sizes": [16, 16], "depths": [1, 1], "out_features": ["stage2"]}
        arguments = {**arguments, "backbone_config": transformers.ResNetConfig(**backbone)}
    attention = {"attn_implementation": "eager"} if "eager attention" in name else {}
    made = getattr(transformers, config)(**arguments, **attention)
    torch.manual_seed(0)
    model = getattr(transformers, kind)(made)
    return (OwnLoss(model) if "own loss" in name else model).to(DEVICE).train(), batch


def moved(value):
    """Return a batch on the device."""
    if isinstance(value, dict):
        return {name: moved(each) for name, each in value.items()}
    if isinstance(value, list):
        return [moved(each) for each in value]
    return value.to(DEVICE) if isinstance(value, torch.Tensor) else value


def train(name):
    """Train a family for some steps; return its row."""
    model, batch = build(name)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    stand_in = captured_step_emulation() if DEVICE.type == "cpu" else contextlib.nullcontext()
    with stand_in, hotloop.Loop(model, optimizer, run="eager+graph") as loop:

        @loop.step
        def step(**inputs):
            with torch.autocast("cuda", torch.bfloat16) if DEVICE.type == "cuda" else contextlib.nullcontext():
                loss = model(**inputs).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        for _ in range(STEPS):
            step(**moved(batch()))
        status = loop.status()
    why = next((tier.why for tier in status.tiers if tier.name == "eager+graph"), "")
    return {
        "family": name,
        "captured": status.tier == "eager+graph",
        "why": re.sub(r"\S*/site-packages/|\S*/benchmarks/", "", why),
    }


def main():
    """Train the families, print a line for each, and write the document."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", metavar="FAMILY", help=f"of {', '.join(FAMILIES)}; else all")
    parser.add_argument("--out", type=pathlib.Path)
    options = parser.parse_args()
    if unknown := [name for name in options.families if name not in FAMILIES]:
        parser.error(f"{unknown[0]!r} is none of {', '.join(FAMILIES)}")
    logging.getLogger("hotloop").setLevel(logging.ERROR)
    rows = []
    for name in options.families or FAMILIES:
        rows.append(train(name))
        print(f"{name:28} {'captured' if rows[-1]['captured'] else rows[-1]['why']}", flush=True)
    print(f"{sum(row['captured'] for row in rows)} of {len(rows)} are captured whole")
    if options.out is not None:
        document = {
            "date": f"{dt.datetime.now(dt.UTC):%Y-%m-%d}",
            "hardware": torch.cuda.get_device_name() if DEVICE.type == "cuda" else platform.processor(),
            "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
            "command": "python benchmarks/families.py",
            "rows": rows,
        }
        options.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
