"""What a run is part of, a search or a cross-validation: who hears of its validations, and what follows after it."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path


class Listener(Protocol):
    """Hears of each validation of a run."""

    def __call__(self, step: int, epoch: int, metrics: Mapping[str, float]) -> None:
        """Record a validation at an optimizer step.

        Raises:
            RunPrunedError: the run is not worth going on with.
        """


def _nothing(step: int, epoch: int, metrics: Mapping[str, float]) -> None:
    """Hear, and do nothing."""


@dataclasses.dataclass(frozen=True)
class Within:
    """What a run belongs to; a run on its own is within nothing.

    Args:
        validated: hears of each validation, and may end the run by raising `RunPrunedError`.
        metric: the setting and the metric that the whole is judged by, where validations have to give one.
        runs: how many runs of about this length, this one included, will use what is compiled in it: the folds that are
            left, or the trials of a search that will share it. What a compile may cost follows from it.
        study: the name of the search, or of the cross-validation on its own: loggers nest its runs below it.
        trial: the trial's number, for the run of a trial and for the folds of one.
        fold: the fold's number, for the run of a fold.
        folder: of the study, which all of its workers share.
        keeps: says of a validation's metrics whether the whole may keep its checkpoint: another is not written, nor is
            any to resume the run by. None writes all.
        resume: the command that goes on with the whole; None where the run is on its own, and is resumed itself.
    """

    validated: Listener = _nothing
    metric: str | None = None
    runs: float = 1.0
    study: str | None = None
    trial: int | None = None
    fold: int | None = None
    folder: Path | None = None
    keeps: Callable[[Mapping[str, float]], bool] | None = None
    resume: str | None = None

    def levels(self, name: str) -> tuple[tuple[str, str], ...]:
        """Return what the run is, from the outside in, the run itself last: ``(("study", "s"), ("trial", "trial-3"))``.

        Args:
            name: of a run that is within nothing.
        """
        if self.study is None:
            return (("run", name),)
        numbered = (("trial", self.trial), ("fold", self.fold))
        below = tuple((kind, f"{kind}-{number}") for kind, number in numbered if number is not None)
        return (("study", self.study), *(below or (("run", name),)))
