"""A hostile page on another port of 127.0.0.1, and the ordinary way to a program, in a real browser."""

import http.server
import json
import re
import threading
import urllib.error
import urllib.parse
import urllib.request

import pytest
from browser import CHROMIUM, SECONDS, STATES, a_person, at, server

pytest.importorskip("playwright", reason="the tests of the page in a browser need playwright")
pytestmark = [
    pytest.mark.campaign,
    pytest.mark.skipif(not CHROMIUM, reason="no Chromium: `make setup-browser` installs it"),
]
from playwright.sync_api import expect  # noqa: E402

from hotloop import record  # noqa: E402

expect.set_options(timeout=SECONDS)
PROGRAM = """
from pathlib import Path
import torch, hotloop

Path(RAN).write_text("")


def make(width: int = 4):
    model = torch.nn.Linear(width, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step(x):
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return hotloop.Workload(model, optimizer, step, [torch.randn(4, width) for _ in range(8)])
"""
HOSTILE = """<!doctype html><title>hostile</title>
<img src="TARGET/training?LINK"><iframe src="TARGET/training?LINK"></iframe><script src="TARGET/run/charts?run=a"></script>
<iframe name="read"></iframe><iframe name="start"></iframe>
<form method="post" action="TARGET/training/read" target="read"><input name="program" value="PROGRAM"></form>
<form method="post" action="TARGET/training/start" target="start"><input name="program" value="PROGRAM"></form>
<script>
for (const one of document.forms) one.submit();
window.open("TARGET/training?LINK");
const asked = ["GET", "POST"].map((method) => fetch("TARGET/training?LINK", {method, mode: "no-cors", credentials: "include"}));
Promise.allSettled(asked).then(() => { document.title = "done"; });
</script>"""


class Hostile(http.server.BaseHTTPRequestHandler):
    """A server of somebody else's on this machine."""

    def do_GET(self):
        self.server.cookies.append(self.headers.get("cookie", ""))
        self.send_response(200)
        self.send_header("content-type", "text/html")
        self.end_headers()
        self.wfile.write(self.server.page.encode())

    def log_message(self, *_):
        pass


@pytest.fixture
def hostile():
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hostile) as one:
        one.cookies, one.page = [], ""
        threading.Thread(target=one.serve_forever, daemon=True).start()
        yield one
        one.shutdown()


def test_a_page_on_another_port_runs_nothing_and_a_person_runs_their_program(chromium, hostile, tmp_path):
    ran, program = tmp_path / "ran", f"{tmp_path}/train.py:make"
    (tmp_path / "train.py").write_text(PROGRAM.replace("RAN", repr(str(ran))))
    own = {"HOTLOOP_CACHE_DIR": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    with server(tmp_path / "runs", environment=own.items()) as (_, url):
        with a_person(chromium, url) as page:
            page.goto(at(url, f"/training?program={program}"))  # a link of their own, which asks as well
            expect(page.locator("#unread")).to_contain_text(program)
        target = at(url, "/").rstrip("/")
        link = urllib.parse.urlencode({"program": program})
        hostile.page = HOSTILE.replace("TARGET", target).replace("LINK", link).replace("PROGRAM", program)
        for host in ("127.0.0.1", "localhost"):
            attacked(chromium, url, f"http://{host}:{hostile.server_port}/")
        assert not ran.exists()
        stolen = next(one for one in hostile.cookies if "hotloop_" in one)  # browsers send cookies to every port
        assert acts(target, stolen, program) == 403
        assert not ran.exists()
        with a_person(chromium, url) as page:
            page.click("nav >> text=Training")
            page.fill("#program", program)
            page.click("text=Show its settings")
            page.fill("[name='program.width']", "8")
            page.fill("#name", "mine")
            expect(page.locator("#command")).to_contain_text("program.width=8")
            assert ran.exists()
            page.reload()  # what is known of the file's settings is shown
            expect(page.locator("[name='program.width']")).to_have_value("8")
            page.click("#check")
            expect(page.locator("#checked")).to_contain_text("It can run.")
            page.click("#start")
            page.wait_for_url(re.compile(r"/run\?run="))
            expect(page.locator("#status")).to_have_text("finished")
            page.click("text=New run with these settings")
            expect(page.locator("[name='program.width']")).to_have_value("8")
            page.click("text=Machine")
            expect(page.locator("#findings")).to_contain_text("torch")
    folder = tmp_path / "runs" / "train.py-make" / "mine"
    assert record.load(folder)["status"] == "finished"
    assert "program.width=8" in json.loads((folder / "ui-start.json").read_text())["arguments"]


def attacked(chromium, url, hostile):
    """Visit a hostile page in the browser that is open at the server of an address."""
    context = chromium.new_context(storage_state=STATES[url])
    page = context.new_page()
    with context.expect_page() as opened:
        page.goto(hostile)
    page.wait_for_function("document.title === 'done'")
    assert "type hotloop's address into your browser" in opened.value.inner_text("body")
    page.goto(hostile)
    page.evaluate("target => { location = target; }", at(url, "/runs"))
    page.wait_for_url("**/runs")
    expect(page.locator("body")).to_contain_text("type hotloop's address into your browser")
    context.close()


def acts(target, cookie, program):
    """Return the status of a press that brings a stolen cookie alone."""
    form = urllib.parse.urlencode({"program": program}).encode()
    asked = urllib.request.Request(f"{target}/training/read", form, {"cookie": cookie})
    try:
        return urllib.request.urlopen(asked).status
    except urllib.error.HTTPError as refused:
        return refused.code
