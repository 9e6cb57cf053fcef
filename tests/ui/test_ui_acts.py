"""What a person asks of a run: a checkpoint now; and weights for other programs."""

import json

import pytest
from run_folders import a_run, a_study

from hotloop import record
from hotloop.train import configure, requests
from hotloop.train.requests import Requests
from hotloop.ui import processes, run_acts

SCRIPT = "<script>alert(1)</script>"


@pytest.fixture
def running(root, monkeypatch):
    """A run whose process is this one, as far as the page can tell."""
    folder = a_run(root / "a", status="running")
    told = record.this_process()
    (folder / "run.lock.json").write_text(json.dumps(told))
    monkeypatch.setattr(processes, "_is_ours", lambda pid: pid == told["pid"])
    return folder


def test_a_run_is_asked_for_a_checkpoint_and_for_nothing_else(client, running):
    asked = Requests(running)
    assert "Save now" in client.get("/run?run=a").text
    assert client.post("/run/ask", data={"run": "a", "what": "save"}).status_code == 303
    assert "Save now: after this step" in client.get("/run/head?run=a").text
    assert asked.asked()
    assert "Save now: after this step" not in client.get("/run/head?run=a").text
    before = {one.name for one in running.iterdir()}
    for what in ("sample", "../../x", "", SCRIPT, "record.jsonl"):
        answer = client.post("/run/ask", data={"run": "a", "what": what})
        assert answer.status_code == 409
        assert SCRIPT not in answer.text
    assert {one.name for one in running.iterdir()} == before


def test_nobody_is_asked_where_nothing_runs(client, root):
    a_run(root / "a")
    assert "Save now" not in client.get("/run?run=a").text
    assert client.post("/run/ask", data={"run": "a", "what": "save"}).status_code == 409
    assert not requests.is_asked(root / "a")


def test_an_export_is_a_process_of_its_own_and_its_files_are_links(client, root, monkeypatch):
    folder, asked = a_run(root / "a"), []

    def ask(arguments, seconds):
        asked.append(arguments)
        out = root / "a" / ("export-best" if len(asked) == 1 else "export-best-2")
        assert arguments == ["export", str(folder), str(out), "--checkpoint", "best", "--format", "safetensors"]
        out.mkdir()
        (out / "model.safetensors").write_bytes(b"weights")
        return 0, "", ""

    monkeypatch.setattr(processes, "ask", ask)
    answer = client.post("/run/export", data={"run": "a", "checkpoint": "best"})
    assert answer.headers["location"] == "/run?run=a#exported"
    assert "export-best/model.safetensors" in client.get("/run?run=a").text
    got = client.get("/run/exported?run=a&name=export-best/model.safetensors")
    assert got.content == b"weights"
    assert got.headers["content-disposition"].startswith("attachment")
    client.post("/run/export", data={"run": "a", "checkpoint": "best"})
    assert len(asked) == 2


def test_a_format_that_runs_the_program_of_a_run_is_asked_for_twice(client, root, monkeypatch):
    folder, asked = a_run(root / "a"), []

    def ask(arguments, seconds):
        asked.append(arguments)
        inner = folder / "export-last-pretrained" / "unet"
        inner.mkdir(parents=True)
        (inner / "config.json").write_text("{}")
        (inner / "deeper").mkdir()
        (inner / "deeper" / "a.json").write_text("{}")
        return 0, "", ""

    monkeypatch.setattr(processes, "ask", ask)
    wanted = {"run": "a", "checkpoint": "last", "format": "pretrained"}
    assert "It runs as you" in client.post("/run/export", data=wanted).text
    assert asked == []
    assert client.post("/run/export", data={**wanted, "sure": "yes"}).status_code == 303
    out = str(folder / "export-last-pretrained")
    assert asked == [["export", str(folder), out, "--checkpoint", "last", "--format", "pretrained"]]
    name = "export-last-pretrained/unet/config.json"
    assert client.get("/run/exported", params={"run": "a", "name": name}).content == b"{}"
    deeper = "export-last-pretrained/unet/deeper/a.json"
    assert client.get("/run/exported", params={"run": "a", "name": deeper}).status_code == 404
    assert client.post("/run/export", data={**wanted, "format": "onnx", "sure": "yes"}).status_code == 409


def test_the_page_offers_every_format_of_the_command():
    from hotloop.train.export import FORMATS

    assert run_acts.FORMATS == FORMATS


def test_an_export_that_fails_says_why(client, root, monkeypatch):
    a_run(root / "a")
    monkeypatch.setattr(processes, "ask", lambda *_: (2, "", f"hotloop: no checkpoint {SCRIPT}"))
    answer = client.post("/run/export", data={"run": "a", "checkpoint": "last"})
    assert answer.status_code == 409
    assert "no checkpoint" in answer.text
    assert SCRIPT not in answer.text
    assert client.post("/run/export", data={"run": "a", "checkpoint": "../x"}).status_code == 409


@pytest.mark.parametrize(
    "name",
    ["record.jsonl", "../a/record.jsonl", "export-x/link.json", "export-x/a.py", "linked/a.json", "export-x", ""],
)
def test_only_the_files_of_exports_are_served(client, root, tmp_path, name):
    folder = a_run(root / "a")
    (folder / "export-x").mkdir()
    (folder / "export-x" / "a.py").write_text("secret")
    (folder / "export-x" / "link.json").symlink_to(folder / "record.jsonl")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "a.json").write_text("secret")
    (folder / "export-linked").symlink_to(tmp_path / "out")
    assert client.get("/run/exported", params={"run": "a", "name": name}).status_code == 404
    assert client.get("/run/exported", params={"run": "a", "name": "export-linked/a.json"}).status_code == 404


def test_a_search_goes_on_from_its_page_by_its_folder_and_never_by_what_it_says(client, root, monkeypatch):
    folder = a_study(root / "a, study")
    found = json.loads((folder / "study.json").read_text())
    (folder / "study.json").write_text(json.dumps({**found, "left": 2, "command": "rm -rf /"}))
    assert "Resume" not in client.get("/run", params={"run": "a, study"}).text  # without its settings
    (folder / "study.yaml").write_text("recipe: {name: digits}\n")
    began = []
    monkeypatch.setattr(processes, "start", lambda folder, arguments: began.append((folder, arguments)))
    assert "Resume" in client.get("/run", params={"run": "a, study"}).text
    assert client.post("/run/resume", data={"run": "a, study"}).status_code == 303
    assert began == [(folder, ["hpo", "--config", f"{folder}/study.yaml", f"hpo.folder='{folder}'"])]
    assert configure.load_search(["recipe=digits", began[0][1][-1]]).hpo.folder == str(folder)
    (folder / "study.json").write_text(json.dumps(found))
    assert "Resume" not in client.get("/run", params={"run": "a, study"}).text  # nothing is left
