"""LoRA and dropout under gradient checkpointing, as each library switches it on: captured, and equal to eager."""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig, get_peft_model
from trainer_fits import ARGUMENTS
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from hotloop.integrations import transformers as of_transformers
from hotloop.testing import captured_step_emulation

pytestmark = [
    pytest.mark.campaign,
    pytest.mark.filterwarnings("default"),  # the frameworks warn of their own use of torch
]
GRAPH = "eager+graph"


def tuned_llama():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, use_cache=False, attn_implementation="eager",
    )  # fmt: skip
    adapter = LoraConfig(r=2, lora_dropout=0.2, target_modules=["q_proj", "v_proj", "down_proj"])
    return get_peft_model(LlamaForCausalLM(config), adapter)


def packed(items):
    """Put the examples of a batch one behind the other, as trl's packing does."""
    tokens = torch.cat([one["input_ids"] for one in items])[None]
    places = torch.cat([torch.arange(len(one["input_ids"])) for one in items])[None]
    return {"input_ids": tokens, "labels": tokens.clone(), "position_ids": places}


@pytest.mark.parametrize(("collator", "reentrant"), [(None, False), (None, True), (packed, False)])
def test_the_trainers_gradient_checkpointing_with_lora(tmp_path, collator, reentrant):
    draws = torch.Generator().manual_seed(1)
    data = [{"input_ids": one, "labels": one} for one in torch.randint(64, (40, 6), generator=draws)]
    settings = {
        "learning_rate": 2**-8, "gradient_checkpointing": True, "max_steps": 18, "per_device_train_batch_size": 2,
        "gradient_checkpointing_kwargs": {"use_reentrant": reentrant}, "optim": "adamw_torch_fused", **ARGUMENTS,
    }  # fmt: skip

    def fitted(kind, hot=None):
        trainer = kind(
            tuned_llama(), TrainingArguments(str(tmp_path), **settings), train_dataset=data, data_collator=collator,
            callbacks=[hot] if hot else [],
        )  # fmt: skip
        trainer.train()
        losses = [one["loss"] for one in trainer.state.log_history if "loss" in one]
        return losses, trainer.model.state_dict(), torch.get_rng_state()

    eager, hot = fitted(Trainer), of_transformers.HotLoop(run=GRAPH)
    with captured_step_emulation():
        ours = fitted(of_transformers.HotTrainer, hot)
    assert hot.status().tier == GRAPH, hot.status()
    same(ours, eager)


def same(ours, eager):
    """Hold losses, parameters and the random position against eager's, bit for bit."""
    assert ours[0] == eager[0]
    for name, value in eager[1].items():
        torch.testing.assert_close(ours[1][name], value, rtol=0, atol=0, msg=name)
    assert torch.equal(ours[2], eager[2])
