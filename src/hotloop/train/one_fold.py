"""One fold of a cross-validation: the ordinary run that holds it out, after a search of its own where there is one."""

from __future__ import annotations

import dataclasses
import importlib
from typing import TYPE_CHECKING

from hotloop import record
from hotloop.errors import ConfigError, HotloopError
from hotloop.train import configure, folds, start
from hotloop.train.display import Display
from hotloop.train.search import space
from hotloop.train.within import Within

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from rich.console import Console

    from hotloop.train.outcome import Outcome
    from hotloop.train.recipe import Recipe
    from hotloop.train.settings import Settings

SEARCH = "search"
"""The folder of an inner search, in that of its fold."""


@dataclasses.dataclass(frozen=True)
class OneFold:
    """Trains folds of a cross-validation.

    Args:
        settings: of the whole.
        folder: of the whole.
        again: the command that goes on with the whole.
        recipe: trains.
        console: what a fold prints to.
    """

    settings: Settings
    folder: Path
    again: str
    recipe: Recipe
    console: Console | None = None

    def train(self, fold: int, runs: int, known: Sequence[str] | None, note: Callable[[list[str]], None]) -> Outcome:
        """Train a fold from its start, or from its last checkpoint.

        Args:
            fold: its number.
            runs: how many folds, this one included, will use what is compiled in this process.
            known: what its inner search chose in an earlier start.
            note: hears of what it chose in this one.
        """
        folder = self.folder / f"fold-{fold}"
        settings = folds.of_fold(self.settings, fold)
        if (trials := self.settings.kfold.inner_trials) is not None:
            later = (runs - 1) * trials
            settings = chosen_for(settings, self._chosen(fold, trials, known, note, later=later))
            runs += later * settings.kfold.inner_splits
        within = Within(runs=runs, study=self.folder.name, fold=fold, folder=self.folder, resume=self.again)
        return self.recipe.train(start.take_up(settings, folder, within), self.console)

    def _chosen(
        self, fold: int, trials: int, known: Sequence[str] | None, note: Callable[[list[str]], None], later: int
    ) -> Sequence[str]:
        """Return what the fold's inner search found; one that is done is not run again. ``later`` trials come after.

        The seam is ``hotloop.train.search.nested(settings, folder, trials, say=say, later=...)``. The settings name the
        outer fold and have ``kfold.inner_trials``, with which no run can be split: each trial is judged by runs with
        ``kfold.inner_fold`` set (`hotloop.train.folds.of_inner_fold`), which see the outer fold's training side
        alone. It goes on with the search that it finds in its folder, gives the overrides of the best trial, and raises
        KeyboardInterrupt where the user stopped it.
        """
        say = Display(self.console).say
        if known is None:
            folder = self.folder / f"fold-{fold}" / SEARCH
            say(f"Inner search: {trials} trials on the training side of fold {fold}, in {folder}")
            nested = importlib.import_module("hotloop.train.search").nested
            found = list(nested(folds.with_search(self.settings, fold), folder, trials, say=say, later=later))
            note(found)
            known = found
        say(f"Inner search of fold {fold} chose: {' '.join(known) or 'no change'}")
        return known


def chosen_for(settings: Settings, chosen: Sequence[str]) -> Settings:
    """Put what an inner search chose on top of a fold's settings.

    Raises:
        ConfigError: it would change the data, the folds or the run itself.
    """
    for one in chosen:
        if one.lstrip("+~").split(".")[0] in space.KEPT:
            kept = ", ".join(space.KEPT)
            raise ConfigError(f"the inner search chose {one}: a search within a fold has no say in {kept}")
    return configure.from_dict(configure.to_dict(settings), chosen)


def words(error: BaseException) -> str:
    """Put a failure into one paragraph; the kind is named where the words are not our own."""
    said = " ".join(str(error).split())
    return (said if isinstance(error, HotloopError) else f"{type(error).__name__}: {said}")[: record.ERROR_LENGTH]
