"""What the recipe's tests share."""

import pytest


@pytest.fixture(autouse=True)
def _no_memory(monkeypatch):
    """What an earlier run found out about the networks is no part of a test."""
    monkeypatch.setenv("HOTLOOP_CACHE_DIR", "")
