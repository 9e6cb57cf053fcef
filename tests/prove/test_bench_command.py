"""``hotloop bench``: its output and exit codes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import hotloop.cli

NAME = f"{Path(__file__).with_name('bench_programs.py')}:make"


def bench(*arguments):
    with pytest.raises(SystemExit) as stopped:
        hotloop.cli.main(["bench", *map(str, arguments)])
    return stopped.value.code or 0


def test_a_table_a_page_and_a_record(tmp_path, capsys):
    page, folder = tmp_path / "page.html", tmp_path / "run"
    asked = ("--runs", "aot_eager, full+graph", "--steps", 12, "--total-steps", 300)
    assert bench(NAME, *asked, "--html", page, "--record", folder) == 0
    shown = capsys.readouterr()
    assert "aot_eager" in shown.out
    assert "full+graph was not timed" in shown.out
    assert "At 300 steps: " in shown.out
    assert shown.out.endswith(f"Report: {page}\n")
    assert "At 300 steps: " in page.read_text(encoding="utf-8")
    with pytest.raises(SystemExit) as stopped:
        hotloop.cli.main(["report", str(folder)])
    assert not stopped.value.code
    assert "Ways to run it" in capsys.readouterr().out


def test_json_is_all_that_is_printed(capsys):
    assert bench(NAME, "--runs", "aot_eager", "--steps", 12, "--json") == 0
    data = json.loads(capsys.readouterr().out)
    assert [one["name"] for one in data["ways"]] == ["eager", "aot_eager"]
    assert data["html"] is None


def test_where_nothing_that_was_asked_for_ran_the_exit_code_is_1(capsys):
    assert bench(NAME, "--runs", "full+graph", "--steps", 12) == 1
    assert "since no other way ran here" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((NAME, "--runs", "eagre"), "run 'eagre'"),
        ((NAME, "--runs", ","), "--runs ','"),
        ((NAME, "--steps", "3"), "steps 3"),
        (("nowhere.py:make",), "there is no file"),
        ((NAME, "--html", Path(__file__).parent), "it is a folder"),
        ((NAME, "--steps", "many"), "Usage: hotloop bench"),
    ],
)
def test_wrong_usage_is_2(arguments, said, capsys):
    assert bench(*arguments) == 2
    assert said in capsys.readouterr().err
