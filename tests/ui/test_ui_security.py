"""Who may ask: tokens, cookies, forged forms, names of hosts, paths, and what a hostile folder can do."""

import html
import json
import os
import re
import signal

import pytest
from run_folders import a_run
from starlette.routing import Route

from hotloop.errors import ConfigError
from hotloop.record import RunRecord
from hotloop.ui import app, processes, server
from hotloop.ui.site import Site

SCRIPT = "<script>alert(1)</script>\"'><img src=x onerror=alert(2)>"


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


def test_two_servers_on_one_machine_have_cookies_of_their_own():
    assert server.Access(1).cookie != server.Access(2).cookie
    assert server.Access(1).token != server.Access(1).token


@pytest.mark.parametrize("host", ["evil.example", "evil.example:8765", "", "127.0.0.1.evil.example", "[::1"])
def test_a_name_of_another_is_refused(client, host):
    assert client.get("/runs", headers={"host": host}).status_code == 421


@pytest.mark.parametrize("host", ["localhost:9999", "127.0.0.1:8765", "[::1]:8765"])
def test_this_machines_names_are_answered_at_any_port_as_through_a_tunnel(client, host):
    assert client.get("/runs", headers={"host": host}).status_code == 200


def posts(root, access):
    return [one for one in app.routes(Site(root, access)) if isinstance(one, Route) and "POST" in one.methods]


def test_every_form_is_refused_without_its_token(client, root, access):
    del client.headers["x-hotloop-key"]
    found = posts(root, access)
    assert len(found) >= 6
    for route in found:
        assert client.post(route.path, data={"run": "a"}).status_code == 403, route.path
        assert client.post(route.path, data={"run": "a", "hotloop-key": "0" * 43}).status_code == 403, route.path
        forged = {"sec-fetch-site": "cross-site", "x-hotloop-key": access.key}
        assert client.post(route.path, data={"run": "a"}, headers=forged).status_code == 403, route.path


def test_what_changes_something_is_not_done_by_a_link(client, root, access, monkeypatch):
    monkeypatch.setattr(processes, "start", lambda *_: pytest.fail("it was started"))
    to_the_form = ("/training/start", "/training/queue", "/training/read")
    for route in posts(root, access):
        answer = client.get(route.path, params={"recipe": "digits"})
        if route.path in to_the_form:
            assert (answer.status_code, answer.headers["location"]) == (307, "/training"), route.path
        else:
            assert answer.status_code == 405, route.path
    assert not root.exists()  # nothing waits, either


def test_a_form_that_is_too_large_is_not_read(client):
    assert client.post("/run/stop", data={"run": "a" * (2**20 + 1)}).status_code == 413


def test_every_answer_has_a_policy_that_lets_nothing_inline_act(client, root):
    a_run(root / "a")
    for path in ("/runs", "/run?run=a", "/training", "/machine", "/nowhere"):
        policy = client.get(path).headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy


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
@pytest.mark.parametrize("page", ["/run", "/run/charts", "/run/settings", "/run/report", "/run/head", "/compare"])
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
    pages = [client.get("/runs"), client.get("/run", params=asked), client.get("/run/head", params=asked)]
    pages += [
        client.get("/run/part", params={**asked, "part": part}) for part in ("charts", "details", "summary", "files")
    ]
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
    monkeypatch.setattr(processes, "_command_of", lambda pid: b"/usr/bin/editor\0letter.txt")
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
