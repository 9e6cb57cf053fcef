"""transformers' Trainer and Accelerate on a GPU, with CUDA graphs."""

import pytest

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

import hotloop
from hotloop.integrations.accelerate import prepare
from hotloop.integrations.transformers import HotLoop, HotTrainer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]


@pytest.fixture(autouse=True)
def _fresh_state():
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


def small_bert():
    torch.manual_seed(0)
    return BertForSequenceClassification(
        BertConfig(
            vocab_size=64,
            hidden_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=128,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            problem_type="single_label_classification",
        )
    )  # fmt: skip


def fit(kind, folder, hot=None, **more):
    draws = torch.Generator().manual_seed(1)
    data = [{"input_ids": torch.randint(64, (16,), generator=draws), "labels": at % 2} for at in range(160)]
    args = TrainingArguments(
        str(folder), per_device_train_batch_size=8, num_train_epochs=2, report_to=[], disable_tqdm=True,
        save_strategy="no", logging_steps=1, seed=0, **more,
    )  # fmt: skip
    trainer = kind(small_bert(), args, train_dataset=data, callbacks=[hot] if hot else [])
    trainer.train()
    return [one["loss"] for one in trainer.state.log_history if "loss" in one]


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_captured_training_step_of_a_trainer(tmp_path, bf16, accumulate):
    settings = {"bf16": bf16, "gradient_accumulation_steps": accumulate}
    eager = fit(Trainer, tmp_path, **settings)
    hot = HotLoop("eager+graph")
    ours = fit(HotTrainer, tmp_path, hot, **settings)
    torch.testing.assert_close(torch.tensor(ours), torch.tensor(eager), rtol=1e-2 if bf16 else 1e-4, atol=1e-4)
    tiers = {one.name: one for one in hot.status().tiers}
    assert tiers["eager+graph"].steps > 10, str(hot.status())


def test_a_captured_step_around_accelerate():
    def losses(run):
        AcceleratorState._reset_state(reset_partial_state=True)
        accelerator = Accelerator(mixed_precision="bf16")
        model = small_bert()
        model, optimizer = prepare(
            accelerator, model, torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True), preset="none"
        )
        loop = hotloop.Loop(model, optimizer, run=run)

        @loop.step
        def step(ids, labels):
            loss = model(input_ids=ids, labels=labels).loss
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            return loss

        draws = torch.Generator().manual_seed(1)
        batches = [torch.randint(64, (8, 16), generator=draws).cuda() for _ in range(20)]
        found = [float(step(ids, torch.arange(8, device="cuda") % 2).detach()) for ids in batches]
        status = loop.status()
        loop.close()
        return found, status

    eager, _ = losses("eager")
    ours, status = losses("eager+graph")
    torch.testing.assert_close(torch.tensor(ours), torch.tensor(eager), rtol=1e-2, atol=1e-3)
    assert {one.name: one.state for one in status.tiers}["eager+graph"] == "in force", str(status)
