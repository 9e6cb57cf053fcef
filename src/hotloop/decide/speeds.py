"""What trials told: seconds of a step in each tier, all at one speed of the machine, and which tiers were rejected.

Times of different moments cannot be: a shared machine is half as fast for minutes, batches grow longer. What lasts is
the ratio of two tiers timed by turns, so ratios to the base tier are kept, chained over trials, and turned into seconds
with the base tier's step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hotloop.decide.options import number

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hotloop.decide.trial import Trial


class Speeds:
    """What is known of each tier's step; feeds `Standing`, `Option` and `Facts`.

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
        """Take the median of the last steps in the tier in force (some 100, so that a short slow spell is outvoted).

        In the base tier it is what a step takes. In another, only a step that became *faster* is believed, and taken
        for the whole program's; one that became slower may be the tier's own doing, which a trial has to tell.
        """
        ratio = self.ratio(tier)
        if not (seconds := number(seconds) or 0.0) or not ratio:
            return
        base = seconds / ratio
        if tier == self._base or self._base_seconds is None or base < self._base_seconds:
            self._set_base(base)

    def recall(self, base_seconds: float, ratios: Mapping[str, tuple[float, float]]) -> None:
        """Take what trials of an earlier run of this process told; what this run sees itself replaces it."""
        if number(base_seconds):
            self._set_base(base_seconds)
            self._ratios |= {tier: ratio for tier, ratio in ratios.items() if tier != self._base}

    def known(self) -> dict[str, tuple[float, float]]:
        """Give the ratio of each tier to the base tier, and its slow end."""
        return dict(self._ratios)

    def _set_base(self, seconds: float) -> None:
        self._base_seconds = seconds
        self._base_low = seconds if self._base_low is None else min(seconds, self._base_low)

    def record(self, trial: Trial, steps_left: int) -> None:
        """Take what a decided trial found; one broken off, or beside a tier of unknown speed, says nothing.

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
        """Take that ``after`` is in force now: ``before`` is rejected, so that the run does not go to and fro.

        Tiers are rejected beside the one that beat them. Back in the base tier, that one is gone, so they may be tried.
        """
        if after == self._base:
            self._rejected.clear()
        self.reject(before, steps_left)

    def reject(self, tier: str, steps_left: int) -> None:
        """Take that ``tier`` was no better, or its background compile given up; the base tier is never barred."""
        if tier != self._base:
            self._rejected[tier] = steps_left

    def rejected_at(self, tier: str) -> int | None:
        """Give the horizon at which ``tier`` was rejected, for `Option`."""
        return self._rejected.get(tier)

    def ratio(self, tier: str) -> float | None:
        """Give a step in ``tier`` over one in the base tier, or None where no trial told."""
        found = self._ratios.get(tier)
        return None if found is None else found[0]

    def seconds(self, tier: str) -> float | None:
        """Give the seconds of a step in ``tier``, or None where they are not known."""
        ratio = self.ratio(tier)
        return None if ratio is None or self._base_seconds is None else self._base_seconds * ratio

    @property
    def base_low_seconds(self) -> float | None:
        """The least that a step in the base tier was ever found to take, a slow spell of the machine thus left out."""
        return self._base_low

    def high_seconds(self, tier: str) -> float | None:
        """Give the slow end of `seconds`."""
        found = self._ratios.get(tier)
        return None if found is None or self._base_seconds is None else self._base_seconds * found[1]

    def measured(self) -> dict[str, float]:
        """Give the seconds of a step of each tier known, for `Facts`."""
        return {tier: seconds for tier in self._ratios if (seconds := self.seconds(tier)) is not None}

    def saved(self, tier: str, seconds: float) -> float:
        """Give what ``seconds`` of steps in ``tier`` saved at least against the base tier; negative if it is slower.

        Counted at the slow end: a trial stops when its figures look good, so its ratio is a little too good on average.
        """
        found = self._ratios.get(tier)
        return 0.0 if found is None else seconds * (1.0 / found[1] - 1.0)
