"""One row from its command to the file, in processes of its own."""

import os
import subprocess
import sys

import pytest

from benchmarks.suite import document as files
from benchmarks.suite.__main__ import ROOT


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    path = tmp_path_factory.mktemp("suite") / "x.json"
    command = [sys.executable, "-m", "benchmarks.suite", "--cpu", "--out", str(path), "--only", "mlp:eager,eager+graph"]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return files.load(path), done.stdout


@pytest.mark.campaign
@pytest.mark.long
def test_both_ways_are_measured(found):
    document, out = found
    eager, captured = document["rows"]
    assert (eager["way"], captured["way"]) == ("eager", "eager+graph")
    assert not any(row.get("error") for row in document["rows"]), document["rows"]
    assert eager["steady"]["ms"] > 0
    assert eager["prepared_steps"] == 3
    assert eager["first_seconds"] == sorted(eager["first_seconds"])
    assert "eager+graph" in out


@pytest.mark.campaign
def test_the_captured_step_is_right_and_no_speed(found):
    captured = found[0]["rows"][1]
    assert captured["emulated"]
    assert captured["ran"] == "eager+graph"
    assert captured["loss_difference"] < 1e-5
    assert len(captured["losses"]) == len(captured["eager_losses"]) == 16
    assert [row["way"] for row in found[0]["totals"]] == ["eager"]


@pytest.mark.campaign
def test_hardware_and_versions_are_named_and_no_host(found):
    machine = found[0]["machine"]
    assert machine["torch"]
    assert machine["processor"]
    assert "host" not in machine
    assert {one["status"] for one in found[0]["goals"]} == {"open"}
