"""Scripts that change something their step reads, each held against eager bit by bit: followed, noticed late, or wrong.

``python tests/step/guard/test_step_changed_campaign.py`` prints a table, and the scripts that are not replayed at once.
"""

from __future__ import annotations

import collections
import contextlib
import datetime as dt
import decimal
import inspect
import sys

import changed_aliases
import changed_loops
import changed_losses
import changed_models
import changed_nothing
import changed_places
import changed_tricks
import changed_unseen
import pytest
import torch
from changed_programs import outcome, script_of, scripts

from hotloop.cache import ambient

pytestmark = [
    pytest.mark.campaign,
    # torch says so of a hook on a module whose inputs require no gradients; the program has one on purpose.
    pytest.mark.filterwarnings("ignore:Full backward hook is firing:UserWarning"),
]

REPLAYED, DECLINED, LATE, WRONG = "right, replayed", "right, declined", "late", "wrong"
TRAINING = [changed_losses, changed_models, changed_loops, changed_places]


def tricks(module):
    own = {name: one for name, one in vars(module).items() if getattr(one, "__module__", "") == module.__name__}
    return {
        name: script_of(one)
        for name, one in own.items()
        if inspect.isfunction(one) and not inspect.signature(one).parameters
    }


GROUPS = {
    "training code": {name: one for module in TRAINING for name, one in scripts(module).items()},
    "training code that changes nothing the step reads": scripts(changed_nothing),
    "tricks": tricks(changed_tricks) | tricks(changed_aliases),
    "reads that nobody saw": tricks(changed_unseen),
}
ALL = {name: one for group in GROUPS.values() for name, one in group.items()}


@pytest.fixture(autouse=True)
def _as_it_was():
    before = ambient.process_settings()
    with decimal.localcontext(), contextlib.chdir("."):
        yield
    ambient.apply_process_settings(before)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.some_of(4)
def test_what_comes_of_a_change(name):
    found = outcome(ALL[name])
    assert found.kind != WRONG, found
    nothing = name in GROUPS["training code that changes nothing the step reads"]
    assert found.matters != nothing, "the change makes no difference in eager"
    assert not nothing or (found.kind == REPLAYED and not found.drops), found


def main():
    settings = ambient.process_settings()
    print(f"torch {torch.__version__}, Python {sys.version.split()[0]}, {dt.datetime.now(dt.UTC):%Y-%m-%d}\n")
    print(f"| | programs | {REPLAYED} | {DECLINED} | {LATE} | {WRONG} |\n|---|---|---|---|---|---|")
    for title, group in GROUPS.items():
        kinds = collections.Counter()
        for name, script in group.items():
            found = outcome(script)
            kinds[found.kind] += 1
            if found.kind != REPLAYED:
                print(f"{name}: {found}", file=sys.stderr)
            ambient.apply_process_settings(settings)
        print(f"| {title} | {len(group)} | {kinds[REPLAYED]} | {kinds[DECLINED]} | {kinds[LATE]} | {kinds[WRONG]} |")


if __name__ == "__main__":
    main()
