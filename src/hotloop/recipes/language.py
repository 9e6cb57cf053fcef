"""Teach a small GPT-2 the language of Python's own documentation: ``hotloop train recipe=language``.

The text is what ``help("for")`` shows: the topics of the package `pydoc_data`. The model begins with random weights and
is judged on topics that it never saw. Topics quote each other at length, so each paragraph is kept once, in one topic.
"""

from __future__ import annotations

import hashlib
import lzma
import math
from collections import Counter
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from hotloop.errors import DataError
from hotloop.train import batches, checkpoint, environment
from hotloop.train import evaluate as evaluation
from hotloop.train.export import Made
from hotloop.train.folds import Side, Sides, sample, split_rows
from hotloop.train.goal import Goal
from hotloop.train.networks import Logits, count
from hotloop.train.optional import require
from hotloop.train.recipe import on_devices
from hotloop.train.supervised import Supervised

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from hotloop.train.display import Display
    from hotloop.train.ranks import Devices
    from hotloop.train.settings import Settings
    from hotloop.train.start import Start
    from hotloop.train.task import Task

COMPONENTS = ("model", "loss")
"""What can be compiled: the GPT-2, and the loss."""
GOAL = Goal("loss", maximize=False)
"""What says which validation is the best."""
SHORT = 40
"""Paragraphs of fewer characters (headings, "Example:") are no quotations, and may stand in several topics."""
OVERLAP = 2
"""Each training token stands in so many rows, at different places in each."""
_NAMES = {"baseline_unigram_bits": "bytes alone", "baseline_bigram_bits": "pairs of bytes", "baseline_xz_bits": "xz"}


class Text(NamedTuple):
    """The text of the topics on both sides of the split, and the topic of each paragraph there."""

    train: str
    validation: str
    topics: tuple[tuple[str, ...], tuple[str, ...]]

    def fingerprint(self) -> str:
        """Return a text that other topics, or the same split otherwise, would not have."""
        return hashlib.sha256(repr(tuple(self)).encode()).hexdigest()

    def describe(self) -> str:
        """Say how much text there is on each side."""
        sides = zip(("train", "validation"), (self.train, self.validation), self.topics, strict=True)
        return ", ".join(
            f"{name} {len(text.encode()):,} bytes in {len(set(topics))} topics" for name, text, topics in sides
        )


@on_devices(*COMPONENTS)
def train(start: Start, display: Display, devices: Devices) -> Task:
    """Make the recipe's task. `on_devices` trains it, from the start or from where the run stopped.

    Raises:
        ConfigError: settings that cannot be used.
        DataError: too little text to learn or to judge by.
    """
    settings = start.settings

    # The data: topics, none of them on both sides, and tokens learnt from the training side alone.
    text = load_text(settings)
    start.check_data(text.fingerprint())
    tokens = Tokens(text.train, settings.language.vocabulary)
    sides = tokens.sides(text, settings.language.context)
    about = f"{text.describe()}; a vocabulary of {tokens.count:,} tokens"
    display.say(f"Data: {about}")

    # The model, with random weights.
    environment.seed(settings.run.seed)
    model = make_model(settings, tokens.count)
    display.say(f"Model: a GPT-2, {count(sum(one.numel() for one in model.parameters()))} parameters")

    # What needs no training, to judge the result by.
    context = baselines(text.train.encode(), text.validation.encode())
    display.say(describe(context))

    return Supervised(
        start,
        "language",
        devices,
        model=model,
        parts={"model": model.net, "loss": next_token},
        train=sides[0],
        validation=sides[1],
        fingerprint=text.fingerprint(),
        judge=lambda _: Surprise(tokens.sizes),
        goal=GOAL,
        rows="blocks",
        per_row={"tokens": settings.language.context},
        context=context,
        remarks=lambda _, measured: [describe(measured)],
        told={"data": [about]},
    )


def sides(settings: Settings) -> Sides:
    """Say what `train` learns from and is judged by: the topics on both sides, paragraph by paragraph."""
    text = load_text(settings)
    train_side, held_out = (Side((None,) * len(topics), topics) for topics in text.topics)
    return Sides(train_side, held_out, text.fingerprint())


def evaluate(settings: Settings, weights: dict[str, Any]) -> dict[str, float]:
    """Judge a checkpoint's weights on the topics that were held out.

    Raises:
        ConfigError: the weights do not fit the model that the settings describe.
    """
    text = load_text(settings)
    tokens = Tokens(text.train, settings.language.vocabulary)
    held_out, model = tokens.sides(text, settings.language.context)[1], make_model(settings, tokens.count)
    checkpoint.fit_weights(model, weights["model"], "language")
    device = environment.device_of(settings.run)
    judged = Surprise(tokens.sizes)
    return evaluation.evaluate(model.to(device), judged, held_out, settings.training.eval_batch_size, device)


def load_text(settings: Settings) -> Text:
    """Read the topics, and split them.

    Raises:
        DataError: there is too little text.
    """
    from pydoc_data.topics import topics  # noqa: PLC0415 - half a megabyte, for this recipe alone

    data, seed = settings.data, settings.run.seed
    paragraphs = sample(unquoted(topics), data.sample_size, seed)
    names = [name for name, _ in paragraphs]
    fraction, alike = data.validation_fraction, ["text"] * len(names)
    both = split_rows(names, alike, fraction=fraction, seed=seed, kfold=settings.kfold)
    train_text, held_out = ("\n\n".join(paragraphs[row][1] for row in side) for side in both)
    return Text(train_text, held_out, (tuple(names[row] for row in both[0]), tuple(names[row] for row in both[1])))


def unquoted(topics: Mapping[str, str]) -> list[tuple[str, str]]:
    """Return each paragraph with its topic, once: in the longest topic that has it, however its lines are broken."""
    seen: set[str] = set()
    found = []
    for name in sorted(topics, key=lambda one: (-len(topics[one]), one)):
        for paragraph in topics[name].strip().split("\n\n"):
            words = " ".join(paragraph.split())
            if words in seen:
                continue
            if len(words) >= SHORT:
                seen.add(words)
            found.append((name, paragraph))
    return found


class Tokens:
    """Byte pairs that are frequent in a text, as tokens.

    ``sizes``, int64 of shape (tokens,), is how many bytes each of them stands for.
    """

    def __init__(self, text: str, vocabulary: int) -> None:
        tokenizers = require("tokenizers", "recipe=language", "demo")
        byte_level = tokenizers.pre_tokenizers.ByteLevel
        trainer = tokenizers.trainers.BpeTrainer(
            vocab_size=vocabulary, initial_alphabet=sorted(byte_level.alphabet()), show_progress=False
        )
        self._tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
        self._tokenizer.pre_tokenizer = byte_level(add_prefix_space=False)
        self._tokenizer.decoder = tokenizers.decoders.ByteLevel()
        self._tokenizer.train_from_iterator([text], trainer)
        self.count: int = self._tokenizer.get_vocab_size()
        # A byte-level token is written with one character for each byte.
        self.sizes = torch.tensor([len(self._tokenizer.id_to_token(token)) for token in range(self.count)])

    def encode(self, text: str) -> Tensor:
        """Return the tokens of a text, int64 of shape (tokens,)."""
        return torch.tensor(self._tokenizer.encode(text).ids)

    def decode(self, tokens: Tensor) -> str:
        """Return the text of tokens, int64 of shape (tokens,)."""
        return str(self._tokenizer.decode(tokens.tolist()))

    def sides(self, text: Text, context: int) -> tuple[batches.Table, batches.Table]:
        """Return both sides as rows of tokens with those that follow them; held-out tokens are predicted once each.

        Raises:
            DataError: a side has no whole row.
        """
        return self._rows("training", text.train, context, context // OVERLAP), self._rows(
            "validation", text.validation, context, context
        )

    def _rows(self, side: str, text: str, context: int, stride: int) -> batches.Table:
        ids = self.encode(text)
        if len(ids) <= context:
            raise DataError(
                f"the {side} side has {len(ids)} tokens, fewer than one row of language.context={context} and the "
                "token after it: use a larger data.sample_size, or a smaller language.context"
            )
        rows = ids.unfold(0, context + 1, stride)
        return batches.Table({"input_ids": rows[:, :-1].contiguous()}, rows[:, 1:].contiguous())


def make_model(settings: Settings, vocabulary: int) -> Logits:
    """Make the GPT-2, with random weights."""
    transformers, chosen = require("transformers", "recipe=language", "demo"), settings.language
    dropout = settings.model.dropout or 0.0
    config = transformers.GPT2Config(
        vocab_size=vocabulary,
        n_positions=chosen.context,
        n_embd=chosen.hidden_size,
        n_layer=chosen.layers,
        n_head=chosen.heads,
        resid_pdrop=dropout,
        embd_pdrop=dropout,
        attn_pdrop=dropout,
        bos_token_id=None,
        eos_token_id=None,
        use_cache=False,  # it is for writing text token by token
    )
    return Logits(transformers.GPT2LMHeadModel(config))


def made(settings: Settings, weights: dict[str, Any]) -> Made:
    """Make the GPT-2 again with a checkpoint's weights, for `hotloop export`."""
    vocabulary = weights["model"]["net.transformer.wte.weight"].shape[0]
    model = make_model(settings, vocabulary)
    checkpoint.fit_weights(model, weights["model"], "language")
    return Made({"model": model})


def next_token(logits: Tensor, tokens: Tensor) -> Tensor:
    """Return the mean cross-entropy, in nats, of logits of shape (batch, context, tokens) against what follows."""
    return functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())


class Surprise:
    """Judges by how surprising the held-out tokens are to the model.

    Args:
        sizes: how many bytes each token stands for, shape (tokens,).
    """

    def __init__(self, sizes: Tensor) -> None:
        self._sizes = sizes
        self._nats, self._tokens, self._bytes = 0.0, 0, 0

    def see(self, output: Tensor, labels: Tensor) -> None:
        """Add up what these tokens take; logits of a whole side would not fit into memory."""
        self._nats += float(functional.cross_entropy(output.float().flatten(0, 1), labels.flatten(), reduction="sum"))
        self._tokens += labels.numel()
        self._bytes += int(self._sizes[labels.cpu()].sum())

    def figures(self) -> dict[str, float]:
        """Return the loss in nats a token, the perplexity, and bits a byte, which no vocabulary changes."""
        loss = self._nats / self._tokens
        bits = self._nats / math.log(2) / self._bytes
        return {"loss": loss, "perplexity": math.exp(min(loss, 700.0)), "bits_per_byte": bits}


def baselines(known: bytes, held_out: bytes) -> dict[str, float]:
    """Return the bits a byte that the held-out text takes without a network: counts of bytes and pairs, and xz.

    Counts are of the training text, each with one more spread over all bytes; xz has read the training text before.
    """
    ones, pairs = Counter(known), Counter(pairwise(known))

    def one(byte: int) -> float:
        return (ones[byte] + 1) / (len(known) + 256)

    def pair(first: int, second: int) -> float:
        return (pairs[first, second] + one(second)) / (ones[first] + 1)

    alone = [one(byte) for byte in held_out]
    after = [pair(*both) for both in pairwise(held_out)]
    return {
        "baseline_unigram_bits": _bits(alone),
        "baseline_bigram_bits": _bits(after),
        "baseline_xz_bits": 8 * (_packed(known + held_out) - _packed(known)) / len(held_out),
    }


def _bits(chances: Sequence[float]) -> float:
    return -sum(math.log2(one) for one in chances) / len(chances)


def _packed(text: bytes) -> int:
    return len(lzma.compress(text, lzma.FORMAT_RAW, filters=[{"id": lzma.FILTER_LZMA2, "preset": 9}]))


def describe(measured: Mapping[str, Any]) -> str:
    """Put the baselines among a record's measurements into words."""
    return "Bits a byte without a network: " + ", ".join(f"{said} {measured[one]:.4f}" for one, said in _NAMES.items())
