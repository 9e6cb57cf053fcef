"""`auto` in several processes compiles where the run is long enough: all of them compile, time, choose and leave together."""

import functools

import pytest
import rank_processes

pytestmark = [pytest.mark.campaign, pytest.mark.long]  # several processes, some of which fail

WAY = "e" * 8 + "ffff" + "effeef"
"""Eight timed calls, an audit and three proof steps, then three pairs of turns, whose times come two turns late."""
CAPTURED = "e" * 11 + "g" * 5


processes = functools.partial(rank_processes.processes, "auto_compiled_program.py")
told_by = functools.partial(rank_processes.told_by, "auto_compiled_program.py")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """What two processes tell of all that they live through: to start them takes longer than to train."""
    scenarios = (
        "full", "regional", "captured", "captured blocks", "slower", "slowest", "slower graph", "short",
        "short captured", "host read", "unused", "fails to compile", "fails in a trial", "fails in force", "one fails",
        "replay fails", "flaky", "flaky captured", "short batches", "varying shapes", "evaluated", "accumulated", "anew", "slowed",
        "two steps", "late", "said", "short in a proof",
    )  # fmt: skip
    return told_by(tmp_path_factory.mktemp("compiled"), *scenarios)


def both(trained, name):
    ranks = [told[name] for told in trained]
    assert all(one["same"] for one in ranks), ranks
    return ranks


def one_line(told):
    """The status without the borders of its table."""
    return " ".join(told["status"].replace("│", " ").split())


def test_all_processes_reach_compiled_code_in_the_same_call(trained):
    first, second = both(trained, "full")
    assert first["tiers"] == second["tiers"] == WAY + "f" * (80 - len(WAY))
    assert first["log"] == second["log"]
    assert first["decided"] == second["decided"]
    assert "full: 5.00 ms a step against 10.0 ms in eager, timed side by side" in first["decided"]


@pytest.mark.parametrize("name", ["regional", "evaluated", "accumulated", "two steps"])
def test_compiled_code_is_chosen_by_all(trained, name):
    first, second = both(trained, name)
    assert first["tiers"] == second["tiers"]
    assert first["tiers"].endswith(("r" if name == "regional" else "f") * 40)


@pytest.mark.parametrize("name", ["captured", "captured blocks"])
def test_compiled_code_is_captured_after_the_captured_step_is_in_force(trained, name):
    first, second = both(trained, name)
    assert first["tiers"] == second["tiers"]
    assert first["decided"] == second["decided"]
    assert first["tiers"].startswith(CAPTURED)
    assert first["tiers"].endswith("F" * 50)
    assert "full+graph: 4.00 ms a step against 8.00 ms in eager+graph, timed side by side" in first["decided"]


@pytest.mark.parametrize(("name", "stays"), [("slower", "e"), ("slowest", "e"), ("slower graph", "g")])
def test_compiled_code_that_is_slower_in_one_process_is_put_back_in_all(trained, name, stays):
    first, second = both(trained, name)
    assert first["tiers"] == second["tiers"]
    assert first["decided"] == second["decided"]
    assert {"f", "F"} & set(first["tiers"])
    assert first["tiers"].endswith(stays * 60)


@pytest.mark.parametrize(("name", "tried"), [("short", "e"), ("short captured", "eg")])
def test_a_run_that_is_too_short_in_one_process_compiles_nothing(trained, name, tried):
    first, second = both(trained, name)
    assert first["tiers"] == second["tiers"]
    assert set(first["tiers"]) == set(tried)
    assert "does not pay within the 1,9" in first["decided"][-1]
    assert first["decided"] == second["decided"]


@pytest.mark.parametrize("name", ["host read", "unused"])
def test_steps_that_cannot_be_captured_are_compiled_without_a_graph(trained, name):
    first, second = both(trained, name)
    assert first["tiers"] == second["tiers"]
    assert "F" not in first["tiers"]
    assert first["tiers"].endswith("f" * 50)


@pytest.mark.parametrize("name", ["fails to compile", "fails in a trial", "fails in force"])
def test_compiled_code_that_fails_in_one_process_is_left_by_all_in_the_same_call(trained, name):
    first, second = both(trained, name)
    assert second["fired"]
    assert first["tiers"][-37:] == second["tiers"][-37:] == "e" * 37
    for one in (first, second):
        assert one["tier"] == "eager"
        assert "planted failure in forward" in one_line(one)
        assert one["decided"][-1].startswith("eager stays")
    assert "rank 1: " in one_line(first)
    assert first["decided"] == second["decided"]


def test_after_one_tier_was_left_by_all_the_next_one_is_tried(trained):
    first, second = both(trained, "one fails")
    assert first["tiers"] == second["tiers"]
    assert first["tiers"].startswith("e" * 8 + "ffff" + "rrr")
    assert first["tiers"].endswith("r" * 40)
    assert "planted: nothing compiled" in one_line(first)


def test_a_replay_of_compiled_code_that_fails_in_one_process_leaves_all_with_the_code_once_it_is_timed(trained):
    first, second = both(trained, "replay fails")
    assert first["tiers"][-60:] == second["tiers"][-60:] == "f" * 60
    assert "F" * 10 in first["tiers"]
    assert "planted: no replay" in one_line(first)
    assert any(line.startswith("full against eager: faster") for line in first["decided"])


@pytest.mark.parametrize(("name", "tier"), [("flaky", "full"), ("flaky captured", "full+graph")])
def test_an_exception_that_one_process_catches_shifts_no_decision(trained, name, tier):
    for one in both(trained, name):
        assert one["tiers"] == [tier]


def test_a_short_batch_in_one_process_runs_eager_there(trained):
    first, second = both(trained, "short batches")
    assert first["tiers"] == WAY + "f" * (120 - len(WAY))
    assert second["tiers"][-50:].count("e") >= 5
    assert second["tier"] == "full"


def test_code_whose_proof_is_under_way_trains_nothing(trained):
    """A short batch in one process has a call run without a graph in all of them."""
    first, second = both(trained, "short in a proof")
    for one in (first, second):
        assert one["tiers"][51:55] == "FFeF"
        assert one["tiers"].endswith("F" * 40)


def test_the_log_says_that_all_processes_compile_before_they_do(trained):
    for one in both(trained, "said"):
        assert len(one["said"]) == 1
        assert one["said"][0] == [
            "step: all 2 processes compile full now, in the foreground: this step takes as long as the slowest compile"
        ]


def test_shapes_that_never_come_back_end_in_eager(trained):
    first, second = both(trained, "varying shapes")
    assert first["tiers"][-10:] == second["tiers"][-10:] == "e" * 10
    assert first["decided"] == second["decided"]


def test_code_that_one_process_compiles_anew_is_proven_anew_by_all(trained):
    first, second = both(trained, "anew")
    assert first["log"] == second["log"]
    assert first["log"].count("p") == 6
    assert first["tiers"][-60:] == second["tiers"][-60:] == "f" * 60


def test_compiled_code_that_becomes_slow_in_one_process_is_timed_anew_and_left_by_all(trained):
    first, second = both(trained, "slowed")
    assert first["tiers"] == second["tiers"]
    assert first["tiers"].endswith("e" * 50)
    assert any("was 5.00 ms: timed side by side to see why" in line for line in first["decided"])


def test_a_process_that_is_late_for_a_vote_leaves_all_eager(trained):
    for one in both(trained, "late"):
        assert one["tiers"].endswith("f" + "e" * 49)
        assert "waited 8 s for another process" in one["status"]


def test_an_end_of_one_process_ends_the_others(tmp_path):
    first, second = processes(tmp_path, "ends")
    assert second[0] == 9
    assert "StepLostError: another process has ended" in first[1]


def test_an_exception_of_one_process_ends_the_others_amid_a_proof(tmp_path):
    """It waited for the others in a vote, and they for it in the step's first collective, for half an hour."""
    first, second = processes(tmp_path, "raises")
    assert "ValueError: the program's own" in second[1]
    assert "StepLostError: another process has ended" in first[1]


@pytest.mark.long
def test_four_processes_decide_together(tmp_path):
    names = {"full": "full", "captured": "full+graph", "slowest": "eager", "short batches": "full"}
    ranks = told_by(tmp_path, *names, size=4)
    for told in ranks:
        assert all(one["same"] for one in told.values()), told
        assert {name: one["tier"] for name, one in told.items()} == names
