"""Loops of several processes that are asked for different things, or called apart: refused, or brought together."""

import pytest
from rank_processes import told_by

pytestmark = pytest.mark.campaign  # several processes


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    scenarios = (
        "sentinel", "auto and a tier", "two tiers", "sentinel without a graph", "length of one", "length of the other",
        "runs", "evaluates alone", "evaluates alone by auto", "another name",
    )  # fmt: skip
    return told_by("settings_program.py", tmp_path_factory.mktemp("settings"), *scenarios)


@pytest.mark.parametrize(
    ("scenario", "values"),
    [
        ("sentinel", ("sentinel 0.0", "sentinel 0.01")),
        ("auto and a tier", ("run 'auto'", "run 'eager+graph'")),
        ("two tiers", ("run 'aot_eager'", "run 'eager+graph'")),
    ],
)
def test_all_processes_refuse_settings_that_differ_and_name_their_own(told, scenario, values):
    for rank, value in enumerate(values):
        message = told[rank][scenario]["message"]
        assert message.startswith(f"{value} in rank {rank}: a loop of another process has another value")
        assert f"give the loops of all 2 processes the same {value.split()[0]}=" in message


def test_sentinel_may_differ_where_nothing_is_checked(told):
    assert [one["sentinel without a graph"]["message"] for one in told] == ["", ""]


@pytest.mark.parametrize("scenario", ["length of one", "length of the other"])
def test_the_length_that_one_process_was_told_of_counts_for_all(told, scenario):
    for one in told:
        assert "does not pay within the 52 steps left" in one[scenario]["decided"][0]


def test_later_runs_that_one_process_was_told_of_change_no_decision(told):
    first, second = (one["runs"] for one in told)
    assert first["decided"] == second["decided"]
    assert "g" not in first["graph"] + second["graph"]


@pytest.mark.parametrize("scenario", ["evaluates alone", "evaluates alone by auto"])
def test_a_step_that_one_process_calls_alone_ends_the_votes_before_any_step_is_repeated(told, scenario):
    """On a GPU nobody waits for a collective: the next proof would reduce the gradients of two steps together."""
    first, second = (one[scenario] for one in told)
    assert first["left"] == second["left"]
    for one in (first, second):
        assert one["graph"][30:40] == "g" * 10
        assert one["graph"].endswith("e" * 38)
        assert "have not called the same decorated steps as often as each other" in one["status"]
        assert "leave a step that one of them makes alone (an evaluation) undecorated" in one["status"]


def test_an_argument_that_differs_between_processes_is_named_as_what_to_leave_out(told):
    for one in told:
        assert one["another name"]["graph"].count("g") <= 1  # a call that was observed
        assert (
            "leave what differs between processes (a rank, a path) out of the arguments"
            in one["another name"]["status"]
        )
