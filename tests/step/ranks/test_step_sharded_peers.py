"""Steps of sharded parameters (FSDP2) that several processes capture together, equal to eager."""

import functools

import pytest
import rank_processes

pytestmark = pytest.mark.campaign  # several processes, some of which fail

STEPS, WAY = 60, 16
"""Steps of a run, and those on the way: eleven that reduce, an audit, a warm-up and three proofs."""


told_by = functools.partial(rank_processes.told_by, "sharded_program.py")

CAPTURED = (
    "plain", "recomputed", "unfused", "kept whole", "never whole", "half", "zeroed", "twice", "synced last", "evaluations",
    "evaluated after", "begun", "averaged",
)  # fmt: skip


@pytest.fixture(scope="module")
def captured(tmp_path_factory):
    """What two processes tell of steps that are captured: to start them takes longer than to train."""
    return told_by(tmp_path_factory.mktemp("captured"), *CAPTURED, "over calls", "wrong", "auto")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """What two processes tell of all else that they live through."""
    scenarios = (
        "unsynced calls", "unsynced kinds", "unsynced within", "hooked later", "taught", "evaluates inside", "divided",
        "reloaded", "flaky", "short batches", "host read", "fails to capture", "fails in a backward",
        "fails in a replay", "no memory", "sgd", "compiled", "offloaded", "two dimensions", "tensor parallel",
    )  # fmt: skip
    return told_by(tmp_path_factory.mktemp("sharded"), *scenarios)


def both(trained, name):
    ranks = [told[name] for told in trained]
    assert all(one["same"] and one.get("kinds", True) for one in ranks), ranks
    return ranks


@pytest.mark.parametrize("name", CAPTURED)
@pytest.mark.some_of(2)
def test_a_sharded_step_is_replayed_in_all_processes(captured, name):
    """Losses, shards and optimizer state are equal to eager's bit for bit, where the optimizer's kernel is the same."""
    for one in both(captured, name):
        assert (one["tier"], one["replays"]) == ("eager+graph", STEPS - WAY)


def test_gradients_are_accumulated_over_calls(captured):
    """Those of a group lie in one memory: whoever reads one of them reads all."""
    for one in both(captured, "over calls"):
        assert one["tier"] == one["last"] == "eager+graph"
        assert one["replays"] > 30


@pytest.mark.long
def test_gradients_that_are_kept_whole_between_calls_end_the_replays_by_name(trained):
    for one in both(trained, "unsynced calls"):
        assert (one["last"], one["replays"]) == ("eager", 30 - WAY)
        assert "has kept whole gradients of an earlier call" in " ".join(one["status"].split())


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "replays", "why"),
    [
        ("unsynced kinds", 0, "whole gradients"),
        ("unsynced within", 0, "has kept whole gradients of an earlier call"),
        ("hooked later", 35 - WAY, "set_all_reduce_hook() has set a hook"),
        ("taught", 0, "the step calls a sharded model that the loop was not given: FSDPNet"),
        ("evaluates inside", 0, "evaluate outside of the step: fully_shard keeps the root's whole parameters"),
    ],
)
def test_what_no_recording_can_follow_ends_the_replays_by_name(trained, name, replays, why):
    for one in both(trained, name):
        assert (one["last"], one["replays"]) == ("eager", replays)
        assert why in " ".join(one["status"].replace("│", " ").split())


@pytest.mark.long
def test_a_setting_of_the_sharding_that_changes_makes_another_kind_of_call(trained):
    for one in both(trained, "divided"):
        assert one["tier"] == "eager+graph"
        assert one["log"].count("c") == 2


@pytest.mark.long
def test_a_state_is_saved_and_loaded_as_eagers(trained):
    for one in both(trained, "reloaded"):
        assert one["tier"] == one["last"] == "eager+graph"


@pytest.mark.long
def test_an_exception_that_one_process_catches_leaves_what_eager_leaves(trained):
    for one in both(trained, "flaky"):
        assert one["tiers"] == ["eager+graph"]


@pytest.mark.long
def test_a_short_batch_in_one_process_runs_eager_in_all(trained):
    first, second = both(trained, "short batches")
    assert first["log"] == second["log"]
    assert STEPS - WAY - 7 <= first["replays"] == second["replays"] < STEPS - WAY


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("host read", "a value is read on the host"),
        ("fails to capture", "planted"),
        ("fails in a replay", "planted"),
        ("no memory", "OutOfMemoryError: planted"),
    ],
)
def test_what_fails_in_one_process_is_left_by_all(trained, name, why):
    first, second = both(trained, name)
    assert [one["last"] for one in (first, second)] == ["eager", "eager"]
    assert why in " ".join(second["status"].split())
    assert "another process" in " ".join(first["status"].split())


@pytest.mark.long
def test_a_capture_that_fails_within_a_backward_leaves_the_model_at_rest(trained):
    for one in both(trained, "fails in a backward"):
        assert (one["last"], one["replays"], one["log"].count("c")) == ("eager", 0, 1)


def test_a_recording_that_goes_wrong_in_one_process_is_left_by_all(captured):
    first, second = [told["wrong"] for told in captured]
    assert first["log"] == second["log"]
    assert [one["last"] for one in (first, second)] == ["eager", "eager"]
    assert "does not agree with the step itself: parameter" in second["checks"][0][1]


def test_auto_chooses_the_captured_step_in_all_processes_alike(captured):
    first, second = both(captured, "auto")
    assert first["replays"] == second["replays"] > 60
    assert first["log"] == second["log"]
    assert first["tier"] == second["tier"] == "eager+graph"


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("sgd", "torch's fused SGD kernel takes no sharded parameters"),
        ("offloaded", "CPUOffloadPolicy()) keeps parameters on the host"),
        ("two dimensions", "of two dimensions (HSDP)"),
        ("tensor parallel", "by DTensor alone (tensor parallelism)"),
    ],
)
def test_what_is_not_proven_is_declined_by_name(trained, name, why):
    for one in both(trained, name):
        assert (one["last"], one["replays"]) == ("eager", 0)
        assert why in " ".join(one["status"].split()) + " ".join(one["decided"]) + one.get("said", "")


@pytest.mark.long
def test_four_processes_capture_together(tmp_path):
    """With parameters that are kept by halves after a forward, and shards that are empty in some processes."""
    for told in told_by(tmp_path, "plain", "part whole", "short batches", "fails in a backward", size=4):
        assert all(one["same"] for one in told.values()), told
        assert [one["tier"] for one in told.values()] == ["eager+graph"] * 3 + ["eager"]
