"""`auto` in several processes: all take the same decisions from the same numbers, and equal eager."""

import functools
import json
import os
import re

import pytest
import rank_processes

pytestmark = pytest.mark.campaign  # several processes, some of which fail

WAY = "e" * 11 + "g" * 5 + "eggeegg"
"""Eleven calls that reduce, then the way to a proven recording, then three pairs of turns; their times come two late."""


processes = functools.partial(rank_processes.processes, "auto_program.py")
told_by = functools.partial(rank_processes.told_by, "auto_program.py")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """What two processes tell of all that they live through: to start them takes longer than to train."""
    scenarios = (
        "plain", "fused", "views", "slower", "slowest", "short", "host read", "unlike", "no memory", "fails to capture",
        "fails in a proof", "fails in a trial", "fails in force", "too dear", "decides wrongly",
        "decides wrongly in force", "accumulated", "four",
        "flaky", "short batches", "varying shapes", "drops", "slowed", "two steps", "unused", "late at first", "late",
        "uneven", "without a wrapper", "resumed", "checks", "checks of two kinds", "goes wrong", "goes wrong by name",
        "caught in a check", "no memory for a check",
    )  # fmt: skip
    return told_by(tmp_path_factory.mktemp("auto"), *scenarios)


def both(trained, name):
    ranks = [told[name] for told in trained]
    assert all(one["same"] for one in ranks), ranks
    return ranks


@pytest.mark.parametrize("name", ["plain", "fused", "views"])
@pytest.mark.some_of(3)
def test_all_processes_reach_the_captured_step_in_the_same_call(trained, name):
    first, second = both(trained, name)
    assert [one["tier"] for one in (first, second)] == ["eager+graph"] * 2
    assert first["graph"] == second["graph"] == WAY + "g" * (80 - len(WAY))
    assert first["log"] == second["log"]


def test_the_values_are_eagers_bit_by_bit_where_eager_repeats_itself(trained):
    for one in both(trained, "fused"):
        assert one["equal"]


def test_the_slowest_process_keeps_all_of_them_eager(trained):
    for one in both(trained, "slower"):
        assert one["tier"] == "eager"
        assert one["graph"] == WAY + "e" * (80 - len(WAY))
        assert any("eager+graph against eager: no faster: 2.000 of the time" in line for line in one["decided"])


def test_the_greatest_times_of_both_tiers_are_compared(trained):
    first, second = both(trained, "slowest")
    assert [one["tier"] for one in (first, second)] == ["eager+graph"] * 2
    assert first["decided"] == second["decided"]
    assert "eager+graph: 12.0 ms a step against 20.0 ms in eager, timed side by side" in first["decided"]


def test_a_resumed_run_decides_alike_where_the_processes_count_other_steps(trained):
    first, second = both(trained, "resumed")
    assert first["graph"] == second["graph"] == WAY + "g" * (60 - len(WAY))
    assert first["decided"] == second["decided"]
    assert "of the 999,492 steps left" in first["decided"][0]


def test_the_shortest_run_that_a_process_was_told_of_counts(trained):
    first, second = both(trained, "short")
    assert first["decided"] == second["decided"]
    assert "does not pay within the 52 steps left" in first["decided"][0]


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("host read", "a value is read on the host"),
        ("unlike", "a captured step does not agree with the step itself: parameter module.first.weight"),
        ("no memory", "OutOfMemoryError: planted"),
        ("fails to capture", "planted: no capture"),
        ("fails in a proof", "planted: no replay"),
        ("fails in a trial", "planted: no replay"),
        ("fails in force", "planted: no replay"),
        ("too dear", "and no more may be lost"),
    ],
)
def test_what_one_process_finds_out_is_left_by_all_with_its_reason(trained, name, why):
    first, second = both(trained, name)
    assert [one["tier"] for one in (first, second)] == ["eager"] * 2
    assert first["graph"][-40:].count("g") <= 6
    assert first["graph"].rstrip("e") == second["graph"].rstrip("e") or name in {"no memory", "fails in force"}
    assert re.search(
        r"(another process cannot capture such a call|it failed in another process) \(rank 1: ", one_line(first)
    )
    assert why in one_line(first)
    assert why in one_line(second)


def one_line(told):
    """The status without the borders of its table."""
    return " ".join(told["status"].replace("│", " ").split())


@pytest.mark.parametrize("name", ["decides wrongly", "decides wrongly in force"])
def test_a_process_that_cannot_decide_any_more_holds_nobody_up(trained, name):
    first, second = both(trained, name)
    assert [one["tier"] for one in (first, second)] == ["eager"] * 2
    assert "rank 1 has closed its loop" in one_line(first)


@pytest.mark.parametrize("name", ["accumulated", "four"])
def test_calls_that_reduce_and_calls_that_do_not_are_both_captured(trained, name):
    first, second = both(trained, name)
    assert first["graph"] == second["graph"]
    assert first["tier"] == "eager+graph"
    assert first["graph"].endswith("g" * 60)


def test_an_exception_that_one_process_catches_shifts_no_decision(trained):
    for one in both(trained, "flaky"):
        assert one["tiers"] == ["eager+graph"]


def test_a_short_batch_in_one_process_runs_eager_in_all(trained):
    first, second = both(trained, "short batches")
    assert first["tier"] == "eager+graph"
    assert first["graph"] == second["graph"]
    assert first["graph"][-30:].count("e") >= 3


def test_a_recording_that_one_process_drops_is_made_anew_by_all(trained):
    first, second = both(trained, "drops")
    assert first["log"] == second["log"]
    assert (first["tier"], first["log"].count("c")) == ("eager+graph", 2)


def test_shapes_that_never_come_back_are_given_up_by_all(trained):
    for one in both(trained, "varying shapes"):
        assert one["tier"] == "eager"
        assert "eager+graph │ declined" in one["status"]


def test_a_tier_that_becomes_slow_in_one_process_is_timed_anew_and_left_by_all(trained):
    first, second = both(trained, "slowed")
    assert first["graph"] == second["graph"]
    assert first["graph"][:60].endswith("g" * 30)
    assert first["graph"].endswith("e" * 30)
    assert any("was 5.00 ms: timed side by side to see why" in line for line in first["decided"])


def test_a_second_step_that_one_process_cannot_capture_leaves_all_eager(trained):
    for one in both(trained, "two steps"):
        assert one["tier"] == "eager"
        assert "a value is read on the host" in one_line(one)


def test_what_cannot_be_captured_is_said_at_once_with_a_remedy(trained):
    for one in both(trained, "unused"):
        assert "g" not in one["graph"]
        assert "make it with static_graph=True" in " ".join(one["decided"])
    told = trained[0]["without a wrapper"]
    assert "Loop(DistributedDataParallel(model), optimizer)" in told["no wrapper"]
    assert "nothing can be captured on cpu: name a compiled tier, run='full'. Steps run eager" in told["no engine"]


@pytest.mark.parametrize("name", ["late at first", "late"])
def test_a_process_that_is_late_for_a_vote_leaves_all_eager(trained, name):
    for one in both(trained, name):
        assert one["graph"].endswith("e" * 25)
        assert "waited 8 s for another process" in one["status"] + " ".join(one["decided"])


def test_a_process_that_is_out_of_batches_holds_nobody_up(trained):
    for one in both(trained, "uneven"):
        assert one["tier"] == "eager"
        assert "within Join([...])" in one["status"]
        assert "waited" not in one["status"]


@pytest.mark.parametrize("name", ["checks", "checks of two kinds"])
def test_all_processes_check_the_same_steps(trained, name):
    """What one of them looks at all look at."""
    first, second = both(trained, name)
    assert first["log"] == second["log"]
    assert first["tier"] == "eager+graph"
    later = first["log"][50:] if name == "checks of two kinds" else first["log"][len(WAY) :]
    assert later.count("p") >= 6
    assert "were also run eagerly and agreed, one in" in one_line(first)


@pytest.mark.parametrize("name", ["goes wrong", "goes wrong by name"])
def test_a_recording_that_goes_wrong_in_one_process_is_left_by_all(trained, name):
    first, second = (told[name] for told in trained)
    assert first["graph"] == second["graph"]
    assert "ppp" in first["log"][16:]  # a check before it went wrong
    assert first["graph"].endswith("e" * 40)
    for one in (first, second):
        assert "sentinel: step did not agree with eager" in one_line(one)
        assert "a captured step does not agree with the step itself: parameter module.second.bias" in one_line(one)
    assert "rank 1" in one_line(first)


def test_an_exception_that_one_process_catches_in_a_check_leaves_the_tier_in_force(trained):
    first, second = both(trained, "caught in a check")
    assert first["log"] == second["log"]
    assert [one["graph"][-30:] for one in (first, second)] == ["g" * 30] * 2


def test_no_memory_for_a_check_in_one_process_leaves_all_eager(trained):
    first, second = both(trained, "no memory for a check")
    assert first["graph"][-30:] == second["graph"][-30:] == "e" * 30
    assert "OutOfMemoryError: planted" in one_line(first)


@pytest.mark.parametrize(
    "name",
    [
        "ends in force",
        *(
            pytest.param(one, marks=pytest.mark.long)
            for one in ("ends on the way", "ends in a trial", "ends in a check")
        ),
    ],
)
def test_an_end_of_one_process_ends_the_others(tmp_path, name):
    first, second = processes(tmp_path, name)
    assert second[0] == 9
    raised = json.loads(first[1].strip().splitlines()[-1])[name]["raised"]
    assert raised.startswith("StepLostError: another process has ended")
    assert "start again from the last checkpoint" in raised


@pytest.mark.long
def test_a_process_that_hangs_ends_the_others_once_its_collective_is_late(tmp_path):
    """Eight seconds of a vote, then thirty of the group's timeout; the one that hangs does so for sixty."""
    first, second = processes(tmp_path, "hangs")
    assert second[0] == 9
    if os.environ.get("PEERS_BACKEND") == "nccl" and first[0]:  # NCCL's own watchdog ends a process
        assert "Watchdog caught collective operation timeout" in first[2], (first[0], first[2][-3000:])
        return
    told = json.loads(first[1].strip().splitlines()[-1])["hangs"]
    assert told["raised"]
    assert not told["seconds"] > 60


@pytest.mark.long
def test_four_processes_decide_together(tmp_path):
    names = {"plain": "eager+graph", "slower": "eager", "host read": "eager", "accumulated": "eager+graph"}
    ranks = told_by(tmp_path, *names, size=4)
    for told in ranks:
        assert all(one["same"] for one in told.values()), told
        assert {name: one["tier"] for name, one in told.items()} == names
    assert len({tuple(one["graph"] for one in told.values()) for told in ranks}) == 1


def test_a_single_process_of_a_group_decides_alone(tmp_path):
    (told,) = told_by(tmp_path, "plain", size=1)
    assert told["plain"]["same"]
    assert told["plain"]["tier"] == "eager+graph"
