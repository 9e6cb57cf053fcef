"""A small GPT-2 learns Python's own documentation: what ``help("for")`` shows, judged on topics that it never saw.

hotloop train examples/language.py:make training.num_epochs=6 recipe.goal=min:bits_per_byte
hotloop hpo   examples/language.py:make recipe.goal=min:bits_per_byte hpo.n_trials=20 training.num_epochs=3
"""

import math
from pydoc_data.topics import topics
from typing import Annotated

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.nn import functional as F
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel

import hotloop

SHORT = 40
"""Paragraphs of fewer characters are no quotations, and may stand in several topics."""


def paragraphs() -> list[tuple[str, str]]:
    """Return each paragraph with its topic, once: topics quote each other, in the longest that has it it stays."""
    found: dict[str, tuple[str, str]] = {}
    for name in sorted(topics, key=lambda one: (-len(topics[one]), one)):
        for paragraph in topics[name].strip().split("\n\n"):
            words = " ".join(paragraph.split())
            found.setdefault(words if len(words) >= SHORT else f"{name}: {words}", (name, paragraph))
    return list(found.values())


def learn_tokens(text: str) -> Tokenizer:
    """Learn the byte pairs that are frequent in a text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=1024, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([text], trainer)
    return tokenizer


def make(
    lr: Annotated[float, hotloop.Range(0, 1), hotloop.Search(log=(3e-4, 1e-2))] = 3e-3,
    width: Annotated[int, hotloop.Search(choices=(64, 128, 256))] = 128,
    layers: int = 4,
    context: int = 64,
    *,
    fold: hotloop.Fold | None = None,
) -> hotloop.Workload:
    """Train a GPT-2 with random weights.

    Args:
        lr: the learning rate of AdamW.
        width: of the embeddings.
        layers: how many there are.
        context: tokens of a row.
        fold: what a run of a cross-validation holds out; None holds out one topic in five.
    """
    read = paragraphs()
    sides = (fold or hotloop.Fold()).split(len(read), groups=[name for name, _ in read])
    train, held_out = ("\n\n".join(read[row][1] for row in side) for side in sides)
    tokens = learn_tokens(train)

    def rows(text: str, stride: int) -> torch.Tensor:
        return torch.tensor(tokens.encode(text).ids).unfold(0, context + 1, stride).contiguous()

    config = GPT2Config(
        vocab_size=tokens.get_vocab_size(),
        n_positions=context,
        n_embd=width,
        n_layer=layers,
        n_head=4,
        bos_token_id=None,
        eos_token_id=None,
        use_cache=False,
    )
    model = GPT2LMHeadModel(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.1)

    def loss_of(batch: torch.Tensor) -> torch.Tensor:
        logits = model(input_ids=batch[:, :-1]).logits
        return F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())

    def step(batch: torch.Tensor) -> torch.Tensor:
        loss = loss_of(batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    judged = rows(held_out, context)
    predicted = judged[:, 1:].flatten().tolist()
    size = sum(len(tokens.id_to_token(one)) for one in predicted)  # a token has one character for each byte

    def metrics() -> dict[str, float]:
        model.eval()
        with torch.no_grad():
            nats = sum(float(loss_of(batch)) * batch[:, 1:].numel() for batch in judged.split(64))
        return {"loss": nats / len(predicted), "bits_per_byte": nats / math.log(2) / size}

    batches = DataLoader(rows(train, context // 2), batch_size=32, shuffle=True, drop_last=True)
    return hotloop.Workload(model, optimizer, step, batches, metrics=metrics)
