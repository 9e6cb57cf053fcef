"""Fine-tuning with LoRA as people do it: gradient checkpointing, adapters with dropout, clipped gradients.

The weights are drawn, which changes no time. The learning rate is a power of two, which float32 holds as it is: with it
losses beside eager's may be compared bit for bit (``loss_difference`` is 0 where they are equal).
"""

from __future__ import annotations

import torch
from torch import nn

from .program import BATCHES, Program

SIZES = {
    "0.2b": ({"vocab_size": 32_000, "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 12,
              "num_attention_heads": 16, "num_key_value_heads": 4}, 4, 512),
    "1b": ({"vocab_size": 128_256, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
            "num_attention_heads": 32, "num_key_value_heads": 8}, 4, 512),
    "3b": ({"vocab_size": 128_256, "hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 28,
            "num_attention_heads": 24, "num_key_value_heads": 8}, 2, 1024),
}  # fmt: skip
"""The shape of the model, and its batch: sequences and their tokens."""
_SMALL = ({"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
           "num_attention_heads": 4, "num_key_value_heads": 2}, 2, 12)  # fmt: skip
_PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def lora_02b(place):
    """A Llama of 0.2 B with LoRA on all projections, 4 sequences of 512 tokens."""
    return _lora(place, "0.2b")


def lora_1b(place):
    """A Llama of 1 B (the shape of Llama 3.2 1B) with LoRA on all projections, 4 sequences of 512 tokens."""
    return _lora(place, "1b")


def lora_3b(place):
    """A Llama of 3 B (the shape of Llama 3.2 3B) with LoRA on all projections, 2 sequences of 1,024 tokens."""
    return _lora(place, "3b")


def _lora(place, size):
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    shape, number, length = place.of(gpu=SIZES[size], cpu=_SMALL)
    adapter = LoraConfig(r=16, lora_alpha=32, lora_dropout=0.05, target_modules=_PROJECTIONS)

    def make():
        model = LlamaForCausalLM(LlamaConfig(**shape, use_cache=False)).to(torch.bfloat16)
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.enable_input_require_grads()
        return get_peft_model(model, adapter)

    model = place.build(make)
    trained = [one for one in model.parameters() if one.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=2**-12, fused=True)

    def train_step(input_ids):
        with torch.autocast(place.device.type, torch.bfloat16):
            loss = model(input_ids=input_ids, labels=input_ids).loss
        loss.backward()
        nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    words = shape["vocab_size"]
    return Program(model, optimizer, train_step, [(place.whole(0, words, number, length),) for _ in range(BATCHES)])
