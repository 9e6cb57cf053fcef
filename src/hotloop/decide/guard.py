"""The guard of the promise: total time with ``auto`` is at most 1.02 x eager + 1 s, whatever the tiers turn out to be.

What may be lost at this moment, if all that is spent from here on turns out to be for nothing, is the **credit**::

    credit = 0.02 * eager * steps + 1 s + saved - spent + certain

``saved`` is what the steps done saved against eager, ``spent`` what preparations and trials took. With a known length,
``steps`` is the whole run and ``certain`` half of what the tier in force (proven, timed, taken at the slow end of its
interval) will save in the steps that are left. With a guessed length the run may end at any moment, so ``steps`` are
those done, ``certain`` is 0, and the promise holds at each single step. A preparation starts only if its *worst* cost
fits in the credit; one that goes by steps, with nothing to compile, if its expected cost does, since it is given up
between two of its steps once it has cost that much (a known length only: an open one waits until it can afford the
worst). So the promise may be broken by what one step of it takes beyond the credit. Where that step alone took more
than the whole was expected to (the first attention kernel of another kind is read from a cold disk in two seconds), to
give up makes sure that the promise is broken, and to go on mends it where the tier proves right, which nearly all do:
then it may take its expected cost once more, a second at most, and again what a step takes beyond that. For a tier
whose gain is known (timed in this run, or kept from earlier runs of the same program), and a known length, its own
saving at the slow end of its step counts as well: then the investment is no bet.

Where runs share what is compiled (the trials of a search, the folds of a cross-validation), the promise is one for all
of them: ``steps`` counts half of the later runs' as well, since a search may be stopped, and the credit is carried from
one run to the next. What is captured serves one run only, so a captured tier saves nothing in the later ones.

This is ski rental with a budget instead of a ratio: a preparation is bought not when renting has cost as much (which
is 2-competitive, so up to 2 x eager), but when the loss of buying in vain fits in the 2 % and the second. On a known
horizon expected cost decides inside that bound (`choose`); the bound itself never looks at a guess.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hotloop.decide.horizon import Horizon
    from hotloop.decide.options import Option, Standing

SLOWER_SHARE = 0.02
SLOWER_SECONDS = 1.0
"""The promise: at most so much slower than eager."""

TRIAL_SHARE = 0.01
"""Trials, the preparation and proof of the tiers chosen apart, take at most this share of the run in eager."""

CERTAIN = 0.5
"""Share of a tier's future saving that is counted on: it may become slower, or the run may be stopped early."""


def eager_run_seconds(standing: Standing, horizon: Horizon, eager: float) -> float:
    """Give the seconds of all steps in eager: those of the whole run where its length is known, else those done."""
    return eager * (standing.step + (0 if horizon.guessed else horizon.steps + CERTAIN * horizon.later_steps))


def credit_seconds(standing: Standing, horizon: Horizon, eager: float, step_high: float) -> float:
    """Give the seconds that may be lost from here on without breaking the promise (module docstring).

    Args:
        standing: where the run stands.
        horizon: the steps that are left.
        eager: seconds of an eager step, at the low end.
        step_high: seconds of a step in the tier in force, at the high end.
    """
    certain = 0.0
    if not horizon.guessed and standing.tier != standing.base:
        certain = certain_saving_seconds(eager, step_high, horizon.steps)
    spent = standing.trial_seconds + standing.prepare_seconds
    promise = SLOWER_SHARE * eager_run_seconds(standing, horizon, eager) + SLOWER_SECONDS
    return promise + standing.carried_seconds + standing.saved_seconds - spent + certain


def certain_saving_seconds(eager: float, step: float, steps: int) -> float:
    """Give what may be counted on of the saving of a tier whose step is known, over the ``steps`` that are left."""
    return CERTAIN * max(0.0, eager - step) * steps


def carried_seconds(standing: Standing, eager: float) -> float:
    """Give what a run leaves of the promise to those after it that share: what it may have lost, and saved, less spent.

    The second that the promise allows is there once, so it is not part of this.
    """
    spent = standing.trial_seconds + standing.prepare_seconds
    return SLOWER_SHARE * eager * standing.step + standing.saved_seconds - spent


def known_saving_seconds(option: Option, horizon: Horizon, step: float) -> float:
    """Give what a tier of known gain saves at least in the steps that are left; 0 where gain or length is a guess."""
    if option.source == "prior" or horizon.guessed:
        return 0.0
    steps = horizon.steps - (option.background_seconds or 0.0) / step if step > 0 else 0.0
    saving = max(0.0, step - option.worst_step_seconds)
    if option.again_seconds is None:
        return saving * max(0.0, steps)
    later = CERTAIN * horizon.later_runs * max(0.0, saving * horizon.run_steps - option.again_seconds)
    return saving * max(0.0, steps) + later


def trial_room_seconds(standing: Standing, horizon: Horizon, eager: float) -> float:
    """Give the seconds that trials may still take. A guessed run is taken at its guess: the credit binds it besides."""
    whole = eager * (standing.step + horizon.steps + CERTAIN * horizon.later_steps)
    return TRIAL_SHARE * whole - standing.trial_seconds


def trial_cost_seconds(option: Option) -> float:
    """Give what a trial is expected to take beyond a chosen tier's preparation and proof: that they are in vain."""
    return (1.0 - min(1.0, option.chance)) * option.cost_seconds
