"""The results of trials: seconds of a step in each tier, at one speed of the machine, and which tiers were rejected.

Times of different moments cannot be compared: a shared machine may be half as fast for minutes, and batches grow
longer. The ratio of two tiers timed in alternation lasts. So ratios to the base tier are kept, chained over trials, and
turned into seconds with the base tier's step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hotloop.decide.options import number

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hotloop.decide.trial import Trial


class Speeds:
    """The known step times of all tiers, for `Standing`, `Option` and `Facts`.

    Args:
        base: the tier that the run starts in.
    """

    def __init__(self, base: str = "eager") -> None:
        self._base = base
        self._base_seconds: float | None = None
        self._base_low: float | None = None
        self._ratios: dict[str, tuple[float, float]] = {base: (1.0, 1.0)}
        self._rejected: dict[str, int] = {}

    def see(self, tier: str, seconds: float) -> None:
        """Record the median seconds of the last steps in the tier in force: some 100, to outvote a short slow spell.

        In the base tier the median is what a step takes. In another tier only a step that became *faster* is believed,
        and taken to hold for all tiers. A slower step may be the tier's own fault, which only a trial can show.
        """
        ratio = self.ratio(tier)
        if not (seconds := number(seconds) or 0.0) or not ratio:
            return
        base = seconds / ratio
        if tier == self._base or self._base_seconds is None or base < self._base_seconds:
            self._set_base(base)

    def recall(self, base_seconds: float, ratios: Mapping[str, tuple[float, float]]) -> None:
        """Record the results of an earlier run of this process; results of this run replace them."""
        if number(base_seconds):
            self._set_base(base_seconds)
            self._ratios |= {tier: ratio for tier, ratio in ratios.items() if tier != self._base}

    def known(self) -> dict[str, tuple[float, float]]:
        """Return the ratio of each tier's step to the base tier's, and the slow end of the ratio."""
        return dict(self._ratios)

    def _set_base(self, seconds: float) -> None:
        self._base_seconds = seconds
        self._base_low = seconds if self._base_low is None else min(seconds, self._base_low)

    def record(self, trial: Trial, steps_left: int) -> None:
        """Record the result of a trial; a trial that was broken off, or beside a tier of unknown speed, is ignored.

        Args:
            trial: the trial.
            steps_left: the horizon (`remaining`) at its end.
        """
        verdict = trial.verdict()
        here = self._ratios.get(trial.in_force)
        if verdict.outcome == "undecided" or not verdict.pairs or here is None:
            return
        if trial.candidate == self._base:
            self._ratios[trial.in_force] = 1.0 / verdict.ratio, 1.0 / verdict.low
        else:
            self._ratios[trial.candidate] = here[0] * verdict.ratio, here[1] * verdict.high
        if self._base in (trial.in_force, trial.candidate) and (seconds := trial.seconds(self._base)) is not None:
            self._set_base(seconds)
        if verdict.outcome != "faster":
            self.reject(trial.candidate, steps_left)

    def switch(self, before: str, after: str, steps_left: int) -> None:
        """Record that ``after`` is in force now, and reject ``before``, so that the run does not go back and forth.

        Tiers are rejected beside the tier that beat them. Back in the base tier that tier is gone, so they may be tried
        again.
        """
        if after == self._base:
            self._rejected.clear()
        self.reject(before, steps_left)

    def reject(self, tier: str, steps_left: int) -> None:
        """Record that ``tier`` was no better, or its background compile given up; the base tier is never rejected."""
        if tier != self._base:
            self._rejected[tier] = steps_left

    def rejected_at(self, tier: str) -> int | None:
        """Return the horizon at which ``tier`` was rejected, for `Option`."""
        return self._rejected.get(tier)

    def ratio(self, tier: str) -> float | None:
        """Return the seconds of a step in ``tier`` over those in the base tier, or None if no trial measured it."""
        found = self._ratios.get(tier)
        return None if found is None else found[0]

    def seconds(self, tier: str) -> float | None:
        """Return the seconds of a step in ``tier``, or None if they are unknown."""
        ratio = self.ratio(tier)
        return None if ratio is None or self._base_seconds is None else self._base_seconds * ratio

    @property
    def base_low_seconds(self) -> float | None:
        """The least seconds that a step in the base tier ever took, which leaves slow spells of the machine out."""
        return self._base_low

    def high_seconds(self, tier: str) -> float | None:
        """Return the slow end of `seconds`."""
        found = self._ratios.get(tier)
        return None if found is None or self._base_seconds is None else self._base_seconds * found[1]

    def measured(self) -> dict[str, float]:
        """Return the seconds of a step of each known tier, for `Facts`."""
        return {tier: seconds for tier in self._ratios if (seconds := self.seconds(tier)) is not None}

    def saved(self, tier: str, seconds: float) -> float:
        """Return what ``seconds`` of steps in ``tier`` saved at least against the base tier; negative if it is slower.

        The slow end is counted: a trial stops when its figures are good, so its ratio is a little too good on average.
        """
        known = self._ratios.get(tier)
        return 0.0 if known is None else seconds * (1.0 / known[1] - 1.0)
