"""What the tests of the guides' features share: the command, the page, a tiny encoder with pairs, and a small classifier.

These tests hold what a user of the guides meets: commands, printed lines, public names, the page. None of them looks inside.
"""

from __future__ import annotations

import contextlib
import csv
import functools
import http.cookiejar
import os
import re
import subprocess
import sys
import tempfile
import urllib.request
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

import hotloop.cli

WORDS = ("fever", "cough", "fracture", "arm", "leg", "skin", "rash", "heart", "lung", "kidney", "acute", "chronic")
MODE = "compile.preset"
"""The setting that names the mode of compiled steps."""
ON = "training.optimization.use_torch_compile=true"
AOT = (ON, f"{MODE}=aot_eager", "compile.measure_eager_steps=1")


def command(*arguments):
    """Run the command line in this process, and return its exit code."""
    try:
        hotloop.cli.main([str(one) for one in arguments])
    except SystemExit as ended:
        return ended.code or 0
    return 0


def compile_lines(text):
    return [line for line in text.splitlines() if line.startswith("[torch.compile]")]


@functools.cache
def tiny_encoder():
    """Save a BERT of one layer with a word tokenizer, and return the folder that ``model.name`` takes."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import BertConfig, BertForSequenceClassification, PreTrainedTokenizerFast

    folder = Path(tempfile.mkdtemp(prefix="guide-encoder-"))
    vocabulary = {word: index for index, word in enumerate(("[PAD]", "[UNK]", "[CLS]", "[SEP]", *WORDS))}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]",
        model_max_length=32, model_input_names=["input_ids", "token_type_ids", "attention_mask"],
    ).save_pretrained(folder)  # fmt: skip
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(vocabulary), hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32,
        max_position_embeddings=32, num_labels=1,
    )  # fmt: skip
    BertForSequenceClassification(config).save_pretrained(folder)
    return folder


def pairs(folder, groups=24):
    """Write pairs of a phrase and a criterion, half of them right, and return settings that train on them in seconds."""
    path = folder / "pairs.csv"
    with path.open("w", newline="", encoding="utf-8") as file:
        rows = csv.writer(file)
        rows.writerow(("text", "criterion", "label", "group"))
        for group in range(groups):
            word, other = WORDS[group % 12], WORDS[(group + 5) % 12]
            rows.writerow((f"{word} x{group}", f"{word} acute", 1, f"g{group}"))
            rows.writerow((f"{word} x{group}", f"{other} chronic", 0, f"g{group}"))
    return [
        "data=csv", f"data.path={path}", "data.validation_fraction=0.25", f"model.name={tiny_encoder()}",
        "training.batch_size=4", "training.num_epochs=1", "training.learning_rate=0.01", "run.device=cpu",
    ]  # fmt: skip


@contextlib.contextmanager
def the_page(folder):
    """Start ``hotloop ui``, and give a function from a path to the HTML that a person with the printed address gets."""
    folder.mkdir()
    command_line = [sys.executable, "-m", "hotloop", "ui", str(folder), "--no-browser", "--port", "0"]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", "XDG_STATE_HOME": str(folder.parent / "state")}
    server = subprocess.Popen(command_line, stdout=subprocess.PIPE, text=True, env=environment)
    person = urllib.request.build_opener(urllib.request.HTTPCookieProcessor(http.cookiejar.CookieJar()))

    def page(path):
        with person.open(base + path, timeout=120) as answer:
            return answer.read().decode()

    try:
        url = re.search(r"http://\S+", server.stdout.readline())[0]
        base = re.match(r"http://[^/]+", url)[0]
        person.open(url, timeout=120).close()
        yield page
    finally:
        server.terminate()
        server.wait(120)
        server.stdout.close()


class Classifier(nn.Module):
    """Token numbers (rows, 4) -> logits (rows, 3)."""

    def __init__(self):
        super().__init__()
        self.embed, self.hidden, self.head = nn.Embedding(11, 8), nn.Linear(8, 16), nn.Linear(16, 3)

    def forward(self, ids):
        return self.head(F.gelu(self.hidden(self.embed(ids).mean(1))))


def batches(count, rows=4):
    draw = torch.Generator().manual_seed(3)
    ids = [torch.randint(11, (rows, 4), generator=draw) for _ in range(count)]
    return [(one, one.sum(1) % 3) for one in ids]
