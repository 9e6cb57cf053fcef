"""Steps of sharded parameters (FSDP2) that run compiled, equal to eager: in one process, and in two together."""

import functools

import pytest
import rank_processes

pytestmark = pytest.mark.campaign  # several processes, some of which fail

told_by = functools.partial(rank_processes.told_by, "sharded_compiled_program.py")
WAY = "sppp"
"""An audit and three proofs."""
PLAIN = ("plain", "bare layers", "evaluated often", "short batches")
EQUAL = (
    "whole", "kept whole", "never whole", "half", "unclipped", "zeroed", "twice", "synced last", "evaluated",
    "bare evaluated", "made late", "begun", "prefetched", "frozen", "recomputed", "averaged", "divided", "reshards",
    "resumed",
)  # fmt: skip
ANEW = ("scaled", "undropped", "evaluates")
KEPT = "has kept whole gradients of an earlier call"
LEFT = {
    "unsynced": ("s", KEPT),
    "unsynced later": (WAY, KEPT),
    "unsynced over calls": ("srppp", KEPT),
    "unsynced within": ("s", KEPT),
    "unsynced within later": (WAY, KEPT),
    "kept unsharded": (WAY, "set_reshard_after_backward(False) keeps whole parameters between calls"),
    "not last": (WAY, "set_is_last_backward(False) keeps state of a backward"),
    "hooked": (WAY, "set_all_reduce_hook() has set a hook"),
    "evaluates inside": ("ss", "evaluate outside of the step: fully_shard keeps the root's whole parameters"),
}
AUTO = {
    "auto compiles": "regional",
    "auto compiles, evaluated": "regional",
    "auto compiles, unsynced": "eager",
    "auto captures": "regional+graph",
    "auto captures, unsynced": "eager",
}
"""What `auto` comes to in a long run."""
SEEN_ONCE = ("unsynced in a proof", "switched for the next")
"""What one call alone does, whichever of the way it is."""


def both(trained, name):
    ranks = [told[name] for told in trained]
    assert all(one["same"] for one in ranks), ranks
    return ranks


def said(one):
    return " ".join(one["status"].replace("│", " ").split())


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """What two processes tell: to start them takes longer than to train."""
    return told_by(tmp_path_factory.mktemp("compiled"), *PLAIN, *AUTO, "unsynced later", "unsynced in a proof")


@pytest.fixture(scope="module")
def equal(tmp_path_factory):
    """What two processes tell of settings that stay as a program has made them."""
    return told_by(tmp_path_factory.mktemp("equal"), *EQUAL)


@pytest.fixture(scope="module")
def others(tmp_path_factory):
    """What two processes tell of all else that they live through."""
    more = ("frozen later", "taught", "flaky", "raises within", "switched for the next", "hooked alone", "auto")
    named = ("fails to compile",)
    left = [name for name in LEFT if name != "unsynced later"]
    return told_by(tmp_path_factory.mktemp("others"), *ANEW, *left, *more, *named)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """What one process tells, in a group of its own."""
    more = ("checked", *SEEN_ONCE, "unsynced and fails", "fails between backwards", "fails in a backward")
    return told_by(tmp_path_factory.mktemp("alone"), "plain", "evaluated often", *LEFT, *ANEW, *more, size=1)


@pytest.mark.parametrize("name", PLAIN)
def test_compiled_code_is_in_force_in_all_processes(trained, name):
    for one in both(trained, name):
        assert one["log"] == WAY + "r" * 56
        assert one["tier"] == one["last"] != "eager"


@pytest.mark.parametrize("name", AUTO)
def test_auto_chooses_compiled_code_in_all_processes_alike(trained, name):
    first, second = both(trained, name)
    assert first["log"] == second["log"]
    assert first["decided"] == second["decided"]
    for one in (first, second):
        assert one["tier"] == one["last"] == AUTO[name]
        assert (AUTO[name] == "eager") == (KEPT in said(one))


@pytest.mark.long
@pytest.mark.parametrize("name", EQUAL)
def test_whatever_a_program_sets_before_is_trained_as_by_eager(equal, name):
    for one in both(equal, name):
        assert one["log"].count("p") == 3
        assert one["tier"] == one["last"] != "eager"


@pytest.mark.long
@pytest.mark.parametrize("name", ANEW)
def test_code_that_is_compiled_anew_is_proven_anew_in_the_same_call(others, name):
    """Until the next vote, a process whose code is new runs eager."""
    for one in both(others, name):
        assert one["log"] == WAY + "r" * 60 + "ppp" + "r" * 33
        assert one["last"] == "regional"


def test_whole_gradients_that_are_kept_between_calls_end_the_tier_by_name(trained):
    for one in both(trained, "unsynced later"):
        assert (one["tier"], one["last"]) == ("eager", "eager")
        assert KEPT in said(one)
        assert "accumulate within one call" in said(one)


def test_a_proof_whose_call_leaves_whole_gradients_leaves_them_once(trained):
    """A run that is undone has left some too."""
    for one in both(trained, "unsynced in a proof"):
        assert one["lasts"][:3] == ["eager"] * 3  # after the last call of a proof the next vote is 32 calls away


@pytest.mark.long
@pytest.mark.parametrize("name", [name for name in LEFT if name != "unsynced later"])
def test_what_no_undo_knows_ends_the_tier_by_name(others, name):
    way, why = LEFT[name]
    for one in both(others, name):
        assert one["log"] == way + "r" * (60 - len(way))
        assert one["last"] == "eager"
        assert why in said(one)


@pytest.mark.long
def test_what_one_process_leaves_all_leave_in_a_vote(others):
    """Till then an evaluation leaves the same in all: none gathers what another has whole."""
    first, second = both(others, "hooked alone")
    assert [one["last"] for one in (first, second)] == ["eager", "eager"]
    assert "it failed in another process" in said(first)
    assert "set_all_reduce_hook() has set a hook" in said(second)


@pytest.mark.long
def test_settings_that_a_run_leaves_are_undone_with_it(others):
    for one in both(others, "switched for the next"):
        assert one["lasts"][:3] == ["eager"] * 3  # after the last call of a proof the next vote is 32 calls away


@pytest.mark.long
@pytest.mark.parametrize("name", ["flaky", "raises within"])
def test_an_exception_that_a_program_catches_leaves_what_eager_leaves(others, name):
    for one in both(others, name):
        assert set(one["lasts"]) == {"regional"}


@pytest.mark.long
def test_a_part_that_is_frozen_later_and_a_model_of_others_are_trained_as_by_eager(others):
    both(others, "frozen later")
    for one in both(others, "taught"):
        assert one["last"] == "regional"


@pytest.mark.long
@pytest.mark.parametrize("size", [1, 2])
def test_compiled_code_is_captured(tmp_path, size):
    names = [
        f"captured{more}" for more in ("", " by blocks", ", evaluated", ", resumed", ", compiled anew", ", in 16 bits")
    ]
    ranks = told_by(tmp_path, *names, "captured, unsynced", size=size)
    for name in names:
        for one in (told[name] for told in ranks):
            assert one["same"], one
            assert one["last"] == ("aot_eager+graph" if name == "captured" else "regional+graph"), one["status"]
            assert one["replays"] >= 38
            assert "leaves set_requires_gradient_sync()" not in said(
                one
            )  # what a first forward sets is the model's own
    for one in (told["captured, unsynced"] for told in ranks):
        assert one["same"], one
        assert (one["last"], one["replays"] > 10) == ("eager", True)
        assert KEPT in said(one)


@pytest.mark.long
def test_what_is_declined_names_what_to_write(others):
    first, second = both(others, "fails to compile")
    assert [one["last"] for one in (first, second)] == ["eager", "eager"]
    assert "nothing of the model was compiled: PlantedError" in said(second)


@pytest.mark.long
@pytest.mark.parametrize(
    "name", ["fails in a forward", "fails in a backward", "fails in a proof", "fails in a proof's backward"]
)
def test_compiled_code_that_fails_in_one_process_ends_all(tmp_path, name):
    """After the first collective of a step no process repeats it alone."""
    for told in told_by(tmp_path, name):
        assert (
            f"rank 1: PlantedError: planted failure in {'backward' if 'backward' in name else 'forward'}"
            in (told[name]["raised"])
        )


@pytest.mark.long
@pytest.mark.parametrize("name", ["plain", "evaluated often", "checked"])
def test_one_process_runs_compiled_code(alone, name):
    (one,) = both(alone, name)
    assert one["last"] == "regional"
    assert not any(disagreed for _, disagreed in one["checks"])
    assert name != "checked" or one["checks"][0][0] > 0


@pytest.mark.long
@pytest.mark.parametrize("name", ANEW)
def test_one_process_proves_new_code_at_once(alone, name):
    (one,) = both(alone, name)
    assert one["log"].startswith(WAY + "r" * 32 + "pp")
    assert one["last"] == "regional"


@pytest.mark.long
@pytest.mark.parametrize("name", LEFT)
def test_one_process_leaves_what_no_undo_knows(alone, name):
    (one,) = both(alone, name)
    assert one["last"] == "eager"
    assert LEFT[name][1] in said(one)


@pytest.mark.long
@pytest.mark.parametrize("name", SEEN_ONCE)
def test_one_process_undoes_all_that_a_run_has_left(alone, name):
    (one,) = both(alone, name)
    assert one["lasts"] == ["eager"] * 4


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "fired"), [("fails in a backward", 1), ("fails between backwards", 1), ("unsynced and fails", 0)]
)
def test_one_process_undoes_code_that_fails_and_runs_none_while_gradients_are_kept(alone, name, fired):
    (one,) = both(alone, name)
    assert (one["last"], one["fired"], one["log"].count("u")) == ("eager", fired, fired)


@pytest.mark.long
def test_inductors_code_with_dropout_trains_as_eager(tmp_path):
    names = ("inductor", "recomputed by inductor")
    for one in (told[name] for told in told_by(tmp_path, *names) for name in names):
        assert one["same"], one
        assert one["log"] == WAY + "r" * 36
        assert one["last"] == "full"


@pytest.mark.long
def test_four_processes_with_empty_shards_run_compiled_code(tmp_path):
    for told in told_by(tmp_path, "plain", "evaluated often", "unsynced later", size=4):
        assert all(one["same"] for one in told.values()), told
        assert [one["last"] for one in told.values()] == ["regional", "regional", "eager"]
