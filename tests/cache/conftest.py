"""Stores of compiled code."""

import pytest

from hotloop.cache.compiled import CompiledStore


@pytest.fixture
def store(tmp_path):
    return CompiledStore(tmp_path / "store" / "compiled")


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A store of the test's own, and no folder of torch's."""
    monkeypatch.setenv("HOTLOOP_CACHE_DIR", str(tmp_path / "home"))
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    return tmp_path / "home"
