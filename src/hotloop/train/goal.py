"""The goal of a run: the metric that says which validation is the best, and whether a program has that metric."""

from __future__ import annotations

import dataclasses
import difflib
import math
from typing import TYPE_CHECKING

from hotloop.errors import ConfigError
from hotloop.train import configure
from hotloop.train.schema import meant
from hotloop.train.settings import usual_direction

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping
    from pathlib import Path


@dataclasses.dataclass(frozen=True)
class Goal:
    """The metric that says which validation is the best: for ``best.pt``, early stopping, and a search.

    Args:
        metric: its name among the metrics.
        maximize: whether more is better.
        of_search: a search judges its trials by it, and ``hpo.metric`` may have named it.
    """

    metric: str
    maximize: bool = True
    of_search: bool = False

    def __str__(self) -> str:
        return f"{'max' if self.maximize else 'min'}:{self.metric}"

    def of(self, metrics: Mapping[str, float]) -> float:
        """Return the goal's metric of a validation, NaN before there was any."""
        return metrics.get(self.metric, math.nan)

    def better(self, metrics: Mapping[str, float], than: Mapping[str, float]) -> bool:
        """Say whether a validation is better than the best so far, which is empty at first; NaN is never better."""
        new, old = self.of(metrics), self.of(than)
        if math.isnan(new) or math.isnan(old):
            return not math.isnan(new)
        return new > old if self.maximize else new < old

    def check(self, metrics: Collection[str], recipe: str, folder: Path | None = None) -> None:
        """Check that the goal's metric is among a program's metrics.

        Args:
            metrics: their names.
            recipe: the program's name.
            folder: that of the run, which goes on with another goal; None where the run has not begun.

        Raises:
            ConfigError: it is not.
        """
        if self.metric in metrics:
            return
        near = difflib.get_close_matches(self.metric, metrics, n=1, cutoff=0.5)  # acc is near accuracy
        metric = [*near, *(metrics if len(metrics) == 1 else ()), "<metric>"][0]
        maximize = self.maximize
        if self.of_search and maximize == _is_high(self.metric):  # its misspelt name may have said so
            maximize = _is_high(metric)
        example = dataclasses.replace(self, metric=metric, maximize=maximize)
        cure = f"recipe.goal={example}"
        cure = configure.again(folder, changed=cure) if folder else cure
        where = "hpo.metric or recipe.goal" if self.of_search else "recipe.goal"
        cure += ", in place of either" if self.of_search else ""
        raise ConfigError(
            f"{where} names {self.metric!r}; the metrics of recipe={recipe} are {', '.join(metrics) or 'none'}"
            f"{meant(self.metric, metrics) or '.'} {'Go on with' if folder else 'Set'}: {cure}"
        )


def _is_high(metric: str) -> bool:
    return usual_direction(metric) == "maximize"
