"""Pairs as tokens, padded to fixed lengths.

Padding each batch to its own longest text would give every batch its own shape, and a compiled model a recompile for
each: so all are padded to one length, or to one of a few declared ones.
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any, Literal

import torch

from hotloop.errors import ConfigError
from hotloop.train.batches import Batch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from hotloop.recipes.criteria.pairs import Pair

SHARE_THAT_FITS = 0.99


@dataclasses.dataclass(frozen=True)
class Lengths:
    """The lengths that batches are padded to, shortest first; texts are cut at the last."""

    buckets: tuple[int, ...]
    note: str

    @property
    def longest(self) -> int:
        """The length at which texts are cut."""
        return self.buckets[-1]


def choose_lengths(
    tokenizer: Any, pairs: Sequence[Pair], wanted: int | Literal["auto"], buckets: Sequence[int], longest: int
) -> Lengths:
    """Choose the lengths to pad to, from the pairs unless they are given.

    Args:
        tokenizer: the model's.
        pairs: those to look at: the training pairs, or those of all folds, which are to have one shape.
        wanted: ``model.max_length``.
        buckets: ``model.buckets``.
        longest: the most tokens that the model takes.

    Raises:
        ConfigError: a length is longer than the model takes.
    """
    for name, value in (("model.max_length", wanted), *(("model.buckets", one) for one in buckets)):
        if value != "auto" and int(value) > longest:
            raise ConfigError(f"{name}={value}: the model takes at most {longest} tokens")
    counts = sorted(len(ids) for ids in _encode(tokenizer, pairs)["input_ids"])
    if wanted == "auto":
        fitting = counts[min(len(counts) - 1, math.ceil(SHARE_THAT_FITS * len(counts)) - 1)]
        limit = max(buckets) if buckets else min(longest, 8 * math.ceil(fitting / 8))
    else:
        limit = wanted
    cut = sum(count > limit for count in counts)
    chosen = tuple(sorted({*(one for one in buckets if one < limit), limit}))
    padded = " or ".join(str(one) for one in chosen)
    return Lengths(chosen, f"padded to {padded} tokens; {cut} of {len(counts)} pairs are cut to fit")


def _encode(tokenizer: Any, pairs: Sequence[Pair], **options: Any) -> Any:
    return tokenizer([pair.text for pair in pairs], [pair.criterion for pair in pairs], verbose=False, **options)


class Dataset:
    """All pairs of one side of the split, tokenised once and held in memory.

    ``bucket``, int64 of shape (pairs,), is the index of the shortest length that holds the pair.
    """

    apart = False

    def __init__(self, tokenizer: Any, pairs: Sequence[Pair], lengths: Lengths) -> None:
        self.lengths = lengths
        encoded = _encode(
            tokenizer, pairs, truncation=True, max_length=lengths.longest, padding="max_length", return_tensors="pt"
        )
        self.inputs: dict[str, Tensor] = {name: encoded[name] for name in tokenizer.model_input_names}
        self.labels = torch.tensor([pair.label for pair in pairs], dtype=torch.float32)
        counts = self.inputs["attention_mask"].sum(dim=1)
        self.bucket = torch.bucketize(counts, torch.tensor(lengths.buckets))

    @property
    def buckets(self) -> int:
        """How many lengths there are."""
        return len(self.lengths.buckets)

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, rows: Tensor) -> Batch:
        """Return these rows as a batch, padded to the smallest length that holds them all."""
        length = self.lengths.buckets[int(self.bucket[rows].max())]
        return Batch({name: one[rows, :length] for name, one in self.inputs.items()}, self.labels[rows])
