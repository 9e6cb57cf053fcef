"""Who may ask: tokens, cookies, other ports, forged forms, names of hosts, paths, programs, and hostile folders."""

import contextlib
import html
import http.client
import json
import os
import re
import signal
import socket
import threading
import time
import urllib.parse

import pytest
import uvicorn
from conftest import KnownProbe
from run_folders import a_run
from starlette.routing import Route
from starlette.testclient import TestClient

from hotloop.errors import ConfigError
from hotloop.record import RunRecord
from hotloop.ui import app, processes, server
from hotloop.ui.app import application
from hotloop.ui.security import Access
from hotloop.ui.site import Site

ELSEWHERE = ["cross-site", "same-site"]
SCRIPT = "<script>alert(1)</script>\"'><img src=x onerror=alert(2)>"
LONG, DEEP = "a" * 5000, "a/" * 2500 + "a"


@pytest.fixture
def live(root):
    """A server on a real socket, with who may ask it and the tokens that it would print."""
    tokens = []
    access = Access(renewed=tokens.append)
    listening = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(application(root, access, KnownProbe()), log_level="warning"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
    thread.start()
    yield listening.getsockname()[1], access, tokens
    server.should_exit = True
    thread.join(60)
    listening.close()


def ask(port, path, method="GET", body=None, **headers):
    """Ask as a program does, and return the status, the headers and the text of the answer."""
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=60)) as connection:
        form = {"content-type": "application/x-www-form-urlencoded"} if body else {}
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        connection.request(method, path, urllib.parse.urlencode(body) if body else None, {**form, **named})
        answer = connection.getresponse()
        return answer.status, dict(answer.getheaders()), answer.read().decode()


def cookie(access):
    return f"{access.cookie('http')}={access.session}"


def test_a_stranger_sees_nothing_but_scripts_and_styles(stranger):
    for path in ("/", "/runs", "/run?run=a", "/training", "/machine", "/run/charts?run=a", "/runs?token=wrong"):
        assert stranger.get(path).status_code == 401, path
    assert stranger.get("/static/app.css").status_code == 200


def test_the_token_becomes_a_cookie_that_scripts_and_other_sites_do_not_get(stranger, access):
    answer = stranger.get(f"/?token={access.token}")
    said = answer.headers["set-cookie"]
    assert "HttpOnly" in said
    assert "SameSite=strict" in said
    assert access.token not in answer.text
    assert stranger.get("/runs").status_code == 200


def test_a_token_opens_the_page_once_and_the_next_one_is_told(live):
    port, access, tokens = live
    first = access.token
    status, headers, text = ask(port, f"/?token={first}", sec_fetch_site="cross-site")  # a link in a chat
    assert status == 200
    assert headers["cache-control"] == "no-store"
    assert f'data-key="{access.key}"' in text
    assert ask(port, f"/?token={first}")[0] == 401
    assert tokens == [access.token]
    assert ask(port, f"/?token={first}", cookie=headers["set-cookie"].split(";")[0])[1]["location"] == "/runs"  # again
    assert ask(port, f"/?token={tokens[0]}")[0] == 200


def test_the_cookie_is_neither_the_token_nor_the_key_and_has_a_name_of_its_own(live):
    port, access, _ = live
    token = access.token
    name, _, value = ask(port, f"/?token={token}")[1]["set-cookie"].split(";")[0].partition("=")
    assert re.fullmatch(r"hotloop_[0-9a-f]{8}", name)
    assert (name, value) != (Access().name, token)
    assert value == access.session
    assert len({token, access.token, access.session, access.key}) == 4


def test_over_https_the_cookie_is_of_this_host_alone(root):
    access = Access()
    with TestClient(application(root, access, KnownProbe()), base_url="https://localhost") as client:
        said = client.get(f"/?token={access.token}").headers["set-cookie"]
        assert said.startswith(f"__Host-{access.name}=")
        assert "Secure" in said
        assert "Path=/;" in f"{said};"
        assert "omain" not in said
        assert client.get("/runs").status_code == 200
        client.cookies.clear()
        client.cookies.set(access.name, access.session)
        assert client.get("/runs").status_code == 401


def test_a_cookie_that_another_port_received_lets_nobody_act(live, root):
    """A browser sends the cookies of 127.0.0.1 to each of its ports."""
    port, access, _ = live
    a_run(root / "a")
    stolen = cookie(access)
    for path in ("/runs", "/run?run=a", "/training", "/machine", "/?token=" + access.token):
        text = ask(port, path, cookie=stolen)[2]
        assert access.key not in text or path.startswith("/?token")
    for body in ({"run": "a"}, {"run": "a", "hotloop-key": access.session}):
        assert ask(port, "/run/delete", "POST", {**body, "sure": "yes"}, cookie=stolen)[0] == 403
    assert (root / "a").exists()
    done = ask(port, "/run/delete", "POST", {"run": "a", "sure": "yes"}, cookie=stolen, x_hotloop_key=access.key)
    assert done[0] == 303
    assert not (root / "a").exists()


@pytest.mark.parametrize("host", ["evil.example", "localhost.evil.example", "evil@127.0.0.1.evil.example", "", "[::1"])
def test_a_name_that_was_bound_to_this_machine_anew_is_refused(live, host):
    port, access, _ = live
    said = (
        f"GET /?token={access.token} HTTP/1.1\r\nHost: {host}\r\nCookie: {cookie(access)}\r\nConnection: close\r\n\r\n"
    )
    with socket.create_connection(("127.0.0.1", port)) as one:
        one.sendall(said.encode())
        answer = one.makefile("rb").read()
    assert answer.startswith(b"HTTP/1.1 421")
    assert access.key.encode() not in answer


@pytest.mark.parametrize("host", ["localhost:9999", "127.0.0.1:8765", "[::1]:8765"])
def test_this_machines_names_are_answered_at_any_port_as_through_a_tunnel(client, host):
    assert client.get("/runs", headers={"host": host}).status_code == 200


def routes(root, access, method):
    return [one.path for one in app.routes(Site(root, access)) if isinstance(one, Route) and method in one.methods]


@pytest.mark.parametrize("site", ELSEWHERE)
def test_no_page_of_another_site_or_port_gets_anything_but_scripts_and_styles(client, root, access, site):
    a_run(root / "a")
    for path in routes(root, access, "GET"):
        name = path.replace("{name}", "app.css")
        answer = client.get(name, params={"run": "a"}, headers={"sec-fetch-site": site})
        assert answer.status_code == (200 if path == "/static/{name}" else 403), path
        assert client.head(name, params={"run": "a"}, headers={"sec-fetch-site": site}).status_code != 500
    assert "type hotloop's address into your browser" in client.get("/runs", headers={"sec-fetch-site": site}).text
    for own in ("same-origin", "none"):  # a link of the page, and an address that was typed
        assert client.get("/run", params={"run": "a"}, headers={"sec-fetch-site": own}).status_code == 200


def test_every_form_is_refused_without_its_token(client, root, access):
    del client.headers["x-hotloop-key"]
    found = routes(root, access, "POST")
    assert len(found) >= 6
    forged = {"sec-fetch-site": "cross-site", "x-hotloop-key": access.key}
    for path in found:
        answers = [
            client.post(path, data={"run": "a"}), client.post(path, data={"run": "a", "hotloop-key": "0" * 43}),
            client.post(path, data={"run": "a"}, headers=forged),
        ]  # fmt: skip
        assert [one.status_code for one in answers] == [403] * 3, path


def test_what_changes_something_is_not_done_by_a_link(client, root, access, monkeypatch):
    monkeypatch.setattr(processes, "start", lambda *_: pytest.fail("it was started"))
    for path in routes(root, access, "POST"):
        answer = client.get(path, params={"recipe": "criteria"})
        assert answer.status_code == 405 or answer.headers["location"] == "/training", path
    assert not root.exists()


def test_a_form_that_is_too_large_is_not_read(client):
    assert client.post("/run/stop", data={"run": "a" * (2**20 + 1)}).status_code == 413


def test_every_answer_has_a_policy_that_lets_nothing_inline_act_and_nobody_frame_it(client, root):
    folder = a_run(root / "a")
    (folder / "samples").mkdir()
    (folder / "samples" / "one.png").write_bytes(b"picture")
    plain = ["/runs", "/run?run=a", "/training", "/machine", "/nowhere", "/static/app.js"]
    for path in [*plain, "/run/report?run=a", "/run/sample?run=a&name=one.png"]:
        headers = client.get(path).headers
        policy = headers["content-security-policy"]
        assert "default-src 'none'" in policy, path
        assert "frame-ancestors 'none'" in policy, path
        assert headers["x-frame-options"] == "DENY"
        assert path not in plain or "unsafe" not in policy


@pytest.mark.parametrize("path", ["/runs", "/run?run=a", "/training", "/machine", "/compare?run=a&run=b"])
def test_no_page_has_anything_inline(client, root, path):
    a_run(root / "a")
    a_run(root / "b")
    text = client.get(path).text
    assert not re.findall(r"<style|\sstyle=|\son\w+=|javascript:", text)
    assert all("src=" in tag for tag in re.findall(r"<script[^>]*>", text))


NAMES = [
    "../secret",
    "..",
    ".",
    "",
    "/etc",
    "a/../../secret",
    "a//b",
    "a\\..\\b",
    "link",
    "link/inside",
    "a\0b",
    "%2e%2e",
]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("page", ["/run", "/run/charts", "/run/settings", "/run/report", "/run/now", "/compare"])
def test_no_name_leads_out_of_the_runs_folder(client, root, page, name):
    a_run(root / "a")
    a_run(root.parent / "secret" / "inside")
    a_run(root.parent / "secret")
    (root / "link").symlink_to(root.parent / "secret")
    assert client.get(page, params={"run": name}).status_code == 404
    assert client.post("/run/delete", data={"run": name, "sure": "yes"}).status_code == 404
    assert (root.parent / "secret" / "record.json").exists()


@pytest.mark.parametrize("name", ["../record.json", "../../secret.png", "record.json", "link.png", "", "step.png/.."])
def test_only_a_runs_own_pictures_are_served(client, root, name):
    folder = a_run(root / "a")
    (root.parent / "secret.png").write_bytes(b"secret")
    (folder / "samples").mkdir()
    (folder / "samples" / "step.png").write_bytes(b"picture")
    (folder / "samples" / "link.png").symlink_to(root.parent / "secret.png")
    (folder / "samples" / "page.html").write_bytes(b"<script>")
    assert client.get("/run/sample", params={"run": "a", "name": name}).status_code == 404
    assert client.get("/run/sample", params={"run": "a", "name": "page.html"}).status_code == 404
    served = client.get("/run/sample", params={"run": "a", "name": "step.png"})
    assert served.content == b"picture"
    assert served.headers["content-type"] == "image/png"
    assert served.headers["x-content-type-options"] == "nosniff"


def test_a_hostile_folder_is_shown_as_text(client, root):
    name = SCRIPT.replace("/", "_")
    folder = root / name
    with RunRecord(folder) as record:
        record.update("settings", recipe={"name": SCRIPT, "goal": f"max:{SCRIPT}"}, data={SCRIPT: SCRIPT})
        record.update("told", data=[SCRIPT])
        record.update(
            "components", **{SCRIPT: {"requested": SCRIPT, "running": SCRIPT, "causes": [{"reason": SCRIPT}]}}
        )
        for step in range(1, 9):
            record.append("steps", {"step": step, "seconds": 0.1, "loss": 1.0, "running": SCRIPT, SCRIPT: 1.0})
        record.append("metrics", {"step": 1, "split": SCRIPT, SCRIPT: 1.0})
        record.append("events", {"kind": "fallback", "step": 1, "reason": SCRIPT, "file": SCRIPT, "component": SCRIPT})
        record.finish("failed", SCRIPT)
    (folder / "ui-log.txt").write_text(f"{SCRIPT}\x1b[31m\n")
    (folder / "ui-start.json").write_text(json.dumps({"arguments": [SCRIPT], "pid": "x"}))
    (folder / "samples").mkdir()
    (folder / "samples" / f"{name}.png").write_bytes(b"picture")
    asked = {"run": name}
    pages = [client.get(path, params=asked) for path in ("/runs", "/run", "/run/now", "/run/frames")]
    pages += [client.get("/runs", params={"find": SCRIPT}), client.get("/compare", params={"run": [name, name]})]
    pages += [client.post("/run/delete", data=asked), client.get("/training", params={"program": SCRIPT})]
    for page in pages:
        assert page.status_code in (200, 422)
        assert "<script>" not in page.text
        assert "<img src=x" not in page.text
        assert "\x1b" not in page.text
    assert html.escape("<script>alert(1)</script>") in pages[1].text
    assert client.get("/run/charts", params=asked).headers["content-type"] == "application/json"


def test_a_report_acts_as_another_site(client, root):
    folder = a_run(root / "a")
    (folder / "report.html").write_text("<script>alert(1)</script>")
    answer = client.get("/run/report?run=a")
    assert "alert(1)" not in answer.text
    assert answer.headers["content-security-policy"].startswith("sandbox allow-scripts;")


@pytest.mark.parametrize(
    "told", ["[]", "{", '{"pid": 1}', '{"pid": "a"}', '{"pid": -1}', '{"pid": 99999999999999999999}', "9" * 2**17]
)
def test_nonsense_about_a_process_finds_none(root, told):
    folder = a_run(root / "a")
    (folder / "run.lock.json").write_text(told)
    assert processes.find(folder) is None


def test_a_folder_that_names_a_process_of_another_program_does_not_get_it_stopped(client, root, monkeypatch):
    folder = a_run(root / "a")
    sent = []
    monkeypatch.setattr(os, "kill", lambda pid, number: sent.append(number) if number else None)
    other = os.getppid()
    told = processes.Process(other, processes.started(other)).to_dict()
    monkeypatch.setattr(processes.Path, "read_bytes", lambda path: b"/usr/bin/editor\0letter.txt")
    (folder / "run.lock.json").write_text(json.dumps(told))
    assert client.post("/run/stop", data={"run": "a"}).status_code == 409
    assert signal.SIGTERM not in sent


def test_an_address_that_others_reach_has_to_be_meant():
    for host in ("0.0.0.0", "::", "192.168.1.7", "machine.example"):
        with pytest.raises(ConfigError, match=r"--host .*other machines reach this address.*ssh -L.*--i-know"):
            server.check_host(host, known=False)
        server.check_host(host, known=True)
    for host in ("127.0.0.1", "::1", "localhost", "127.8.8.8"):
        server.check_host(host, known=False)


# -- programs of users -------------------------------------------------------------------------------------------------


@pytest.fixture
def program(tmp_path):
    """A program that leaves a file behind wherever it runs."""
    (tmp_path / "train.py").write_text(
        f"from pathlib import Path\nPath({str(tmp_path / 'ran')!r}).write_text('')\n"
        "def make(width: int = 4, kind: str = 'a'):\n    pass\n"
    )
    return f"{tmp_path}/train.py:make"


def planted(root, program):
    """Runs that name the program, with settings that are right or wrong."""
    good = f"recipe: {{name: '{program}'}}\n"
    for name, text in {
        "good": good, "wrong": f"{good}training: {{batch_size: none}}\n", "own": f"{good}program: {{width: b}}\n",
        "odd": f"{good}compile: {{components: {{model: 3}}}}\ntraining: 3\n",
        "choice": f"recipe: '{program}'\nprogram: {{width: 3}}\n", "unknown": f"{good}nonesuch: {{a: 1}}\n",
    }.items():  # fmt: skip
        (a_run(root / name) / "settings.yaml").write_text(text)
        yield f"from={name}"
    for number, more in enumerate(([], ["program.width=3"], ["nonesuch=1"], ["training.batch_size=none"])):
        folder = root / f"started-{number}"
        folder.mkdir()
        started = processes.record.to_json({"pid": 0, "arguments": ["train", f"recipe={program}", *more]})
        (folder / processes.START).write_text(started)
        yield f"from=started-{number}"


def test_no_link_runs_a_program_whatever_names_it(live, root, program, tmp_path, monkeypatch):
    port, access, _ = live
    monkeypatch.setattr(processes, "ask", lambda *_: pytest.fail("a process was started"))
    links = [f"program={program}", f"recipe={program}", f"program={program}&program.width=b", *planted(root, program)]
    for link in links:
        for method in ("GET", "HEAD"):
            status, _, text = ask(port, f"/training?{link}", method, cookie=cookie(access))
            assert status in (200, 422), link
            assert not (tmp_path / "ran").exists(), link
        assert ask(port, f"/training?{link}", cookie=cookie(access), sec_fetch_site="same-site")[0] == 403
    assert "Run it and show its settings" in ask(port, f"/training?{links[0]}", cookie=cookie(access))[2]
    (a_run(root / "strange") / "settings.yaml").write_text(
        "recipe: {name: criteria}\ncompile: {components: {model: 3}}\n"
    )
    assert ask(port, "/training?from=strange", cookie=cookie(access))[0] in (200, 422)
    text = ask(port, "/training?from=good", cookie=cookie(access))[2]
    assert 'name="from" value="good"' in text
    assert program in text


@pytest.mark.campaign
def test_a_press_with_the_key_runs_a_program_and_its_form_is_shown_until_its_file_changes(live, program, tmp_path):
    port, access, _ = live
    form = {"program": program}
    assert ask(port, "/training/read", "POST", form, cookie=cookie(access))[0] == 403
    assert not (tmp_path / "ran").exists()
    status, headers, _ = ask(port, "/training/read", "POST", form, cookie=cookie(access), x_hotloop_key=access.key)
    assert status == 303
    assert (tmp_path / "ran").exists()
    (tmp_path / "ran").unlink()
    assert 'name="program.width" value="4"' in ask(port, headers["location"], cookie=cookie(access))[2]
    assert not (tmp_path / "ran").exists()
    os.utime(tmp_path / "train.py", (1, 1))
    assert "Run it and show its settings" in ask(port, headers["location"], cookie=cookie(access))[2]
    assert not (tmp_path / "ran").exists()


# -- what somebody planted in a folder ---------------------------------------------------------------------------------


def in_time(pipe, act):
    """Do something that must not wait for the other end of a pipe."""
    done = []
    thread = threading.Thread(target=lambda: done.append(act()))
    thread.start()
    thread.join(30)
    if thread.is_alive():
        os.close(os.open(pipe, os.O_WRONLY))
        thread.join(30)
        pytest.fail("it waits for the other end of a pipe")
    return done[0]


@pytest.mark.parametrize("path", ["/training?from=a", "/run?run=a", "/run/settings?run=a", "/runs", "/compare?run=a"])
@pytest.mark.parametrize("kind", ["pipe", "zero"])
def test_settings_that_are_no_file_hold_neither_threads_nor_memory(client, root, path, kind):
    file = a_run(root / "a") / "settings.yaml"
    if kind == "pipe":
        os.mkfifo(file)
    else:
        file.symlink_to("/dev/zero")
    assert in_time(file, lambda: client.get(path)).status_code in (200, 422)


@pytest.mark.parametrize("name", ["ui-start.json", "ui-stop.json", "run.lock.json", "ui-log.txt"])
def test_a_pipe_in_a_runs_folder_holds_no_page(client, root, name):
    file = a_run(root / "a") / name
    os.mkfifo(file)
    for path in ("/runs", "/run?run=a"):
        assert in_time(file, lambda path=path: client.get(path)).status_code == 200


def test_planted_settings_that_are_a_link_show_nothing_of_what_it_leads_to(client, root, tmp_path):
    (tmp_path / "private.yaml").write_text("recipe: {name: criteria}\ntraining: {batch_size: 4711}\n")
    (a_run(root / "a") / "settings.yaml").symlink_to(tmp_path / "private.yaml")
    answer = client.get("/training?from=a")
    assert answer.status_code == 422
    assert "4711" not in answer.text
    assert "settings.yaml cannot be read: it is no regular file, but a link" in html.unescape(answer.text)
    assert "--config" not in answer.text


def test_a_record_that_claims_a_huge_size_is_not_read(client, root):
    folder = a_run(root / "a")
    with (folder / "record.jsonl").open("r+b") as sparse:
        sparse.truncate(5 * 2**30)
    before = time.monotonic()
    text = client.get("/run?run=a").text
    assert time.monotonic() - before < 5
    assert "has 5,368,709,120 bytes, and a page reads 1,073,741,824 at most" in text


def test_planted_links_are_not_written_through(client, root, tmp_path, monkeypatch):
    precious = tmp_path / "precious"
    precious.write_text("mine")
    folder = a_run(root / "a", status="interrupted")
    (folder / "ui-log.txt").symlink_to(precious)
    (folder / ".ui-start.json.part").symlink_to(precious)
    assert client.post("/run/resume", data={"run": "a"}).status_code == 409
    assert precious.read_text() == "mine"
    (folder / "ui-log.txt").unlink()
    monkeypatch.setattr(processes.host, "python", lambda *_: ["true"])
    assert client.post("/run/resume", data={"run": "a"}).status_code == 303
    assert precious.read_text() == "mine"
    assert (folder / processes.START).is_file()


@pytest.mark.parametrize("name", [LONG, DEEP, "a" * 300], ids=["long", "deep", "300"])
def test_a_name_that_is_too_long_is_a_message(client, root, name):
    root.mkdir()
    for path in ("/run", "/run/news", "/run/report", "/compare"):
        assert client.get(path, params={"run": name}).status_code == 404
    assert client.get("/runs", params={"find": name}).status_code == 200
    assert client.post("/run/stop", data={"run": name}).status_code == 404
    assert client.get("/training", params={"from": name}).status_code == 404
    for program in (f"{name}.py:make", name):
        answer = client.get("/training", params={"program": program})
        assert answer.status_code == 422
        assert f"({len(program)} characters)" in answer.text
    assert client.post("/training/start", data={"recipe": "criteria", "name": name}).status_code == 422
