"""`Fold`: which rows a run of a cross-validation trains on, and which it holds out."""

from __future__ import annotations

import dataclasses
import hashlib
import warnings
from typing import TYPE_CHECKING, Any

from hotloop.errors import ConfigError, DataError
from hotloop.train.optional import require

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np

    Rows = np.ndarray[Any, np.dtype[np.intp]]


@dataclasses.dataclass(frozen=True)
class Fold:
    """One fold of a cross-validation, for a program's ``make(*, fold: hotloop.Fold | None = None)``.

    ``fold = fold or hotloop.Fold()`` is for a run that is no part of a cross-validation: the first of five folds.

    Args:
        number: the fold that is held out, counted from 0.
        splits: how many folds there are.
        seed: which of the possible splits: ``run.seed``.
        within: the fold on whose training side this one is, in a nested search.

    Raises:
        ConfigError: there is no such fold.
    """

    number: int = 0
    splits: int = 5
    seed: int = 0
    within: Fold | None = None
    asked: list[tuple[int, Any, Any]] = dataclasses.field(default_factory=list, init=False, repr=False, compare=False)
    """What `split` was asked: the number of rows, labels and groups, call by call."""

    def __post_init__(self) -> None:
        if self.splits < 2 or not 0 <= self.number < self.splits:  # noqa: PLR2004 - one fold leaves nothing to train on
            raise ConfigError(
                f"Fold(number={self.number}, splits={self.splits}): expected at least two folds, and a number from 0 "
                f"to {max(2, self.splits) - 1}"
            )

    def split(self, n: int, labels: Any = None, groups: Any = None) -> tuple[Rows, Rows]:
        """Split rows by scikit-learn, in every process alike.

        Args:
            n: how many rows there are.
            labels: the class of each row, a sequence, array or tensor: classes are as frequent on both sides as can be.
            groups: the group of each row, such as a patient or a document: a group is never on both sides.

        Returns:
            The numbers of the rows to train on, and of those held out.

        Raises:
            DataError: labels or groups are not one for each row, or too few for so many folds.
        """
        import numpy  # noqa: ICN001, PLC0415 - comes with scikit-learn

        labels, groups = _column("labels", labels, n), _column("groups", groups, n)
        self.asked.append((n, labels, groups))
        rows = numpy.arange(n)
        if self.within is not None:
            rows, _ = self.within.split(n, labels, groups)
        within = [None if column is None else column[rows] for column in (labels, groups)]
        train, held_out = self._sides(len(rows), *within)
        return rows[train], rows[held_out]

    def _sides(self, n: int, labels: Any, groups: Any) -> tuple[Rows, Rows]:
        sklearn = require("sklearn.model_selection", "Splitting into folds")
        kind = f"{'' if labels is None else 'Stratified'}{'' if groups is None else 'Group'}KFold"
        splitter = getattr(sklearn, kind)(self.splits, shuffle=True, random_state=self.seed)
        distinct = n if groups is None else len(set(groups.tolist()))
        with warnings.catch_warnings():
            # A class with fewer rows than folds cannot be even; the folds are as even as they can be, and valid.
            warnings.filterwarnings("ignore", message="The least populated class in y", category=UserWarning)
            try:
                sides: list[tuple[Rows, Rows]] = list(splitter.split([0] * n, labels, groups))
                smallest = min(len(side) for pair in sides for side in pair)
            except ValueError as error:  # no class has as many rows as there are folds, or there are fewer groups
                raise self._too_few(n, distinct) from error
        if distinct < self.splits or not smallest:
            raise self._too_few(n, distinct)
        return sides[self.number]

    def _too_few(self, n: int, distinct: int) -> DataError:
        setting = "kfold.n_splits" if self.within is None else "kfold.inner_splits"
        return DataError(
            f"{n} rows in {distinct} groups are too few to hold out one of {self.splits} folds, and groups are never "
            f"split: set {setting} lower, use more rows, or check which column names the groups"
        )

    def fingerprint(self) -> str:
        """Return what tells other rows, or another split of them, apart; empty where `split` was not called."""
        if not self.asked:
            return ""
        digest = hashlib.sha256(repr(self).encode())
        for n, *columns in self.asked:
            digest.update(repr((n, *(None if one is None else one.tolist() for one in columns))).encode())
        return digest.hexdigest()


def _column(name: str, values: Sequence[Any] | Any, n: int) -> Any:
    """Return labels or groups as an array.

    Raises:
        DataError: they are not one for each row, or labels are measurements.
    """
    if values is None:
        return None
    import numpy  # noqa: ICN001, PLC0415 - comes with scikit-learn

    column = numpy.asarray(values.cpu() if hasattr(values, "cpu") else values)
    if column.shape != (n,):
        raise DataError(f"fold.split: {name} of shape {column.shape}: expected one for each of the {n} rows")
    if name == "labels" and column.dtype.kind == "f" and (column != column.round()).any():
        raise DataError("fold.split: labels are measurements, and no classes: leave labels out, or give quartiles")
    return column
