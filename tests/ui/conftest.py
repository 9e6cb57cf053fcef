"""A server in this process, with runs in a folder, and a person who has its token."""

import sys
from pathlib import Path

import pytest
from browser import browser

pytest.importorskip("starlette", reason="the page needs pip install 'hotloop[ui]'")
from starlette.testclient import TestClient

from hotloop.ui.app import application
from hotloop.ui.security import Access

sys.path.insert(0, str(Path(__file__).parents[1] / "report"))

MISSING = {"triton": "no GPU that torch can use", "max-autotune": "no GPU that torch can use"}


class KnownProbe:
    """A machine of which is known what it can run."""

    def begin(self):
        pass

    def answer(self):
        components = {"diffusion": ["unet", "text_encoder", "text_encoder_2", "vae", "loss"], "criteria": ["model"]}
        return {"device": "cpu", "missing": MISSING, "components": components, "error": ""}


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
