"""Optuna's samplers and pruners by the names of the settings."""

from __future__ import annotations

import time
import warnings
import zlib
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from hotloop.train.optional import require

if TYPE_CHECKING:
    import optuna

    from hotloop.train.settings import Settings


_SPACES = ("_search_space", "_intersection_search_space")
"""Where a sampler keeps what all trials so far have in common."""


def sampler(settings: Settings, number: int, known: dict[str, Any] | None = None) -> optuna.samplers.BaseSampler:
    """Make the sampler for one trial: made anew and seeded by the trial's number, it draws alike in any worker.

    Args:
        settings: the search's.
        number: the trial's.
        known: what earlier samplers of this study found out about all its trials, and this one goes on with: each
            would look at every trial again, a quarter of the time of drawing after 2,000 of them.
    """
    made = _made(settings, number)
    if known is not None:
        for place in _SPACES:
            if hasattr(made, place):
                setattr(made, place, known.setdefault(place, getattr(made, place)))
    return made


def _made(settings: Settings, number: int) -> optuna.samplers.BaseSampler:
    hpo = settings.hpo
    samplers: Any = require("optuna", "hotloop hpo", "search").samplers
    seed = zlib.crc32(f"{settings.run.seed}/{number}".encode())
    if hpo.sampler in ("random", "grid"):  # a trial of a grid has its values before a sampler is asked
        made = samplers.RandomSampler(seed=seed)
    elif hpo.sampler == "qmc":
        # One sequence for all trials: each takes the next of its points, by a count in the storage.
        made = samplers.QMCSampler(seed=settings.run.seed, scramble=True, warn_independent_sampling=False)
    else:
        tpe = samplers.TPESampler(seed=seed, n_startup_trials=hpo.startup_trials, constant_liar=hpo.at_once > 1)
        made = tpe
        if hpo.sampler == "gp":
            made = samplers.GPSampler(
                seed=seed, n_startup_trials=hpo.startup_trials, independent_sampler=tpe, warn_independent_sampling=False
            )
        elif hpo.sampler == "cmaes":
            require("cmaes", "hpo.sampler=cmaes", "search")
            made = samplers.CmaEsSampler(seed=seed, independent_sampler=tpe, warn_independent_sampling=False)
    chosen: optuna.samplers.BaseSampler = made
    return chosen


def pruner(settings: Settings, reports: int) -> optuna.pruners.BasePruner:
    """Make the pruner.

    Args:
        settings: the search's.
        reports: how often a trial that runs to its end reports.
    """
    hpo = settings.hpo
    pruners: Any = require("optuna", "hotloop hpo", "search").pruners
    made = {
        "none": pruners.NopPruner,
        "median": lambda: _seldom_reading(pruners.MedianPruner(n_startup_trials=hpo.startup_trials)),
        "successive_halving": lambda: pruners.SuccessiveHalvingPruner(
            min_resource=1, reduction_factor=hpo.reduction_factor
        ),
        "hyperband": lambda: pruners.HyperbandPruner(
            min_resource=1, max_resource=max(1, reports), reduction_factor=hpo.reduction_factor
        ),
    }[hpo.pruner]()
    chosen: optuna.pruners.BasePruner = made
    return chosen


def _seldom_reading(pruner: Any) -> Any:
    """Let a pruner read the study's complete trials once a second at most in a trial: it takes 4 ms each time."""
    judge, known = pruner.prune, SimpleNamespace(number=None, until=0.0, trials=[])

    def prune(study: Any, trial: Any) -> bool:
        if trial.number != known.number or time.monotonic() > known.until:
            complete = [one for one in study.get_trials(deepcopy=False) if one.state.name == "COMPLETE"]
            known.number, known.until, known.trials = trial.number, time.monotonic() + 1.0, complete
        seen = SimpleNamespace(direction=study.direction, get_trials=lambda **_: known.trials)
        return bool(judge(seen, trial))

    pruner.prune = prune
    return pruner


def quiet() -> None:
    """Leave to us what is said, and do not warn of parts of Optuna that are called experimental."""
    optuna_module: Any = require("optuna", "hotloop hpo", "search")
    optuna_module.logging.set_verbosity(optuna_module.logging.ERROR)
    warnings.filterwarnings("ignore", category=optuna_module.exceptions.ExperimentalWarning)
    # Heartbeats beside ask and tell: `work` gives them itself.
    warnings.filterwarnings("ignore", message="Heartbeat of storage is supposed to be used", category=UserWarning)
