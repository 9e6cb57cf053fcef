"""Scripts that change something their step reads, each held against eager bit by bit: replayed, declined or wrong.

``python tests/step/guard/test_step_changed_campaign.py`` prints the table of docs/design/read-set.md, and what is not replayed.
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

REPLAYED, DECLINED, WRONG = "right, replayed", "right, declined", "wrong"
TRAINING = [changed_losses, changed_models, changed_loops, changed_places]
OTHERWISE = {
    # The step itself changes Python state.
    "features_kept_by_a_hook": DECLINED,
    "weights_pruned": DECLINED,
    "cached_property_forgotten": DECLINED,
    "cache_cleared": DECLINED,
    "optimizer_made_anew": DECLINED,
    # All attributes count where code makes their names; a table counts with all its items.
    "method_chosen_by_name": DECLINED,
    "progress_in_a_config": DECLINED,
    # What cannot be looked at, or what is asked of Python itself.
    "objects_in_an_array": DECLINED,
    "subclass_of_tensor": DECLINED,
    "subclasses_counted": DECLINED,
    "objects_that_gc_knows": DECLINED,
    "number_of_threads": DECLINED,
    "folder_at_hand": DECLINED,
    # Not noticed: docs/design/read-set.md lists why.
    "bases_of_a_class_assigned": WRONG,
    "kind_of_an_abstract_class": WRONG,
    "name_of_a_class": WRONG,
    "single_dispatch": WRONG,
    "signature_of_a_function": WRONG,
    "text_of_an_exception": WRONG,
    "decimal_precision": WRONG,
    "settings_of_torch": WRONG,
    "element_of_xml": WRONG,
    "built_in_replaced": WRONG,
    "object_from_c_alone": WRONG,
}


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
    assert found.kind == OTHERWISE.get(name, REPLAYED), found
    nothing = name in GROUPS["training code that changes nothing the step reads"]
    assert found.matters != nothing, "the change makes no difference in eager"
    assert not nothing or not found.drops, found


def main():
    settings = ambient.process_settings()
    print(f"torch {torch.__version__}, Python {sys.version.split()[0]}, {dt.datetime.now(dt.UTC):%Y-%m-%d}\n")
    print(f"| | programs | {REPLAYED} | {DECLINED} | {WRONG} |\n|---|---|---|---|---|")
    for title, group in GROUPS.items():
        kinds = collections.Counter()
        for name, script in group.items():
            kinds[found := outcome(script).kind] += 1
            if found != REPLAYED:
                print(f"{name}: {found}", file=sys.stderr)
            ambient.apply_process_settings(settings)
        print(f"| {title} | {len(group)} | {kinds[REPLAYED]} | {kinds[DECLINED]} | {kinds[WRONG]} |")


if __name__ == "__main__":
    main()
