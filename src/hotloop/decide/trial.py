"""A trial: real steps in two tiers, alternating, until it is clear which tier is faster.

The steps go in pairs, in alternating order (A B, B A, ...): a spell in which the whole machine is slow affects both
halves of a pair, and a trend cancels. The median of the pairs' ratios is estimated. Its interval is taken from order
statistics, which assume nothing about the distribution of times: the k-th smallest and k-th largest of n ratios enclose
the median with probability 1 - 2 * P(Binomial(n, 1/2) < k).
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from typing import Literal

from hotloop.decide.options import number

MIN_GAIN = 0.02
"""Share of a step that a tier must save to be switched to."""

COVERAGE = 0.98
"""Confidence of the interval. It is checked after each pair, so the error of the whole trial is larger."""

MOST_PAIRS = 100
"""Pairs after which a trial gives up, as on a noisy machine; at least 7 are needed for an interval of `COVERAGE`."""

CLEAR_PAIRS, CLEAR_RATIO = 3, 0.75
"""So many pairs are enough if each ratio is below `CLEAR_RATIO` (or above its inverse). With steps that vary by 30%, a
tier that is no faster gives three such pairs once in 400 trials."""

Outcome = Literal["undecided", "faster", "no faster"]


@dataclasses.dataclass(frozen=True)
class Verdict:
    """The result of a trial: seconds of the candidate over those of the tier in force, and the interval of the median.

    ``outcome`` is ``undecided`` while more pairs are needed. Before there are enough pairs for an interval, ``low`` and
    ``high`` are the least and the greatest ratio.
    """

    outcome: Outcome
    ratio: float
    low: float
    high: float
    pairs: int

    def __str__(self) -> str:
        return f"{self.outcome}: {self.ratio:.3f} of the time ({self.low:.3f} to {self.high:.3f}, {self.pairs} pairs)"


def median_interval(values: list[float], coverage: float = COVERAGE) -> tuple[float, float]:
    """Return the narrowest interval of order statistics that encloses the median with probability ``coverage``.

    With too few values the interval is unbounded: (0, inf).
    """
    ordered = sorted(values)
    count = len(ordered)
    outside, rank = 0.0, 0
    while rank < count // 2:
        outside += 2.0 * math.comb(count, rank) / 2.0**count
        if outside > 1.0 - coverage:
            break
        rank += 1
    return (ordered[rank - 1], ordered[-rank]) if rank else (0.0, math.inf)


@dataclasses.dataclass(frozen=True)
class Turn:
    """One step of a trial: its number, from 0, and the tier that it runs in. Turns 2n and 2n+1 make a pair."""

    number: int
    tier: str


class Trial:
    """A running trial of two tiers.

    Run the next step in the tier of a `turn`, pass its seconds to `add` when they are known, and stop when `verdict` is
    no longer ``undecided``. Times may come late. A turn whose time never comes (its step failed) voids its pair only.

    Args:
        in_force: the tier in force.
        candidate: the tier on trial, prepared and proven.
        most_pairs: pairs of steps after which to give up; a difference that is not clear by then is not worth a switch.
    """

    def __init__(self, in_force: str, candidate: str, *, most_pairs: int = MOST_PAIRS) -> None:
        self.in_force = in_force
        self.candidate = candidate
        self._most_pairs = max(CLEAR_PAIRS, most_pairs)
        self._pairs: list[tuple[float, float]] = []
        self._halves: dict[int, float] = {}
        self._turns = 0

    def turn(self) -> Turn:
        """Return the turn of the next step: A B, B A, A B, ..."""
        turn = Turn(self._turns, self.candidate if self._turns % 4 in (1, 2) else self.in_force)
        self._turns += 1
        self._halves.pop(turn.number - 512, None)  # its partner has not come by now: it is forgotten
        return turn

    def add(self, turn: Turn, seconds: float) -> None:
        """Add the seconds of a turn's step; if they are not a positive number, the pair does not count."""
        if not (valid := number(seconds)):
            return
        other = self._halves.pop(turn.number ^ 1, None)
        if other is None:
            self._halves[turn.number] = valid
        else:
            self._pairs.append((other, valid) if turn.tier == self.candidate else (valid, other))

    def seconds(self, tier: str) -> float | None:
        """Return the median seconds of a step in ``tier``, or None before the first pair."""
        side = 1 if tier == self.candidate else 0
        return statistics.median(pair[side] for pair in self._pairs) if self._pairs else None

    @property
    def extra_seconds(self) -> float:
        """Seconds that the candidate's steps took beyond those of the tier in force; 0 if it was faster."""
        return max(0.0, sum(there - here for here, there in self._pairs))

    def verdict(self) -> Verdict:
        """Return the result so far."""
        ratios = [there / here for here, there in self._pairs]
        if not ratios:
            return Verdict("no faster" if self._turns >= 2 * self._most_pairs else "undecided", 1.0, 0.0, math.inf, 0)
        ratio = statistics.median(ratios)
        low, high = median_interval(ratios)
        enough = math.isfinite(high)
        if not enough:
            low, high = min(ratios), max(ratios)
        clear = len(ratios) >= CLEAR_PAIRS
        if (enough and high < 1.0 and ratio <= 1.0 - MIN_GAIN) or (clear and high <= CLEAR_RATIO):
            outcome: Outcome = "faster"
        elif (enough and low > 1.0 - MIN_GAIN) or (clear and low >= 1.0 / CLEAR_RATIO):
            outcome = "no faster"
        else:
            # Void pairs count towards the end as well: a clock that never works must not prolong a trial for ever.
            outcome = "no faster" if self._turns >= 2 * self._most_pairs else "undecided"
        return Verdict(outcome, ratio, low, high, len(ratios))
