"""The queue: what waits is on disk, is started once and one after another, and only what this user queued is started."""

import json
import os
import subprocess
import sys
import threading

import pytest
from run_folders import a_run

from hotloop import record
from hotloop.errors import ConfigError
from hotloop.ui import places, processes, queue, queue_launcher
from hotloop.ui.places import Places
from hotloop.ui.queue import Queue

SCRIPT = "<script>alert(1)</script>"


@pytest.fixture
def waiting(root):
    return Queue(Places(root))


def names(waiting):
    return [one.name for one in waiting.entries()]


def files(root):
    return sorted((root / queue.FOLDER).glob("*.json"))


def trains(folder, monkeypatch):
    """Let a process of another number work in a run's folder, as far as the queue can tell."""
    told = record.this_process()
    (a_run(folder, status="running") / "run.lock.json").write_text(json.dumps(told))
    monkeypatch.setattr(processes, "_is_ours", lambda pid: pid == told["pid"])


def test_what_is_queued_waits_in_its_order_for_any_server(client, root, waiting):
    for name in ("first", "second"):
        answer = client.post("/training/queue", data={"recipe": "digits", "name": name, "training.num_epochs": "1"})
        assert answer.headers["location"] == "/runs"
    assert names(waiting) == ["digits/first", "digits/second"]
    first = waiting.entries()[0]
    assert first.arguments == (
        "train", "recipe=digits", "training.num_epochs=1", f"run.folder={root}/digits/first",
    )  # fmt: skip
    text = client.get("/runs").text
    assert text.index("digits/first") < text.index("digits/second")
    assert client.get("/runs/queue").text.count("from the queue") == 2


def test_a_form_with_a_mistake_is_not_queued_and_comes_back(client, waiting):
    answer = client.post("/training/queue", data={"recipe": "digits", "training.batch_size": "zero"})
    assert answer.status_code == 422
    assert 'value="zero"' in answer.text
    assert not waiting.entries()


def test_the_name_of_what_waits_is_taken(client, root):
    typed = {"recipe": "digits", "name": "mine"}
    client.post("/training/queue", data=typed)
    assert "is there already" in client.post("/training/start", data=typed).text
    for _ in range(2):  # within one second, and without a name
        client.post("/training/queue", data={"recipe": "digits"})
    assert len(set(names(Queue(Places(root))))) == 3


def test_an_entry_is_removed_and_its_name_is_free_again(client, root, waiting):
    for name in ("one", "two"):
        client.post("/training/queue", data={"recipe": "digits", "name": name})
    client.post("/queue/remove", data={"entry": waiting.entries()[0].file})
    assert names(waiting) == ["digits/two"]
    assert not (root / "digits" / "one").exists()
    for odd in ("../../digits/two", "", "nonesuch.json"):
        assert client.post("/queue/remove", data={"entry": odd}).status_code == 404
    assert names(waiting) == ["digits/two"]


def test_the_next_run_is_taken_once_and_its_process_is_known(root, waiting):
    waiting.add(root / "a", ["train", "recipe=digits"])
    waiting.add(root / "b", ["train", "recipe=digits"])
    taken = waiting.take()
    assert taken.name == "a"
    assert json.loads((root / "a" / places.START).read_text())["pid"] == os.getpid()
    assert names(waiting) == ["b"]


def test_nothing_is_taken_while_a_run_of_the_folder_trains(root, waiting, monkeypatch):
    waiting.add(root / "b", ["train"])
    trains(root / "a", monkeypatch)
    assert waiting.take() is None
    assert names(waiting) == ["b"]


def test_nothing_is_taken_while_a_fold_of_a_cross_validation_trains(root, waiting, monkeypatch):
    waiting.add(root / "b", ["train"])
    (root / "folds").mkdir()
    (root / "folds" / "kfold.json").write_text("{}")
    trains(root / "folds" / "fold-0", monkeypatch)
    assert waiting.take() is None


def test_a_launcher_that_dies_before_the_run_is_its_own_loses_nothing(root, waiting, monkeypatch):
    waiting.add(root / "a", ["train"])
    note = processes.note

    def dies(*told):
        note(*told)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(processes, "note", dies)
        waiting.take()
    assert (root / "a" / places.START).exists()
    assert waiting.take().name == "a"
    assert waiting.take() is None


def test_a_run_that_is_there_by_now_is_not_started_again(root, waiting):
    waiting.add(root / "a", ["train"])
    waiting.add(root / "b", ["train"])
    a_run(root / "a")
    assert "holds a run" in waiting.entries()[0].problem
    assert waiting.take().name == "b"


@pytest.mark.parametrize("change", ["arguments", "name", "directory", "signature"])
def test_what_somebody_else_wrote_is_shown_and_never_started(client, root, waiting, change):
    waiting.add(root / "a", ["train"])
    file = files(root)[0]
    told = json.loads(file.read_text())
    told[change] = ["train", f"recipe=/tmp/evil.py:make{SCRIPT}"] if change == "arguments" else "other"
    file.write_text(json.dumps(told))
    assert waiting.take() is None
    text = client.get("/runs").text
    assert "not queued by you" in text
    assert SCRIPT not in text


def test_a_queue_from_another_folder_is_not_started(root, tmp_path, waiting):
    waiting.add(root / "a", ["train"])
    root.rename(tmp_path / "copied")
    assert Queue(Places(tmp_path / "copied")).take() is None


@pytest.mark.parametrize(
    "content", ["", "[]", "{}", '{"name": 1}', '{"name": "../x", "directory": "", "arguments": []}']
)
def test_an_entry_that_is_none_is_shown_and_can_be_removed(client, root, waiting, content):
    (root / queue.FOLDER).mkdir(parents=True)
    (root / queue.FOLDER / "x.json").write_text(content)
    assert waiting.entries()[0].problem
    assert waiting.take() is None
    assert "Not started" in client.get("/runs").text
    client.post("/queue/remove", data={"entry": "x.json"})
    assert not waiting.entries()


def test_the_key_is_this_users_alone(root, waiting):
    waiting.add(root / "a", ["train"])
    key = queue.Path(os.environ["XDG_STATE_HOME"]) / "hotloop" / "queue.key"
    assert key.stat().st_mode & 0o077 == 0
    assert len(key.read_bytes()) == 32


def test_a_launcher_becomes_the_run(root, tmp_path, waiting, monkeypatch):
    monkeypatch.chdir(tmp_path)
    waiting.add(root / "a", ["train", "recipe=digits"])
    began, there = [], []
    monkeypatch.chdir("/")
    monkeypatch.setattr(queue_launcher.os, "dup2", lambda *_: None)
    monkeypatch.setattr(
        queue_launcher.os, "execv", lambda path, words: (began.append(words), there.append(str(queue.Path.cwd())))
    )
    queue_launcher.main(str(root))
    queue_launcher.main(str(root))
    assert [one[-2:] for one in began] == [["train", "recipe=digits"]]
    assert there == [str(tmp_path)]


@pytest.mark.campaign
def test_many_launchers_at_once_start_each_run_once(root, waiting):
    for name in ("a", "b"):
        waiting.add(root / name, ["--version"])
    command = [sys.executable, "-m", "hotloop.ui.queue_launcher", str(root)]

    def launch():
        while waiting.entries():
            subprocess.run(command, check=True, timeout=600)

    threads = [threading.Thread(target=launch) for _ in range(3)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    for name in ("a", "b"):
        assert len((root / name / places.LOG).read_text().splitlines()) == 1


def test_a_look_starts_a_launcher_only_where_there_is_something_to_start(root, waiting, monkeypatch):
    launched = []
    monkeypatch.setattr(Queue, "_launch", lambda self: launched.append(1))
    waiting.look()
    assert not root.exists()
    trains(root / "a", monkeypatch)
    waiting.add(root / "b", ["train"])
    waiting.look()
    assert not launched
    (root / "a" / "run.lock.json").unlink()
    waiting.look()
    assert launched


def test_why_a_launcher_failed_is_shown(root, tmp_path, waiting, monkeypatch):
    broken = tmp_path / "broken"
    broken.write_text("#!/bin/sh\necho this Python is broken >&2\nexit 3\n")
    broken.chmod(0o755)
    waiting.add(root / "a", ["train"])
    monkeypatch.setattr(sys, "executable", str(broken))
    waiting.look()
    waiting._launcher.wait(300)
    waiting.look()
    assert waiting.problem == "this Python is broken"
    assert names(waiting) == ["a"]


def test_a_folder_that_cannot_be_written_is_said(root, waiting):
    root.write_text("")
    with pytest.raises(ConfigError, match="cannot be queued"):
        waiting.add(root / "a", ["train"])


def test_a_link_in_place_of_the_launchers_log_is_not_written_through(root, waiting, tmp_path, monkeypatch):
    """A runs folder may come from a stranger."""
    precious = tmp_path / "precious"
    precious.write_text("mine")
    waiting.add(root / "a", ["train", "recipe=digits"])
    (root / queue.FOLDER / queue.LOG).symlink_to(precious)
    started = []
    monkeypatch.setattr(subprocess, "Popen", lambda *given, **_: started.append(given))
    waiting.look()
    assert precious.read_text() == "mine"
    assert not started
    assert queue.LOG in waiting.problem
