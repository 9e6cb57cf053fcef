"""What a run takes of the machine, and how far its compiles are: told where something tells it, silent where nothing does."""

import json
import os

import pytest
from run_folders import a_run

from hotloop import record
from hotloop.record import RunRecord
from hotloop.ui import processes, usage
from hotloop.ui.usage import Gpus

TOLD = """0, NVIDIA <b>H100</b>, 87, 12288, 81559
1, NVIDIA H100, [N/A], [N/A], 81559
nonsense
"""


@pytest.fixture
def driver(tmp_path, monkeypatch):
    """Puts a driver's program in front of the machine's own; however busy the machine is, it is heard."""
    monkeypatch.setattr(usage, "_LONGEST_SECONDS", 300.0)

    def put(script):
        file = tmp_path / "bin" / "nvidia-smi"
        file.parent.mkdir(exist_ok=True)
        file.write_text(f"#!/bin/sh\n{script}\n")
        file.chmod(0o755)
        monkeypatch.setenv("PATH", f"{file.parent}:{os.environ['PATH']}")

    return put


def running(root, monkeypatch, **settings):
    written = RunRecord(root / "digits" / "now")
    written.update("settings", **settings)
    written._lines.close()
    told = record.this_process()
    (root / "digits" / "now" / "run.lock.json").write_text(json.dumps(told))
    monkeypatch.setattr(processes, "_is_ours", lambda pid: pid == told["pid"])


def test_gpus_are_told_by_the_driver(client, root, driver, monkeypatch):
    driver(f"cat <<'END'\n{TOLD}END")
    first, second = Gpus().look()
    assert (first.busy, first.used) == (0.87, 12288 * 2**20)
    assert (second.busy, second.used) == (None, None)
    text = client.get("/machine").text
    assert "87%" in text
    assert "&lt;b&gt;H100" in text
    running(root, monkeypatch)
    assert "GPU 0: 87% busy" in client.get("/run?run=digits/now").text


@pytest.mark.parametrize("script", ["exit 9", "echo '<html>'", "sleep 60"])
def test_a_driver_that_does_not_tell_is_left_alone(client, driver, monkeypatch, script):
    monkeypatch.setattr(usage, "_LONGEST_SECONDS", 0.5)
    driver(script)
    assert Gpus().look() == []
    assert "GPU 0" not in client.get("/machine").text


def test_without_a_driver_there_are_no_gpus(monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert Gpus().look() == []


def test_the_driver_is_asked_once_for_all_who_watch(driver, tmp_path, monkeypatch):
    monkeypatch.setattr(usage, "FRESH_SECONDS", 300.0)
    driver(f"echo asked >> {tmp_path}/asked; echo '0, a, 1, 1, 1'")
    gpus = Gpus()
    for _ in range(5):
        gpus.look()
    assert (tmp_path / "asked").read_text() == "asked\n"


def test_the_memory_of_a_process_is_told(client, root, monkeypatch):
    assert usage.memory(os.getpid()) > 2**20
    assert usage.memory(2**30) is None
    running(root, monkeypatch)
    assert "The process holds" in client.get("/run?run=digits/now").text


def compiled(folder, graphs, **settings):
    with RunRecord(folder) as written:
        written.update("settings", **settings)
        for number in range(graphs):
            written.append("events", {"kind": "compiled", "step": 1, "seconds": 2.0, "function": f"f{number}"})


def test_compiles_are_told_beside_those_of_an_earlier_run_with_the_same_graphs(client, root, monkeypatch):
    alike = {"recipe": {"name": "digits"}, "compile": {"preset": "default"}}
    compiled(root / "digits" / "old", 5, **alike, training={"learning_rate": 1.0, "batch_size": 8}, run={"seed": 1})
    compiled(root / "digits" / "other", 9, **alike, training={"learning_rate": 1.0, "batch_size": 16})
    a_run(root / "digits" / "failed", status="failed")
    running(root, monkeypatch, **alike, training={"learning_rate": 0.1, "batch_size": 8}, run={"seed": 2})
    head = client.get("/run/head?run=digits/now").text
    assert "0 of 5 graphs" in head
    assert "took 10 s" in head
    lines = root / "digits" / "now" / "record.jsonl"
    for number in range(5):
        entry = {"kind": "compiled", "step": 1, "seconds": 1.0, "function": f"f{number}"}
        with lines.open("a") as file:
            file.write(json.dumps({"time": 2.0, "append": "events", "entry": entry}) + "\n")
        head = client.get("/run/head?run=digits/now").text
        assert f"{number + 1} of 5 graphs" in head
    with lines.open("a") as file:
        file.write(json.dumps({"time": 2.0, "append": "steps", "entry": {"step": 1, "seconds": 1.0}}) + "\n")
    assert "Compiled so far" not in client.get("/run/head?run=digits/now").text  # it steps, with all that it needs


def test_without_an_earlier_run_the_graphs_so_far_are_told(client, root, monkeypatch):
    running(root, monkeypatch, recipe={"name": "digits"})
    assert "Compiled so far" not in client.get("/run/head?run=digits/now").text
    entry = {"kind": "compiled", "step": 1, "seconds": 3.0}
    with (root / "digits" / "now" / "record.jsonl").open("a") as file:
        file.write(json.dumps({"time": 2.0, "append": "events", "entry": entry}) + "\n")
    assert "Compiled so far: 1 graph, 3 s" in client.get("/run/head?run=digits/now").text
