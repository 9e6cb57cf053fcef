"""Folds on a Ray cluster are those of one process; a fold whose node is lost goes on from its last checkpoint."""

import pytest

pytest.importorskip("ray")
from ray_cluster import nodes
from test_train_workers import cross, losses, metrics, own, starts, whole

from hotloop.errors import ConfigError

__all__ = ["cross", "own", "whole"]
campaign = pytest.mark.campaign


@pytest.fixture
def two():
    with nodes(1, 1) as made:
        yield made


@pytest.fixture
def away(cross, two):
    """Cross-validate on the cluster."""
    return lambda folder, *more: cross(
        folder, "kfold.engine=ray", f"engine.address={two.address}", *more, workers="auto"
    )


@campaign
@pytest.mark.long
def test_folds_over_two_nodes_are_those_of_one_process(away, whole):
    ended = away("study")
    assert ended.status == "finished"
    assert metrics(ended) == metrics(whole)
    assert [losses(ended, fold) for fold in range(3)] == [losses(whole, fold) for fold in range(3)]
    assert starts(ended) == [1, 1, 1]


@campaign
@pytest.mark.long
def test_a_fold_whose_worker_is_lost_goes_on_and_needs_no_shared_folder_where_runs_are_stored(away, whole, tmp_path):
    ended = away("study", "program.act=dies", f"run.storage=file://{tmp_path}/there")
    assert ended.status == "finished"
    assert metrics(ended) == metrics(whole)
    assert losses(ended, 1) == losses(whole, 1)
    assert all(list(tmp_path.glob(f"there/study/fold-{fold}/checkpoints/last.pt")) for fold in range(3))


def test_an_address_that_nobody_answers_is_told_and_nothing_is_written(cross, tmp_path):
    with pytest.raises(ConfigError, match=r"engine\.address=127\.0\.0\.1:1: .*correct engine\.address"):
        cross("study", "kfold.engine=ray", "engine.address=127.0.0.1:1")
    assert not (tmp_path / "study").exists()
