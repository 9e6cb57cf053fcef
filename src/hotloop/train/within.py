"""What a run is part of, a search or a cross-validation: who hears of its validations, and what follows after it."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping


class Listener(Protocol):
    """Hears of each validation of a run."""

    def __call__(self, step: int, epoch: int, metrics: Mapping[str, float]) -> None:
        """Take note of a validation at an optimizer step.

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
        runs: how many runs of about this length, this one included, will use what is compiled in it: the folds that are
            left, or the trials of a search that will share it. What a compile may cost follows from it.
        resume: the command that goes on with the whole; None where the run is on its own, and is resumed itself.
    """

    validated: Listener = _nothing
    runs: float = 1.0
    resume: str | None = None
