"""A user's program: transformers' Trainer with one line changed, and a search over learning rates in one process.

A small BERT learns which of two words a text holds more of. Texts have different lengths, and batches are padded to
their longest. `HotTrainer` in the place of `Trainer` is the change.
"""

import tempfile

import torch
from transformers import BertConfig, BertForSequenceClassification, TrainingArguments

from hotloop.integrations.transformers import HotLoop, HotTrainer

WORDS, TEXTS = 20, 64
ONE, OTHER = 1, 2


def texts() -> list[dict[str, torch.Tensor]]:
    """Give token ids and labels."""
    draws = torch.Generator().manual_seed(0)
    found = []
    for at in range(TEXTS):
        ids = torch.randint(1, WORDS, (6 + at % 5,), generator=draws)
        found.append({"input_ids": ids, "labels": ((ids == ONE).sum() > (ids == OTHER).sum()).long()})
    return found


def padded(samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Pad to the longest text of a batch."""
    ids = torch.nn.utils.rnn.pad_sequence([one["input_ids"] for one in samples], batch_first=True)
    return {"input_ids": ids, "attention_mask": ids.ne(0), "labels": torch.stack([one["labels"] for one in samples])}


def fresh_model() -> BertForSequenceClassification:
    """Make the model; a search makes one for each trial, and all share compiled code."""
    shape = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    return BertForSequenceClassification(
        BertConfig(vocab_size=WORDS, problem_type="single_label_classification", **shape)
    )


def main(run: str = "auto", trials: int = 2) -> HotTrainer:
    """Train, then search."""
    arguments = TrainingArguments(
        tempfile.mkdtemp(),
        per_device_train_batch_size=8,
        num_train_epochs=3,
        learning_rate=1e-3,
        max_grad_norm=1.0,
        logging_steps=4,
        eval_strategy="epoch",
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    data = texts()
    trainer = HotTrainer(
        model_init=fresh_model,
        args=arguments,
        train_dataset=data[16:],
        eval_dataset=data[:16],
        data_collator=padded,
        callbacks=[HotLoop(run)],
    )
    trainer.train()
    print(trainer.hot.status())  # noqa: T201 - a program prints
    if trials:
        trainer.hyperparameter_search(
            lambda trial: {"learning_rate": trial.suggest_float("learning_rate", 1e-4, 1e-2, log=True)},
            n_trials=trials,
            backend="optuna",
        )
    return trainer


if __name__ == "__main__":
    main()
