"""What a run is part of, a search or a cross-validation: who hears of its validations, and what follows after it."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path


@dataclasses.dataclass(frozen=True)
class Within:
    """What a run belongs to; a run on its own is within nothing.

    Args:
        validated: called after each validation with step, epoch and metrics; may end the run by `RunPrunedError`.
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

    validated: Callable[[int, int, Mapping[str, float]], None] = lambda *_: None
    metric: str | None = None
    runs: float = 1.0
    study: str | None = None
    trial: int | None = None
    fold: int | None = None
    folder: Path | None = None
    keeps: Callable[[Mapping[str, float]], bool] | None = None
    resume: str | None = None
