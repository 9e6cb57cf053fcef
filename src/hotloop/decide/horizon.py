"""The horizon of a decision: over how many steps a preparation has to pay."""

from __future__ import annotations

import dataclasses
import math

FEWEST_GUESSED = 1_000
"""Steps that a run of unknown length is expected to do at least. The promise does not rely on it (`guard`)."""
MOST = 10**12
"""Steps, and runs, beyond which a count makes no difference; `total_steps=10**400`, an endless run, is no float."""


@dataclasses.dataclass(frozen=True)
class Horizon:
    """Steps that remain in this run, whether that is known, and the runs after it that will use the same code.

    Args:
        steps: left in this run.
        guessed: whether the length of the run is unknown.
        later_runs: runs like this one that come after it and share what is compiled: trials of a search, folds.
        run_steps: the length of one such run.
    """

    steps: int
    guessed: bool
    later_runs: float = 0.0
    run_steps: int = 0

    def __str__(self) -> str:
        return f"{self.steps:,} {'steps guessed to be left' if self.guessed else 'steps left'}"

    @property
    def shared(self) -> str:
        """How many runs share what is compiled, including this one; empty if it is alone."""
        return f", shared by about {self.later_runs + 1:,.0f} runs like this one" if self.later_runs >= 0.5 else ""  # noqa: PLR2004 - rounds to none


def remaining(step: int, total_steps: int | None, runs: float = 1.0) -> Horizon:
    """Return the steps that remain after ``step``, and the later ones of ``runs`` (this one included) that share code.

    Without ``total_steps`` a run is expected to do as many steps again as it has done, and never fewer than
    `FEWEST_GUESSED` in all. (Lindy's law: with a prior 1/n over its length, the median of the steps that are left
    equals the steps done.)
    """
    done = bounded(step)
    later = min(runs, float(MOST)) - 1.0 if math.isfinite(runs) and runs > 1.0 else 0.0
    if total_steps is not None:
        total = bounded(total_steps)
        return Horizon(max(0, total - done), guessed=False, later_runs=later, run_steps=total)
    left = max(done, FEWEST_GUESSED - done)
    return Horizon(left, guessed=True, later_runs=later, run_steps=done + left)


def bounded(steps: int) -> int:
    """Return a count of steps between 0 and `MOST`, so that arithmetic on it cannot overflow."""
    return max(0, min(int(steps), MOST))
