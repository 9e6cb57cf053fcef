"""The tables of README and docs are what their result files say."""

import json
import re

import pytest
from suite_rows import auto, document, ways, whole

from benchmarks.suite import __main__ as program
from benchmarks.suite import document as files
from benchmarks.suite import tables

MEMORY = {"preparing_mb": 3_000, "preparing_reserved_mb": 3_100, "peak_mb": 1_000, "reserved_mb": 2_000}


@pytest.mark.parametrize("name", tables.PAGES)
def test_a_page_is_as_the_result_files_that_it_names(name):
    page = (tables.ROOT / name).read_text(encoding="utf-8")
    assert "<!-- suite end -->" in page
    assert page == tables.drawn(page), f"{name} is out of date: python -m benchmarks.suite --write-tables"


@pytest.mark.parametrize("name", tables.PAGES)
def test_a_page_names_the_newest_results_of_its_gpus(name):
    page = (tables.ROOT / name).read_text(encoding="utf-8")
    for named in {found[3] for found in tables._MARK.finditer(page)}:
        gpu = re.fullmatch(r"benchmarks/results/[\d-]+-(\w+)-suite\.json", named)[1]
        newest = max(files.RESULTS.glob(f"*-{gpu}-suite.json")).name
        assert named.endswith(newest), f"{newest} is newer: --write-tables benchmarks/results/{newest}"


@pytest.fixture
def pages(tmp_path, monkeypatch):
    """A repository of one page and two results, the second of which is faster."""
    monkeypatch.setattr(tables, "ROOT", tmp_path)
    monkeypatch.setattr(tables, "PAGES", ("page.md",))
    for name, ms in (("a.json", 2.0), ("b.json", 1.0)):
        found = document([ways("tiny", "eager"), ways("tiny", "full+graph", ms=ms, ratio=10 / ms)])
        (tmp_path / name).write_text(json.dumps(found))
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- suite steps a.json -->\nold\n<!-- suite end -->\nafter\n")
    return page


def test_tables_are_written_between_their_marks_and_stay(pages):
    assert tables.write() == ["page.md"]
    text = pages.read_text()
    assert text.startswith("before\n<!-- suite steps a.json -->\n")
    assert text.endswith("<!-- suite end -->\nafter\n")
    assert "| tiny: 8 layers d256, 8\u00d764 | 10.0 | 2.00 (5.00\u00d7) |" in text
    assert "NVIDIA H200, torch 2.11.0, 2026-11-20: `a.json`" in text
    assert "old" not in text
    assert tables.write() == []


def test_tables_are_drawn_from_another_file_where_one_is_given(pages, capsys):
    assert program.main(["--write-tables", str(pages.with_name("b.json"))]) == 0
    assert "<!-- suite steps b.json -->" in pages.read_text()
    assert "1.00 (10.0\u00d7)" in pages.read_text()
    assert "written: page.md" in capsys.readouterr().out


def test_a_table_of_other_hardware_stays(pages):
    other = json.loads(pages.with_name("b.json").read_text())
    other["machine"]["gpu"] = "NVIDIA H100 80GB HBM3"
    pages.with_name("b.json").write_text(json.dumps(other))
    assert tables.write(pages.with_name("b.json")) == ["page.md"]
    assert "<!-- suite steps a.json -->" in pages.read_text()


def test_a_mark_of_no_table_or_of_no_file_is_refused(pages, capsys):
    pages.write_text("<!-- suite wonders a.json -->\n<!-- suite end -->\n")
    assert program.main(["--write-tables"]) == 2
    assert "expected one of steps, gains, seconds, memory" in capsys.readouterr().err
    pages.write_text("<!-- suite steps c.json -->\n<!-- suite end -->\n")
    assert program.main(["--write-tables"]) == 2
    assert "there is no such file" in capsys.readouterr().err


def test_gains_are_of_the_middle_run_with_their_mean():
    head, *rows, mean = tables.gains(whole()["rows"])
    assert head[1:] == ["told 1,000 steps", "told 10,000 steps"]
    assert len(rows) == 5
    assert rows[0][1] == "1.48\u00d7"  # (2 + 9.97) / 8.1, between the runs of 8.0 and 8.2 s
    assert mean == ["geometric mean", "**1.48\u00d7** (5 rows)", mean[2]]


def test_seconds_show_every_way_and_mark_what_is_computed():
    head, tiny, *_ = tables.seconds(whole()["rows"])
    cells = dict(zip(head, tiny, strict=True))
    assert cells["1,000 steps: eager"] == "~12.0"
    assert cells["1,000 steps: default"] == "~28.0"
    assert cells["1,000 steps: reduce-overhead"] == ""
    assert cells["1,000 steps: `auto`"] == "8.10 (1.48\u00d7)"
    assert cells["10,000: `auto`"].startswith("~")


def test_memory_is_of_proving_and_in_force():
    rows = [ways("tiny", "eager", memory=MEMORY), auto("tiny", 1_000, {1_000: 9.0}, memory=MEMORY)]
    _, (_, eager, *_, proving, force, _, _) = tables.memory(rows)
    assert (eager, proving, force) == ("3,000 / 3,100", "3,000 / 3,100", "1,000 / 2,000")


def test_memory_of_an_older_file_has_no_reserved_figure():
    old = {"preparing_mb": 180, "peak_mb": 152, "reserved_mb": 210}
    _, (_, eager, *_) = tables.memory([ways("tiny", "eager", memory=old)])
    assert eager == "180"
