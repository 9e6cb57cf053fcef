"""What the tests of the search share: a study in a folder of the test's own, and a PostgreSQL server."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path += [str(HERE), str(HERE.parent / "train")]


@pytest.fixture(autouse=True)
def _workers_find_the_tests(monkeypatch):
    known = [str(HERE), str(HERE.parents[1] / "src"), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(one for one in known if one))
    monkeypatch.setenv("HOTLOOP_CACHE_DIR", "")


@pytest.fixture
def compose(tmp_path):
    """Settings of a search in the test's folder; ``a__b=value`` changes a setting."""
    from hotloop.train import configure

    def made(*more, **named):
        chosen = {"hpo.folder": tmp_path / "study", "hpo.sampler": "random", "hpo.pruner": "none", "hpo.n_trials": 4}
        chosen.update({name.replace("__", "."): value for name, value in named.items()})
        return configure.load([*(f"{name}={value}" for name, value in chosen.items()), *more])

    return made


@pytest.fixture
def search(compose):
    """Run a search with an objective of `search_objectives`; returns how it ended, and the printed lines."""
    from hotloop.train.search import command

    def run(objective, *more, **named):
        heard = []
        ended = command.search(compose(*more, **named), heard.append, f"search_objectives:{objective}")
        return ended, heard

    return run
