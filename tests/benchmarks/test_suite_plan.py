"""The plan: everything that is asked for, in parts of a few minutes, and the choice of some of it."""

import subprocess
import sys

import pytest
from suite_rows import whole

from benchmarks.suite import plan

ROWS = plan.gpu()


def test_every_way_is_planned_on_every_workload():
    for name in plan.WORKLOADS:
        ways = {way for row in ROWS if row.workload == name for way in row.ways}
        missing = {*plan.TIERS, "eager", "default", "reduce-overhead", "auto"} - ways
        allowed = {"autotune+graph"} if name not in plan.AUTOTUNED else set()
        allowed |= {"regional", "regional+graph"} if name in plan.NO_BLOCKS else set()
        assert missing == allowed


def test_auto_is_really_run_to_1000_twice_and_to_200_five_times():
    for name in plan.WORKLOADS:
        told = [(row.told, row.steps) for row in ROWS if row.workload == name and row.kind == "auto"]
        assert told.count((1_000, 1_000)) == 2
        assert told.count((200, 200)) == 5


def test_the_choice_of_a_user_is_planned_on_every_workload_and_selected_as_a_part():
    chosen = [row for row in ROWS if plan.in_part(row, "choice")]
    for name in (*plan.WORKLOADS, *plan.HARD):
        rows = [row for row in chosen if row.workload == name]
        assert [row.ways for row in rows if row.kind == "ways"] == [(way,) for way in plan.CHOICE[:-1]]
        assert [(row.told, row.number) for row in rows if row.kind == "auto"] == [(1_000, 1), (10_000, 1)]
    assert all(plan.in_part(row, row.part) for row in ROWS)
    assert not any(plan.in_part(row, "auto") for row in ROWS if row.part == "choice")


def test_each_row_is_a_few_minutes_at_most_and_has_a_key_of_its_own():
    assert max(row.seconds for row in ROWS) < 500
    assert len({row.key for row in ROWS}) == len(ROWS)
    assert {row.part for row in ROWS} == set(plan.PARTS)


def test_cold_seconds_are_repeated_for_the_ways_that_decide():
    ways = {row.ways for row in plan.gpu(whole()) if row.kind == "cold" and row.workload == "gpt"}
    assert ways == {("eager+graph",), ("full+graph",)}


@pytest.mark.parametrize(
    ("pattern", "ways"),
    [
        ("tiny:eager", {"eager"}),
        ("tiny:full", {"full+graph,full"}),
        ("tiny:reduce*,default", {"reduce-overhead", "default"}),
        ("xlmr:max-autotune-no-cudagraphs", {"max-autotune-no-cudagraphs"}),
    ],
)
def test_rows_are_chosen_by_workload_and_way(pattern, ways):
    assert {",".join(row.ways) for row in plan.choose(ROWS, [pattern])} == ways


def test_runs_of_auto_are_chosen_by_what_they_are_told():
    assert [row.number for row in plan.choose(ROWS, ["gpt:auto told 1000 *"])] == [1, 2]
    assert {row.told for row in plan.choose(ROWS, ["gpt:auto told 200 *"])} == {200}


def test_a_second_cold_start_is_chosen_by_its_name_alone():
    """It has a comma, and the row of the same way is minutes long."""
    rows = plan.gpu(whole())
    assert [row.key for row in plan.choose(rows, ["gpt:full+graph, cold 2"])] == ["gpt:full+graph, cold 2"]
    assert {row.kind for row in plan.choose(rows, ["gpt:full+graph"])} == {"ways", "cold"}


def test_a_pattern_over_all_workloads():
    assert {row.workload for row in plan.choose(ROWS, ["*:auto"])} == {*plan.WORKLOADS, *plan.HARD, *plan.LORA}


def test_a_pattern_that_fits_nothing_names_what_there_is():
    with pytest.raises(ValueError, match="tiny"):
        plan.choose(ROWS, ["tinny"])


def test_captured_steps_on_a_cpu_are_marked_as_stood_in_for():
    rows = plan.cpu()
    assert all(row.emulated == row.ways[0].endswith("+graph") for row in rows)
    assert {row.workload for row in rows} >= {*plan.WORKLOADS, *plan.HARD}


def test_the_plan_is_printed_without_torch():
    code = "import sys; from benchmarks.suite.__main__ import main; main(['--plan']); assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], cwd=plan_root(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "minutes" in done.stdout


def plan_root():
    from benchmarks.suite.__main__ import ROOT

    return ROOT
