"""The list of runs and the page of a run: what they show as it changes, and what a person does to a run."""

import asyncio
import json
import re
import shutil
import subprocess
import sys

import pytest
from run_folders import a_cross_validation, a_process, a_run, a_study
from starlette.requests import Request

from hotloop import record
from hotloop.record import RunRecord
from hotloop.train import configure
from hotloop.train.requests import Requests
from hotloop.ui import places, processes, watching
from hotloop.ui.places import Places
from hotloop.ui.run_pages import RunPages
from hotloop.ui.site import Site


def names_in(text):
    return re.findall(r'<a href="/run\?run=([^"]+)">', text)


def test_an_empty_folder_says_where_to_begin(client, root):
    assert "Start one" in client.get("/runs").text
    assert not root.exists()


def test_runs_are_listed_with_what_came_of_them(client, root):
    a_run(root / "criteria" / "one", accuracies=(0.5, 0.9))
    a_run(root / "criteria" / "two", status="failed")
    a_cross_validation(root / "folds")
    a_study(root / "search")
    text = client.get("/runs").text
    assert set(names_in(text)) == {"criteria/one", "criteria/two", "folds", "search"}
    for said in (
        "finished",
        "failed",
        "Time saved",
        "accuracy 0.9",
        "why it ended",
        "2 folds",
        "1 trial<",
        "cross-validation",
    ):
        assert said in text, said


def test_the_list_is_found_by_name_and_paged_the_last_changed_first(client, root):
    for number_ in range(60):
        a_run(root / f"run-{number_:03}", accuracies=(0.5,))
    first = client.get("/runs").text
    assert names_in(first)[0] == "run-059"
    assert len(names_in(first)) == 50
    assert "Page 1 of 2, 60 runs" in first
    assert names_in(client.get("/runs?page=2").text)[-1] == "run-000"
    assert names_in(client.get("/runs?find=RUN-007").text) == ["run-007"]
    for odd in ("0", "-1", "99", "x", "\u0661", "9" * 50):
        assert client.get("/runs", params={"page": odd}).status_code == 200


def test_of_a_thousand_runs_a_page_reads_only_its_own(client, root, monkeypatch):
    whole = a_run(root / "run-0000", accuracies=(0.5,))
    for number_ in range(1, 1000):
        shutil.copytree(whole, root / f"run-{number_:04}")
    read = []
    monkeypatch.setattr(watching.runs, "read", lambda path, was=watching.runs.read: read.append(path) or was(path))
    assert "1,000 runs" in client.get("/runs").text
    assert len(read) == 50
    client.get("/runs")
    assert len(read) == 50  # nothing has changed


def long_record(folder, steps):
    entries = ({"step": n, "seconds": 0.01, "loss": 1 / n, "running": "eager"} for n in range(1, steps + 1))
    folder.mkdir(parents=True)
    with (folder / "record.jsonl").open("w") as lines:
        lines.write(json.dumps({"time": 1.0, "set": {"created": 1.0, "schema": 1, "status": "finished"}}) + "\n")
        lines.writelines(json.dumps({"time": 1.0, "append": "steps", "entry": one}) + "\n" for one in entries)
    return folder


@pytest.mark.campaign
def test_a_hundred_thousand_points_become_what_a_screen_can_show(client, root):
    long_record(root / "long", 100_000)
    charts = client.get("/run/charts?run=long").json()
    loss = next(one for one in charts if one["key"] == "loss")
    assert loss["steps"][0] == 1
    assert loss["steps"][-1] == 100_000
    assert all(len(one["steps"]) <= 4000 for one in charts)


def test_a_record_is_read_on_where_it_was_left(root):
    folder = long_record(root / "a", 100)
    follower = record.Follower(folder)
    first = follower.look()
    assert len(first["steps"]) == 100
    with (folder / "record.jsonl").open("a") as lines:
        lines.write('{"time": 2.0, "append": "steps", "entry": {"step": 101}}\n{"time": 3.0, "append": "st')
    assert follower.look() is first
    assert [one["step"] for one in first["steps"][-2:]] == [100, 101]
    with (folder / "record.jsonl").open("a") as lines:
        lines.write('eps", "entry": {"step": 102}}\nnonsense\n')
    assert follower.look()["steps"][-1]["step"] == 102
    assert first["unread_lines"] == 1
    assert {**record.load(folder), "updated": 0} == {**first, "updated": 0}


def test_a_record_that_was_written_anew_is_read_anew(root):
    folder = long_record(root / "a", 100)
    follower = record.Follower(folder)
    follower.look()
    shutil.rmtree(folder)
    long_record(folder, 3)
    assert len(follower.look()["steps"]) == 3


def test_a_run_goes_on_while_it_is_watched(client, root):
    written = RunRecord(root / "a")
    written.update("measurements", steps_total=10)
    for step in range(1, 5):
        written.append("steps", {"step": step, "seconds": 2.0, "loss": 1.0, "running": "full+graph"})
    first = client.get("/run/charts?run=a").json()
    for step in range(5, 9):
        written.append("steps", {"step": step, "seconds": 2.0, "loss": 0.5, "running": "full+graph"})
    then = client.get("/run/charts?run=a").json()
    assert (first[0]["steps"][-1], then[0]["steps"][-1]) == (4, 8)
    assert "full+graph" in client.get("/run/frames?run=a").text
    written.finish()
    assert "finished" in client.get("/run/now?run=a").text


def test_a_running_run_says_how_far_it_is(client, root, monkeypatch):
    a_process(root, monkeypatch)
    head = client.get("/run/now?run=a").text
    for said in ("40%", "12 s left", "running"):
        assert said in head


def test_before_its_first_step_a_run_says_what_it_has_compiled(client, root, monkeypatch):
    a_process(root, monkeypatch, done=0)
    with (root / "a" / record.LINES).open("a") as lines:
        event = {"kind": "compiled", "seconds": 3.0}
        lines.writelines(json.dumps({"time": 9.0, "append": "events", "entry": event}) + "\n" for _ in range(2))
    assert "Compiled so far: 2 graphs, 6 s. The first steps take longer" in client.get("/run/now?run=a").text


def test_a_run_that_goes_on_does_not_say_how_it_ended_before(client, root, monkeypatch):
    a_run(root / "a", status="interrupted")
    ended = json.dumps({"time": 9.0, "set": {"pid": 1}})
    with (root / "a" / "record.jsonl").open("a") as lines:
        lines.write(ended + "\n")
    assert "Interrupted" in client.get("/run/now?run=a").text
    told = record.this_process()
    (root / "a" / "run.lock.json").write_text(json.dumps(told))
    monkeypatch.setattr(processes, "_is_ours", lambda pid: pid == told["pid"])
    head = client.get("/run/now?run=a").text
    assert "starting" in head
    assert "goes on with this run" in head
    assert "nterrupted" not in head


def test_nothing_is_said_to_be_wrong_with_a_run_that_starts(client, root, monkeypatch):
    (root / "a").mkdir(parents=True)
    told = record.this_process()
    (root / "a" / processes.START).write_text(json.dumps(told))
    monkeypatch.setattr(processes, "_is_ours", lambda pid: pid == told["pid"])
    text = client.get("/runs").text
    assert "starting" in text
    assert 'class="problem"' not in text


def test_stop_is_sent_once_and_the_second_time_only_where_that_is_meant(client, root, monkeypatch):
    told = a_process(root, monkeypatch)
    sent = []
    monkeypatch.setattr(processes.os, "kill", lambda pid, signal: sent.append(pid) if signal else None)
    assert client.post("/run/stop", data={"run": "a"}).status_code == 303
    client.post("/run/stop", data={"run": "a"})
    assert sent == [told["pid"]]
    head = client.get("/run/now?run=a").text
    assert "stopping" in head
    assert "Stop at once" in head
    client.post("/run/stop", data={"run": "a", "at_once": "yes"})
    assert len(sent) == 2


def test_what_runs_is_neither_deleted_nor_resumed(client, root, monkeypatch):
    a_process(root, monkeypatch)
    monkeypatch.setattr(processes.subprocess, "Popen", lambda *_, **__: pytest.fail("a second process"))
    assert "it runs now" in client.post("/run/delete", data={"run": "a", "sure": "yes"}).text
    assert client.post("/run/resume", data={"run": "a"}).status_code == 303
    assert (root / "a").is_dir()


def test_a_run_is_deleted_once_a_person_said_so_twice(client, root):
    a_run(root / "a")
    asked = client.post("/run/delete", data={"run": "a"})
    assert "cannot be undone" in asked.text
    assert (root / "a").is_dir()
    assert client.post("/run/delete", data={"run": "a", "sure": "yes"}).headers["location"] == "/runs"
    assert not (root / "a").exists()
    assert names_in(client.get("/runs").text) == []


def test_a_part_of_a_cross_validation_is_not_deleted(client, root):
    a_cross_validation(root / "folds")
    refused = client.post("/run/delete", data={"run": "folds/fold-0", "sure": "yes"})
    assert refused.status_code == 409
    assert "is part of" in refused.text


def test_a_process_that_ended_before_its_record_is_shown_with_its_log(client, root):
    folder = root / "a"
    folder.mkdir(parents=True)
    (folder / places.START).write_text(json.dumps({"pid": 1, "arguments": ["train", "recipe=x"]}))
    (folder / places.LOG).write_text("hotloop: recipe=x: no such choice\n10%\r20%\r30%\n")
    text = client.get("/run?run=a").text
    for said in ("not started", "recipe=x: no such choice", "30%", "hotloop train recipe=x"):
        assert said in text
    assert "20%" not in text
    client.post("/run/delete", data={"run": "a", "sure": "yes"})
    assert not folder.exists()


def test_a_run_is_resumed_by_its_folder_and_never_by_what_a_folder_says(client, root, monkeypatch):
    folder = a_run(root / "a", status="interrupted")
    (folder / places.START).write_text(json.dumps({"arguments": ["train", "recipe=/tmp/evil.py:make"]}))
    began = []
    monkeypatch.setattr(processes, "start", lambda folder, arguments: began.append((folder, arguments)))
    assert "Resume" in client.get("/run?run=a").text
    client.post("/run/resume", data={"run": "a"})
    assert began == [(folder, ["train", f"run.resume={folder}"])]


def test_runs_are_compared(client, root):
    a_run(root / "a", accuracies=(0.5, 0.6))
    a_run(root / "b", accuracies=(0.7,), goal="min:loss")
    a_study(root / "search")
    text = client.get("/compare?run=a&run=b").text
    assert "recipe.goal" in text
    assert "training.learning_rate" not in text  # which does not differ
    assert "min:loss" in text
    charts = client.get("/compare/charts?run=a&run=b&run=search").json()
    assert [one["names"] for one in charts] == [["a", "b"]]
    assert text.count("data-chart=") == len(charts)


@pytest.mark.parametrize(("make", "said"), [(a_study, "Best accuracy"), (a_cross_validation, "Trained for")])
def test_searches_and_folds_have_pages(client, root, make, said):
    make(root / "whole")
    text = client.get("/run?run=whole").text
    assert said in text


def test_settings_are_kept_as_a_file(client, root):
    folder = a_run(root / "a")
    (folder / "settings.yaml").write_text("recipe: {name: criteria}\n")
    answer = client.get("/run/settings?run=a")
    assert answer.text == "recipe: {name: criteria}\n"
    assert answer.headers["content-disposition"].startswith("attachment")
    (folder / "settings.yaml").unlink()
    (folder / "settings.yaml").symlink_to("/etc/hostname")
    assert not client.get("/run/settings?run=a").text


def test_links_and_hidden_folders_hold_no_runs(root, tmp_path):
    a_run(tmp_path / "elsewhere")
    a_run(root / ".hidden")
    a_run(root / "shown")
    (root / "link").symlink_to(tmp_path / "elsewhere")
    assert [one.name for one in Places(root).all()] == ["shown"]


# -- what a page hears of ----------------------------------------------------------------------------------------------


def looks(root, access, path):
    """What the stream of a run's page compares, and the list's."""
    site = Site(root, access, None)
    site.news = lambda look, seen=None: look
    pages = RunPages(site)
    return pages.run_news(Request({"type": "http", "query_string": f"run={path}".encode()})), pages.list_news(None)


def test_a_page_that_was_made_before_its_stream_began_hears_of_the_change_between(root, access):
    site = Site(root, access, None)

    async def first(seen):
        stream = site.news(lambda: "now", seen).body_iterator
        said = [await anext(stream) for _ in range(2)]
        site.stopping = True
        await stream.aclose()
        return said[1], [one async for one in site.news(lambda: 1).body_iterator]

    assert asyncio.run(first("before")) == (b"event: changed\ndata: 1\n\n", [b"retry: 2000\n\n"])


def test_a_record_whose_process_is_gone_is_heard_of_although_no_file_changes(root, access):
    """A program with a `Loop` of its own holds no lock of the folder: its record alone names its process."""
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100_000)"])
    try:
        folder = a_run(root / "a", status="running")
        told = {"pid": process.pid, "process_started": record.process.started(process.pid)}
        with (folder / record.LINES).open("a") as lines:
            lines.write(json.dumps({"time": 9.0, "set": told}) + "\n")
        look = looks(root, access, "a")[0]
        before = look()
        assert look() == before
    finally:
        process.kill()
        process.wait()
    assert look() != before
    watched = watching.Watching()
    assert watched.row(folder).status == watched.run(folder).status == "killed"


def test_the_page_of_a_search_hears_of_its_trials_and_of_its_first_document(client, root, access):
    folder = root / "search"
    folder.mkdir(parents=True)
    (folder / "study.yaml").write_text("recipe: {name: criteria}\n")
    assert "Best accuracy" not in client.get("/run?run=search").text
    a_study(root / "other")
    (root / "other" / "study.json").rename(folder / "study.json")
    assert "Best accuracy" in client.get("/run/now?run=search").text
    look = looks(root, access, "search")[0]
    before = look()
    a_run(folder / "trials" / "0", status="running")
    with_trial = look()
    assert with_trial != before
    with (folder / "trials" / "0" / record.LINES).open("a") as lines:
        lines.write(json.dumps({"time": 9.0, "set": {"status": "finished"}}) + "\n")
    assert look() != with_trial
    assert "search/trials/0" in client.get("/run/now?run=search").text


def test_of_many_trials_the_last_are_listed(client, root, monkeypatch):
    monkeypatch.setattr(watching, "MEMBERS", 2)
    a_study(root / "search")
    for number_ in range(5):
        a_run(root / "search" / "trials" / str(number_), accuracies=(0.5,))
    text = client.get("/run?run=search").text
    assert [one for one in names_in(text) if "trials" in one] == ["search/trials/3", "search/trials/4"]
    assert "3 earlier ones" in text


# -- what a person asks of a run ---------------------------------------------------------------------------------------


def test_a_run_that_trains_is_asked_for_a_checkpoint(client, root, monkeypatch):
    a_run(root / "ended")
    assert "Save now" not in client.get("/run?run=ended").text
    assert client.post("/run/save", data={"run": "ended"}).status_code == 409
    a_process(root, monkeypatch)
    assert "Save now" in client.get("/run?run=a").text
    assert client.post("/run/save", data={"run": "a"}).status_code == 303
    assert "Save now: after this step" in client.get("/run/now?run=a").text
    assert Requests(root / "a").asked()
    assert "Save now: after this step" not in client.get("/run/now?run=a").text


def test_an_export_is_a_process_of_its_own(client, root, monkeypatch):
    folder, asked = a_run(root / "a"), []
    answers = [(0, "", ""), (2, "", "hotloop: no checkpoint <b>"), (0, "", "")]
    monkeypatch.setattr(processes, "ask", lambda arguments: asked.append(arguments) or answers[len(asked) - 1])
    text = client.post("/run/export", data={"run": "a", "checkpoint": "best"}).text
    assert asked[0][:2] == ["export", str(folder)]
    assert asked[0][2].startswith(f"{folder}/export-best-safetensors-")
    assert asked[0][2] in text
    assert asked[0][3:] == ["--checkpoint", "best", "--format", "safetensors"]
    wrong = client.post("/run/export", data={"run": "a", "checkpoint": "last"})
    assert (wrong.status_code, "no checkpoint &lt;b&gt;" in wrong.text) == (409, True)
    for one in ({"checkpoint": "../x"}, {"checkpoint": "best", "format": "onnx", "sure": "yes"}):
        assert client.post("/run/export", data={"run": "a", **one}).status_code == 409
    wanted = {"run": "a", "checkpoint": "last", "format": "pretrained"}
    assert "It runs as you" in client.post("/run/export", data=wanted).text
    assert len(asked) == 2
    client.post("/run/export", data={**wanted, "sure": "yes"})
    assert asked[2][-1] == "pretrained"


def test_a_search_goes_on_from_its_page_by_its_folder_and_never_by_what_it_says(client, root, monkeypatch):
    folder = a_study(root / "a, study")
    found = json.loads((folder / "study.json").read_text())
    (folder / "study.json").write_text(json.dumps({**found, "left": 2, "command": "rm -rf /"}))
    assert "Resume" not in client.get("/run", params={"run": "a, study"}).text  # without its settings
    (folder / "study.yaml").write_text("recipe: {name: criteria}\n")
    began = []
    monkeypatch.setattr(processes, "start", lambda folder, arguments: began.append((folder, arguments)))
    assert "Resume" in client.get("/run", params={"run": "a, study"}).text
    assert client.post("/run/resume", data={"run": "a, study"}).status_code == 303
    assert began == [(folder, ["hpo", "--config", f"{folder}/study.yaml", f"hpo.folder={folder}"])]
    assert configure.load_search(["recipe=criteria", began[0][1][-1]]).hpo.folder == str(folder)


@pytest.mark.campaign
def test_optunas_plots_are_made_of_the_study_in_the_searchs_own_folder(client, root):
    optuna = pytest.importorskip("optuna")
    pytest.importorskip("plotly")
    folder = a_study(root / "search")
    assert client.get("/run/plots?run=search").status_code == 404
    study = optuna.create_study(storage=f"sqlite:///{folder}/study.db", study_name="one")
    study.optimize(lambda trial: trial.suggest_float("lr<b>", 0, 1), n_trials=4)
    assert "/run/plots?run=search" in client.get("/run?run=search").text
    answer = client.get("/run/plots?run=search")
    assert answer.headers["content-security-policy"].startswith("sandbox allow-scripts;")
    assert "Plotly.newPlot" in answer.text
