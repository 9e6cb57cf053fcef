"""An option beside the tier in force: what it saves, what it costs, and the figures of both for the record."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from hotloop.decide import guard
from hotloop.decide.horizon import Horizon, bounded, remaining
from hotloop.decide.options import Option, Standing, number

PAYS = {"measured": 1.0, "stored": 1.1, "prior": 1.25}
"""How many times its cost an option must be expected to save, by the source of its figures; chosen, not measured."""


@dataclasses.dataclass(frozen=True)
class Case:
    """An option against the tier in force, in seconds."""

    option: Option
    saving: float
    """Expected seconds saved per step."""
    steps: float
    """Steps that are left in this run once it is in force."""
    cost: float
    later: float = 0.0
    """Seconds that later runs save with the same code, less what each pays to capture and prove it."""

    @property
    def saved(self) -> float:
        """Seconds that it is expected to save, in this run and in later runs that share its code."""
        return self.option.chance * (self.saving * self.steps + self.later)

    @property
    def value(self) -> float:
        """Seconds that it is expected to save over the horizon, less its cost."""
        return self.saved - self.cost

    @property
    def pays(self) -> bool:
        """Whether it saves its cost, times the margin `PAYS` for figures that are only an expectation."""
        return self.saved > PAYS[self.option.source] * self.cost

    @property
    def pays_after(self) -> int:
        """Steps after which the saving makes up for the cost."""
        return math.ceil(min(1e18, self.cost / self.saving)) if self.saving > 0 else 0

    @property
    def pays_from(self) -> int:
        """The fewest steps, in force, for which `pays` holds without later runs."""
        needed = PAYS[self.option.source] * self.cost / max(1e-18, self.option.chance * self.saving)
        return math.floor(min(1e18, needed)) + 1

    @property
    def effort(self) -> float:
        """Seconds until it is in force."""
        return self.cost + (self.option.background_seconds or 0.0)


@dataclasses.dataclass(frozen=True)
class Known:
    """A `Standing` with nothing missing: times in seconds, what may be lost and what trials may take."""

    standing: Standing
    horizon: Horizon
    eager: float
    step: float
    credit: float
    trial_room: float

    @classmethod
    def of(cls, standing: Standing, eager: float, step: float) -> Known:
        """Clean the loop's figures, and add the horizon and what may be spent; ``eager`` and ``step`` are positive."""
        horizon = remaining(standing.step, standing.total_steps, standing.runs)
        low = min(eager, number(standing.eager_low_seconds) or eager)
        high = max(step, number(standing.step_high_seconds) or step)
        clean = dataclasses.replace(
            standing,
            step=bounded(standing.step),
            trial_seconds=number(standing.trial_seconds) or 0.0,
            prepare_seconds=number(standing.prepare_seconds) or 0.0,
            saved_seconds=standing.saved_seconds if math.isfinite(standing.saved_seconds) else 0.0,
        )
        return cls(
            standing=clean,
            horizon=horizon,
            eager=eager,
            step=step,
            credit=guard.credit_seconds(clean, horizon, low, high),
            trial_room=guard.trial_room_seconds(clean, horizon, low, high),
        )

    def compare(self, option: Option) -> Case:
        """Compare an option with the tier in force."""
        horizon, saving = self.horizon, self.step - option.step_seconds
        steps = horizon.steps - (option.background_seconds or 0.0) / self.step
        later = 0.0
        if option.again_seconds is not None and horizon.run_steps > 0:
            # A child may compile beyond the end of this run: the runs that it takes go eager.
            runs = max(0.0, horizon.later_runs + min(0.0, steps) / horizon.run_steps)
            later = runs * max(0.0, saving * horizon.run_steps - option.again_seconds)
        return Case(option, saving, max(0.0, steps), option.cost_seconds, later)

    def credit_for(self, option: Option) -> float:
        """Return the seconds that may be lost on an option: the credit, and the option's own saving if it is known."""
        return self.credit + guard.known_saving_seconds(option, self.horizon, self.step)

    def numbers(self, case: Case | None) -> dict[str, Any]:
        """Return the figures of a decision as plain data; times in seconds."""
        numbers: dict[str, Any] = {
            "steps_done": self.standing.step,
            "steps_left": self.horizon.steps,
            "guessed": self.horizon.guessed,
            "later_runs": self.horizon.later_runs,
            "eager_seconds": self.eager,
            "step_seconds": self.step,
            "credit_seconds": self.credit,
            "trial_room_seconds": self.trial_room,
        }
        if case is not None:
            numbers |= {
                "option_step_seconds": case.option.step_seconds,
                "saving_seconds_a_step": case.saving,
                "saving_seconds_later": case.later,
                "cost_seconds": case.cost,
                "worst_cost_seconds": case.option.worst_cost_seconds,
                "background_seconds": case.option.background_seconds,
                "pays_after_steps": case.pays_after,
                "value_seconds": case.value,
                "chance": case.option.chance,
                "source": case.option.source,
            }
        return numbers
