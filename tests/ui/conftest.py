"""A server in this process, with runs in a folder, and a person who has its token."""

import sys
from pathlib import Path

import pytest

pytest.importorskip("starlette", reason="the page needs pip install 'hotloop[ui]'")
from starlette.testclient import TestClient

from hotloop.ui import watching
from hotloop.ui.app import application
from hotloop.ui.security import Access

sys.path.insert(0, str(Path(__file__).parents[1] / "report"))

MISSING = {"triton": "no GPU that torch can use", "max-autotune": "no GPU that torch can use"}


class KnownProbe:
    """A machine of which is known what it can run."""

    def begin(self):
        pass

    def answer(self):
        components = {"diffusion": ["unet", "text_encoder", "vae", "loss"], "digits": ["model", "loss"]}
        return {"device": "cpu", "missing": MISSING, "components": components, "error": ""}


@pytest.fixture(autouse=True)
def _at_once(monkeypatch):
    """Look at a run whenever it has changed; tests of how often it is looked at say so themselves."""
    monkeypatch.setattr(watching, "LEAST_SECONDS", 0.0)
    monkeypatch.setattr(watching, "WHOLE_SECONDS", 0.0)
    monkeypatch.setattr(watching, "SHARE", float("inf"))


@pytest.fixture
def access():
    return Access(8765)


@pytest.fixture
def root(tmp_path):
    return tmp_path / "runs"


@pytest.fixture
def stranger(root, access):
    with TestClient(application(root, access, KnownProbe()), base_url="http://127.0.0.1:8765") as client:
        yield client


@pytest.fixture
def client(stranger, access):
    stranger.cookies.set(access.cookie, access.token)
    stranger.follow_redirects = False
    stranger.headers["x-csrf-token"] = access.csrf
    return stranger
