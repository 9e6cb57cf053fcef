"""Folds on a Ray cluster are those of one process; a fold whose node is lost goes on from its last checkpoint."""

import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("ray")
from ray_cluster import nodes
from shared import once
from test_train_workers import cross, losses, metrics, own, starts, whole

from hotloop.errors import ConfigError
from hotloop.recipes import load
from hotloop.train import cluster as clusters
from hotloop.train import kfold
from hotloop.train.child import WorkerLostError
from hotloop.train.fold_workers import FoldWorkers

__all__ = ["cross", "own", "whole"]
campaign = pytest.mark.campaign


def parent(process):
    return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])


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
@pytest.mark.parametrize(
    "case",
    ["node", *(pytest.param(one, marks=pytest.mark.long) for one in ("process", "worker", "node, runs are stored"))],
)
def test_a_fold_that_is_lost_goes_on_from_its_last_checkpoint(away, whole, tmp_path, capsys, case):
    killed, _, stored = case.partition(", ")
    storage = f"file://{tmp_path}/there" if stored else "null"

    def kill():
        once((tmp_path / "waits-1").exists)
        process = int((tmp_path / "waits-1").read_text())
        worker = parent(process)
        lost = {"process": [process], "worker": [worker], "node": [parent(worker), worker, process]}[killed]
        for one in lost:
            os.kill(one, signal.SIGKILL)
        (tmp_path / "go").touch()

    thread = threading.Thread(target=kill)
    thread.start()
    ended = away("study", "program.act=waits", f"run.storage={storage}")
    thread.join()
    assert ended.status == "finished"
    assert metrics(ended) == metrics(whole)
    assert losses(ended, 1) == losses(whole, 1)
    # One that only lost whoever started it may come to its end before it hears of that; then nothing is left to train.
    assert starts(ended)[1] == 2 or killed != "process"
    lost = "signal 9" if killed == "process" else "its process or its node on the cluster was lost"
    assert f"died ({lost})" in capsys.readouterr().out


@campaign
@pytest.mark.long
def test_a_lost_head_is_told_and_a_new_one_goes_on(cross, own, whole, tmp_path):
    with nodes(1, 1) as made:
        given = [own, "recipe.goal=max:accuracy", "kfold.n_splits=3", "training.num_epochs=1"]
        given += ["training.checkpoint_every_steps=1", "program.act=waits", f"run.folder={tmp_path / 'study'}"]
        given += ["kfold.engine=ray", "kfold.workers=auto", f"engine.address={made.address}"]
        command = [sys.executable, "-m", "hotloop", "kfold", *given]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        once((tmp_path / "waits-1").exists)
        os.kill(made.head_node.all_processes["gcs_server"][0].process.pid, signal.SIGKILL)
        said = " ".join(process.communicate(timeout=900)[0].split())
    assert process.returncode == 1, said
    assert re.search(r"the head of the Ray cluster, .* is lost\. Each fold is kept at its last checkpoint", said)
    (tmp_path / "go").touch()
    with nodes(1, 1) as made:
        study = kfold.prepare([f"run.resume={tmp_path / 'study'}", f"engine.address={made.address}"])
        ended = kfold.run(study, load(study.settings.recipe.name))
    assert (ended.status, metrics(ended)) == ("finished", metrics(whole))
    assert losses(ended, 1) == losses(whole, 1)


@campaign
@pytest.mark.long
def test_folds_need_no_shared_folder_where_runs_are_stored(away, whole, tmp_path, monkeypatch):
    monkeypatch.setattr(clusters.Path, "cwd", lambda: tmp_path / "nowhere")  # no node has the driver's working folder
    ended = away("study", f"run.storage=file://{tmp_path}/there")
    assert ended.status == "finished"
    assert metrics(ended) == metrics(whole)
    assert [losses(ended, fold) for fold in range(3)] == [losses(whole, fold) for fold in range(3)]
    assert all(list(tmp_path.glob(f"there/study/fold-{fold}/*/checkpoints/last.pt")) for fold in range(3))


@campaign
def test_nodes_that_cannot_run_a_fold_are_told(away, monkeypatch, tmp_path):
    with monkeypatch.context() as patch:
        patch.setattr(clusters, "__version__", "9.9")
        with pytest.raises(
            ConfigError, match=r"node .* has hotloop .*, and this is 9\.9: install one version on all nodes"
        ):
            away("study")
    with monkeypatch.context() as patch:
        patch.setattr(clusters.Path, "cwd", lambda: tmp_path / "nowhere")
        with pytest.raises(ConfigError, match=r"nowhere.*have to be the same ones on all nodes"):
            away("other")


def test_a_worker_that_was_left_is_waited_for_no_longer():
    from ray import exceptions

    def get(what, timeout):
        asked.append(timeout)
        assert len(asked) < 5, "it is waited for still"
        if len(asked) == 2:
            child.leave()
        raise exceptions.GetTimeoutError

    asked, child = [], object.__new__(clusters.RemoteChild)
    vars(child).update(_ray=SimpleNamespace(get=get, exceptions=exceptions), _start=None, _line="line", _left=False)
    with pytest.raises(WorkerLostError):
        child.hear()
    assert asked == [clusters._HEAR_SECONDS] * 2  # a silent worker is heard until it is left


def test_a_stop_does_not_wait_for_a_node_that_the_cluster_has_not():
    waits, stopping = object.__new__(clusters.RemoteChild), SimpleNamespace(running={})
    vars(waits).update(_start="ref", _left=False)
    stopping.running[1] = waits
    FoldWorkers.stop(stopping)
    assert waits._left


def test_an_address_that_nobody_answers_is_told_and_nothing_is_written(cross, tmp_path):
    with pytest.raises(
        ConfigError, match=r"engine\.address=127\.0\.0\.1:1: nobody answers there.*leave kfold\.engine out"
    ):
        cross("study", "kfold.engine=ray", "engine.address=127.0.0.1:1")
    assert not (tmp_path / "study").exists()


def test_one_fold_alone_is_not_for_a_cluster(own):
    from hotloop.train import start

    with pytest.raises(
        ConfigError, match=r"kfold\.engine='ray' has no effect.*one fold is an ordinary run of this machine"
    ):
        start.prepare([own, "kfold.n_splits=3", "kfold.fold=1", "kfold.engine=ray", "recipe.goal=max:accuracy"])
