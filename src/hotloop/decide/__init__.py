"""Deciding: break-even arithmetic over tiers, pure and without torch.

`decide` takes where the run stands (`Standing`) and the tiers on offer (`Option`), and returns a `Decision`. `expect`
makes the option of a tier that was not measured yet. `Trial` finds the faster of two tiers from alternating steps.
"""

from __future__ import annotations

from hotloop.decide.break_even import EAGER_STEPS, decide
from hotloop.decide.guard import certain_saving_seconds
from hotloop.decide.horizon import remaining
from hotloop.decide.options import Decision, Option, Standing
from hotloop.decide.priors import Facts, expect
from hotloop.decide.speeds import Speeds
from hotloop.decide.trial import Trial, Turn, median_interval

__all__ = [
    "EAGER_STEPS",
    "Decision",
    "Facts",
    "Option",
    "Speeds",
    "Standing",
    "Trial",
    "Turn",
    "certain_saving_seconds",
    "decide",
    "expect",
    "median_interval",
    "remaining",
]
