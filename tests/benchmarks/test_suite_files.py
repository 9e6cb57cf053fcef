"""The result file, its tables and its picture; and what is read off blocks and traces."""

import json
import xml.etree.ElementTree as ET

import pytest
from suite_rows import FIVE, auto, ways, whole

from benchmarks.suite import __main__ as program
from benchmarks.suite import clock, plot, show
from benchmarks.suite import document as files


def test_a_saved_document_is_read_back_with_its_goals(tmp_path):
    found, path = whole(), tmp_path / "found" / "x.json"
    files.save(found, path)
    again = files.load(path)
    assert again == found
    assert again["goals"]
    assert {one["workload"] for one in again["totals"]} == set(FIVE)
    assert [one.name for one in path.parent.iterdir()] == ["x.json"]


def test_text_in_a_file_keeps_its_spaces():
    assert json.loads(files.text({"why": "two  spaces [a\n b]", "blocks": [1, 2]})) == {
        "why": "two  spaces [a\n b]",
        "blocks": [1, 2],
    }


def test_results_take_the_place_of_earlier_ones_of_their_row():
    found = {"rows": [ways("tiny", "eager", ms=1.0), ways("tiny", "full", ms=2.0)]}
    files.add(found, "tiny:eager", [ways("tiny", "eager", ms=3.0)])
    assert [(row["way"], row["steady"]["ms"]) for row in found["rows"]] == [("full", 2.0), ("eager", 3.0)]


def test_rows_of_other_hardware_do_not_mix(tmp_path):
    path = tmp_path / "x.json"
    files.save(whole(), path)
    with pytest.raises(SystemExit, match="NVIDIA H200"):
        files.begin(path, "cpu", {})


def test_names_of_files_say_date_and_gpu():
    assert files.default_path("cuda", "NVIDIA H200").name == f"{files.today()}-h200-suite.json"
    assert files.default_path("cpu", "").name == f"{files.today()}-cpu-suite.json"


@pytest.mark.parametrize("wide", [True, False])
def test_tables_show_what_was_found(capsys, monkeypatch, wide):
    found = whole()
    found["rows"] += [
        ways("mlp", "eager", memory={"peak_mb": 12_345, "preparing_mb": 1, "reserved_mb": None}),
        ways(
            "mlp", "full", ratio=1.5, of_busy=1.25, waiting_share=0.2, loss_difference=1e-3, prepared_from="full+graph"
        ),
        {**ways("mlp", "eager+graph", ratio=3.0), "declined": "a reason"},
        auto(
            "mlp",
            1_000,
            {1_000: 9.0},
            ran="full+graph",
            memory={"preparing_mb": 23_456, "preparing_reserved_mb": 34_567},
        ),
        {"row": "vit:eager", "kind": "ways", "workload": "vit", "way": "eager", "error": "it failed"},
    ]
    files.summarise(found)
    monkeypatch.setattr(show, "WIDTH", 220 if wide else 60)
    show.tables(found)
    out = capsys.readouterr().out
    if wide:
        for words in (
            "12,345",
            "auto told 1000 (run 1)",
            "23,456",
            "34,567",
            "1.50 [1.47, 1.53]",
            "declined: a reason",
            "error: it failed",
            "~",
            "(computed)",
            "met",
        ):
            assert words in out


def test_the_picture_is_a_self_contained_svg(tmp_path):
    path = tmp_path / "x.svg"
    plot.write(whole(), path)
    text = path.read_text()
    tree = ET.fromstring(text)
    words = [one.text for one in tree.iter("{http://www.w3.org/2000/svg}text")]
    assert {*FIVE, "auto", "eager", "full+graph", "10,000"} <= set(words)
    assert "http" not in text.replace("http://www.w3.org/2000/svg", "")
    lines = list(tree.iter("{http://www.w3.org/2000/svg}polyline"))
    assert len(lines) == len(FIVE) * 4
    assert "nan" not in text


def test_a_picture_of_nothing_is_one_as_well(tmp_path):
    plot.write({"rows": []}, tmp_path / "x.svg")
    ET.fromstring((tmp_path / "x.svg").read_text())


def test_labels_do_not_cover_each_other():
    heights = [at for at, _, _ in plot.apart([(5.0, "b", ""), (4.0, "a", ""), (99.0, "c", "")], 95.0)]
    assert heights == [4.0, 16.0, 95.0]


def test_work_that_overlaps_counts_once():
    assert clock.merged([(0, 10), (5, 10), (30, 5), (31, 1)]) == 20


def test_busy_time_is_read_off_kernels_and_copies():
    events = [
        {"cat": "kernel", "ts": 0, "dur": 1_000},
        {"cat": "gpu_memcpy", "ts": 500, "dur": 1_000},
        {"cat": "gpu_user_annotation", "ts": 0, "dur": 99_000},
        {"name": "no category"},
    ]
    assert clock.busy_of(events, steps=2) == {"busy_ms": 0.75, "kernels": 1}
    assert clock.busy_of([], steps=2)["busy_ms"] is None


def test_a_row_in_the_file_is_not_run_again(tmp_path, monkeypatch, capsys):
    path, begun = tmp_path / "x.json", []

    def measured(row, _options, _limit):
        begun.append(row.key)
        return [{**ways(row.workload, row.ways[0]), "row": row.key}]

    monkeypatch.setattr(program, "measured", measured)
    arguments = ["--cpu", "--out", str(path), "--only", "tiny:eager*", "--only", "inception:eager"]
    monkeypatch.setattr(program.plan, "missing", lambda workload: "no package" if workload == "inception" else "")
    assert program.main(arguments) == 0
    assert begun == ["tiny:eager", "tiny:eager+graph"]
    assert {row.get("skipped") for row in files.load(path)["rows"]} == {None, "no package"}
    program.main(arguments)
    assert len(begun) == 2
    program.main([*arguments, "--again"])
    assert len(begun) == 4
    program.main([*arguments, "--again", "--limit", "0", "--note", "a shared machine"])
    assert files.load(path)["settings"]["note"] == "a shared machine"
    assert len(begun) == 4
    said = capsys.readouterr().out
    assert "not begun" in said
    assert "3 rows were asked for, 0 failed, 3 did not run" in said.splitlines()[-1]


def test_a_row_cut_off_by_the_limit_is_left_for_later(tmp_path, monkeypatch):
    path = tmp_path / "x.json"
    late = {**ways("tiny", "eager"), "error": f"{program.LATE} 100 s"}
    monkeypatch.setattr(program, "measured", lambda *_: [late])
    arguments = ["--cpu", "--out", str(path), "--only", "tiny:eager"]
    program.main([*arguments, "--limit", "100"])
    assert not files.load(path)["rows"]
    program.main(arguments)
    assert files.load(path)["rows"][0]["error"]


def test_auto_has_a_line_of_its_runs():
    rows = [
        ways("tiny", "eager"),
        auto("tiny", 200, {50: 1.0, 200: 2.0}),
        auto("tiny", 200, {50: 3.0, 200: 4.0}, number=2),
    ]
    lines = plot.series(rows, "tiny")
    assert [steps for steps, _, _ in lines["auto"]] == [50, 50, 200, 200]


@pytest.mark.parametrize("option", ["--table", "--plot", "--out"])
def test_a_file_that_is_none_of_the_suites_is_refused(tmp_path, capsys, option):
    other = tmp_path / "README.md"
    other.write_text("# Words", encoding="utf-8")
    assert program.main([option, str(other)]) == 2
    assert "README.md: expected a result file of the suite" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--table", "--plot"])
def test_a_file_that_is_not_there_is_refused_and_draws_nothing(tmp_path, capsys, option):
    assert program.main([option, str(tmp_path / "nofile.json")]) == 2
    assert "nofile.json: there is no such file" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
