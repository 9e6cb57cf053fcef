"""The suite: what it plans, what it computes from rows, and one row from its command to the file."""

import json
import os
import subprocess
import sys

import pytest
from suite_rows import FIVE, auto, cold, ways, whole

from benchmarks.suite import __main__ as program
from benchmarks.suite import clock, plan, show, tables, totals
from benchmarks.suite import document as files

SCRIPTS = sorted(path.stem for path in (program.ROOT / "benchmarks").glob("*.py") if "usage:" in path.read_text())


@pytest.mark.parametrize("name", tables.PAGES)
def test_a_page_is_as_the_result_files_that_it_names(name):
    page = (tables.ROOT / name).read_text(encoding="utf-8")
    assert "<!-- suite end -->" in page
    assert page == tables.drawn(page), f"{name} is out of date: python -m benchmarks.suite --write-tables"


def test_every_result_is_named_by_a_page_or_a_test():
    texts = [path.read_text(encoding="utf-8") for path in (tables.ROOT / "docs").rglob("*.md")]
    texts += [(tables.ROOT / "README.md").read_text(encoding="utf-8")]
    texts += [path.read_text(encoding="utf-8") for path in (tables.ROOT / "tests").rglob("*.py")]
    unnamed = [path.name for path in files.RESULTS.iterdir() if not any(path.name in text for text in texts)]
    assert unnamed == []


@pytest.mark.campaign
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_says_how_it_is_used(name):
    env = {**os.environ, "PYTHONPATH": str(program.ROOT)}
    command = [sys.executable, "-m", f"benchmarks.{name}", "--help"]
    done = subprocess.run(command, cwd=program.ROOT, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "usage" in done.stdout


def test_a_user_s_choice_is_planned_on_every_workload():
    chosen = [row for row in plan.gpu() if plan.in_part(row, "choice")]
    for name in (*plan.WORKLOADS, *plan.HARD):
        rows = [row for row in chosen if row.workload == name]
        assert [row.ways for row in rows if row.kind == "ways"] == [(way,) for way in plan.CHOICE[:-1]]
        assert [(row.told, row.number) for row in rows if row.kind == "auto"] == [(1_000, 1), (10_000, 1)]


def test_a_pattern_that_fits_no_row_is_refused():
    with pytest.raises(ValueError, match="no row fits"):
        plan.choose(plan.gpu(), ["tiny:fulll"])


def test_a_total_is_cold_seconds_and_the_steps_left():
    row = ways("tiny", "full", cold=5.0, ms=10.0, ratio=2.0, steps=8)
    assert totals.total([row], row, 1_008) == {"seconds": pytest.approx(5.0 + 1_000 * 0.010), "computed": True}
    assert totals.total([row], row, 5) is None
    again = [row, cold("tiny", "full", 7.0), cold("xlmr", "full", 99.0)]
    assert totals.prepared(again, row) == (8, 6.0)


def test_a_real_run_comes_before_what_is_computed():
    row = ways("tiny", "full", real={"1000": 12.5})
    assert totals.total([row], row, 1_000) == {"seconds": 12.5, "computed": False}


@pytest.mark.parametrize("why", [{"error": "x"}, {"declined": "x"}, {"emulated": True}, {"skipped": "x"}])
def test_a_way_that_did_not_run_as_asked_has_no_total(why):
    rows = [ways("tiny", "eager"), ways("tiny", "full", cold=0.1, ms=1.0, ratio=10.0, **why)]
    assert list(totals.fixed(rows, "tiny")) == ["eager"]


def test_runs_of_auto_count_for_the_steps_that_they_were_given():
    rows = [
        auto("tiny", 200, {50: 1.0, 200: 2.0}),
        auto("tiny", 1_000, {50: 1.5, 200: 3.0, 1_000: 9.0}),
        auto("tiny", 10_000, {1_000: 10.0, 1_200: 11.0}, settled=True, ms=2.0),
        auto("tiny", 10_000, {1_000: 10.0, 1_200: 11.0}, settled=False, number=2),
    ]
    seconds = {n: [run["seconds"] for run in totals.auto_runs(rows, "tiny", n)] for n in totals.STEPS}
    assert seconds == {50: [1.0], 200: [2.0], 1_000: [9.0], 10_000: [11.0 + 8_800 * 0.002], 100_000: [208.6]}


def test_gains_are_of_the_middle_run_with_their_mean():
    head, *rows, mean = tables.gains(whole()["rows"])
    assert head[1:] == ["told 1,000 steps", "told 10,000 steps"]
    assert rows[0][1] == "1.48\u00d7"  # (2 + 9.97) / 8.1, between the runs of 8.0 and 8.2 s
    assert mean[1] == "**1.48\u00d7** (5 rows)"


def test_a_saved_document_is_read_back_and_mixes_with_no_other_hardware(tmp_path):
    found, path = whole(), tmp_path / "found" / "x.json"
    files.save(found, path)
    assert files.load(path) == found
    assert {one["workload"] for one in found["totals"]} == set(FIVE)
    with pytest.raises(SystemExit, match="NVIDIA H200"):
        files.begin(path, "cpu", {})


def test_tables_show_what_was_found(capsys, monkeypatch):
    found = whole()
    found["rows"] += [{**ways("mlp", "eager+graph", ratio=3.0), "declined": "a reason"}]
    files.summarise(found)
    monkeypatch.setattr(show, "WIDTH", 220)
    show.tables(found)
    out = capsys.readouterr().out
    assert "declined: a reason" in out
    assert "~" in out


def test_busy_time_is_read_off_kernels_and_copies():
    events = [
        {"cat": "kernel", "ts": 0, "dur": 1_000},
        {"cat": "gpu_memcpy", "ts": 500, "dur": 1_000},
        {"cat": "gpu_user_annotation", "ts": 0, "dur": 99_000},
    ]
    assert clock.busy_of(events, steps=2) == {"busy_ms": 0.75, "kernels": 1}


def test_a_row_in_the_file_is_not_run_again(tmp_path, monkeypatch):
    path, begun = tmp_path / "x.json", []

    def measured(row, _options, _limit):
        begun.append(row.key)
        return [{**ways(row.workload, row.ways[0]), "row": row.key}]

    monkeypatch.setattr(program, "measured", measured)
    arguments = ["--cpu", "--out", str(path), "--only", "tiny:eager*"]
    assert program.main(arguments) == 0
    program.main(arguments)
    assert begun == ["tiny:eager", "tiny:eager+graph"]


@pytest.mark.parametrize("option", ["--table", "--out"])
def test_a_file_of_something_else_is_refused(tmp_path, capsys, option):
    other = tmp_path / "README.md"
    other.write_text("# Words", encoding="utf-8")
    assert program.main([option, str(other)]) == 2
    assert "README.md: expected a result file of the suite" in capsys.readouterr().err


@pytest.mark.campaign
def test_a_row_is_measured_by_the_command(tmp_path):
    path = tmp_path / "x.json"
    command = [sys.executable, "-m", "benchmarks.suite", "--cpu", "--out", str(path), "--only", "mlp:eager,eager+graph"]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=program.ROOT, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    eager, captured = json.loads(path.read_text())["rows"]
    assert (eager.get("error"), captured.get("error")) == (None, None)
    assert eager["steady"]["ms"] > 0
    assert (captured["ran"], captured["emulated"]) == ("eager+graph", True)
    assert captured["loss_difference"] < 1e-5
