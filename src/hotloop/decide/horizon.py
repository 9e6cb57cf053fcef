"""The horizon of a decision: over how many steps a preparation has to pay."""

from __future__ import annotations

import dataclasses

FEWEST_GUESSED = 1_000
"""Steps that a run of unknown length is expected to do at least. The promise does not rest on it (`guard`)."""


@dataclasses.dataclass(frozen=True)
class Horizon:
    """Steps that remain, and whether that is known."""

    steps: int
    guessed: bool

    def __str__(self) -> str:
        return f"{self.steps:,} {'steps guessed to be left' if self.guessed else 'steps left'}"


def horizon(steps_left: int, share: int = 1) -> int:
    """Give the steps that a preparation serves: those left in one run, times the runs that share what it made.

    Args:
        steps_left: steps left in one run.
        share: runs that use the same code, this one included: trials of a search times folds, 1 for a run alone.
    """
    return max(0, steps_left) * max(1, share)


def remaining(step: int, total_steps: int | None, share: int = 1) -> Horizon:
    """Give the steps that remain after ``step``.

    Without ``total_steps`` a run is expected to do as many steps again as it has done (Lindy's law: with a prior
    1/n over its length, the median of what is left equals what was done), and never fewer than `FEWEST_GUESSED` in all.
    """
    done = max(0, step)
    if total_steps is not None:
        return Horizon(horizon(total_steps - done, share), guessed=False)
    return Horizon(horizon(max(done, FEWEST_GUESSED - done), share), guessed=True)
