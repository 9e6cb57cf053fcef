"""Runs on a Ray head of this machine: sent, followed, killed, stopped, resumed, fetched."""

import time
from pathlib import Path

import pytest

from hotloop import record
from hotloop.remote import runs

pytestmark = pytest.mark.campaign
RUN = ["train", "train.py:make", "training.num_epochs=1", "training.checkpoint_every_steps=2"]


def submit(hotloop, head, *arguments):
    hotloop("submit", "--address", head.address, *arguments)
    return runs.find(None)


def test_a_run_that_kills_itself_goes_on_and_comes_back_whole(project, head, hotloop, over):
    Path(".env").write_text("secret")
    checked = hotloop("submit", "--address", head.address, "--dry-run", "--", *RUN)
    assert "step" in checked.stdout
    assert runs.known() == []
    run = submit(hotloop, head, "--retries", "2", "--", *RUN, "program.steps=12", "program.die_at=6")
    assert over(run) == "finished", hotloop("submit", "logs").stdout
    assert "attempt 1 of 3" in hotloop("submit", "logs").stdout
    assert "finished" in hotloop("submit", "status", "--json").stdout
    hotloop("submit", "fetch", "--checkpoints", "last")
    folder = Path(run.folder)
    assert record.load(folder)["status"] == "finished"
    assert (folder / "checkpoints" / "last.pt").is_file()
    assert not list(head.place.rglob(".env"))


def test_a_run_is_stopped_and_resumed_and_shows_what_it_has_meanwhile(project, head, hotloop, over):
    run = submit(hotloop, head, "--", *RUN, "program.steps=40", "program.slow=0.3")
    until = time.monotonic() + 300
    while not (Path(run.folder) / record.LINES).exists():
        assert time.monotonic() < until
        hotloop("submit", "fetch", "--checkpoints", "none")
    assert "stopped" in hotloop("submit", "stop", run.name).stdout
    hotloop("submit", "resume")
    again = runs.find(None)
    assert (again.name, again.number) == (run.name, 2)
    assert over(again) == "finished", hotloop("submit", "logs").stdout
    hotloop("submit", "fetch")
    found = record.load(Path(run.folder))
    assert (found["status"], found["steps"][-1]["step"]) == ("finished", 40)


def test_a_run_that_cannot_work_fails_with_its_reason(project, head, hotloop, over):
    run = submit(hotloop, head, "--", *RUN, "program.needs=/nowhere")
    assert over(run) == "failed"
    assert "/nowhere" in hotloop("submit", "logs", "-f", code=1).stdout
