"""The arithmetic of a bench on made-up figures: differences, noise, where ways overtake each other, the sentence."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotloop.prove.bench.courses import Course, Stretch, envelope
from hotloop.prove.bench.rounds import block_steps, groups
from hotloop.prove.bench.verdict import Ratio, Sample, Steady, conclude, noise_of
from hotloop.prove.bench.way import in_turns

TINY = {"eager": (2.1, 16.75), "default": (20.5, 13.21), "eager+graph": (2.2, 1.85), "full+graph": (23.0, 1.70)}
"""Cold seconds and ms of a step, about as an H200 gave them for a small transformer."""


def samples(ms, eager_ms, jitter=0.002, rounds=12, seed=0):
    """Return blocks whose times jitter, on a machine that is half as fast in some rounds."""
    draw = random.Random(seed)
    found = []
    for turn in range(rounds):
        slow = 2.0 if turn % 5 == 4 else 1.0
        found.append(Sample(*(slow * one / 1e3 * (1 + draw.uniform(-jitter, jitter)) for one in (ms, eager_ms))))
    return found


def times_of(figures, **settings):
    base = figures["eager"][1]
    return {way: samples(ms, base, seed=n, **settings) for n, (way, (_, ms)) in enumerate(figures.items())}


def verdict(figures, total_steps=None, noise=0.01, **settings):
    courses = [Course(way, cold, ms / 1e3) for way, (cold, ms) in figures.items()]
    return conclude(courses, times_of(figures, **settings), noise, total_steps)


def test_a_ratio_holds_where_the_machine_slows_down_for_both():
    times = times_of(TINY)
    found = Ratio.between(times["eager"], times["eager+graph"])
    assert found.median == pytest.approx(16.75 / 1.85, rel=0.005)
    assert found.low <= found.median <= found.high < 9.2
    assert found.difference(0.01) == "faster"
    assert Ratio.between(times["eager+graph"], times["eager"]).difference(0.01) == "slower"


def test_a_difference_smaller_than_the_noise_is_none():
    times = times_of({"eager": (1, 10.0), "near": (1, 9.9)}, jitter=0.0005)
    found = Ratio.between(times["eager"], times["near"])
    assert found.low > 1
    assert found.difference(0.005) == "faster"
    assert found.difference(0.02) == "none"
    assert found.difference(math.inf) == "none"


def test_noise_is_how_far_eager_is_from_itself():
    assert noise_of(samples(10, 10, jitter=0)) == 0
    assert 0.001 < noise_of(samples(10, 10, jitter=0.05)) < 0.1
    assert noise_of(samples(9, 10, jitter=0)) == pytest.approx(1 / 0.9 - 1), "the farther end, either way"
    assert math.isinf(noise_of(samples(10, 10, rounds=5)))


def test_too_few_pairs_allow_no_statement():
    times = times_of(TINY, rounds=5)
    assert Ratio.between(times["eager"], times["eager+graph"]).difference(0.0) == "none"
    assert Steady.of(times, "eager+graph", 0.0).difference == "none"


def test_missing_rounds_are_left_out_of_pairs():
    whole = samples(5, 10, jitter=0)
    holes = [None if n % 3 == 0 else one for n, one in enumerate(whole)]
    assert Ratio.between(samples(10, 10, jitter=0), holes).median == pytest.approx(2)


def test_the_sentence_over_known_steps():
    found = verdict(TINY, 100_000)
    assert [one.way for one in found.stretches] == ["eager", "eager+graph", "full+graph"]
    assert found.stretches[1].first == 7, "0.1 s more to get ready, 14.9 ms less a step"
    assert found.stretches[2].first == 138_667
    assert found.sentence == (
        "At 100,000 steps: eager+graph, 8.96x in all; below 7 steps: eager; from 138,667 steps on: full+graph."
    ).replace("x in", "\N{MULTIPLICATION SIGN} in")
    assert found.best(6) == "eager"
    assert found.best(7) == found.best(138_666) == "eager+graph"
    assert found.best(10**7) == "full+graph"


def test_the_sentence_over_any_number_of_steps():
    assert verdict(TINY).sentence.startswith("From 138,667 steps on: full+graph (9.85")
    only = verdict({"eager": (2.0, 10.0), "eager+graph": (1.0, 5.0)})
    assert only.sentence == "At any length of the run: eager+graph (2\N{MULTIPLICATION SIGN} a step)."


def test_two_ways_that_differ_by_noise_do_not_overtake_each_other():
    figures = {"eager": (1, 16.0), "eager+graph": (2, 4.0), "full+graph": (30, 3.99)}
    assert [one.way for one in verdict(figures, noise=0.01).stretches] == ["eager", "eager+graph"]


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ((20.0, 15.0), "; full comes nearest, and its step takes 1.50 times eager's."),
        ((20.0, 10.0), "; full comes nearest, and 1.00x a step is no difference (noise: 1%)."),
    ],
)
def test_stay_eager_is_said_with_its_figures(other, said):
    found = verdict({"eager": (1.0, 10.0), "full": other}, 5_000)
    assert found.sentence == "At 5,000 steps: eager" + said.replace("0x", "0\N{MULTIPLICATION SIGN}")


def test_eager_that_is_overtaken_later_is_said_as_such():
    found = verdict({"eager": (1.0, 10.0), "full": (101.0, 8.0)}, 5_000)
    assert found.sentence == "At 5,000 steps: eager; from 50,001 steps on: full."


def test_eager_alone():
    assert verdict({"eager": (1.0, 10.0)}).sentence == "At any length of the run: eager, since no other way ran here."


@given(
    st.lists(st.tuples(st.floats(0, 100), st.floats(0.001, 1)), min_size=1, max_size=6, unique_by=lambda pair: pair[1]),
    st.integers(0, 10**6),
)
def test_the_envelope_is_the_least_total_of_the_ways_that_are_faster(pairs, steps):
    courses = [Course(str(n), *pair) for n, pair in enumerate(pairs)]
    known = {one.way: one for one in courses}
    found = envelope(courses, lambda a, b: known[a].step_seconds < known[b].step_seconds)
    assert found[0].first == 0
    assert [one.first for one in found] == sorted({one.first for one in found})
    way = [one.way for one in found if one.first <= steps][-1]
    rivals = [one for one in courses if one.step_seconds <= courses[0].step_seconds]
    least = min(one.seconds(steps) for one in rivals)
    assert known[way].seconds(steps) <= least * (1 + 1e-9) + 1e-9


def test_nothing_overtakes_that_is_not_known_to_be_faster():
    assert envelope([Course("a", 9, 9), Course("b", 1, 1)], lambda a, b: False) == [Stretch(0, "a")]


@pytest.mark.parametrize("number", [1, 2, 3, 6])
def test_each_way_comes_in_each_place(number):
    orders = list(in_turns(number, 2 * number))
    assert all(sorted(order) == list(range(number)) for order in orders)
    assert {order[0] for order in orders} == {order[-1] for order in orders} == set(range(number))
    assert list(in_turns(2, 2)) == [[0, 1], [1, 0]]


def test_blocks_are_long_enough_for_the_fastest_and_short_enough_for_the_slowest():
    assert block_steps(0.015, 0.015) == 10
    assert block_steps(0.00185, 0.01675) == 28
    assert block_steps(3.0, 4.0) == 1
    assert block_steps(1e-7, 1e-6) == 400


def test_ways_run_together_as_far_as_memory_holds():
    peaks = {"eager": 10.0, "a": 10.0, "b": 15.0, "c": 20.0}
    assert groups(peaks, 100.0) == [["eager", "a", "b", "c"]]
    assert groups(peaks, 36.0) == [["eager", "a", "b"], ["eager", "c"]]
    assert groups(peaks, 30.0) == [["eager", "a"], ["eager", "b"], ["eager", "c"]]
    assert groups(peaks, 29.0) is None, "not even eager and c"
