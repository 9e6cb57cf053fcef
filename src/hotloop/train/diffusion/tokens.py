"""A tokenizer of whole words, learnt from captions: for networks that are made here."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from hotloop.train.optional import require

if TYPE_CHECKING:
    from collections.abc import Iterable

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
    tokenizers, transformers = (require(name, "recipe=diffusion") for name in ("tokenizers", "transformers"))
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(unk_token=SPECIAL[UNKNOWN]))
    tokenizer.normalizer = tokenizers.normalizers.Lowercase()
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    counts, longest = Counter[str](), 0
    for caption in captions:
        words = [
            word for word, _ in tokenizer.pre_tokenizer.pre_tokenize_str(tokenizer.normalizer.normalize_str(caption))
        ]
        counts.update(words)
        longest = max(longest, len(words))
    # Equally frequent words are ordered by their letters, so that the numbers depend on the captions alone.
    words = sorted(counts, key=lambda word: (-counts[word], word))[:MOST_WORDS]
    tokenizer.model = tokenizers.models.WordLevel(
        {word: number for number, word in enumerate((*SPECIAL, *words))}, unk_token=SPECIAL[UNKNOWN]
    )
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
        model_max_length=min(LONGEST, longest + 2),
        model_input_names=["input_ids"],
    )
