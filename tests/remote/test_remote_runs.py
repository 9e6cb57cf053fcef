"""A run on a real Ray head, over its dashboard's port alone: sent, followed, stopped, fetched; and whatever is killed."""

import contextlib
import dataclasses
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from ray_head import SOURCE
from shared import once

from hotloop import record
from hotloop.errors import ConfigError, DataError, RecordError
from hotloop.remote import fetch, following, runs, signed, submitting, there
from hotloop.report import runs as found

pytestmark = pytest.mark.campaign
TRAIN = ("train", "train.py:make")


def submitted(head, *command, **options):
    """Submit a run, and return it with what was said."""
    said = []
    run = submitting.submit(submitting.Request(head.address, command, **options), said.append)
    return run, "\n".join(said)


def losses(folder):
    return [one["loss"] for one in record.load(Path(folder))["steps"]]


def steps(run):
    """Fetch what there is while it runs, and count its steps; 0 before the first."""
    if fetch.status_of(run) != "running":
        return 0
    with contextlib.suppress(DataError, RecordError):  # nothing was written yet
        fetch.fetch(run, "none", print)
        return len(losses(run.folder))
    return 0


def test_a_run_there_is_that_of_here(project, hotloop, head, over):
    done = hotloop(
        "submit", "--json", "--address", head.address, "--retries", 1, "--", *TRAIN, "training.num_epochs=3",
        "program.die_at=20",
    )  # fmt: skip
    assert "Environment: the cluster's" in done.stderr
    assert str(head.place) in done.stderr
    answer = json.loads(done.stdout)
    assert (answer["status"], answer["found"]["dry_run"]["code"]) == ("submitted", 0)
    run = runs.find(answer["name"])
    followed = hotloop("submit", "logs", "-f", run.name).stdout
    assert "The run ended with signal 9. It is resumed: attempt 2 of 2" in followed
    assert "step 36/36" in followed
    logs = [one for one in head.folder.glob("session_2*/logs/**/*") if one.is_file()]
    assert any(one.name.startswith("runtime_env") for one in logs)
    for one in logs:  # Ray logs what it is asked for
        assert run.key.encode() not in one.read_bytes(), one
    assert not list(head.folder.rglob(there.ASKED_FILE))
    assert over(run) == "finished"
    rows = json.loads(hotloop("submit", "status", "--json").stdout)
    assert [(one["name"], one["status"]) for one in rows] == [(run.name, "finished")]
    assert hotloop("submit", "stop", run.name).stdout.strip() == f"{run.name} was over already: finished"
    fetched = fetch.fetch(run, "all", print)
    folder = Path(run.folder)
    assert folder == project / "runs/train.py-make" / run.name
    assert (folder / "report.html").is_file()
    assert "step 36/36" in (folder / fetch.LOG).read_text()
    assert {one.name for one in folder.glob("checkpoints/*.pt")} == {"last.pt"}
    assert (fetched.state["code"], fetched.state["attempts"]) == (0, 2)
    hotloop(*TRAIN, "training.num_epochs=3", "run.folder=here")
    assert losses(folder) == losses("here") != []  # dead once, and the same result
    assert record.load(folder)["status"] == "finished"
    assert fetch.fetch(run, "all", print).files == ()  # nothing is new


@pytest.mark.long
def test_what_cannot_run_there_is_told_and_nothing_trains(project, hotloop, head):
    run, said = submitted(head, *TRAIN, dry=True)
    assert run is None
    assert "Dry run: settings, data and one batch were checked there" in said
    with pytest.raises(ConfigError, match=r"the dry run on node .* exit code 2:[\s\S]*/nowhere/there"):
        submitted(head, *TRAIN, "program.needs=/nowhere/there")
    Path("other.py").write_text(Path("train.py").read_text())
    with pytest.raises(ConfigError, match=r"other\.py does not travel, .*: git add other\.py, or --include other\.py"):
        submitted(head, "train", "other.py:make")
    assert runs.known() == []


@pytest.mark.long
def test_a_run_is_stopped_with_a_checkpoint_and_goes_on(project, head, over):
    run, _ = submitted(head, *TRAIN, "program.steps=400", "program.slow=0.1")
    once(lambda: steps(run))
    assert record.load(Path(run.folder))["status"] == "running"
    said = []
    assert following.stop(run, said.append) == (True, "stopped")
    assert said == [f"{run.name} was asked to stop: it has 60 s to save a checkpoint"]
    fetch.fetch(run, "last", print)
    assert record.load(Path(run.folder))["status"] == "interrupted"
    assert (Path(run.folder) / "checkpoints/last.pt").is_file()
    before = len(losses(run.folder))
    again = submitting.resume(run, 0)
    with pytest.raises(ConfigError, match=f"{run.name} is not over: follow it"):
        submitting.resume(again, 0)
    assert runs.find(run.name) == again != run
    once(lambda: steps(again) > before)
    following.Client(run.address).stop(again.submission)
    assert over(again) == "stopped"


@pytest.mark.long
def test_who_follows_may_be_killed(project, head, over):
    run, _ = submitted(head, *TRAIN, "program.steps=60", "program.slow=0.2")
    command = [sys.executable, "-m", "hotloop", "submit", "logs", "-f", run.name]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": str(SOURCE)}) as client:
        while (line := client.stdout.readline()) and b"step 1/60" not in line:
            pass
        assert line  # else it ended before
        client.kill()
    assert over(run) == "finished"
    fetch.fetch(run, "none", print)
    assert len(losses(run.folder)) == 60


@pytest.mark.long
def test_what_the_runs_key_did_not_sign_is_refused(project, head, over):
    run, _ = submitted(head, *TRAIN)
    assert over(run) == "finished"
    back = head.place / run.name / there.BACK
    (back / run.name / "settings.yaml").write_text("forged: true\n")
    fetched = fetch.fetch(run, "none", print)
    assert fetched.changing == (f"{run.name}/settings.yaml",)
    assert not (Path(run.folder) / "settings.yaml").exists()
    (back / there.INDEX).write_text(signed.dumps("other", {"files": {}, "state": {"ended": 1}}))
    with pytest.raises(DataError, match="not signed by the run's key"):
        fetch.fetch(run, "none", print)


@pytest.mark.long
def test_compiled_code_comes_back_and_travels(project, head, over, tmp_path):
    from hotloop.cache.compiled import compiled_store

    command = (
        *TRAIN,
        "training.optimization.use_torch_compile=true",
    )
    run, said = submitted(head, *command)
    assert "it fits there; nothing is kept here that the cluster has not" in said
    assert over(run) == "finished"
    said = []
    fetch.fetch(run, "none", said.append)
    assert "Compiled code from there: 1 bundle" in "\n".join(said)
    (entry,) = compiled_store().entries()
    said = []
    assert fetch.fetch(run, "none", said.append).files == ()
    assert said == []
    shutil.rmtree(head.cache)
    again, said = submitted(head, *command)
    assert "it fits there; 1 bundle, " in said
    assert "Compiling took" in said
    assert over(again) == "finished"
    fetch.fetch(again, "none", print)
    assert "Compiled code that came along: 1 bundle" in (Path(again.folder) / fetch.LOG).read_text()
    assert entry.folder.name in {one.name for one in head.cache.glob("compiled/*")}
    components = record.load(Path(again.folder))["components"]
    assert sum(one["cache_hits"] for one in components.values()) > 0


@pytest.mark.long
def test_a_head_that_is_killed_leaves_what_there_is_and_the_run_goes_on_with_a_new_one(project, head, over):
    run, _ = submitted(head, *TRAIN, "program.steps=40", "program.slow=0.25", "training.num_epochs=2")
    once((head.place / run.name / there.BACK / run.name / "checkpoints/last.pt").exists)
    head.kill()
    with pytest.raises(ConfigError, match=rf"nobody answers there[\s\S]*What was fetched of {run.name} before is in"):
        fetch.fetch(run, "last", print)
    assert fetch.status_of(run) == "unreachable"
    head.start()
    said = []
    fetched = fetch.fetch(run, "last", said.append)
    assert fetched.status == "lost"
    assert f"does not know {run.name}: its head was started anew" in said[0]
    assert (Path(run.folder) / "checkpoints/last.pt").is_file()
    assert 40 <= len(losses(run.folder)) < 80
    again = submitting.resume(run, 0)
    assert over(again) == "finished"
    fetch.fetch(again, "last", print)
    assert len(losses(run.folder)) == 80
    shutil.rmtree(head.place / run.name)
    runs.keep(dataclasses.replace(run, submission="unknown"))
    for go in (lambda one: fetch.fetch(one, "last", print), lambda one: submitting.resume(one, 0)):
        with pytest.raises(ConfigError, match=rf"no node of .* has run {run.name}, of 1 that were asked"):
            go(runs.find(run.name))


@pytest.mark.long
def test_a_run_whose_head_is_lost_goes_on_with_a_new_one_while_it_is_watched(project, head):
    run, _ = submitted(head, *TRAIN, "program.steps=40", "program.slow=0.25", "training.num_epochs=2")
    command = [sys.executable, "-m", "hotloop", "submit", "logs", "--retries", "1", run.name]
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command, stdout=pipe, stderr=pipe, text=True, env={**os.environ, "PYTHONPATH": str(SOURCE)}
    ) as client:
        assert client.stdout.readline()
        once((head.place / run.name / there.BACK / run.name / "checkpoints/last.pt").exists)
        head.kill()
        waits = [client.stderr.readline() for _ in range(2)]
        head.start()
        printed, said = client.communicate(timeout=400)
    assert client.returncode == 0, said
    assert waits[1].startswith("The run may be lost. Waiting up to 60 minutes"), waits
    assert "was started anew. The run is being resumed, which takes a minute. After this, 0 of 1 left" in said
    assert "step 80/80" in printed
    again = runs.find(run.name)
    assert (again.number, fetch.status_of(again)) == (2, "finished")
    fetch.fetch(again, "last", print)
    document = record.load(Path(run.folder))
    assert (len(document["steps"]), document["starts"]) == (80, 2)


@pytest.mark.long
def test_a_run_whose_disk_is_gone_goes_on_from_its_storage(project, head, over, tmp_path):
    steps = ("program.steps=40", "program.slow=0.25", "training.num_epochs=2")
    run, _ = submitted(head, *TRAIN, *steps, f"run.storage={tmp_path}/storage")
    once(lambda: list((tmp_path / "storage" / run.name).rglob("last.pt")))
    once(lambda: list((tmp_path / "storage" / run.name).rglob("stored.json")))
    following.Client(run.address).stop(run.submission)
    assert over(run) == "stopped"
    shutil.rmtree(head.place / run.name)
    said = []
    again = submitting.resume(run, 0, said.append)
    assert f"goes on from file://{tmp_path}/storage/{run.name}" in said[0]
    assert over(again) == "finished"
    fetch.fetch(again, "last", print)
    document = record.load(Path(run.folder))
    assert (len(document["steps"]), document["starts"]) == (80, 2)
    assert (Path(run.folder) / "checkpoints/last.pt").is_file()


@pytest.mark.long
def test_the_commands_of_the_page_run_as_they_stand(project, hotloop, head):
    page = (SOURCE.parent / "docs/how-to/submit.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"^```bash\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    for line in block.splitlines():
        words = shlex.split(line.replace("http://127.0.0.1:8265", head.address))
        assert words[0] == "hotloop"
        done = hotloop(*words[1:])
    assert "is finished: " in done.stdout
    (row,) = found.find(Path("runs"))
    assert (row.status, row.steps) == ("finished", 24)


@pytest.mark.parametrize(
    "command",
    [
        ("kfold", "recipe=digits", "kfold.n_splits=2", "training.num_epochs=1"),
        ("hpo", "recipe=digits", "hpo.n_trials=2", "hpo.sampler=random", "hpo.pruner=none", "training.num_epochs=1"),
    ],
)
@pytest.mark.long
def test_a_cross_validation_and_a_search_come_back_with_their_members(project, head, over, command):
    run, _ = submitted(head, *command)
    assert over(run) == "finished"
    fetch.fetch(run, "none", print)
    assert found.known(Path(run.folder)).status == "finished"
    assert [one.status for one in found.members(Path(run.folder))] == ["finished"] * 2
    assert not list(Path(run.folder).rglob("*.pt"))
