"""Labelled pairs of texts, their groups, and a split that never puts one group on both sides."""

from __future__ import annotations

import dataclasses
import hashlib
import random
import warnings
from typing import TYPE_CHECKING, TypeVar

from hotloop.errors import DataError
from hotloop.train.optional import require

if TYPE_CHECKING:
    from collections.abc import Sequence

T = TypeVar("T")


@dataclasses.dataclass(frozen=True, slots=True)
class Pair:
    """A phrase, a criterion, whether the one meets the other (0 or 1), and the group that is never split."""

    text: str
    criterion: str
    label: int
    group: str


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


def sample(items: Sequence[T], size: int | None, seed: int) -> list[T]:
    """Draw ``size`` items at random, in their first order; all of them where there are fewer or size is None."""
    if size is None or size >= len(items):
        return list(items)
    chosen = sorted(random.Random(seed).sample(range(len(items)), size))  # noqa: S311 - a sample, no secret
    return [items[index] for index in chosen]


def split_groups(
    groups: Sequence[str], strata: Sequence[object], fraction: float, seed: int
) -> tuple[list[int], list[int]]:
    """Split rows by whole groups, keeping the shares of the strata as even as that allows.

    Args:
        groups: each row's group.
        strata: each row's label, or what else should be as frequent on both sides.
        fraction: the share to hold out; one fold of ``round(1 / fraction)``.
        seed: which of the possible splits.

    Returns:
        Row numbers to train on, and those held out.

    Raises:
        DataError: there is only one group.
    """
    model_selection = require("sklearn.model_selection", "Splitting by groups")
    distinct = len(set(groups))
    if distinct < 2:  # noqa: PLR2004 - two sides
        raise DataError(
            f"all {len(groups)} pairs are of one group ({groups[0]!r}): groups are never split between training and "
            "validation, so two are needed. Check the column that data.columns.group names"
            if groups
            else "there are no pairs to split"
        )
    folds = min(max(2, round(1 / fraction)), distinct)
    with warnings.catch_warnings():
        # A stratum with fewer rows than folds cannot be even; the split is as even as it can be, and valid.
        warnings.filterwarnings("ignore", message="The least populated class in y", category=UserWarning)
        splitter = model_selection.StratifiedGroupKFold(folds, shuffle=True, random_state=seed)
        try:
            train, held_out = next(iter(splitter.split(groups, [str(one) for one in strata], groups)))
        except ValueError as error:  # no stratum has as many rows as there are folds
            raise DataError(
                f"{len(groups)} pairs in {distinct} groups are too few to hold out {fraction:.0%}: {error}. "
                "Use more pairs, or a larger data.validation_fraction"
            ) from error
    return train.tolist(), held_out.tolist()
