"""Where a run's record is written."""

from pathlib import Path

import pytest
from torch import distributed

from hotloop.measure.machine import record_folder


def test_without_other_processes_it_is_the_folder_that_was_named():
    assert record_folder(None) is None
    assert record_folder("runs/mine") == Path("runs/mine")


@pytest.mark.parametrize(("rank", "folder"), [(0, "runs/mine"), (1, "runs/mine/rank-1"), (12, "runs/mine/rank-12")])
def test_of_several_processes_each_has_its_own(monkeypatch, rank, folder):
    monkeypatch.setattr(distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(distributed, "get_rank", lambda: rank)
    assert record_folder("runs/mine") == Path(folder)
