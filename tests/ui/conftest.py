"""A server in this process, with runs in a folder, and a person who has its token."""

import shutil
import sys
from pathlib import Path

import pytest
from browser import a_person, browser, server

pytest.importorskip("starlette", reason="the page needs pip install 'hotloop[ui]'")
from starlette.testclient import TestClient

from hotloop.ui import app, watching
from hotloop.ui.app import application
from hotloop.ui.security import Access

sys.path.insert(0, str(Path(__file__).parents[1] / "report"))

MISSING = {"triton": "no GPU that torch can use", "max-autotune": "no GPU that torch can use"}


class KnownProbe:
    """A machine of which is known what it can run."""

    def begin(self):
        pass

    def answer(self):
        components = {
            "diffusion": ["unet", "text_encoder", "text_encoder_2", "vae", "loss"],
            "digits": ["model", "loss"],
        }
        return {"device": "cpu", "missing": MISSING, "components": components, "error": ""}


@pytest.fixture(scope="session", autouse=True)
def _own_key(tmp_path_factory):
    """Keep the key of the queue out of the home of whoever runs the tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        yield


@pytest.fixture(autouse=True)
def _at_once(monkeypatch):
    """Look at a run whenever it has changed, and at the queue only where a test does; tests of that say so."""
    monkeypatch.setattr(app, "QUEUE_SECONDS", 1e6)
    monkeypatch.setattr(watching, "LEAST_SECONDS", 0.0)
    monkeypatch.setattr(watching, "WHOLE_SECONDS", 0.0)
    monkeypatch.setattr(watching, "SHARE", float("inf"))


@pytest.fixture
def access():
    return Access()


@pytest.fixture
def root(tmp_path):
    return tmp_path / "runs"


@pytest.fixture
def stranger(root, access):
    with TestClient(application(root, access, KnownProbe()), base_url="http://127.0.0.1:8765") as client:
        yield client


@pytest.fixture
def client(stranger, access):
    stranger.cookies.set(access.cookie("http"), access.session)
    stranger.follow_redirects = False
    stranger.headers["x-hotloop-key"] = access.key
    return stranger


@pytest.fixture(scope="module")
def chromium():
    with browser() as opened:
        yield opened


@pytest.fixture
def runs(served):
    """The folder of the server that all tests share, empty again after each."""
    yield served[0]
    for one in served[0].iterdir():
        shutil.rmtree(one)


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    folder = tmp_path_factory.mktemp("served") / "runs"
    folder.mkdir()
    with server(folder) as (_, url):
        yield folder, url


@pytest.fixture
def person(chromium, served):
    with a_person(chromium, served[1]) as page:
        page.base = served[1]
        yield page
