"""What the tests of training share."""

from __future__ import annotations

import pytest
from training_fixtures import overrides

from hotloop import recipes
from hotloop.train import start


@pytest.fixture(autouse=True)
def _no_memory(monkeypatch):
    """What an earlier run found out about the tiny encoder is no part of a test."""
    monkeypatch.setenv("HOTLOOP_CACHE_DIR", "")


@pytest.fixture
def prepare(tmp_path):
    """Settings and folder of a tiny run; ``a__b=value`` changes a setting."""
    return lambda **more: start.prepare(overrides(tmp_path, **more))


@pytest.fixture
def train(prepare):
    """Train a tiny run to its end; ``a__b=value`` changes a setting."""
    return lambda **more: recipes.load("criteria").train(prepare(**more))
