"""Folds: which rows a run trains on and which it holds out, at two levels, and what every fold holds before any work.

The outer level splits all rows into ``kfold.n_splits`` folds and holds out ``kfold.fold``. The inner level, which a
nested search is judged by, splits the outer fold's training rows again, and never sees a row that the fold holds out.
"""

from __future__ import annotations

import collections
import dataclasses
import random
from typing import TYPE_CHECKING, Any, TypeVar

from hotloop.errors import ConfigError, DataError
from hotloop.report.folds import shares
from hotloop.train.fold import Fold
from hotloop.train.settings import EngineSettings

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence

    from hotloop.train.settings import KfoldSettings, Settings

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Side:
    """One side of a split, row by row: each row's label (None of data that has none), and the group never split."""

    labels: tuple[Hashable, ...]
    groups: tuple[str, ...]

    @property
    def shares(self) -> dict[str, float]:
        """Return the share of each label, by its text; empty where rows have none."""
        counts = collections.Counter(label for label in self.labels if label is not None)
        return {str(label): counts[label] / len(self.labels) for label in sorted(counts, key=str)}

    def to_dict(self) -> dict[str, object]:
        """Return what a reader should know of the side."""
        return {"rows": len(self.labels), "groups": len(set(self.groups)), "shares": self.shares}


@dataclasses.dataclass(frozen=True)
class Sides:
    """What a run with some settings trains on, and what it holds out.

    ``fingerprint`` tells other rows, or the same rows otherwise split, apart: no run is resumed on them. It is
    empty where nothing is known of the sides.
    """

    train: Side
    validation: Side
    fingerprint: str

    def check(self, where: str, change: str) -> None:
        """Refuse a split that nothing can be learned from or judged by, or that leaks.

        Args:
            where: names the split in a message, such as "fold 2 of kfold.n_splits=5".
            change: what the user can change.

        Raises:
            DataError: a side is empty or has rows of one label only, or a group is on both sides.
        """
        if not self.fingerprint:  # a program split its rows by itself
            return
        for name, side in (("training", self.train), ("held-out", self.validation)):
            labels = set(side.labels)
            if labels != {None} and len(labels) < 2:  # noqa: PLR2004 - one label teaches nothing, and no metric can be made of it
                held = f"only rows with label {labels.pop()}" if labels else "no rows"
                raise DataError(f"the {name} side of {where} has {held}: at least two labels are needed. {change}")
        both = sorted(set(self.train.groups) & set(self.validation.groups))
        if both:
            raise DataError(f"{where} has the group {both[0]!r} on both sides: a group is never split between them")


def sample(items: Sequence[T], size: int | None, seed: int) -> list[T]:
    """Draw ``size`` items at random, in their first order; all of them where there are fewer or size is None."""
    if size is None or size >= len(items):
        return list(items)
    chosen = sorted(random.Random(seed).sample(range(len(items)), size))  # noqa: S311 - a sample, no secret
    return [items[index] for index in chosen]


def split_rows(
    groups: Sequence[str], strata: Sequence[object], *, fraction: float, seed: int, kfold: KfoldSettings | None = None
) -> tuple[list[int], list[int]]:
    """Split rows by whole groups as the settings say: once, or into folds, of which one is held out.

    Args:
        groups: each row's group.
        strata: each row's label, or what else should be as frequent on both sides.
        fraction: the share to hold out where there are no folds: one of ``round(1 / fraction)``.
        seed: which of the possible splits.
        kfold: the folds; None, or without ``n_splits``, holds out one share.

    Returns:
        Row numbers to train on, and those held out.

    Raises:
        DataError: there are too few groups, or too few rows of a stratum, for so many folds.
        ConfigError: the settings are of a whole cross-validation, and not of one fold.
    """
    if kfold is None or kfold.n_splits is None:
        most = len(set(groups))
        fold = Fold(0, max(2, min(round(1 / fraction), most)), seed)
    else:
        fold = fold_of(kfold, seed)
    train, held_out = fold.split(len(groups), [str(one) for one in strata], groups)
    return train.tolist(), held_out.tolist()


def fold_of(kfold: KfoldSettings, seed: int) -> Fold:
    """Return the fold that a run of a cross-validation holds out.

    Raises:
        ConfigError: the settings are of a whole cross-validation, and not of one fold.
    """
    assert kfold.n_splits is not None
    if kfold.fold is None:
        raise ConfigError(
            f"kfold.n_splits={kfold.n_splits} without kfold.fold is no single run: start it by `hotloop kfold`, or set "
            "kfold.fold"
        )
    if kfold.inner_trials is not None:  # else a trial that forgot its inner fold would be judged by what is held out
        raise ConfigError(
            f"kfold.inner_trials={kfold.inner_trials} is of a fold with its search, and of no single run: start it by "
            "`hotloop kfold`"
        )
    outer = Fold(kfold.fold, kfold.n_splits, seed)
    return outer if kfold.inner_fold is None else Fold(kfold.inner_fold, kfold.inner_splits, seed, outer)


def sides_of(fold: Fold) -> Sides:
    """Return what is on both sides of a fold, by the first split that it was asked for."""
    n, labels, groups = fold.asked[0]
    named = [str(one) for one in (range(n) if groups is None else groups.tolist())]
    classes = [None] * n if labels is None else labels.tolist()
    train, held_out = (
        Side(tuple(classes[row] for row in side), tuple(named[row] for row in side))
        for side in (rows.tolist() for rows in dataclasses.replace(fold).split(n, labels, groups))
    )
    return Sides(train, held_out, fold.fingerprint())


def remedy(kfold: KfoldSettings | None) -> str:
    """Say which settings to change where a side of a split is too small."""
    if kfold is None or kfold.fold is None:
        return "another run.seed, or a larger data.validation_fraction"
    return f"another run.seed, or a lower kfold.n_splits (it is {kfold.n_splits})"


def where(kfold: KfoldSettings | None) -> str:
    """Name the split that settings mean: a fold, a fold's inner one, or the only one."""
    if kfold is None or kfold.fold is None:
        return "the split"
    inner = "" if kfold.inner_fold is None else f"inner fold {kfold.inner_fold} within "
    return f"{inner}fold {kfold.fold} of kfold.n_splits={kfold.n_splits}"


def of_fold(settings: Settings, fold: int) -> Settings:
    """Return the settings of the ordinary run that holds out one fold."""
    alone = _with(settings, fold=fold, inner_trials=None, workers=1, engine="local")
    return alone.model_copy(update={"engine": EngineSettings()})


def with_search(settings: Settings, fold: int) -> Settings:
    """Return the settings of a fold and its inner search: no run's, until an inner fold is named (`of_inner_fold`)."""
    return _with(settings, fold=fold, workers=1)


def of_inner_fold(settings: Settings, fold: int) -> Settings:
    """Return the settings of the ordinary run that holds out one inner fold of the training side of ``kfold.fold``."""
    return _with(settings, inner_fold=fold, inner_trials=None)


def _with(settings: Settings, **kfold: Any) -> Settings:
    return settings.model_copy(update={"kfold": settings.kfold.model_copy(update=kfold)})


def examine(settings: Settings, sides: Callable[[Settings], Sides]) -> list[Sides]:
    """Make every fold of a cross-validation, and check it before anything is trained.

    Args:
        settings: of the cross-validation, or of one fold whose inner folds are meant where ``inner_trials`` is set.
        sides: the recipe's.

    Returns:
        What is on both sides of each fold, by its number.

    Raises:
        DataError: a fold is empty or has one label only, a group is split, or there are fewer groups than folds.
    """
    many = settings.kfold.n_splits
    assert many is not None
    found = []
    change = "Set kfold.n_splits or kfold.inner_splits lower, use more rows or groups, or another run.seed"
    for fold in range(many):
        one = of_fold(settings, fold)
        inner = range(settings.kfold.inner_splits if settings.kfold.inner_trials else 0)
        for run in (one, *(of_inner_fold(one, number) for number in inner)):
            both = sides(run)
            both.check(where(run.kfold), change)
            if run is one:
                found.append(both)
    held = collections.Counter(group for one in found for group in set(one.validation.groups))
    twice = sorted(group for group, times in held.items() if times > 1)
    if twice:
        raise DataError(f"kfold.n_splits={many}: the group {twice[0]!r} is held out by {held[twice[0]]} folds")
    return found


def describe(found: Sequence[Sides]) -> list[str]:
    """Say in a line what is on both sides of each fold."""
    return [
        f"Fold {fold}: train on {_said(one.train)}; hold out {_said(one.validation)}" for fold, one in enumerate(found)
    ]


def _said(side: Side) -> str:
    return f"{len(side.labels):,} rows, {len(set(side.groups)):,} groups ({shares(side.shares)})"
