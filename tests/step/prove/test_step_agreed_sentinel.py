"""When recordings are proven again in several processes: all have to come to the same call."""

from types import SimpleNamespace

import pytest

from hotloop.step.prove import agreed_sentinel
from hotloop.step.prove.agreed_sentinel import FIRST, LEAST, AgreedSentinel
from hotloop.step.tiers import Tier


def made(*, usual=0.01, proof=0.1, total=None, calls=7, share=0.01):
    progress = SimpleNamespace(tier=Tier("eager", graph=True), steps=100, in_trial=False)
    context = SimpleNamespace(
        progress=progress,
        reports=SimpleNamespace(seconds_of=lambda _: usual),
        peers=SimpleNamespace(calls=calls),
        total_steps=total,
    )
    graphs = SimpleNamespace(seconds=proof, replay_seconds=None)
    return AgreedSentinel(SimpleNamespace(context=context, name="step"), graphs, share), progress


def replays_until_due(sentinel):
    return next(number for number in range(1, 10_000) if sentinel.due())


def test_the_share_pays_for_three_steps_of_a_proof():
    assert made()[0].step_ends(checked=False) == pytest.approx(3 * 0.1 / (0.01 * 0.01), abs=1)
    assert made(usual=1.0, proof=0.001)[0].step_ends(checked=False) == LEAST


def test_the_first_check_of_a_run_that_pays_for_it_later_comes_early():
    assert made(total=10_000)[0].step_ends(checked=False) == FIRST
    assert made(total=3_000)[0].step_ends(checked=False) > 2_900


def test_the_same_number_of_the_call_draws_the_same_distance_in_all_processes():
    distances = set()
    for calls in range(40):
        ours, theirs = made(calls=calls)[0], made(calls=calls, usual=0.5, proof=9.0)[0]
        for one in (ours, theirs):
            one.proven(400, checked=False)
        distance = replays_until_due(ours)
        assert distance == replays_until_due(theirs)
        assert 200 <= distance <= 600
        distances.add(distance)
    assert len(distances) > 20


def test_turns_of_a_trial_are_not_counted_and_nothing_is_due_before_a_proof():
    sentinel, progress = made()
    assert not any(sentinel.due() for _ in range(1000))
    sentinel.proven(10, checked=False)
    progress.in_trial = True
    assert not any(sentinel.due() for _ in range(1000))
    progress.in_trial = False
    assert replays_until_due(sentinel) <= 15


def test_another_kind_that_is_proven_does_not_put_a_check_off():
    sentinel, _ = made()
    sentinel.proven(10, checked=False)
    for _ in range(4):
        assert not sentinel.due()
    sentinel.proven(1000, checked=False)
    assert replays_until_due(sentinel) <= 11


def test_a_check_whose_calls_do_not_come_any_more_gives_way_to_another():
    sentinel, _ = made()
    sentinel.proven(10, checked=False)
    replays_until_due(sentinel)
    assert replays_until_due(sentinel) == agreed_sentinel._ABANDONED


def test_what_a_check_has_cost_counts_for_the_next(monkeypatch):
    sentinel, _ = made(total=10_000)
    sentinel.proven(100, checked=False)
    now = iter([0.0, 1.01, 5.0, 6.01])
    monkeypatch.setattr(agreed_sentinel.time, "perf_counter", lambda: next(now))
    for _ in range(2):
        sentinel.step_begins()
        distance = sentinel.step_ends(checked=True)
    assert distance == pytest.approx(2.0 / (0.01 * 0.01), abs=2)
    sentinel.proven(distance, checked=True)
    assert (sentinel.status.checks, sentinel.status.every) == (3, distance)
    assert sentinel.status.seconds == pytest.approx(2.0)
