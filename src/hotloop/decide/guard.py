"""The guard of the promise: total time with ``auto`` is at most 1.02 x eager + 1 s, however the tiers turn out.

The **credit** is what may be lost from here on, if everything that is spent turns out to be in vain::

    credit = 0.02 * eager * steps + 1 s + saved - spent + certain

``saved`` is what the steps done saved against eager, ``spent`` what preparations and trials took.

- With a known length, ``steps`` is the whole run. ``certain`` is half of what the tier in force will save in the steps
  that are left; it is proven and timed, and taken at the slow end of its interval.
- With a guessed length the run may end at any moment: ``steps`` are the steps done, ``certain`` is 0, and the promise
  holds at each single step.

A preparation starts only if its *worst* cost fits in the credit. One that goes by steps, with nothing to compile,
starts if its expected cost fits, since it is given up between two of its steps once it has cost the credit. That holds
for a known length only: an open run waits until it can afford the worst. So a single step may break the promise by what
it takes beyond the credit. A tier whose gain is known (timed in this run, or kept from earlier runs of the same
program) is no bet in a run of known length: its own saving, at the slow end of its step, counts as well. Each of the
runs that share what is compiled (the trials of a search, the folds of a cross-validation) keeps the promise by itself.

This is ski rental with a budget instead of a ratio. A preparation is not bought when renting has cost as much (which is
2-competitive, so up to 2 x eager), but when the loss of buying in vain fits in the 2% and the second. On a known
horizon the expected cost decides within that bound (`choose`); the bound itself never relies on a guess.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hotloop.decide.horizon import Horizon
    from hotloop.decide.options import Option, Standing

SLOWER_SHARE = 0.02
SLOWER_SECONDS = 1.0
"""The promise: a run is slower than eager by at most this share and these seconds."""

TRIAL_SHARE = 0.01
"""Share of the run in eager that trials may take, without the preparation and proof of the tiers that are chosen."""
SAVED_SHARE = 0.1
"""Share of what tiers saved, and of what is relied on to be saved, that trials may take besides: the promise is against
eager. One layout that was no faster had taken the 1% of a run of a minute, so that nothing was compiled for it at all,
though its captured step had halved the minute."""

CERTAIN = 0.5
"""Share of a tier's future saving that is relied on: it may become slower, or the run may be stopped early."""


def credit_seconds(standing: Standing, horizon: Horizon, eager: float, step_high: float) -> float:
    """Return the seconds that may be lost from here on without breaking the promise (module docstring).

    Args:
        standing: where the run stands.
        horizon: the steps that are left.
        eager: seconds of an eager step, at the low end.
        step_high: seconds of a step in the tier in force, at the high end.
    """
    steps = standing.step + (0 if horizon.guessed else horizon.steps)
    promise = SLOWER_SHARE * eager * steps + SLOWER_SECONDS
    spent = standing.trial_seconds + standing.prepare_seconds
    certain = _relied_on_seconds(standing, horizon, eager, step_high)
    return promise + standing.saved_seconds - spent + certain


def _relied_on_seconds(standing: Standing, horizon: Horizon, eager: float, step_high: float) -> float:
    """Return what is relied on to be saved by the tier in force; nothing in a run of guessed length."""
    if horizon.guessed or standing.tier == standing.base:
        return 0.0
    return certain_saving_seconds(eager, step_high, horizon.steps)


def certain_saving_seconds(eager: float, step: float, steps: int) -> float:
    """Return the part of a tier's saving that is relied on, over the ``steps`` that are left; its step is known."""
    return CERTAIN * max(0.0, eager - step) * steps


def known_saving_seconds(option: Option, horizon: Horizon, step: float) -> float:
    """Return what a tier of known gain saves at least in the steps that are left; 0 if gain or length is a guess."""
    if option.source == "prior" or horizon.guessed:
        return 0.0
    steps = horizon.steps - (option.background_seconds or 0.0) / step if step > 0 else 0.0
    saving = max(0.0, step - option.worst_step_seconds)
    return saving * max(0.0, steps)


def trial_room_seconds(standing: Standing, horizon: Horizon, eager: float, step_high: float) -> float:
    """Return the seconds that trials may still take; a guessed length is taken as it is, since the credit binds too."""
    whole = eager * (standing.step + horizon.steps)
    saved = max(0.0, standing.saved_seconds) + _relied_on_seconds(standing, horizon, eager, step_high)
    return TRIAL_SHARE * whole + SAVED_SHARE * saved - standing.trial_seconds
