"""A tiny encoder with its tokenizer, and a tiny data set that it can learn: what the tests of training share."""

from __future__ import annotations

import contextlib
import csv
import functools
import os
import subprocess
import sys
import tempfile
from pathlib import Path

WORDS = ("fever", "cough", "fracture", "arm", "leg", "skin", "rash", "heart", "lung", "kidney", "acute", "chronic")


def hotloop_command(*arguments: str, code: int = 0, **environment: str) -> str:
    """Run the command in a process of its own, and return what it printed; it has to end with ``code``."""
    command = [sys.executable, "-W", "ignore", "-m", "hotloop", *arguments]
    said = subprocess.run(
        command, check=False, timeout=900, capture_output=True, text=True, env={**os.environ, **environment}
    )
    assert said.returncode == code, said.stdout + said.stderr
    return said.stdout + said.stderr


@functools.cache
def tiny_encoder(dropout: float = 0.1) -> Path:
    """A BERT of two layers and a word tokenizer, saved as a folder that ``model.name`` can name."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import BertConfig, BertForSequenceClassification, PreTrainedTokenizerFast

    folder = Path(tempfile.mkdtemp(prefix="tiny-encoder-"))
    vocabulary = {word: index for index, word in enumerate(("[PAD]", "[UNK]", "[CLS]", "[SEP]", *WORDS))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        model_max_length=32,
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
    ).save_pretrained(folder)
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(vocabulary),
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=32,
        num_labels=1,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
    )
    BertForSequenceClassification(config).save_pretrained(folder)
    return folder


def write_pairs(
    path: Path, groups: int = 24, header: tuple[str, ...] = ("text", "criterion", "label", "group")
) -> Path:
    """Write a CSV in which a pair is positive when both sides share their first word: two rows for each group."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(header)
        for group in range(groups):
            word, other = WORDS[group % 12], WORDS[(group + 5) % 12]
            writer.writerow([f"{word} x{group}", f"{word} acute", 1, f"g{group}"])
            writer.writerow([f"{word} x{group}", f"{other} chronic", 0, f"g{group}"])
    return path


def overrides(folder: Path, **more: object) -> list[str]:
    """The settings of a run that takes a second: tiny encoder, tiny CSV, on the CPU, into ``folder``/run."""
    data = folder / "pairs.csv"
    if not data.exists():
        write_pairs(data)
    chosen = {
        "data": "csv", "data.path": data, "data.validation_fraction": 0.25, "model.name": tiny_encoder(),
        "training.batch_size": 4, "training.num_epochs": 2, "training.learning_rate": 0.01,
        "training.freeze_embeddings": "false", "run.device": "cpu", "run.folder": folder / "run",
    }  # fmt: skip
    chosen.update({name.replace("__", "."): value for name, value in more.items()})
    return [f"{name}={value}" for name, value in chosen.items()]


@contextlib.contextmanager
def held_elsewhere(folder: Path):
    """Let another process hold the lock of a run's folder while the block runs; yield the process."""
    program = (
        "import pathlib, sys\n"
        "from hotloop.train.turn import folder_held\n"
        "with folder_held(pathlib.Path(sys.argv[1])):\n"
        "    print(flush=True)\n"
        "    sys.stdin.read()\n"
    )
    command = [sys.executable, "-c", program, str(folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        try:
            assert other.stdout.readline() == b"\n"
            yield other
        finally:
            other.kill()


def load(folder, name="last.pt"):
    from hotloop.train import checkpoint

    return checkpoint.load(folder / "checkpoints" / name)


def losses(folder):
    from hotloop import record

    return [step["loss"] for step in record.load(folder)["steps"]]


def assert_alike(found, wanted, **near):
    """Compare two states, tensor by tensor: exactly, or within ``rtol`` and ``atol``."""
    import torch

    assert type(found) is type(wanted)
    if isinstance(wanted, dict):
        assert list(found) == list(wanted)
        for name, value in wanted.items():
            assert_alike(found[name], value, **near)
    elif isinstance(wanted, list | tuple):
        for one, other in zip(found, wanted, strict=True):
            assert_alike(one, other, **near)
    elif isinstance(wanted, torch.Tensor):
        torch.testing.assert_close(found, wanted, **(near or {"rtol": 0, "atol": 0}))
    else:
        assert found == wanted


def assert_same(first, second):
    """Two checkpoints hold the same run, bit for bit."""
    for part in ("position", "model", "others"):
        assert_alike(first[part], second[part])
    assert_alike(first["random"]["torch"], second["random"]["torch"])
