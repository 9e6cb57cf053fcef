"""A cluster of two nodes, of which the head has no CPUs, as examples/cloud/ray-up.yaml makes it: runs are on the other."""

import shutil
import threading
from pathlib import Path

import pytest
from ray_head import Head
from shared import once

from hotloop import record
from hotloop.remote import checking, fetch, runs, submitting, there, watching
from hotloop.remote.locating import NowhereError

pytest.importorskip("ray.job_submission")
pytestmark = [pytest.mark.campaign, pytest.mark.long]
COMMAND = ("train", "train.py:make", "program.steps=40", "program.slow=0.25", "training.num_epochs=2")


@pytest.fixture
def pair(tmp_path):
    """A head without CPUs, and another node with what Ray takes for a GPU, that is started and killed with it."""
    head = Head(tmp_path / "head")
    worker = tmp_path / "worker"

    def start(*, both=True):
        head.start("--num-cpus=0", "--num-gpus=0")
        if both:
            head.join(worker, "--num-cpus=2", "--num-gpus=1")

    try:
        yield head, worker, start
    finally:
        head.kill()
        shutil.rmtree(head.folder, ignore_errors=True)


def test_a_run_of_another_node_is_found_and_goes_on_there_after_all_was_started_anew(pair, project, over, monkeypatch):
    """Without the node's name it would begin at step 0, on the head, and its record replace the one here."""
    head, worker, start = pair
    start()
    monkeypatch.setattr(checking.Asked, "gpus", lambda self, nodes: 1)
    said = []
    run = submitting.submit(submitting.Request(head.address, COMMAND), said.append)
    once((worker / run.name / there.BACK / run.name / "checkpoints/last.pt").exists)
    head.kill()
    start(both=False)
    for ask in (lambda: fetch.fetch(run, "last", print), lambda: submitting.resume(run, 0)):
        with pytest.raises(NowhereError, match=f"no node of {head.address} has run {run.name}, of 1 that were asked"):
            ask()
    assert not (head.place / run.name).exists()
    head.join(worker, "--num-cpus=2", "--num-gpus=1")
    again = once(lambda: _resumed(run))
    assert over(again) == "finished"
    fetch.fetch(again, "last", print)
    assert not (head.place / run.name).exists()
    document = record.load(Path(run.folder))
    assert len(document["steps"]) == 80
    assert document["starts"] == 2
    assert runs.find(run.name).number == 2


@pytest.mark.filterwarnings("ignore:ssl=None is deprecated")  # of Ray's client
def test_a_run_whose_node_is_lost_goes_on_on_another_while_it_is_watched(pair, project, tmp_path, monkeypatch):
    head, worker, start = pair
    start()
    monkeypatch.setattr(checking.Asked, "gpus", lambda self, nodes: 1)
    command = (*COMMAND, f"run.storage={tmp_path}/storage")
    run = submitting.submit(submitting.Request(head.address, command), print)
    once(lambda: list((tmp_path / "storage" / run.name).rglob("last.pt")))
    once(lambda: list((tmp_path / "storage" / run.name).rglob("stored.json")))
    other, said, ends = tmp_path / "other", [], []
    head.join(other, "--num-cpus=2", "--num-gpus=1")
    watcher = threading.Thread(target=lambda: ends.append(watching.watch(run, lambda _: None, said.append, 1)))
    watcher.start()
    head.kill(of=worker)
    watcher.join(600)
    assert (ends, runs.find(run.name).number) == (["finished"], 2)
    assert "has left the cluster. The run is being resumed" in said[0]
    fetch.fetch(runs.find(run.name), "last", print)
    document = record.load(Path(run.folder))
    assert (len(document["steps"]), document["starts"]) == (80, 2)
    assert (other / run.name).is_dir()


def _resumed(run):
    """Resume the run; None as long as the other node has not joined."""
    try:
        return submitting.resume(run, 0)
    except NowhereError:
        return None
