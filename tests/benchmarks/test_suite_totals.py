"""Totals: computed from their parts, taken from real runs where there are any, and never from what did not run."""

import pytest
from suite_rows import auto, cold, ways

from benchmarks.suite import totals


def test_a_total_is_cold_seconds_and_the_steps_left():
    row = ways("tiny", "full", cold=5.0, ms=10.0, ratio=2.0, steps=8)
    assert totals.total([row], row, 1_008) == {"seconds": pytest.approx(5.0 + 1_000 * 0.010), "computed": True}


def test_a_total_follows_the_speed_of_eager_beside_it():
    row = ways("tiny", "full", cold=5.0, ms=10.0, ratio=2.0, steps=8)
    assert totals.total([row], row, 1_008, eager_ms=40.0)["seconds"] == pytest.approx(5.0 + 1_000 * 0.020)


def test_a_real_run_comes_before_what_is_computed():
    row = ways("tiny", "full", real={"1000": 12.5})
    assert totals.total([row], row, 1_000) == {"seconds": 12.5, "computed": False}
    assert totals.total([row], row, 1_000, real=False)["computed"]


def test_fewer_steps_than_it_takes_to_prepare_have_no_total():
    row = ways("tiny", "full", steps=60)
    assert totals.total([row], row, 50) is None


def test_several_cold_runs_count_by_their_median():
    row = ways("tiny", "full", cold=5.0, steps=3)
    assert totals.prepared([row, cold("tiny", "full", 7.0), cold("xlmr", "full", 99.0)], row) == (3, 6.0)


def test_sizes_that_vary_go_on_as_the_last_blocks_did():
    row = ways("xlmr-lengths", "full", varying=True, real={"50": 9.0, "1000": 40.0}, tail_ms=20.0)
    assert totals.total([row], row, 200) is None
    assert totals.total([row], row, 2_000) == {"seconds": pytest.approx(60.0), "computed": True}


@pytest.mark.parametrize("why", [{"error": "x"}, {"declined": "x"}, {"emulated": True}, {"skipped": "x"}])
def test_what_did_not_run_as_asked_is_no_fixed_way(why):
    rows = [ways("tiny", "eager"), ways("tiny", "full", cold=0.1, ms=1.0, ratio=10.0, **why)]
    assert list(totals.fixed(rows, "tiny")) == ["eager"]
    assert totals.best_fixed(rows, "tiny", 1_000)["way"] == "eager"


def test_the_best_fixed_way_depends_on_the_steps():
    rows = [ways("tiny", "eager", cold=1.0), ways("tiny", "full", cold=10.0, ms=2.0, ratio=5.0)]
    assert [totals.best_fixed(rows, "tiny", steps)["way"] for steps in (50, 10_000)] == ["eager", "full"]


def test_runs_of_auto_tell_of_the_steps_that_they_were_told():
    rows = [
        auto("tiny", 200, {50: 1.0, 200: 2.0}),
        auto("tiny", 1_000, {50: 1.5, 200: 3.0, 1_000: 9.0}),
        auto("tiny", 10_000, {1_000: 10.0, 1_200: 11.0}, settled=True, ms=2.0),
        auto("tiny", 10_000, {1_000: 10.0, 1_200: 11.0}, settled=False, number=2),
    ]
    seconds = {n: [run["seconds"] for run in totals.auto_runs(rows, "tiny", n)] for n in totals.STEPS}
    assert seconds == {50: [1.0], 200: [2.0], 1_000: [9.0], 10_000: [11.0 + 8_800 * 0.002], 100_000: [208.6]}
    assert [totals.auto_runs(rows, "tiny", n)[0]["computed"] for n in (200, 10_000)] == [False, True]
    rows.append(auto("tiny", 100_000, {1_000: 10.0, 2_000: 12.0}, settled=True, ms=1.0))
    assert [one["seconds"] for one in totals.auto_runs(rows, "tiny", 100_000)] == [12.0 + 98_000 * 0.001]
    assert [one["seconds"] for one in totals.auto_runs(rows, "tiny", 10_000)] == seconds[10_000]


@pytest.mark.parametrize("way", ["eager+graph", "reduce-overhead"])
def test_beside_a_slow_host_a_captured_step_takes_its_own_time(way):
    captured, code = ways("tiny", way, ms=5.0, ratio=2.0), ways("tiny", "full", ms=5.0, ratio=2.0)
    apart = [totals.total([row], row, 10_000, eager_ms=20.0)["seconds"] for row in (captured, code)]
    own = [totals.total([row], row, 10_000)["seconds"] for row in (captured, code)]
    assert apart[0] == own[0]
    assert apart[1] > 1.9 * own[1]


def test_computed_totals_are_checked_by_real_runs():
    row = ways("tiny", "full", cold=2.0, ms=10.0, ratio=1.0, real={"50": 2.5, "1000": 12.0})
    (check,) = totals.checks([row])
    assert check["steps"] == 1_000
    assert check["real_over_computed"] == pytest.approx(12.0 / (2.0 + 997 * 0.010))
