"""A tokenizer of whole words, learnt from captions: for networks that are made here."""

from __future__ import annotations

import json
from collections import Counter
from typing import TYPE_CHECKING, Any

import torch

from hotloop.train.optional import require

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

SPECIAL = ("<|pad|>", "<|unk|>", "<|startoftext|>", "<|endoftext|>")
"""The tokens that are no words, in the order of their numbers."""
PAD, UNKNOWN, START, END = range(len(SPECIAL))
MOST_WORDS, LONGEST = 8192, 77
"""Words that are kept, the most frequent ones; and the most tokens of a caption, as CLIP has it."""


def learn(captions: Iterable[str]) -> Any:
    """Make a tokenizer of the words of captions, which ``save_pretrained`` writes and a pipeline loads.

    A word that it does not know becomes one token for all of them. Captions are padded to the longest that it saw.

    Returns:
        A transformers tokenizer.
    """
    tokenizers = require("tokenizers", "recipe=diffusion", "diffusion")
    lower, split = tokenizers.normalizers.Lowercase(), tokenizers.pre_tokenizers.Whitespace()
    counts, longest = Counter[str](), 0
    for caption in captions:
        words = [word for word, _ in split.pre_tokenize_str(lower.normalize_str(caption))]
        counts.update(words)
        longest = max(longest, len(words))
    # Equally frequent words are ordered by their letters, so that the numbers depend on the captions alone.
    return _made(sorted(counts, key=lambda word: (-counts[word], word))[:MOST_WORDS], min(LONGEST, longest + 2))


def packed(tokenizer: Any) -> torch.Tensor:
    """Return the words of a tokenizer that was learnt, in their order, and its length: bytes, for a checkpoint."""
    numbers = tokenizer.get_vocab()
    told = [tokenizer.model_max_length, sorted(numbers, key=numbers.__getitem__)[len(SPECIAL) :]]
    return torch.frombuffer(bytearray(json.dumps(told).encode()), dtype=torch.uint8)


def unpacked(kept: torch.Tensor) -> Any:
    """Make the tokenizer that `packed` took the words of."""
    longest, words = json.loads(bytes(kept.tolist()))
    return _made(words, longest)


def _made(words: Sequence[str], longest: int) -> Any:
    tokenizers, transformers = (
        require(name, "recipe=diffusion", "diffusion") for name in ("tokenizers", "transformers")
    )
    numbers = {word: number for number, word in enumerate((*SPECIAL, *words))}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(numbers, unk_token=SPECIAL[UNKNOWN]))
    tokenizer.normalizer = tokenizers.normalizers.Lowercase()
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single=f"{SPECIAL[START]} $A {SPECIAL[END]}",
        special_tokens=[(SPECIAL[START], START), (SPECIAL[END], END)],
    )
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=SPECIAL[PAD],
        unk_token=SPECIAL[UNKNOWN],
        bos_token=SPECIAL[START],
        eos_token=SPECIAL[END],
        model_max_length=longest,
        model_input_names=["input_ids"],
    )
