"""transformers' Trainer on small real models, beyond the conformance suite."""

import pytest
import torch
from accelerate.state import AcceleratorState
from accelerate.utils import DynamoBackend
from trainer_fits import ARGUMENTS, small_bert
from transformers import (
    DataCollatorWithPadding,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

import hotloop
from hotloop import events as ev
from hotloop.integrations.transformers import HotLoop, HotTrainer
from hotloop.testing import captured_step_emulation


@pytest.fixture(autouse=True)
def _settings_of_the_process(monkeypatch):
    """On a GPU ``torch_compile=True`` sets TF32, once in a process and for all that runs there later."""
    monkeypatch.setattr("transformers.training_args.is_torch_tf32_available", lambda: False)


class Tokens:
    """The part of a tokenizer that a padding collator needs."""

    padding_side = "right"

    def save_pretrained(self, folder):
        """Save nothing: there are no files."""

    def pad(self, samples, padding=True, max_length=None, pad_to_multiple_of=None, return_tensors=None):
        longest = max(len(one["input_ids"]) for one in samples)
        more = [longest - len(one["input_ids"]) for one in samples]
        pairs = list(zip(samples, more, strict=True))
        return {
            "input_ids": torch.tensor([one["input_ids"] + [0] * n for one, n in pairs]),
            "attention_mask": torch.tensor([[1] * len(one["input_ids"]) + [0] * n for one, n in pairs]),
            "labels": torch.tensor([one["labels"] for one in samples]),
        }


def samples(count, lengths=(6,)):
    draws = torch.Generator().manual_seed(3)
    sizes = [lengths[at % len(lengths)] for at in range(count)]
    return [
        {"input_ids": torch.randint(1, 16, (size,), generator=draws).tolist(), "labels": at % 3}
        for at, size in enumerate(sizes)
    ]


def fresh_bert():
    return small_bert()


def trainer_of(kind, folder, hot=None, data=None, evaluates=False, **more):
    settings = {"per_device_train_batch_size": 4, "num_train_epochs": 1, "learning_rate": 0.01, **ARGUMENTS, **more}
    made = Seq2SeqTrainingArguments if issubclass(kind, Seq2SeqTrainer) else TrainingArguments
    args = made(str(folder), eval_strategy="epoch" if evaluates else "no", **settings)
    data = samples(24) if data is None else data
    return kind(
        model_init=fresh_bert, args=args, train_dataset=data, eval_dataset=data[:6], callbacks=[hot] if hot else [],
        data_collator=DataCollatorWithPadding(Tokens()),
    )  # fmt: skip


def same(one, other):
    pairs = zip(one.model.named_parameters(), other.model.parameters(), strict=True)
    for (name, a), b in pairs:
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.campaign
@pytest.mark.parametrize("kind", [pytest.param(Trainer, marks=pytest.mark.long), HotTrainer])
def test_mixed_precision_clipping_and_a_second_model_compile_once(kind, tmp_path):
    """Accelerate gives each model its own autocast object, whose identity would guard compiled code."""
    settings = {"bf16": True, "max_grad_norm": 0.1, "gradient_accumulation_steps": 2, "evaluates": True}
    eager = trainer_of(Trainer, tmp_path, **settings)
    eager.train()
    hot = HotLoop("aot_eager")
    ours = trainer_of(kind, tmp_path, hot, **settings)
    with hotloop.watch() as first:
        ours.train()
    expected, found = ([one["loss"] for one in each.state.log_history if "loss" in one] for each in (eager, ours))
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=5e-3, atol=0)
    once = [one.detach().clone() for one in ours.model.parameters()]
    assert any(isinstance(one, ev.Compiled) for one in first)
    forward = ours.model.forward
    assert forward.__func__.__closure__, "Accelerate's own wrapper is back"
    with hotloop.watch() as second:
        ours.train()
    assert not [one for one in second if isinstance(one, ev.Compiled)]
    assert all(torch.equal(a, b) for a, b in zip(once, ours.model.parameters(), strict=True))


@pytest.mark.campaign
def test_a_captured_step_accumulates_and_clips_as_eager(tmp_path):
    # 7 batches: the last update of the epoch has one batch only, which the loss is divided by.
    settings = {"data": samples(28), "gradient_accumulation_steps": 2, "max_grad_norm": 0.1, "num_train_epochs": 3}
    eager = trainer_of(Trainer, tmp_path, **settings)
    eager.train()
    hot = HotLoop("eager+graph")
    with captured_step_emulation():
        ours = trainer_of(HotTrainer, tmp_path, hot, **settings)
        ours.train()
    same(eager, ours)
    assert {one.name: one.state for one in hot.status().tiers}["eager+graph"] in ("proven", "in force")
    assert not hot.status().dropped


@pytest.mark.campaign
def test_torch_compile_of_the_arguments_is_taken_over_and_applied_once(tmp_path):
    hot = HotLoop()
    trainer = trainer_of(Trainer, tmp_path, hot, torch_compile=True, torch_compile_backend="aot_eager")
    assert AcceleratorState().dynamo_plugin.backend == DynamoBackend.NO
    trainer.train()
    (part,) = hot.status().components.values()
    assert (part.requested, part.state, part.compiles) == ("aot_eager", "compiled", 1)
    assert trainer.model_wrapped is trainer.model
    assert all("_orig_mod" not in name for name in trainer.model_wrapped.state_dict())


def test_a_trainer_without_a_callback_gets_one(tmp_path):
    trainer = trainer_of(HotTrainer, tmp_path)
    trainer.train()
    assert isinstance(trainer.hot, HotLoop)
    assert trainer.hot.status().step == 6
    assert trainer.hot.status().asked == "auto"
    trainer.hot.report(tmp_path / "run.html")
    assert "training_step" in (tmp_path / "run.html").read_text() or (tmp_path / "run.html").stat().st_size > 1000


def plain_trainer(model, folder, hot, arguments=None, *, kind=Trainer, more=(), **settings):
    settings = {**ARGUMENTS, "max_steps": 2, "remove_unused_columns": False, **settings}
    arguments = arguments or TrainingArguments(str(folder), **settings)
    collator = DataCollatorWithPadding(Tokens())
    return kind(model, arguments, train_dataset=samples(16), callbacks=[hot, *more], data_collator=collator)


class Annealed(HotTrainer):
    """A Trainer with a loss of its own, which reads an attribute that changes."""

    scale = 1.0

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss, found = super().compute_loss(model, inputs, return_outputs=True, num_items_in_batch=num_items_in_batch)
        return (loss * self.scale, found) if return_outputs else loss * self.scale


class Anneals(TrainerCallback):
    def on_epoch_begin(self, args, state, control, **more):
        self.trainer.scale = 1.0 + int(state.epoch or 0)


@pytest.mark.campaign
def test_what_a_loss_of_ones_own_reads_is_never_frozen(tmp_path):
    trained = []
    for run in ("eager", "eager+graph"):
        trainer = trainer_of(Annealed, tmp_path / run, HotLoop(run), num_train_epochs=3)
        trainer.add_callback(anneals := Anneals())
        anneals.trainer = trainer
        with captured_step_emulation():
            trainer.train()
        trained.append(trainer)
    same(*trained)
    assert trained[1].hot.status().tier == "eager+graph"


@pytest.mark.campaign
def test_a_model_that_the_user_wrapped_trains_as_it_was_given(tmp_path):
    torch.manual_seed(0)
    args = TrainingArguments(
        str(tmp_path), per_device_train_batch_size=4, max_steps=2, remove_unused_columns=False, **ARGUMENTS
    )
    collate = DataCollatorWithPadding(Tokens())
    model = torch.compile(fresh_bert(), backend="aot_eager")
    hot = HotLoop("aot_eager")
    trainer = Trainer(model, args, train_dataset=samples(8), data_collator=collate, callbacks=[hot])
    trainer.train()
    assert trainer.state.global_step == 2
    part = hot.status().components["model"]
    assert (part.requested, part.running) == ("aot_eager", "as-given")
    assert "torch compiled the model" in part.causes[0].reason


def test_a_plain_trainer_says_what_runs_and_why_before_and_after(tmp_path, caplog):
    hot = HotLoop()
    assert "no training run has begun" in hot.status().hint
    plain_trainer(small_bert(), tmp_path, hot).train()
    part = hot.status().components["model"]
    assert (part.requested, part.running, part.state) == ("auto", "none", "eager")
    (cause,) = part.causes
    assert "run='auto': eager, with nothing measured" in cause.reason
    assert "HotTrainer" in cause.hint
    assert cause.reason in caplog.text
    assert hot.record.document["components"]["model"]["causes"] == [cause.to_dict()]


def test_a_tier_that_a_plain_trainer_cannot_have_is_compiled_in_place_and_told(tmp_path, monkeypatch):
    monkeypatch.setenv("HOTLOOP_DISABLE", "1")  # the status names the request in any case
    hot = HotLoop("full+graph")
    plain_trainer(small_bert(), tmp_path, hot).train()
    part = hot.status().components["model"]
    assert part.requested == "default"
    assert [cause.reason.partition(":")[0] for cause in part.causes] == [
        "HOTLOOP_DISABLE=1 is set", "run='full+graph'"
    ]  # fmt: skip


@pytest.mark.parametrize("kind", [Trainer, HotTrainer])
def test_a_second_callback_is_refused_before_training(kind, tmp_path):
    one, two = HotLoop("aot_eager"), HotLoop("eager")
    with pytest.raises(hotloop.errors.ConfigError, match=r"HotLoop\(run='aot_eager'\), HotLoop\(run='eager'\): a Tra"):
        plain_trainer(small_bert(), tmp_path, one, kind=kind, more=[two])
    with pytest.raises(hotloop.errors.ConfigError, match="takes one HotLoop"):
        plain_trainer(small_bert(), tmp_path, one, kind=kind, more=[one])


def test_a_run_that_goes_on_counts_the_steps_that_are_to_come(tmp_path):
    """A compile that pays over a whole run may not pay over its last steps."""
    told = []

    class Counts(TrainerCallback):
        def on_step_begin(self, args, state, control, **_):
            told.append(hot.loop.context.total_steps)

    trainer_of(Trainer, tmp_path, save_strategy="steps", save_steps=4).train()
    hot = HotLoop()
    trainer = trainer_of(HotTrainer, tmp_path, hot)
    trainer.add_callback(Counts())
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert set(told) == {2}
