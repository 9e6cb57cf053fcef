import json
import os
import subprocess
import sys

import pytest

import hotloop.cli
from hotloop.record import RunRecord


@pytest.fixture
def folder(tmp_path):
    with RunRecord(tmp_path / "a run") as run:
        run.update("settings", recipe="criteria")
        run.update(
            "components", model={"requested": "inductor", "running": "inductor", "state": "compiled", "causes": []}
        )
        for step in range(20):
            run.append("steps", {"step": step, "seconds": 0.1, "loss": 1.0})
    return tmp_path / "a run"


def report(*args):
    with pytest.raises(SystemExit) as stopped:
        hotloop.cli.main(["report", *map(str, args)])
    return stopped.value.code or 0


@pytest.mark.parametrize("name", ["", "record.json", "record.jsonl"])
def test_a_summary_and_a_page_beside_the_record(folder, name, capsys):
    assert report(folder / name) == 0
    out = capsys.readouterr().out
    assert "model ran compiled with inductor, as asked." in out
    assert out.endswith(f"\nReport: {folder / 'report.html'}\n")
    assert (folder / "report.html").read_text(encoding="utf-8").startswith("<!doctype html>")


def test_json_is_all_that_is_printed(folder, tmp_path, capsys):
    assert report(folder, "--json") == 0
    data = json.loads(capsys.readouterr().out)
    assert data["headline"]["title"] == "criteria"
    assert data["html"] is None
    assert not (folder / "report.html").exists()
    assert report(folder, "--json", "--html", tmp_path / "y.html") == 0
    assert json.loads(capsys.readouterr().out)["html"] == str(tmp_path / "y.html")


def test_no_torch_is_imported(folder):
    program = (
        "import sys, hotloop.cli\n"
        "try:\n    hotloop.cli.main(['report', sys.argv[1]])\n"
        "except SystemExit as stopped:\n    assert not stopped.code, stopped.code\n"
        "heavy = {'torch', 'numpy', 'transformers', 'lightning', 'pandas'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    # A console of another encoding than ours must not stop a report either.
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(
        [sys.executable, "-c", program, str(folder)], capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "model ran compiled" in done.stdout
