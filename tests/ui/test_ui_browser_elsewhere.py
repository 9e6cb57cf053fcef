"""A run on a cluster from the page, in a real browser: a cluster is added, a run starts there, is watched and stopped."""

import re
import sys
from pathlib import Path

import pytest
from browser import CHROMIUM, SECONDS, a_person, at, server

pytest.importorskip("playwright", reason="the tests of the page in a browser need playwright")
pytest.importorskip("ray.job_submission")
pytestmark = [
    pytest.mark.campaign,
    pytest.mark.skipif(not CHROMIUM, reason="no Chromium: `make setup-browser` installs it"),
]
sys.path.insert(0, str(Path(__file__).parents[1] / "remote"))
from playwright.sync_api import expect  # noqa: E402
from ray_head import Head, git  # noqa: E402
from shared import once  # noqa: E402

from hotloop import record  # noqa: E402

PATIENT = 300_000
"""Milliseconds: each answer about a program loads torch, and so does each job of a head."""
PROGRAM = """
import time
import torch, hotloop


def make(steps: int = 10_000):
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step(x):
        time.sleep(0.05)
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return hotloop.Workload(model, optimizer, step, [torch.randn(4, 4) for _ in range(steps)])
"""


@pytest.fixture(autouse=True)
def _patient():
    expect.set_options(timeout=PATIENT)
    yield
    expect.set_options(timeout=SECONDS)


@pytest.fixture
def head(tmp_path):
    made = Head(tmp_path / "head")
    try:
        made.start()
        yield made
    finally:
        made.kill()


def test_a_run_on_a_cluster_is_started_watched_and_stopped(chromium, head, tmp_path, monkeypatch):
    root = tmp_path / "project" / "runs"
    root.mkdir(parents=True)
    monkeypatch.chdir(root.parent)
    Path("train.py").write_text(PROGRAM)
    git("init", "-q")
    git("add", "train.py")
    own = {"XDG_STATE_HOME": str(tmp_path / "state"), "HOTLOOP_CACHE_DIR": str(tmp_path / "cache")}
    with server(root, environment=own) as (_, url), a_person(chromium, url) as page:
        page.set_default_timeout(PATIENT)
        page.goto(at(url, "/machine"))
        page.fill("#cluster", head.address)
        page.click("#cluster-add")
        expect(page.locator("#clusters code").nth(1)).to_have_text(head.address)
        page.goto(at(url, "/training?program=train.py:make"))
        page.click("text=Run it and show its settings")
        page.select_option("#where", head.address)
        page.wait_for_url(re.compile("where="))
        page.fill("#name", "away")
        expect(page.locator("#command")).to_contain_text(f"hotloop submit --address {head.address} -- train")
        page.click("#start")
        page.wait_for_url(re.compile(r"/run\?run="))
        expect(page.locator("#where")).to_have_text(f"on {head.address}")
        expect(page.locator("#status")).to_have_text("running")
        expect(page.locator(".progress")).to_be_visible(timeout=SECONDS)
        expect(page.locator("#log")).to_contain_text("step 1/10000")
        folder = root / "train.py-make" / "away"
        page.click("#act-run-stop")
        expect(page.locator("#status")).to_have_text("interrupted")
        expect(page.locator("#act-run-resume")).to_have_text("Resume")
        page.goto(at(url, "/runs"))
        expect(page.locator("table.runs")).to_contain_text(head.address)
    assert record.load(folder)["status"] == "interrupted"
    assert 0 < record.load(folder)["steps"][-1]["step"] < 10_000
    assert once((folder / "checkpoints" / "last.pt").is_file)  # whoever follows the run fetches it last
