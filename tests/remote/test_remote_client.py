"""What is asked of a cluster's address, against servers that are silent, that lead elsewhere, that refuse or that break."""

import http.server
import json
import threading
from pathlib import Path

import pytest

from hotloop.errors import ConfigError, DataError
from hotloop.remote import client as asking
from hotloop.remote.client import Client, Node, RefusedError
from hotloop.remote.jobs import Jobs, Sent

ray = pytest.importorskip("ray")
pytest.importorskip("ray.job_submission")
NODES = "/api/v0/nodes"


class Server:
    """A dashboard on loopback: a path's answer is a number and a text; None never answers."""

    def __init__(self):
        version = json.dumps({"ray_version": ray.__version__, "version": "4", "ray_commit": "", "session_name": ""})
        self.answers = {"/api/version": (200, version)}
        self.asked, self.headers, self.ending = [], [], threading.Event()
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def answer(self):
                length = int(self.headers.get("content-length") or 0)
                self.rfile.read(length)
                path = self.path.partition("?")[0]
                outer.asked.append((self.command, path))
                outer.headers.append(dict(self.headers))
                found = outer.answers.get(path, (404, "none"))
                if found is None:
                    outer.ending.wait(600)
                    return
                code, text, *more = found
                self.send_response(code)
                for name, value in more:
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(text.encode())

            do_GET = do_POST = do_PUT = answer

            def log_message(self, *_):
                pass

        self.made = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.made.daemon_threads = True
        self.address = f"http://127.0.0.1:{self.made.server_port}"
        threading.Thread(target=self.made.serve_forever, daemon=True).start()

    def close(self):
        self.ending.set()
        self.made.shutdown()
        self.made.server_close()


@pytest.fixture
def server():
    made = Server()
    try:
        yield made
    finally:
        made.close()


@pytest.mark.filterwarnings("ignore:ssl=None is deprecated")  # of aiohttp, for what Ray gives it
def test_a_tunnel_whose_other_end_is_gone_ends_every_question(server, monkeypatch):
    client = Client(server.address)
    monkeypatch.setattr(asking, "_ANSWER_SECONDS", 0.3)
    monkeypatch.setattr(asking, "_SILENT_SECONDS", 0.3)
    for path in ("/api/jobs/job", "/api/jobs/job/logs", "/api/jobs/job/stop", "/api/jobs/job/logs/tail", NODES):
        server.answers[path] = None
    for ask in (client.job, client.logs, client.stop):
        with pytest.raises(DataError, match="did not answer"):
            ask("job")
    with pytest.raises(DataError, match="does not answer"):
        client.nodes()
    assert list(client.follow("job")) == []


def test_nobody_leads_this_machine_elsewhere(server):
    client = Client(server.address)
    server.answers["/secret"] = (200, "{}")
    for path in ("/api/jobs/job", NODES, "/api/v0/logs/file"):
        server.answers[path] = (307, "", ("location", f"{server.address}/secret"))
    for ask in (lambda: client.job("job"), client.nodes, lambda: list(client.read("n", "x"))):
        with pytest.raises(DataError, match="307"):
            ask()
    assert ("GET", "/secret") not in server.asked


def test_a_long_answer_is_cut(server):
    client = Client(server.address)
    server.answers[NODES] = (500, "x" * 10**6)
    with pytest.raises(DataError) as told:
        client.nodes()
    assert len(str(told.value)) < 400
    server.answers[NODES] = (200, " " * 2**24 + "{}")
    with pytest.raises(DataError, match="more than 16777216 bytes"):
        client.nodes()
    server.answers["/api/jobs/job"] = (500, "x" * 10**6)
    with pytest.raises(DataError) as told:
        client.job("job")
    assert len(str(told.value)) < 3000


def test_only_living_nodes_are_told(server):
    rows = [{"node_id": "a", "state": "ALIVE", "resources_total": {"GPU": 2.0}}, {"node_id": "b", "state": "DEAD"}]
    server.answers[NODES] = (200, json.dumps({"data": {"result": {"result": rows}}}))
    assert Client(server.address).nodes() == [Node("a", {"GPU": 2.0})]
    server.answers[NODES] = (200, "[]")
    with pytest.raises(DataError, match="told none"):
        Client(server.address).nodes()


def test_a_cluster_with_tokens_gets_one_with_every_question(server, monkeypatch):
    """Ray's own client sends it; what is asked beside it has to as well."""
    from ray._private.authentication import http_token_authentication as tokens

    monkeypatch.setattr(tokens, "get_auth_headers_if_auth_enabled", lambda given: {"authorization": "Bearer one"})
    client = Client(server.address)
    server.answers["/api/v0/logs/file"] = (200, "log")
    assert list(client.read("n", "x")) == [b"log"]
    assert server.headers[0]["authorization"] == server.headers[-1]["authorization"] == "Bearer one"


def test_a_token_that_is_missing_is_asked_for(server):
    server.answers["/api/version"] = (401, "Unauthorized: Missing authentication token")
    with pytest.raises(ConfigError, match=r"asks for its token, .*: set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN"):
        Client(server.address)


@pytest.mark.parametrize(
    ("upload", "start", "refused"),
    [
        ((413, "too large"), (200, "{}"), True),
        ((200, ""), (400, "already exists"), True),
        ((200, ""), (500, "the agent died"), False),
        ((200, ""), None, False),
    ],
)
def test_a_refusal_is_told_from_an_answer_that_was_lost(server, monkeypatch, upload, start, refused):
    client = Client(server.address)
    if start is None:
        monkeypatch.setattr(asking, "_ANSWER_SECONDS", 2.0)

    class Packages(dict):
        def get(self, path, other):
            if path.startswith("/api/packages/"):
                return upload if server.asked[-1][0] == "PUT" else (404, "")
            return super().get(path, other)

    server.answers = Packages({**server.answers, "/api/jobs/": start})
    with pytest.raises(RefusedError if refused else DataError):
        Jobs(client, "key").run("name", "run", ["train"], Sent())
    assert (("POST", "/api/jobs/") in server.asked) == (upload[0] == 200)


def test_a_job_is_started_on_the_node_that_is_named(server, monkeypatch):
    client, asked = Client(server.address), {}
    monkeypatch.setattr(client._jobs, "submit_job", lambda **given: asked.update(given) or "job")
    client.submit("true", {}, 0, None, "abc")
    assert asked["entrypoint_label_selector"] == {"ray.io/node-id": "abc"}
    client.submit("true", {}, 0, None, None)
    assert asked["entrypoint_label_selector"] is None


def test_compiled_code_travels_in_requests_that_ray_takes():
    from ray._private import ray_constants

    from hotloop.remote import submitting

    most = ray_constants.DASHBOARD_CLIENT_MAX_SIZE
    assert most > submitting._MOST_REQUEST
    assert 0.9 * most > submitting.MOST_PART_BYTES
    million = 2**20
    sizes = [
        ("a", 50 * million),
        ("b", 50 * million),
        ("large", 200 * million),
        ("c", 20 * million),
        ("d", 80 * million),
    ]
    parts, left = submitting.parted([*sizes, ("e", 70 * million)])
    assert parts == [{"a"}, {"b", "c"}, {"d"}]
    assert left == 2


def test_files_that_ray_does_not_take_are_refused_here(tmp_path):
    import os

    from hotloop.remote import package

    (tmp_path / "x").write_bytes(os.urandom(2000))
    packed = package.collect(tmp_path, ["x"])
    package.write(packed, tmp_path / "zip", most=3000)
    with pytest.raises(ConfigError, match=r"as a zip file, and Ray takes .* at most: put large ones where the cluster"):
        package.write(packed, Path(tmp_path, "zip"), most=1000)
