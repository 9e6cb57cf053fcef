"""Clusters and runs that are remembered, the key that signs, and commands that are checked before anything is asked."""

import contextlib
import json
import socket
import stat
import threading
import time
from pathlib import Path

import pytest

from hotloop.errors import ConfigError, DataError, MissingExtraError
from hotloop.remote import checking, clusters, runs, signed
from hotloop.remote.client import Client
from hotloop.remote.runs import RemoteRun


def made(name="20261126-120000-abcd", **more):
    facts = {
        "address": "http://h:8265",
        "submission": "s",
        "key": "k",
        "command": ("train",),
        "folder": "/r",
        "created": 1.0,
    }
    return RemoteRun(name, **{**facts, **more})


@pytest.mark.parametrize(
    ("given", "address"),
    [
        ("head", "http://head:8265"),
        ("http://head:1/", "http://head:1"),
        ("https://h", "https://h:443"),
        ("[::1]:80", "http://[::1]:80"),
    ],
)
def test_an_address_has_one_form(given, address):
    assert clusters.normal(given) == address


@pytest.mark.parametrize(
    "given",
    [
        "ray://head:10001",
        "http://u:p@head:1",
        "http://head:99999",
        "http://",
        "http://h/x",
        "http://h:a",
        "http://h#x",
        "http://h:0",
        "two words",
        "http://<b>",
        "--",
        "http://[::1",
        "http://a..b",
        f"http://{'a' * 64}",
        f"http://{'ü' * 64}",
    ],
)
def test_what_is_no_address_is_refused(given):
    with pytest.raises(ConfigError, match=r"expected the address of a Ray head's dashboard, such as http://HEAD:8265"):
        clusters.normal(given)


def test_a_password_is_not_shown_by_what_refuses_its_address():
    for given in ("http://me:secret@head:port", "http://me:secret@[::1"):
        with pytest.raises(ConfigError) as refused:
            clusters.normal(given)
        assert "secret" not in str(refused.value)


def test_the_only_cluster_that_is_known_needs_no_name():
    with pytest.raises(ConfigError, match="no cluster is known: name one"):
        clusters.chosen(None)
    clusters.add("head")
    assert clusters.chosen(None) == "http://head:8265"
    clusters.add("other")
    with pytest.raises(ConfigError, match=r"several clusters are known \(http://head:8265, http://other:8265\)"):
        clusters.chosen(None)
    clusters.remove("head")
    assert clusters.known() == ["http://other:8265"]


def test_a_run_is_found_by_its_name_or_folder_or_as_the_newest_and_its_key_is_nobody_elses(tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match="no run was submitted from here"):
        runs.find(None)
    old, new = made(), made("20261127-120000-abcd", gpus=1.5, folder=str(tmp_path / "runs/mine"))
    runs.keep(new)
    runs.keep(old)
    assert runs.find("20261126-120000-abcd") == old
    monkeypatch.chdir(tmp_path)
    assert runs.find(None) == runs.find("runs/mine/") == runs.find(new.name) == new
    assert runs.known() == [new, old]
    path = tmp_path / "state/hotloop/remote/runs/20261126-120000-abcd.json"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert "key" not in old.to_dict()
    with pytest.raises(ConfigError, match=r"\.\./clusters is no run that was submitted from here"):
        runs.find("../clusters")


def test_only_the_key_signs():
    text = "printed\n" + signed.dumps("key", {"a": [1, "x y"]}) + "\nprinted"
    assert signed.loads("key", text) == {"a": [1, "x y"]}
    for forged in (text.replace('"x y"', '"x z"'), "hotloop-signed  {}", "hotloop-signed", ""):
        with pytest.raises(DataError, match="nothing that the run's key signed"):
            signed.loads("key", forged)
    with pytest.raises(DataError):
        signed.loads("other", text)


# -- commands -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ([], r"nothing stands behind --: expected train, hpo or kfold with its settings"),
        (["bench", "train.py:make"], r"-- bench train\.py:make: expected train, hpo or kfold"),
        (["train", "train.py:make", "run.folder=x"], r"run\.folder=x: hotloop submit chooses the folder there"),
        (["train", "run.resume=x"], r"leave run\.resume out"),
        (["train", "train.py:make", "--dry-run"], r"--dry-run behind --: .* stand before --"),
        (["train", "train.py:make", "--config", "/x.yaml"], r"--config /x\.yaml: expected a path below this folder"),
        (["train", "train.py:make", "training.num_epoch=3"], r"training\.num_epoch"),
        (["train", "train.py:make", "program.stepz=3"], r"stepz"),
        (["kfold", "train.py:make", "kfold.n_splits=1"], r"kfold\.n_splits"),
        (["hpo", "train.py:make", "hpo.sampler=best"], r"hpo\.sampler"),
    ],
)
def test_a_command_that_cannot_run_is_refused_here(project, command, said):
    with pytest.raises(ConfigError, match=said):
        checking.check(command)


def test_a_command_names_the_files_that_have_to_travel(project):
    Path("more.yaml").write_text("training: {num_epochs: 2}\n")
    asked = checking.check(["train", "train.py:make", "--config", "more.yaml"])
    assert asked.sources == ("train.py", "more.yaml")
    assert asked.settings.training.num_epochs == 2
    assert not asked.compiles
    assert asked.folder_name == "train.py-make"


def test_a_program_outside_of_the_folder_that_travels_is_refused(project, tmp_path):
    (tmp_path / "other.py").write_text(Path("train.py").read_text())
    with pytest.raises(ConfigError, match=r"other\.py is not below .*project, the folder that travels"):
        checking.check(["train", f"{tmp_path}/other.py:make"])


@pytest.mark.parametrize(
    ("more", "nodes", "gpus"),
    [((), [{"CPU": 4}], 0), ((), [{"CPU": 4}, {"GPU": 2}], 1), (("run.device=cpu",), [{"GPU": 2}], 0)],
)
def test_a_job_takes_the_gpus_that_its_run_needs(project, more, nodes, gpus):
    assert checking.check(["train", "recipe=criteria", *more]).gpus(nodes) == gpus


@pytest.mark.parametrize(
    ("more", "nodes", "said"),
    [
        (
            "run.device=cuda",
            [{"CPU": 4}],
            r"the run needs 1 GPUs of one node, and the most that a node of the cluster has is 0",
        ),
        ("run.device=cuda:1", [{"GPU": 2}], r"run\.device=cuda:1: the cluster chooses the GPU"),
    ],
)
def test_a_cluster_without_the_gpus_that_a_run_needs_is_told(project, more, nodes, said):
    with pytest.raises(ConfigError, match=said):
        checking.check(["train", "recipe=criteria", more]).gpus(nodes)


def test_several_devices_are_of_one_node(project):
    Path("fabric.py").write_text("import train\n\ndef make(*, fabric=None):\n    return train.make()\n")
    asked = checking.check(["train", "fabric.py:make", "run.devices=4"])
    assert asked.gpus([{"GPU": 8}]) == 4
    assert asked.gpus([{"CPU": 8}]) == 0
    with pytest.raises(ConfigError, match=r"run\.devices=4: the run needs 4 GPUs of one node, and the most .* is 2"):
        asked.gpus([{"GPU": 2}, {"GPU": 2}])


# -- addresses ----------------------------------------------------------------------------------------------------------


def test_an_address_that_nobody_answers_is_told():
    pytest.importorskip("ray.job_submission")
    with pytest.raises(
        ConfigError, match=r"--address http://127\.0\.0\.1:1: nobody answers there .*`ray start --head`"
    ):
        Client("http://127.0.0.1:1")


@pytest.fixture
def server():
    """A server on loopback that answers each request with a document."""
    import http.server

    answers = {}

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            found = answers.get(self.path)
            self.send_response(200 if found is not None else 404)
            self.end_headers()
            self.wfile.write(json.dumps(found).encode())

        def log_message(self, *_):
            pass

    made = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=made.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{made.server_port}", answers
    finally:
        made.shutdown()
        made.server_close()


def test_a_cluster_is_asked_whether_it_is_there_without_rays_client(monkeypatch, server):
    monkeypatch.setattr(clusters, "_PROBE_SECONDS", 300.0)
    address, answers = server
    assert clusters.problem("http://127.0.0.1:1").startswith("nobody answers there now (")
    assert clusters.problem(address).startswith("what answers there is no Ray dashboard")
    answers["/api/version"] = {"ray_version": "2.1.0"}
    assert clusters.problem(address) == ""


@pytest.mark.parametrize(
    ("scheme", "parts", "seconds", "told"),
    [
        ("https", [b"HTTP/1.1 400 Bad Request\r\n\r\n"], 300.0, "no connection with TLS comes about there ("),
        ("http", [b"HTTP/1.1 200 OK\r\n\r\n" + b"[" * 100_000], 300.0, "what answers there is no Ray dashboard"),
        ("http", [b"HTTP/1.1 200 OK\r\n", *[b"X: y\r\n"] * 60], 2.0, "nobody answers there now (no answer in "),
    ],
)
def test_whatever_answers_in_place_of_a_dashboard_is_told_in_time(monkeypatch, scheme, parts, seconds, told):
    def answer():
        connection, _ = listening.accept()
        connection.settimeout(300)
        with connection, contextlib.suppress(OSError):
            for part in parts:
                connection.sendall(part)
                time.sleep(0.05)  # each part comes in time: only all of them together do not
            connection.shutdown(socket.SHUT_WR)
            while connection.recv(2**16):  # else what was not read would end the connection before it is read there
                pass

    monkeypatch.setattr(clusters, "_PROBE_SECONDS", seconds)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        answers = threading.Thread(target=answer)
        answers.start()
        assert clusters.problem(f"{scheme}://127.0.0.1:{listening.getsockname()[1]}").startswith(told)
        answers.join()


def test_what_is_no_ray_dashboard_is_told(server):
    pytest.importorskip("ray.job_submission")
    with pytest.raises(ConfigError, match=r"no Ray dashboard with a job server .*pip install 'ray\[default\]'"):
        Client(server[0])


def test_another_version_of_ray_is_told(server):
    pytest.importorskip("ray.job_submission")
    server[1]["/api/version"] = {"ray_version": "2.1.0"}
    with pytest.raises(ConfigError, match=r"the cluster has Ray 2\.1\.0, and this machine .*'ray\[default\]==2\.1\.0'"):
        Client(server[0])


def test_a_variable_of_rays_leads_to_no_other_cluster(server, monkeypatch):
    ray = pytest.importorskip("ray")
    server[1]["/api/version"] = {"ray_version": ray.__version__, "version": "4"}
    monkeypatch.setenv("RAY_ADDRESS", "http://127.0.0.1:1")
    assert Client(server[0]).ray == ray.__version__


def test_a_machine_without_rays_client_is_told_what_to_install(monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "ray.job_submission", None)
    with pytest.raises(
        MissingExtraError, match=r"hotloop submit needs ray.*: install it with pip install 'hotloop\[ray\]'"
    ):
        Client("http://127.0.0.1:1")


def test_the_command_line_sends_to_the_right_places(capsys):
    from hotloop.cli import main

    for arguments, code, said in (
        (["submit", "status"], 0, "No run was submitted from here"),
        (["submit", "fetch", "nothing"], 2, "nothing is no run that was submitted from here"),
        (["submit", "--", "bench"], 2, "expected train, hpo or kfold"),
        (["submit", "stop"], 2, "RUN"),
    ):
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        out = capsys.readouterr()
        assert ended.value.code == code
        assert said in out.out + out.err


def test_the_log_of_a_run_that_failed_ends_with_how_to_go_on(monkeypatch, capsys):
    from hotloop.cli import main

    runs.keep(made())
    monkeypatch.setattr("hotloop.remote.following.print_log", lambda *_, **__: "failed")
    with pytest.raises(SystemExit) as ended:
        main(["submit", "logs"])
    assert ended.value.code == 1
    assert "has failed. Go on with it: hotloop submit resume 20261126-120000-abcd" in capsys.readouterr().err
