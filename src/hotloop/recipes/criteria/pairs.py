"""Labelled pairs of texts, their groups, and a split that never puts one group on both sides."""

from __future__ import annotations

import dataclasses
import hashlib
import re

from hotloop.errors import DataError


@dataclasses.dataclass(frozen=True, slots=True)
class Pair:
    """A phrase, a criterion, whether the one meets the other (0 or 1), and the group that is never split."""

    text: str
    criterion: str
    label: int
    group: str

    def overlap(self) -> float:
        """Return the share of both texts' distinct words that they have in common (Jaccard's index)."""
        first, second = (set(re.findall(r"\w+", text.lower())) for text in (self.text, self.criterion))
        return len(first & second) / max(1, len(first | second))


@dataclasses.dataclass(frozen=True)
class Split:
    """The pairs to train on and those held out; ``notes`` is what a reader should be told about them."""

    train: tuple[Pair, ...]
    validation: tuple[Pair, ...]
    notes: tuple[str, ...] = ()

    def checked(
        self, remedy: str = "another run.seed, or a larger data.validation_fraction", where: str = "the split"
    ) -> Split:
        """Return the split itself once both sides hold both labels and no group is on both.

        Args:
            remedy: what to change besides the number of pairs.
            where: what is split, such as a fold.

        Raises:
            DataError: a side is too small to learn or to judge by.
        """
        for name, side in (("training", self.train), ("validation", self.validation)):
            labels = {pair.label for pair in side}
            if labels != {0, 1}:
                held = f"only pairs with label {labels.pop()}" if labels else "no pairs"
                raise DataError(
                    f"the {name} side of {where} has {held}: both labels are needed on both sides. "
                    f"Use more pairs or more groups, {remedy}"
                )
        both = {pair.group for pair in self.train} & {pair.group for pair in self.validation}
        assert not both, f"groups on both sides: {both}"
        return self

    def fingerprint(self) -> str:
        """Return a text that other pairs, or the same split otherwise, would not have."""
        digest = hashlib.sha256()
        for side in (self.train, self.validation):
            digest.update(repr([dataclasses.astuple(pair) for pair in side]).encode())
        return digest.hexdigest()

    def describe(self) -> str:
        """Say how many pairs and groups there are on each side."""
        sides = (("train", self.train), ("validation", self.validation))
        return ", ".join(f"{name} {len(side)} pairs in {len({p.group for p in side})} groups" for name, side in sides)
