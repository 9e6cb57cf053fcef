"""Pictures that need no folder of the user's: scikit-learn's digits, captioned in several wordings."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import torch

from hotloop.recipes.diffusion.pictures.source import Held, Source
from hotloop.train.optional import require

if TYPE_CHECKING:
    from collections.abc import Sequence

DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
"""The word of each digit, which is part of each of its captions."""
DIGIT_WORDINGS = (
    "a handwritten {}",
    "the digit {}",
    "a picture of a handwritten {}",
    "the number {} written by hand",
    "{}",
)
"""How a digit's picture may be captioned; the first is its prompt."""
BRIGHTEST = 16


def digits(seed: int) -> Source:
    """Return scikit-learn's digits: 1,797 of 8 x 8 pixels and 17 levels of grey.

    Args:
        seed: which picture gets which wording.
    """
    loaded = require("sklearn.datasets", "pictures.source=digits").load_digits()
    labels = [int(one) for one in loaded.target]
    pixels = torch.from_numpy(loaded.images).to(torch.uint8)[:, None]
    return Source(
        names=[f"digit {row}" for row in range(len(labels))],
        captions=caption(labels, DIGITS, DIGIT_WORDINGS, seed),
        labels=labels,
        prompts=tuple(DIGIT_WORDINGS[0].format(word) for word in DIGITS),
        shapes=[(8, 8)] * len(labels),
        reader=Held(pixels, BRIGHTEST),
    )


def caption(labels: Sequence[int], words: Sequence[str], wordings: Sequence[str], seed: int) -> list[str]:
    """Caption each picture with the word of its class, in a wording drawn at random."""
    generator = random.Random(seed)  # noqa: S311 - a sample, no secret
    return [generator.choice(wordings).format(words[label]) for label in labels]
