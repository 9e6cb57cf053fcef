"""Stores of compiled code, and folders that they are loaded into."""

import pytest

from hotloop.cache.compiled import CompiledStore
from hotloop.cache.process_folder import ProcessFolder


@pytest.fixture
def said():
    return []


@pytest.fixture
def store(tmp_path, said):
    return CompiledStore(tmp_path / "store" / "compiled", said.append)


@pytest.fixture
def place(tmp_path):
    made = tmp_path / "place"
    made.mkdir()
    return made


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A store of the test's own, and no folder of torch's."""
    monkeypatch.setenv("HOTLOOP_CACHE_DIR", str(tmp_path / "home"))
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    monkeypatch.setattr(ProcessFolder, "current", None)
    return tmp_path / "home"
