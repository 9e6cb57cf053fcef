"""What tests of the recipe share: the tiny encoder and its data, which those of training have as well."""

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "train"))


@pytest.fixture(autouse=True)
def _no_memory(monkeypatch):
    """What an earlier run found out about the tiny encoder is no part of a test."""
    monkeypatch.setenv("HOTLOOP_CACHE_DIR", "")
