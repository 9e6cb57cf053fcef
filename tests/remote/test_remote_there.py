"""What the job of a run does on its node, without a cluster: attempts, the list of files, and what it finds there."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from hotloop.errors import DataError
from hotloop.remote import signed, there

NAME, KEY = "20261126-120000-abcd", "key"


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.setenv("HOTLOOP_REMOTE_DIR", str(tmp_path / "there"))
    return tmp_path / "there"


@pytest.fixture
def run(place, monkeypatch):
    """A run whose attempts are small programs: the next of a list for each."""

    def made(*programs, retries=0):
        one = there.Run(NAME, there.Asked(KEY, ["train", "train.py:make"], retries))
        (one.folder / there.TREE).mkdir(parents=True)
        (one.folder / there.BACK).mkdir()
        left = list(programs)
        asked = []

        def hotloop():
            return [sys.executable, "-c", left.pop(0)]

        arguments = one._arguments
        monkeypatch.setattr(there, "_hotloop", hotloop)
        monkeypatch.setattr(one, "_arguments", lambda: asked.append(arguments()) or [])
        return one, asked

    before = {name: signal.getsignal(name) for name in (signal.SIGTERM, signal.SIGINT)}
    yield made
    for name, handler in before.items():
        signal.signal(name, handler)


def index(one):
    return signed.loads(KEY, (one.folder / there.BACK / there.INDEX).read_text())


DIES = "import os; os.kill(os.getpid(), 9)"
OUT = f"../back/{NAME}"
WRITES = f"from pathlib import Path; Path('{OUT}').mkdir(); Path('{OUT}/settings.yaml').write_text('a'); "


def test_a_run_that_dies_is_resumed_as_often_as_it_may(run):
    one, asked = run(WRITES + DIES, DIES, "pass", retries=2)
    assert one.train() == 0
    folder = one.folder / there.BACK / NAME
    assert asked == [["train", "train.py:make", f"run.folder={folder}"], *2 * [["train", f"run.resume={folder}"]]]
    assert index(one)["state"]["attempts"] == 3
    assert index(one)["state"]["code"] == 0


def test_without_retries_a_death_is_the_end_and_its_signal_is_told(run, capsys):
    one, asked = run(DIES)
    assert one.train() == 137
    said = capsys.readouterr().out
    assert f"Go on with it: hotloop submit resume {NAME}\nFetch it:      hotloop submit fetch {NAME}\n" in said
    assert index(one)["state"]["code"] == -9
    assert len(asked) == 1


def test_wrong_usage_is_not_tried_again(run, capsys):
    one, asked = run("raise SystemExit(2)", retries=5)
    assert one.train() == 2
    assert "hotloop submit resume" not in capsys.readouterr().out
    assert len(asked) == 1


def test_a_run_that_is_stopped_is_not_resumed(run):
    one, asked = run("import os, signal; os.kill(os.getppid(), signal.SIGTERM); raise SystemExit(130)", retries=5)
    assert one.train() == 130
    assert len(asked) == 1


def test_the_index_has_each_file_with_its_checksum_and_nothing_half_written(run):
    others = (".x.part", "é x", "run.lock", "ui-stop.json", "stored.json")
    one, _ = run(WRITES + "; ".join(f"Path('{OUT}/{name}').write_text('cc')" for name in others))
    one.train()
    found = index(one)["files"]
    assert {name: size for name, (size, _) in found.items()} == {f"{NAME}/settings.yaml": 1, f"{NAME}/é x": 2}
    assert found[f"{NAME}/settings.yaml"][1] == "ca978112ca1bbdcafac231b39a23dc4da786eff8147c4e72b9807785afee48bb"


def test_a_run_whose_job_was_killed_is_listed_anew_and_one_that_ended_is_not(run):
    one, _ = run("pass")
    late = one.folder / there.BACK / NAME / "late"
    late.parent.mkdir()
    one.sign_again()
    assert not (one.folder / there.BACK / there.INDEX).exists()
    one._write_index()
    late.write_text("a")
    assert index(one)["files"] == {}
    again = there.Run(NAME, there.Asked(KEY, []))
    again.sign_again()
    assert list(index(one)["files"]) == [f"{NAME}/late"]
    one.train()
    late.write_text("forged")
    again.sign_again()
    assert index(one)["files"][f"{NAME}/late"][0] == 1
    assert index(one)["state"]["code"] == 0
    (one.folder / there.BACK / there.INDEX).write_text(signed.dumps("other", {"files": {}, "state": {}}))
    again.sign_again()
    with pytest.raises(DataError):
        index(one)


def test_a_search_goes_on_with_the_same_command(place):
    one = there.Run(NAME, there.Asked(KEY, ["hpo", "train.py:make"]))
    folder = one.folder / there.BACK / NAME
    assert one._arguments() == ["hpo", "train.py:make", f"hpo.folder={folder}"]


def test_a_full_disk_is_found_before_anything_runs(place, monkeypatch):
    def full(**_):
        raise OSError(28, "No space left on device")

    assert there._room()["free_bytes"] > 0
    monkeypatch.setattr(there.tempfile, "TemporaryFile", full)
    assert "No space left on device" in there._room()["problem"]


def job(what, name, *command, folder, **options):
    """Run a job as Ray does: what it prints goes into a file of a folder, what it is asked for comes as a module."""
    module = folder / "module"
    file = module / there.ASKED / there.ASKED_FILE
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps({"key": KEY, "command": command, **options}))
    with (folder / "job.log").open("w") as log:
        done = subprocess.run(
            [sys.executable, "-m", "hotloop.remote.there", what, name], stdout=log, stderr=log, cwd=folder, check=False,
            env={**os.environ, "PYTHONPATH": f"{Path(there.__file__).parents[2]}{os.pathsep}{module}"},
        )  # fmt: skip
    assert not file.exists()
    return done.returncode, (folder / "job.log").read_text()


def test_a_run_is_shown_to_ray_or_is_said_not_to_be_there(place, tmp_path):
    code, said = job("link", NAME, folder=tmp_path)
    assert code == 0
    assert f"has no run {NAME} in {place}" in signed.loads(KEY, said)["problem"]
    (place / NAME / there.BACK).mkdir(parents=True)
    for _ in range(2):
        _, said = job("link", NAME, folder=tmp_path)
        assert signed.loads(KEY, said) == {}
    assert (tmp_path / f"hotloop-{NAME}").resolve() == place / NAME / there.BACK


def test_a_run_that_should_be_here_is_not_begun_anew(place, tmp_path):
    """Else `resume` on another node would train from step 0 without a word."""
    code, said = job("run", NAME, "train", "train.py:make", folder=tmp_path, again=True)
    assert code == 1
    assert f"has no run {NAME} in {place}" in said
    assert not (place / NAME).exists()
    _, said = job("find", NAME, folder=tmp_path)
    assert signed.loads(KEY, said) == {"there": False}
    (place / NAME / there.TREE).mkdir(parents=True)
    _, said = job("find", NAME, folder=tmp_path)
    assert signed.loads(KEY, said) == {"there": True}


def test_a_run_goes_on_from_its_storage_in_the_folder_that_is_fetched(place, tmp_path, monkeypatch):
    from hotloop.train import configure, storage

    url = f"file://{tmp_path}/storage/{NAME}"
    left = tmp_path / "left" / NAME
    left.mkdir(parents=True)
    (left / "settings.yaml").write_text("a")
    storage.of(f"file://{tmp_path}/storage", left).push(print)
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    one = there.Run(NAME, there.Asked(KEY, ["train", "train.py:make"], storage=url))
    monkeypatch.setattr(one, "show", lambda: None)
    one.prepare()
    assert one._arguments() == ["train", f'run.resume="{url}"']
    monkeypatch.chdir(one.folder / there.TREE)
    assert configure.resumed([f"run.resume='{url}'"]) == Path("runs", NAME)
    assert (one.folder / there.BACK / NAME / "settings.yaml").read_text() == "a"
    assert one._arguments() == ["train", f"run.resume={one.folder / there.BACK / NAME}"]


def test_each_run_has_a_folder_of_its_name_which_is_that_of_its_copy_at_run_storage(place):
    other = NAME[:-1] + "e"
    for name in (NAME, other):
        assert there.Run(name, there.Asked(KEY, ["train"]))._arguments()[-1].endswith(f"/{name}")


@pytest.mark.campaign
def test_a_machine_tells_what_it_is_and_what_a_dry_run_says(place, project):
    _, said = job("check", "-", "train", "train.py:make", "program.needs=nowhere", folder=project)
    found = signed.loads(KEY, said)
    from hotloop.cache.keys import fits

    assert found["fits"] == fits()
    assert found["findings"]
    assert found["dry_run"]["code"] == 2
    assert "nowhere" in found["dry_run"]["said"]
    assert KEY not in found["dry_run"]["said"]


def test_outside_of_linux_or_of_a_job_the_folder_of_logs_is_not_found(place):
    (place / NAME / there.BACK).mkdir(parents=True)
    read, write = os.pipe()
    kept = os.dup(1)
    try:
        os.dup2(write, 1)
        with pytest.raises(DataError, match="Ray's folder of logs cannot be used"):
            there.Run(NAME, there.Asked(KEY, [])).show()
    finally:
        os.dup2(kept, 1)
        for one in (read, write, kept):
            os.close(one)
