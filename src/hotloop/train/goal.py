"""The goal of a run: the metric that says which validation is the best, and whether a program has that metric."""

from __future__ import annotations

import dataclasses
import difflib
import math
from typing import TYPE_CHECKING

from hotloop.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping


@dataclasses.dataclass(frozen=True)
class Goal:
    """The metric that says which validation is the best: for ``best.pt``, early stopping, and a search.

    Args:
        metric: its name among the metrics.
        maximize: whether more is better.
    """

    metric: str
    maximize: bool = True

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

    def check(self, metrics: Collection[str], recipe: str) -> None:
        """Check that the goal's metric is among a program's metrics.

        Raises:
            ConfigError: it is not.
        """
        if self.metric in metrics:
            return
        near = difflib.get_close_matches(self.metric, metrics, n=1, cutoff=0.5)  # acc is near accuracy
        raise ConfigError(
            f"recipe.goal names {self.metric!r}; the metrics of recipe={recipe} are {', '.join(metrics) or 'none'}. "
            f"Set: recipe.goal={dataclasses.replace(self, metric=[*near, '<metric>'][0])}"
        )
