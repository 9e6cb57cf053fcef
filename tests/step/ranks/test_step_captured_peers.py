"""Steps that several processes capture together: in force in all of them or in none, and equal to eager."""

import functools
import json

import pytest
import rank_processes

pytestmark = pytest.mark.campaign  # several processes, some of which fail

STEPS, WAY = 80, 16
"""Steps of a run, and those on the way: eleven that reduce, an audit, a warm-up and three proofs."""


processes = functools.partial(rank_processes.processes, "captured_program.py")
told_by = functools.partial(rank_processes.told_by, "captured_program.py")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """What two processes tell of all that they live through: to start them takes longer than to train."""
    scenarios = (
        "plain", "views", "recomputed", "compiled", "no buffers", "small buckets", "unused", "hooked", "short batches", "varying shapes",
        "drops", "accumulated", "compiled by turns", "four", "sixteen", "flaky", "late step", "shared memory", "host read", "fails in a replay",
        "fails to capture", "fails in a backward", "no inputs", "no memory", "uneven", "alone", "default stream",
        "adversaries", "grouped anew",
    )  # fmt: skip
    return told_by(tmp_path_factory.mktemp("captured"), *scenarios)


def both(trained, name):
    ranks = [told[name] for told in trained]
    assert all(one["same"] for one in ranks), ranks
    return ranks


@pytest.mark.parametrize("name", ["plain", "views", "recomputed", "no buffers", "small buckets"])
@pytest.mark.some_of(2)
def test_a_step_with_collectives_is_replayed_in_all_processes(trained, name):
    for one in both(trained, name):
        assert (one["tier"], one["replays"]) == ("eager+graph", STEPS - WAY)


@pytest.mark.parametrize(("name", "steps"), [("accumulated", 80), ("four", 120), ("sixteen", 330)])
def test_calls_that_reduce_and_calls_that_do_not_are_replayed_by_turns(trained, name, steps):
    """Of sixteen calls one reduces, and eleven of those come before its first capture."""
    for one in both(trained, name):
        assert one["tier"] == one["last"] == "eager+graph"
        assert one["replays"] > 0.6 * steps


@pytest.mark.parametrize("name", ["plain", "accumulated", "four", "sixteen", "compiled", "compiled by turns"])
def test_a_call_in_which_buckets_are_rebuilt_is_not_observed(trained, name):
    """On a GPU that call copies a list to the device, which no recording may do."""
    for one in both(trained, name):
        assert one["rebuilt in"] == ["run"]


def test_compiled_code_is_proven_and_then_captured_by_all(trained):
    for one in both(trained, "compiled"):
        assert one["tier"] == one["last"] == "aot_eager+graph"
        assert one["replays"] >= STEPS - WAY - 4


def test_a_short_batch_in_one_process_runs_eager_in_all(trained):
    first, second = both(trained, "short batches")
    assert first["log"] == second["log"]
    assert [one["tier"] for one in (first, second)] == ["eager+graph"] * 2
    assert STEPS - WAY - 9 <= first["replays"] == second["replays"] < STEPS - WAY


def test_all_leave_the_tier_where_not_all_could_ever_capture_the_same(trained):
    for one in both(trained, "varying shapes"):
        assert (one["last"], one["replays"]) == ("eager", 0)
        assert "not all processes could do the same" in " ".join(one["status"].split())


def test_a_recording_that_one_process_drops_is_made_anew_by_all(trained):
    first, second = both(trained, "drops")
    assert [one["tier"] for one in (first, second)] == ["eager+graph"] * 2
    assert first["log"] == second["log"]
    assert first["log"].count("c") == 2


def test_an_exception_that_one_process_catches_leaves_what_eager_leaves(trained):
    """In each step of the way, one run each: eager, an audit, a warm-up, a capture, the proofs."""
    for one in both(trained, "flaky"):
        assert one["tiers"] == ["eager+graph"]


def test_a_step_that_is_first_called_after_the_tier_was_left_waits_for_nobody(trained):
    for one in both(trained, "late step"):
        assert one["tiers"] == ["eager", "eager+graph"]


def test_arguments_that_share_memory_in_one_process_alone_run_eager_in_all(trained):
    first, second = both(trained, "shared memory")
    assert first["replays"] == second["replays"] >= 20


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("host read", "a value is read on the host"),
        ("fails in a replay", "planted: no replay"),
        ("fails to capture", "planted: no capture"),
        ("no inputs", "OutOfMemoryError: planted"),
        ("no memory", "OutOfMemoryError: planted"),
    ],
)
def test_what_fails_in_one_process_is_left_by_all(trained, name, why):
    first, second = both(trained, name)
    assert [one["last"] for one in (first, second)] == ["eager", "eager"]
    assert why in " ".join(second["status"].split())
    assert "another process" in " ".join(first["status"].split())


def test_a_capture_that_fails_within_a_backward_leaves_the_wrapper_in_order(trained):
    for one in both(trained, "fails in a backward"):
        assert (one["last"], one["replays"], one["log"].count("c")) == ("eager", 0, 1)


@pytest.mark.parametrize(
    ("name", "why"), [("unused", "find_unused_parameters=True"), ("hooked", "a communication hook")]
)
def test_what_a_wrapper_decides_anew_in_each_step_declines_the_graph_by_name(trained, name, why):
    for one in both(trained, name):
        assert (one["tier"], one["replays"]) == ("eager", 0)
        assert why in " ".join(one["decided"])


def test_a_process_on_its_own_waits_for_its_wrapper_and_captures_no_hook(tmp_path):
    """An audit does not see what the hook counts, and the second run of a proof would count it twice."""
    (one,) = told_by(tmp_path, "hooked", "plain", size=1)
    assert one["plain"]["same"]
    assert (one["plain"]["tier"], one["plain"]["rebuilt in"]) == ("eager+graph", ["run"])
    assert STEPS - WAY <= one["plain"]["replays"] <= STEPS - 12
    assert one["hooked"]["same"]
    assert (one["hooked"]["last"], one["hooked"]["replays"]) == ("eager", 0)
    assert "a communication hook" in " ".join(one["hooked"]["status"].split())


def test_a_process_that_is_out_of_batches_holds_nobody_up(trained):
    for one in both(trained, "uneven"):
        assert one["last"] == "eager"


def test_a_process_that_is_late_for_a_vote_ends_the_tier_in_all(trained):
    for one in both(trained, "alone"):
        assert one["last"] == "eager"
        assert "waited 8 s for another process" in " ".join(one["status"].split())


def test_each_step_settles_its_own_wrappers(trained):
    """The generator reduces in one of three turns, and none of its first eleven calls is looked at."""
    for one in both(trained, "adversaries"):
        assert one["ran"].startswith("r" * 11 + "sp")
        assert one["ran"].endswith("rrrr")


def test_a_capture_that_fails_on_the_default_stream_says_where_to_make_the_wrapper(trained):
    for one in both(trained, "default stream"):
        assert one["last"] == "eager"
        assert "torch.cuda.stream(torch.cuda.Stream())" in "".join(one["status"].split())


def test_a_loop_is_closed_after_its_program_has_left_the_groups(trained):
    assert all(told["grouped anew"]["closed"] for told in trained)


def test_a_loop_that_one_process_makes_alone_says_what_to_do(tmp_path):
    first, _ = told_by(tmp_path, "made alone")
    assert "run 'eager+graph': not all of the 2 processes have made a loop within 8 s" in first["made alone"]["told"]
    assert (
        "Make it in all of them, at the same place, with the same run=; or with run='eager'"
        in first["made alone"]["told"]
    )


@pytest.mark.parametrize("name", ["ends in a capture", pytest.param("ends between", marks=pytest.mark.long)])
def test_an_end_of_one_process_ends_the_others_with_its_reason(tmp_path, name):
    first, second = processes(tmp_path, name)
    assert second[0] == 9
    assert "another process has ended" in json.loads(first[1].strip().splitlines()[-1])[name]["raised"]


@pytest.mark.long
def test_four_processes_capture_together(tmp_path):
    names = {"plain": "eager+graph", "short batches": "eager+graph", "host read": "eager"}
    for told in told_by(tmp_path, *names, size=4):
        assert all(one["same"] for one in told.values()), told
        assert {name: told[name]["last"] if name == "host read" else told[name]["tier"] for name in names} == names
