"""Runs on clusters, from the page: clusters that are added, the form's Where, and runs that are followed from there."""

import dataclasses
import html
import json
import os
import re
import signal
import socket
import threading
import time

import pytest
from run_folders import a_run, a_study
from shared import once

from hotloop import record
from hotloop.errors import ConfigError, DataError
from hotloop.remote import clusters, runs
from hotloop.report.runs import FETCHED
from hotloop.ui import attending, elsewhere, processes, watching
from hotloop.ui.places import LOG, START, STOP
from hotloop.ui.queue import works_here

HEAD = "http://head:8265"
SCRIPT = "<script>alert(1)</script>"


@pytest.fixture(autouse=True)
def _own_state(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


@pytest.fixture
def begun(monkeypatch):
    """Start nothing; give what would have been started."""
    calls = []
    monkeypatch.setattr(processes, "start", lambda *arguments: calls.append(arguments))
    return calls


def remote(folder, name="20261126-120000-abcd"):
    """Remember a run on the cluster."""
    run = runs.RemoteRun(name, HEAD, f"hotloop-{name}", "0" * 64, ("train", "recipe=digits"), str(folder), 1.0)
    runs.keep(run)
    return run


def followed(folder, pid, *, where=HEAD):
    """A folder whose run a process of this number follows."""
    folder.mkdir(parents=True, exist_ok=True)
    told = {**processes.Process(pid, processes.started(pid)).to_dict(), "arguments": ["train"], "where": where}
    (folder / START).write_text(json.dumps(told))


@pytest.fixture
def ours(monkeypatch):
    """Take this very process for one of hotloop's."""
    monkeypatch.setattr(processes, "_is_ours", lambda pid: pid == os.getpid())


# -- clusters ----------------------------------------------------------------------------------------------------------


def test_a_cluster_is_added_shown_and_removed(client, monkeypatch):
    assert "/clusters" in client.get("/machine").text
    monkeypatch.setattr(clusters, "problem", lambda address: "")
    assert HEAD in client.post("/clusters/add", data={"added": "head"}).text
    assert clusters.known() == [HEAD]
    assert HEAD in client.get("/clusters").text
    assert HEAD not in client.post("/clusters/remove", data={"address": HEAD}).text
    assert clusters.known() == []


@pytest.mark.parametrize("wrong", ["", SCRIPT, "ftp://head", "http://me:secret@head", "http://head:port", "a b"])
def test_what_is_no_address_is_refused_as_text(client, wrong):
    text = client.post("/clusters/add", data={"added": wrong}).text
    assert 'role="alert"' in text
    assert SCRIPT not in text
    assert clusters.known() == []


def test_a_cluster_that_does_not_answer_is_kept_and_said_to_be_off(client):
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))  # and does not listen
        address = f"http://127.0.0.1:{one.getsockname()[1]}"
        text = client.post("/clusters/add", data={"added": address}).text
    assert f"{address} is added, but nobody answers there now" in text
    assert clusters.known() == [address]


def test_clusters_need_the_token_and_the_form_of_this_server(stranger, access):
    assert stranger.get("/clusters").status_code == 401
    stranger.cookies.set(access.cookie("http"), access.session)
    assert stranger.post("/clusters/add", data={"added": HEAD}).status_code == 403
    assert clusters.known() == []


# -- the form ----------------------------------------------------------------------------------------------------------


def test_the_form_offers_here_and_the_clusters_that_were_added(client):
    text = client.get("/training?recipe=digits").text
    assert re.search(r'<select name="where".*?</select>', text, re.DOTALL)[0].count("<option") == 1
    clusters.add(HEAD)
    text = client.get(f"/training?recipe=digits&where={HEAD}").text
    assert f"<option selected>{HEAD}</option>" in text
    assert f"hotloop submit --address {HEAD} -- train recipe=digits" in html.unescape(text)
    assert 'formaction="/training/queue"' not in text


def test_what_this_machine_cannot_run_may_be_chosen_for_a_cluster(client):
    clusters.add(HEAD)
    assert 'value="triton" data-default="none" disabled' in client.get("/training?recipe=digits").text
    there = client.get(f"/training?recipe=digits&where={HEAD}").text
    assert 'value="triton" data-default="none"' in there
    assert "Not here" not in there


def test_a_run_is_submitted_with_what_was_typed(client, root, begun):
    clusters.add(HEAD)
    form = {"recipe": "digits", "where": HEAD, "name": "mine", "training.num_epochs": "3"}
    answer = client.post("/training/start", data=form)
    assert answer.headers["location"] == "/run?run=digits%2Fmine"
    arguments = ["train", "recipe=digits", "training.num_epochs=3"]
    assert begun == [(root / "digits" / "mine", arguments, HEAD)]


@pytest.mark.parametrize("wrong", [SCRIPT, HEAD, "--address"])
def test_a_cluster_that_was_not_added_gets_nothing(client, begun, wrong):
    answer = client.post("/training/start", data={"recipe": "digits", "where": wrong})
    assert answer.status_code == 422
    assert "expected this machine, or a cluster that was added" in answer.text
    assert SCRIPT not in answer.text
    assert begun == []


def test_a_cluster_has_no_place_in_the_queue(client, root):
    clusters.add(HEAD)
    answer = client.post("/training/queue", data={"recipe": "digits", "where": HEAD})
    assert answer.status_code == 422
    assert "The queue is this machine" in html.unescape(answer.text)
    assert not root.exists()


def test_check_does_a_dry_run_there(client, monkeypatch):
    clusters.add(HEAD)
    asked = []
    monkeypatch.setattr(processes, "ask", lambda arguments, seconds: (asked.append(arguments), (0, "said", ""))[1])
    assert "said" in client.post("/training/check", data={"recipe": "digits", "where": HEAD}).text
    assert asked == [["submit", "--dry-run", "--address", HEAD, "--", "train", "recipe=digits"]]


# -- runs --------------------------------------------------------------------------------------------------------------


def test_a_run_of_a_cluster_is_listed_and_shown_with_where_it_runs(client, root, ours):
    a_run(root / "a", status="running")
    followed(root / "a", os.getpid())
    assert HEAD in client.get("/runs").text
    text = client.get("/run?run=a").text
    assert f"on {HEAD}" in text
    assert '<span class="pill note" id="status">running</span>' in text
    assert "Stop after this step" in text
    assert "Save now" not in text


def test_what_a_strangers_folder_says_of_its_cluster_is_text(client, root):
    a_run(root / "a", status="running")
    followed(root / "a", 2**30, where=SCRIPT)
    for text in (client.get("/runs").text, client.get("/run?run=a").text):
        assert SCRIPT not in text
        assert html.escape(SCRIPT) in text


def test_the_process_of_the_record_is_of_another_machine(root, ours):
    a_run(root / "a", status="running")
    (root / "a" / "run.lock.json").write_text(json.dumps(record.this_process()))
    assert processes.find(root / "a").pid == os.getpid()
    followed(root / "a", 2**30)
    assert processes.find(root / "a") is None


def test_stop_is_written_for_the_process_that_follows_and_no_signal_ends_it(client, root, ours):
    a_run(root / "a", status="running")
    followed(root / "a", os.getpid())
    client.post("/run/stop", data={"run": "a"})  # a signal would end the tests
    assert json.loads((root / "a" / STOP).read_text())["pid"] == os.getpid()
    text = client.get("/run?run=a").text
    assert "stopping" in text
    assert "Stop at once" not in text


def test_the_queue_does_not_wait_for_a_run_of_a_cluster(root, ours):
    followed(root / "a", os.getpid())
    assert not works_here(root / "a")
    (root / "a" / START).write_text(json.dumps(record.this_process()))
    assert works_here(root / "a")


def test_a_run_that_nobody_follows_is_followed_again_by_what_this_user_remembers(client, root, begun):
    a_run(root / "a", status="running", submitted="20260101-120000-abcd")
    followed(root / "a", 2**30, where="http://strange:8265")
    assert "Follow</button>" not in client.get("/run?run=a").text  # a folder alone starts nothing
    run = remote(root / "a")
    text = client.get("/run?run=a").text
    assert '<span class="pill note" id="status">on cluster</span>' in text
    assert "<code>hotloop submit status 20260101-120000-abcd</code>" in text
    assert "Follow</button>" in text
    assert f"hotloop submit fetch {run.name}" in text
    client.post("/run/resume", data={"run": "a"})
    assert begun == [(root / "a", ["train", "recipe=digits"], HEAD)]


def test_a_run_that_goes_on_on_a_cluster_is_not_deleted(client, root):
    a_run(root / "a", status="running", submitted="20260101-120000-abcd")
    assert "Delete</button>" not in client.get("/run?run=a").text
    refused = client.post("/run/delete", data={"run": "a", "sure": "yes"})
    assert refused.status_code == 409
    assert "on a cluster" in refused.text
    way = f"hotloop runs rm --forget {root / 'a'}"
    assert way in refused.text
    assert way in client.get("/run?run=a").text


def test_a_trial_is_shown_as_the_last_fetch_of_its_search_found_it(root):
    search = a_study(root / "search", "running")
    trial = a_run(search / "trials" / "0000", status="running", submitted="20260101-120000-abcd")
    looks, told = watching.Watching(), {"run": "20260101-120000-abcd", "address": HEAD, "fetched": 1.7e9}
    for status, shown in (("running", "on cluster"), ("failed", "killed")):
        (search / FETCHED).write_text(json.dumps({**told, "status": status}))
        assert looks.row(trial).status == looks.run(trial).status == shown


def test_a_run_that_was_submitted_in_a_terminal_is_followed_from_the_page(client, root, begun):
    a_run(root / "a", status="running", submitted="20260101-120000-abcd")
    assert "Follow</button>" not in client.get("/run?run=a").text
    remote(root / "a")
    text = client.get("/run?run=a").text
    assert f"on {HEAD}" in text
    assert "Follow</button>" in text
    client.post("/run/resume", data={"run": "a"})
    assert begun[0][2] == HEAD


def test_what_cannot_be_read_of_remote_runs_hides_no_run_and_starts_nothing(client, root, begun):
    a_run(root / "a", status="failed")
    remote(root / "b")
    (clusters.state_folder() / "runs" / "20261126-120000-abcd.json").write_text("{")
    assert client.get("/runs").status_code == client.get("/run?run=a").status_code == 200
    assert "cannot be read" in client.post("/run/resume", data={"run": "a"}).text
    assert begun == []


# -- the process that follows ------------------------------------------------------------------------------------------


class Cluster:
    """A cluster of which every answer is known."""

    def __init__(self, folder, answers):
        self.folder, self.answers, self.fetched, self.stopped = folder, answers, [], []

    def fetch(self, run, checkpoints, say):
        self.fetched.append(checkpoints)
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        status, log = answer
        (self.folder / attending.fetch.LOG).write_text(log)
        return attending.fetch.Fetched(status, self.folder, (), 0, (), {})


@pytest.fixture
def attended(root, monkeypatch, capsys):
    """Follow a run whose cluster answers so; give the cluster, how it ended, and what was said."""

    def follow(*answers):
        folder = root / "a"
        folder.mkdir(parents=True, exist_ok=True)
        cluster = Cluster(folder, list(answers))
        run = remote(folder)
        monkeypatch.setattr(attending.fetch, "fetch", cluster.fetch)
        monkeypatch.setattr(attending.fetch, "status_of", lambda run: "running")
        monkeypatch.setattr(attending, "LEAST_SECONDS", 0.01)
        monkeypatch.setattr(attending, "Client", lambda address: _Stops(cluster))
        code = attending.main(folder, HEAD, list(run.command))
        return cluster, code, capsys.readouterr().out

    return follow


class _Stops:
    def __init__(self, cluster):
        self.stop = cluster.stopped.append


def test_what_a_run_prints_is_printed_once_as_it_comes(attended):
    cluster, code, said = attended(("running", "one\n"), ("running", "one\ntwo\n"), ("finished", "one\ntwo\nthree\n"))
    assert said.startswith("one\ntwo\nthree\n")
    assert "20261126-120000-abcd is finished" in said
    assert code == 0
    assert cluster.fetched == ["none", "none", "none", "best", "last"]


def test_the_log_of_a_job_that_was_resumed_begins_anew(attended):
    *_, said = attended(("running", "a long line\n"), ("finished", "two\n"))
    assert said.startswith("a long line\ntwo\n")


def test_a_cluster_that_does_not_answer_is_asked_again_and_told_once(attended):
    gone = DataError("nobody answers")
    _, code, said = attended(("running", "one\n"), gone, gone, ("failed", "one\n"))
    assert said.count("nobody answers") == 1
    assert "The run goes on there" in said
    assert code == 1


def test_a_run_that_is_forgotten_is_followed_no_longer(attended, monkeypatch):
    gone = DataError("nobody answers")
    monkeypatch.setattr(attending.Attendant, "_tell", lambda one, error: runs.forget(one._run.name))
    cluster, code, _ = attended(gone)
    assert (cluster.fetched, code) == (["none"], 1)


def test_a_stop_is_sent_to_the_cluster_once(attended, root):
    (root / "a").mkdir(parents=True)
    own = processes.Process(os.getpid(), processes.started(os.getpid()))
    (root / "a" / STOP).write_text(json.dumps(own.to_dict()))
    cluster, code, said = attended(("running", ""), ("running", ""), ("stopped", ""))
    assert cluster.stopped == ["hotloop-20261126-120000-abcd"]
    assert "It was asked to stop" in said
    assert code == 1


def test_a_run_that_cannot_be_submitted_says_why_in_its_log(root, tmp_path, monkeypatch, client):
    monkeypatch.chdir(tmp_path)
    folder = root / "digits" / "a"
    elsewhere.Elsewhere().start(folder, ["train", "recipe=digits", "run.folder=x"], HEAD)
    once(lambda: "run.folder" in (folder / LOG).read_text())
    once(lambda: processes.find(folder) is None)
    assert "not started" in client.get("/run?run=digits/a").text


def test_a_process_that_is_killed_before_the_cluster_has_its_run_submits_it_once_more(root, monkeypatch):
    """What it noted is this folder's, so that the next one knows what became of it."""
    from hotloop.remote.locating import NowhereError

    asked = []

    def nowhere(*_):
        raise NowhereError("no node has it")

    def submit(request, say):
        asked.append(request)
        return remote(request.folder, "20261126-130000-abcd")

    folder = root / "a"
    remote(folder)
    monkeypatch.setattr(attending.fetch, "status_of", lambda run: "lost")
    monkeypatch.setattr(attending.submitting, "resume", nowhere)
    monkeypatch.setattr(attending.submitting, "submit", submit)
    monkeypatch.setattr(attending.Attendant, "follow", lambda self: "finished")
    assert attending.main(folder, HEAD, ["train", "x"]) == 0
    assert [(one.folder, one.address, list(one.command)) for one in asked] == [
        (folder, HEAD, ["train", "recipe=digits"])
    ]
    assert [one.name for one in runs.known()] == ["20261126-130000-abcd"]
    runs.keep(dataclasses.replace(runs.known()[0], sent=True))  # the cluster had it: it is lost, not begun anew
    assert attending.main(folder, HEAD, ["train", "x"]) == 2
    assert len(asked) == 1


def test_a_run_is_noted_under_the_folder_of_the_page(root, monkeypatch):
    """Before it is sent: the page knows it, whatever ends the process that sends it."""
    asked = []

    def submit(request, say):
        asked.append(request)
        raise DataError("the answer was lost")

    monkeypatch.setattr(attending.submitting, "submit", submit)
    assert attending.main(root / "a", HEAD, ["train", "recipe=digits"]) == 2
    assert asked[0].folder == root / "a"


def test_two_presses_of_follow_start_one_process(root, monkeypatch):
    remote(root / "a")
    (root / "a").mkdir(parents=True)
    started = []
    monkeypatch.setattr(processes, "find", lambda folder: started[0] if started else None)
    monkeypatch.setattr(processes, "start", lambda *arguments: (time.sleep(0.2), started.append(arguments)))
    place = elsewhere.Elsewhere()
    both = [threading.Thread(target=place.follow, args=(root / "a",)) for _ in range(2)]
    for one in both:
        one.start()
    for one in both:
        one.join()
    assert len(started) == 1


def test_a_check_that_takes_too_long_may_end_what_it_started(tmp_path, monkeypatch):
    """Else the job that looks at a cluster would wait there, and take a GPU later."""
    import sys

    mark = tmp_path / "mark"
    told = f"import signal, sys, time; from pathlib import Path\nsignal.signal(15, lambda *_: sys.exit(Path({str(mark)!r}).touch()))\nsignal.pthread_sigmask(signal.SIG_UNBLOCK, [15])\ntime.sleep(600)"
    monkeypatch.setattr(processes, "command", lambda arguments: [sys.executable, "-c", told])
    monkeypatch.setattr(processes, "_ENDING_SECONDS", 300.0)
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])  # until it has its handler, in the child too
    try:
        with pytest.raises(ConfigError, match=r"hotloop submit took longer than 1 s, and was ended"):
            processes.ask(["submit"], 1.0)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    assert mark.exists()
