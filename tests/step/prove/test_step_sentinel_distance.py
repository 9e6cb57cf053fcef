"""When the sentinel of several processes checks: the distance is voted on, as a whole number of 64 bits."""

import time
import types

import pytest

from hotloop.step.prove.agreed_sentinel import AgreedSentinel


def sentinel(share):
    context = types.SimpleNamespace(
        reports=types.SimpleNamespace(seconds_of=lambda _: 1e-3),
        progress=types.SimpleNamespace(tier=types.SimpleNamespace(name="eager+graph"), steps=0),
        total_steps=None,
    )
    step = types.SimpleNamespace(context=context, name="train_step")
    return AgreedSentinel(step, types.SimpleNamespace(seconds=1.0, replay_seconds=1e-3), share)


@pytest.mark.parametrize("share", [1e-22, 1e-300])
def test_the_smallest_share_asks_for_a_distance_that_a_vote_can_hold(share):
    one = sentinel(share)
    one.step_begins()
    time.sleep(0.002)
    assert 0 < one.step_ends(checked=True) < 2**62


def test_a_usual_share_follows_from_what_a_check_costs():
    one = sentinel(0.01)
    assert one.step_ends(checked=False) == 3 * 1.0 / (0.01 * 1e-3)
