"""Runs that are kept at run.storage: a copy after each save, from which they go on where nothing else is."""

import shutil

import fsspec
import pytest
from test_train_workers import own

from hotloop import places, record
from hotloop.errors import ConfigError, TrainingFailedError
from hotloop.recipes import load
from hotloop.train import start, storage

__all__ = ["own"]


@pytest.fixture(params=["folder", "file", "memory"])
def place(request, tmp_path):
    there = {"folder": tmp_path / "there", "file": f"file://{tmp_path}/there", "memory": f"memory://{tmp_path.name}"}
    yield str(there[request.param])
    fsspec.filesystem("memory").store.clear()


@pytest.fixture
def folder(tmp_path):
    """A run's folder with its usual files."""
    made = tmp_path / "run"
    (made / "checkpoints").mkdir(parents=True)
    for name in ("settings.yaml", "record.json", "checkpoints/best.pt", "checkpoints/last.pt", "run.lock"):
        (made / name).write_text(name)
    return made


def fetched(url, folder):
    assert storage.Copy(url, folder).pull()
    return {one.relative_to(folder).as_posix() for one in folder.rglob("*") if one.is_file()}


def test_a_copy_has_the_files_of_the_folder_and_gives_them_back(place, folder, tmp_path):
    copy = storage.of(place, folder)
    assert copy.push(print)
    names = {"settings.yaml", "record.json", "checkpoints/best.pt", "checkpoints/last.pt", "stored.json"}
    assert fetched(f"{place}/run", tmp_path / "other") == names
    assert (tmp_path / "other/checkpoints/last.pt").read_text() == "checkpoints/last.pt"


def test_an_older_copy_replaces_nothing_and_a_newer_one_does(folder, tmp_path):
    url = str(tmp_path / "there/run")
    storage.Copy(url, folder).push(print)
    (folder / "record.json").write_text("newer than there")
    assert storage.Copy(url, folder).pull()
    assert (folder / "record.json").read_text() == "newer than there"
    other = tmp_path / "other"
    fetched(url, other)
    (other / "record.json").write_text("done elsewhere")
    storage.Copy(url, other).push(print)
    assert storage.Copy(url, folder).pull()
    assert (folder / "record.json").read_text() == "done elsewhere"


@pytest.mark.parametrize("url", ["", "nowhere://bucket", "s3://user:secret@bucket/runs"])
def test_a_storage_that_can_be_none_is_refused_with_the_settings(own, url):
    with pytest.raises(ConfigError, match=r"run\.storage") as refused:
        start.prepare([own, f"run.storage='{url}'"])
    assert "secret" not in str(refused.value)


def test_a_new_run_is_not_written_over_another_of_its_name(own, folder, tmp_path):
    storage.of(str(tmp_path / "there"), folder).push(print)
    with pytest.raises(ConfigError, match=r"has a run of this name: go on with it by run\.resume="):
        start.prepare([own, f"run.storage={tmp_path / 'there'}", "run.folder=elsewhere/run"])


@pytest.fixture
def train(own, tmp_path, monkeypatch):
    """Train the program, in a folder that stands for a machine."""

    def run(machine, *more):
        (tmp_path / machine).mkdir(exist_ok=True)
        monkeypatch.chdir(tmp_path / machine)
        new = [own, "run.folder=run", "training.num_epochs=2", "training.checkpoint_every_steps=1"]
        begun = start.prepare([*([] if any("run.resume" in one for one in more) else new), *more])
        return load(begun.settings.recipe.name).train(begun)

    return run


def steps(folder):
    return [one["step"] for one in record.load(folder)["steps"]]


@pytest.mark.parametrize("place", ["file", "memory"], indirect=True)
def test_a_run_goes_on_on_a_machine_that_has_nothing_and_by_the_same_command_again(train, place, tmp_path):
    url = f"{place}/run"
    train("one", f"run.storage={place}", "training.max_steps=3")
    shutil.rmtree(tmp_path / "one")
    ended = train("other", f"run.resume={url}", "training.max_steps=7")
    assert (ended.status, ended.step, str(ended.folder)) == ("finished", 7, "runs/run")
    assert steps(tmp_path / "other/runs/run") == [1, 2, 3, 4, 5, 6, 7]
    assert train("other", f"run.resume={url}", "training.max_steps=8").step == 8
    assert {"report.html", "checkpoints/last.pt"} <= fetched(url, tmp_path / "read")


def test_a_url_without_a_run_and_another_run_of_its_name_are_refused(train, tmp_path):
    with pytest.raises(ConfigError, match=r"run\.resume=file://.*/nowhere: no run is stored there"):
        train("one", f"run.resume=file://{tmp_path}/nowhere")
    train("one", f"run.storage={tmp_path / 'there'}", "training.max_steps=3")
    (tmp_path / "one/runs/run").mkdir(parents=True)
    with pytest.raises(ConfigError, match="is another run of that name"):
        train("one", f"run.resume=file://{tmp_path}/there/run")


def test_a_storage_that_fails_meanwhile_ends_no_run_before_its_end(train, tmp_path, monkeypatch, capsys):
    put = places.Place.put

    def fails(self, source, target):
        if source.name == "last.pt":
            raise OSError("planted: no room")
        put(self, source, target)

    with monkeypatch.context() as patch:
        patch.setattr(places.Place, "put", fails)
        with pytest.raises(TrainingFailedError, match=r"the run is over and kept in run, .*run\.resume=run sends"):
            train("one", f"run.storage={tmp_path / 'there'}", "training.max_steps=3")
    assert capsys.readouterr().out.count("planted: no room; the run goes on") == 1
    assert steps(tmp_path / "one/run") == [1, 2, 3]
    train("one", "run.resume=run")
    assert "checkpoints/last.pt" in fetched(str(tmp_path / "there/run"), tmp_path / "read")
