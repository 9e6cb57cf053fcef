"""LoRA and dropout under gradient checkpointing, as each library switches it on: captured, and equal to eager."""

from __future__ import annotations

import lightning.pytorch as pl
import pytest
import torch
from diffusers import UNet2DConditionModel
from peft import LoraConfig, get_peft_model
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from trainer_fits import ARGUMENTS
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import hotloop
from hotloop.integrations import lightning as of_lightning
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


class Checkpointed(pl.LightningModule):
    """Lightning leaves checkpointing to the module."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = torch.nn.Linear(6, 8), torch.nn.Linear(8, 3)

    def block(self, x):
        return F.dropout(F.gelu(self.first(x)), 0.3)

    def training_step(self, batch, batch_idx):
        hidden = checkpoint(self.block, F.dropout(batch[0], 0.1), use_reentrant=False)
        return F.cross_entropy(self.second(hidden), batch[1])

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=2**-6, fused=True)


def test_a_lightning_module_that_checkpoints(tmp_path):
    draws = torch.Generator().manual_seed(1)
    data = [(torch.randn(4, 6, generator=draws), torch.randint(3, (4,), generator=draws)) for _ in range(20)]

    def fitted(callbacks):
        model = Checkpointed()
        pl.Trainer(
            accelerator="cpu", devices=1, max_epochs=1, logger=False, enable_checkpointing=False, callbacks=callbacks,
            enable_progress_bar=False, enable_model_summary=False, default_root_dir=tmp_path,
        ).fit(model, torch.utils.data.DataLoader(data, batch_size=None))  # fmt: skip
        return [], model.state_dict(), torch.get_rng_state()

    eager, hot = fitted([]), of_lightning.HotLoop(run=GRAPH)
    with captured_step_emulation():
        ours = fitted([hot])
    assert hot.status().loop.tier == GRAPH, hot.status()
    same(ours, eager)


def test_diffusers_gradient_checkpointing_with_lora():
    def trained(run):
        torch.manual_seed(0)
        unet = UNet2DConditionModel(
            sample_size=8, in_channels=2, out_channels=2, layers_per_block=1, block_out_channels=(8, 8),
            down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"), norm_num_groups=2, cross_attention_dim=8,
            up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"), attention_head_dim=4, dropout=0.1,
        )  # fmt: skip
        unet.enable_gradient_checkpointing()
        unet = get_peft_model(unet, LoraConfig(r=2, lora_dropout=0.2, target_modules=["to_q", "to_v"])).train()
        trained = [one for one in unet.parameters() if one.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=2**-8, fused=True)

        def train_step(noisy, times, text, noise):
            loss = F.mse_loss(unet(noisy, times, text).sample, noise)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        draws = torch.Generator().manual_seed(1)
        with captured_step_emulation(), hotloop.Loop(unet, optimizer, run=run) as loop:
            step, losses = loop.step(train_step), []
            for _ in range(12):
                shapes = ((2, 2, 8, 8), (2, 3, 8), (2, 2, 8, 8))
                noisy, text, noise = (torch.randn(shape, generator=draws) for shape in shapes)
                losses.append(step(noisy, torch.randint(100, (2,), generator=draws), text, noise).item())
            return loop.status(), (losses, unet.state_dict(), torch.get_rng_state())

    status, ours = trained(GRAPH)
    assert status.tier == GRAPH, status
    same(ours, trained("eager")[1])


def same(ours, eager):
    """Hold losses, parameters and the random position against eager's, bit for bit."""
    assert ours[0] == eager[0]
    for name, value in eager[1].items():
        torch.testing.assert_close(ours[1][name], value, rtol=0, atol=0, msg=name)
    assert torch.equal(ours[2], eager[2])
