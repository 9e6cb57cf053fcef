"""Runs that are kept at run.storage: a copy after each save, from which they go on where nothing else is."""

import contextlib
import json
import shutil
import threading
import uuid

import fsspec
import pytest
from test_train_workers import cross, losses, metrics, own, whole

from hotloop import places, record
from hotloop.errors import ConfigError, TrainingFailedError
from hotloop.recipes import load
from hotloop.train import configure, kfold, mirror, start
from hotloop.train.kept import Kept
from hotloop.train.within import Within

__all__ = ["cross", "own", "whole"]


@pytest.fixture(params=["folder", "file", "memory"])
def storage(request, tmp_path):
    there = {"folder": tmp_path / "there", "file": f"file://{tmp_path}/there", "memory": f"memory://{tmp_path.name}"}
    yield str(there[request.param])
    fsspec.filesystem("memory").store.clear()


@pytest.fixture
def folder(tmp_path):
    """A run's folder with what a run has."""
    made = tmp_path / "run"
    (made / "checkpoints").mkdir(parents=True)
    for name in ("settings.yaml", "record.json", "checkpoints/best.pt", "checkpoints/last.pt", "run.lock"):
        (made / name).write_text(name)
    return made


def every(url):
    """Return what is at a place."""
    there, root = fsspec.url_to_fs(url)
    return {name.removeprefix(f"{root}/"): there.cat_file(name).decode(errors="replace") for name in there.find(root)}


def files(url, tmp_path):
    """Return what a reader of a copy finds there."""
    folder = tmp_path / f"read-{uuid.uuid4().hex}"
    mirror.Mirror(url, folder).fetch()
    return {
        one.relative_to(folder).as_posix(): one.read_text(errors="replace")
        for one in folder.rglob("*")
        if one.is_file()
    }


def test_a_copy_has_what_a_folder_has_and_gives_it_back(storage, folder, tmp_path):
    mirror.of(storage, folder).push()
    names = {"settings.yaml", "record.json", "checkpoints/best.pt", "checkpoints/last.pt", "stored.json", ".taken"}
    assert {name.split("/", 2)[2] for name in every(storage)} == names
    assert len({name.split("/")[1] for name in every(storage)}) == 1
    back = mirror.Mirror(f"{storage}/run", tmp_path / "back")
    assert back.fetch() == 4
    assert (tmp_path / "back/checkpoints/last.pt").read_text() == "checkpoints/last.pt"


def test_a_database_is_fetched_without_the_log_of_an_older_one(folder, tmp_path):
    (folder / "study.db").write_text("new")
    mirror.Mirror(str(tmp_path / "there"), folder).push()
    log = tmp_path / "here" / "study.db-wal"
    log.parent.mkdir()
    log.write_text("of an older one")
    assert mirror.Mirror(str(tmp_path / "there"), log.parent).fetch()
    assert not log.exists()


def test_a_checkpoint_is_sent_behind_the_record_and_taken_before_it(folder, tmp_path, monkeypatch):
    moved = []
    put, get = places.Place.put, places.Place.get
    monkeypatch.setattr(places.Place, "put", lambda self, one, to: (moved.append(to), put(self, one, to)))
    monkeypatch.setattr(places.Place, "get", lambda self, one, *of: (moved.append(one), get(self, one, *of)))
    mirror.of(str(tmp_path / "there"), folder).push()
    mirror.Mirror(str(tmp_path / "there/run"), tmp_path / "back").fetch()
    names = [one.removeprefix(f"{tmp_path}/there/run/").partition("/")[2] for one in moved]
    order = ["record.json", "settings.yaml", "checkpoints/best.pt", "checkpoints/last.pt"]
    assert names == [".taken", *order, "stored.json", *reversed(order)]


def test_only_what_changed_is_sent_again(folder, tmp_path, monkeypatch):
    one = mirror.of(str(tmp_path / "there"), folder)
    one.push()
    sent, put = [], places.Place.put
    monkeypatch.setattr(places.Place, "put", lambda self, source, to: (sent.append(source.name), put(self, source, to)))
    (folder / "record.json").write_text("longer than it was")
    one.push()
    assert sent == ["record.json", "stored.json"]
    assert files(str(tmp_path / "there/run"), tmp_path)["record.json"] == "longer than it was"


def test_a_process_whose_run_another_one_has_taken_over_writes_no_more(storage, folder, tmp_path):
    lost = mirror.of(storage, folder)
    lost.push()
    other = mirror.Mirror(f"{storage}/run", tmp_path / "other")
    other.fetch()
    (tmp_path / "other/record.json").write_text("gone on")
    other.push()
    (folder / "record.json").write_text("behind a broken network")
    with pytest.raises(ConfigError, match="another process has gone on with the run"):
        lost.push()
    assert files(f"{storage}/run", tmp_path)["record.json"] == "gone on"
    other.push()
    assert len({name.split("/")[1] for name in every(storage)}) == 1  # the former generation is gone


@pytest.mark.parametrize("failing", range(1, 8))
def test_whatever_write_fails_the_next_save_sends_all(storage, folder, tmp_path, monkeypatch, failing):
    left, put = [failing], places.Place.put

    def fails(self, source, target):
        left[0] -= 1
        if not left[0]:
            raise OSError("planted: no network for a moment")
        put(self, source, target)

    monkeypatch.setattr(places.Place, "put", fails)
    said = []
    kept = Kept(mirror.of(storage, folder))
    for number in range(3):
        (folder / "checkpoints/last.pt").write_text(f"save {number}")
        kept.push(said.append)
    kept.close(said.append)
    assert len(said) == 2
    assert "planted" in said[0]
    assert said[1].endswith("has all again")
    assert files(f"{storage}/run", tmp_path)["checkpoints/last.pt"] == "save 2"
    assert len(files(f"{storage}/run", tmp_path)) == 5


@pytest.mark.parametrize("deleted", ["stored.json", "."])
def test_a_copy_that_somebody_deletes_is_made_anew(folder, tmp_path, deleted):
    one = mirror.of(str(tmp_path / "there"), folder)
    one.push()
    (generation,) = (tmp_path / "there/run").iterdir()
    (generation / deleted).unlink() if deleted != "." else shutil.rmtree(generation)
    one.push()
    assert len(files(str(tmp_path / "there/run"), tmp_path)) == 5


class Held:
    """Holds up the writes of a file by one mirror, as a network does, until they may go on."""

    def __init__(self, monkeypatch, folder, name):
        self.began, self.go = threading.Event(), threading.Event()
        put = places.Place._put

        def slow(place, source, target):
            if source.is_relative_to(folder) and source.name == name:
                self.began.set()
                self.go.wait()
            put(place, source, target)

        monkeypatch.setattr(places.Place, "_put", slow)


@pytest.mark.parametrize("name", ["record.json", "last.pt", "stored.json"])
def test_what_a_lost_process_was_sending_is_not_read(storage, folder, tmp_path, monkeypatch, name):
    lost = mirror.of(storage, folder)
    lost.push()
    for one in ("record.json", "checkpoints/last.pt"):
        (folder / one).write_text("step 2 of the lost process")
    held = Held(monkeypatch, folder, name)
    sends = threading.Thread(target=lost.push)
    sends.start()
    held.began.wait()
    other = mirror.Mirror(f"{storage}/run", tmp_path / "other")
    other.fetch()
    for step in (99, 100):
        (tmp_path / "other/checkpoints/last.pt").write_text(f"step {step}")
        other.push()
    held.go.set()
    sends.join()
    with pytest.raises(ConfigError, match="another process has gone on with the run"):
        lost.push()
    other.push()
    assert files(f"{storage}/run", tmp_path)["checkpoints/last.pt"] == "step 100"


def test_what_comes_after_its_time_was_up_replaces_nothing(storage, folder, tmp_path, monkeypatch):
    one = mirror.of(storage, folder)
    one.push()
    held = Held(monkeypatch, folder, "last.pt")
    large = "step 1".ljust(10_000)
    (folder / "checkpoints/last.pt").write_text(large)
    with monkeypatch.context() as patch:
        patch.setattr(places, "_seconds", lambda size: 0.01 if size == len(large) else places.MOVE_SECONDS)
        with pytest.raises(mirror.StorageError, match="no answer in 0 s"):
            one.push()
        (folder / "checkpoints/last.pt").write_text("step 2")
        threads = set(threading.enumerate())  # one of another test may end meanwhile
        for _ in range(3):  # a storage that hangs costs one wait and one thread
            with pytest.raises(mirror.StorageError, match="no answer yet to what was asked before"):
                one.push()
        assert set(threading.enumerate()) <= threads
    late = one._line._last
    held.go.set()
    late.join()
    one.push()
    assert files(f"{storage}/run", tmp_path)["checkpoints/last.pt"] == "step 2"


def test_a_claim_alone_is_not_read_and_a_copy_goes_once_a_newer_one_is_whole(storage, folder, tmp_path, monkeypatch):
    mirror.of(storage, folder).push()
    other = mirror.Mirror(f"{storage}/run", tmp_path / "other")
    other.fetch()
    put = places.Place.put

    def dies(self, source, target):
        if source.name == "last.pt":
            raise OSError("planted: its machine is gone")
        put(self, source, target)

    with monkeypatch.context() as patch:
        patch.setattr(places.Place, "put", dies)
        (tmp_path / "other/record.json").write_text("half of a generation")
        with pytest.raises(mirror.StorageError):
            other.push()
    assert files(f"{storage}/run", tmp_path)["record.json"] == "record.json"
    other.push()
    assert files(f"{storage}/run", tmp_path)["record.json"] == "half of a generation"
    assert len({name.split("/")[1] for name in every(storage)}) == 1


@pytest.mark.parametrize(
    "when",
    [(mirror.Mirror, "_generations", 1), (places.Place, "get", 1), (places.Place, "get", 4)],
    ids=["listed", "half read", "read"],
)
def test_a_copy_that_is_replaced_while_it_is_read_is_read_again(storage, folder, tmp_path, monkeypatch, when):
    at, name, times = when
    mirror.of(storage, folder).push()
    other = tmp_path / "other"
    mirror.Mirror(f"{storage}/run", other).fetch()
    for one in ("record.json", "checkpoints/last.pt"):
        (other / one).write_text("newer")
    really, left = getattr(at, name), [times]

    def replaced(self, *of):
        found = really(self, *of)
        left[0] -= 1
        if not left[0]:
            mirror.Mirror(f"{storage}/run", other).push()
        return found

    monkeypatch.setattr(at, name, replaced)
    assert mirror.Mirror(f"{storage}/run", tmp_path / "back").take()
    assert (tmp_path / "back/record.json").read_text() == "newer"
    assert (tmp_path / "back/checkpoints/last.pt").read_text() == "newer"


def test_a_list_of_a_copy_from_the_middle_of_its_replacement_is_no_empty_copy(storage, folder, tmp_path, monkeypatch):
    mirror.of(storage, folder).push()
    back = mirror.Mirror(f"{storage}/run", tmp_path / "back")
    find, lists = back.place.files.find, []

    def finds(*of, **named):
        found = find(*of, **named)
        lists.append(found)
        return found if len(lists) > 1 else {}

    monkeypatch.setattr(back.place.files, "find", finds)
    assert back.take()
    assert (tmp_path / "back/checkpoints/last.pt").is_file()


def test_an_outcome_is_sent_beside_what_the_run_of_its_process_has_sent(storage, folder, tmp_path):
    run = mirror.of(storage, folder)
    run.push()
    (folder / "outcome.json").write_text("complete")
    mirror.of(storage, folder).add("outcome.json")
    run.push()  # it is still the run's own
    assert {"outcome.json", "checkpoints/last.pt"} <= set(files(f"{storage}/run", tmp_path))


def test_a_storage_that_fails_is_tried_after_1_2_4_saves_and_at_the_end(folder, tmp_path, monkeypatch):
    said, saves, tried = [], [], []
    kept = Kept(mirror.of(str(tmp_path / "there"), folder))

    def fails(_):
        tried.append(saves[-1])
        raise mirror.StorageError("planted")

    monkeypatch.setattr(kept.mirror, "push", fails)
    for number in range(20):
        saves.append(number)
        kept.push(said.append)
    assert tried == [0, 2, 5, 10, 19]
    assert said == ["planted; the run goes on, and tries again after 1, 2, 4, ... saves and at its end"]
    saves.append("end")
    with pytest.raises(TrainingFailedError, match="planted"):
        kept.close(said.append)
    assert tried[-1] == "end"
    kept.push_last(said.append)
    assert said[1:] == ["planted; the copy there lacks what came last"]


def test_a_copy_that_cannot_be_deleted_is_told_once_and_goes_with_a_later_save(
    storage, folder, tmp_path, monkeypatch, caplog
):
    mirror.of(storage, folder).push()
    other = mirror.Mirror(f"{storage}/run", tmp_path / "other")
    other.fetch()

    def refuses(*_):
        raise OSError("planted: no right to delete")

    with monkeypatch.context() as patch:
        patch.setattr(mirror.Mirror, "_remove", refuses)
        other.push()
        other.push()
    assert caplog.text.count("planted: no right to delete; nothing reads it any more") == 1
    assert len({name.split("/")[1] for name in every(storage)}) == 2
    other.push()
    assert len({name.split("/")[1] for name in every(storage)}) == 1


def test_what_a_node_has_stored_is_brought_and_what_is_missing_is_said(storage, folder, tmp_path, monkeypatch):
    said = []
    mirror.bring(None, said.append)
    mirror.bring(mirror.of(storage, tmp_path / "other"), said.append, ended=False)
    assert said == []
    mirror.bring(mirror.of(storage, tmp_path / "other"), said.append)
    assert said == [f"a node has stored nothing at {storage}/other: name a place that all nodes reach"]
    mirror.of(storage, folder).push()
    mirror.bring(mirror.Mirror(f"{storage}/run", tmp_path / "back"), said.append)
    assert (tmp_path / "back/record.json").is_file()
    monkeypatch.setattr(mirror.Mirror, "_fetch", None)
    mirror.bring(mirror.of(storage, folder), said.append)
    assert said[1].startswith(f"{storage}/run cannot be read")


class KilledError(BaseException):
    """Stands for a kill."""


@pytest.mark.parametrize("files_before", range(5))
def test_a_fold_that_a_kill_left_half_fetched_is_fetched_again(own, folder, tmp_path, monkeypatch, files_before):
    settings = configure.load([own, f"run.storage={tmp_path / 'there'}"])
    fold = folder.rename(tmp_path / "fold-0")
    mirror.of(settings.run.storage, fold, tmp_path).push()
    had = sorted(one.name for one in fold.rglob("*.*") if one.name != "run.lock")
    shutil.rmtree(fold)
    monkeypatch.setattr("hotloop.train.checkpoint.load", lambda _: {})
    left, get = [files_before], places.Place.get

    def dies(self, *of):
        left[0] -= 1
        if left[0] < 0:
            raise KilledError
        get(self, *of)

    with monkeypatch.context() as patch:
        patch.setattr(places.Place, "get", dies)
        with contextlib.suppress(KilledError):
            start.take_up(settings, fold, Within(folder=tmp_path))
    taken = start.take_up(settings, fold, Within(folder=tmp_path))
    assert sorted(one.name for one in fold.rglob("*.*")) == had
    assert taken.settings.run.resume == str(fold)


def test_a_file_of_a_storage_that_leads_out_of_the_folder_is_left(tmp_path):
    memory = fsspec.filesystem("memory")
    generation = f"/{tmp_path.name}/run/000001-{16 * '0'}"
    for name in ("../../../out", "settings.yaml", "stored.json"):
        memory.pipe_file(f"{generation}/{name}", b'{"saves": 1}')
    assert mirror.Mirror(f"memory://{tmp_path.name}/run", tmp_path / "a" / "b" / "c" / "back").fetch() == 1
    assert not list(tmp_path.glob("**/out"))
    memory.store.clear()


# -- what is wrong is told before work starts ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("s4://bucket", r"run\.storage=s4://bucket: expected a folder, or a URL that fsspec knows"),
        ("''", r"run\.storage is empty: .*; null keeps runs on this machine alone"),
        ("sftp://me:secret@host/x", r"run\.storage=sftp://\*\*\*@host/x: expected no password"),
    ],
)
def test_a_storage_that_can_be_none_is_refused_with_the_settings(own, url, said):
    with pytest.raises(ConfigError, match=said):
        configure.load([own, f"run.storage={url}"])


def test_a_storage_without_rights_is_told_before_anything_is_made(own, cross, tmp_path):
    (tmp_path / "there").touch()  # no folder can be made in a file
    with pytest.raises(ConfigError, match=r"run\.storage=.*there cannot be written: .*or leave it out"):
        start.prepare([own, f"run.storage={tmp_path / 'there'}", f"run.folder={tmp_path / 'run'}"])
    with pytest.raises(ConfigError, match=r"run\.storage=.*there cannot be written"):
        cross("study", f"run.storage={tmp_path / 'there'}")
    assert not (tmp_path / "run").exists()
    assert not (tmp_path / "study").exists()


def test_a_new_run_is_not_written_over_another_of_its_name(own, folder, tmp_path):
    mirror.of(str(tmp_path / "there"), folder).push()
    shutil.rmtree(folder)
    with pytest.raises(ConfigError, match=r"holds a run run already: go on with it by run\.resume=.*/there/run"):
        start.prepare([own, f"run.storage={tmp_path / 'there'}", f"run.folder={folder}"])


# -- runs --------------------------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("storage", ["file", "memory"], indirect=True)
def test_a_run_goes_on_on_a_machine_that_has_nothing(train, storage, tmp_path):
    url = f"{storage}/run"
    train("one", f"run.storage={storage}", "training.max_steps=3")
    shutil.rmtree(tmp_path / "one")
    ended = train("other", f"run.resume={url}", "training.max_steps=7")
    assert (ended.status, ended.step) == ("finished", 7)
    assert str(ended.folder) == "runs/run"
    assert steps(tmp_path / "other/runs/run") == [1, 2, 3, 4, 5, 6, 7]
    assert {"report.html", "settings.yaml", "checkpoints/last.pt", "stored.json"} <= set(files(url, tmp_path))


def test_a_run_goes_on_from_a_folder_that_keeps_runs_as_from_a_url(train, tmp_path):
    train("one", f"run.storage={tmp_path / 'there'}", "training.max_steps=3")
    ended = train("other", f"run.resume={tmp_path / 'there/run'}", "training.max_steps=7")
    assert (ended.step, str(ended.folder)) == (7, "runs/run")
    assert steps(tmp_path / "other/runs/run") == [1, 2, 3, 4, 5, 6, 7]


def test_the_same_command_goes_on_here_where_the_run_is_as_new(train, tmp_path, monkeypatch):
    train("one", f"run.storage={tmp_path / 'there'}", "training.max_steps=3")
    url = f"file://{tmp_path}/there/run"
    train("other", f"run.resume={url}", "training.max_steps=5")
    monkeypatch.setattr(mirror.Mirror, "fetch", None)  # nothing is fetched
    assert train("other", f"run.resume={url}", "training.max_steps=6").step == 6
    with pytest.raises(ConfigError, match="a newer state of the run is at"):
        train("one", "run.resume=run")


def test_a_copy_is_fetched_again_where_it_is_newer(folder, tmp_path, monkeypatch):
    mirror.of(str(tmp_path / "there"), folder).push()
    monkeypatch.chdir(tmp_path)
    url = f"run.resume=file://{tmp_path}/there/run"
    here = configure.resumed([url])
    (folder / "record.json").write_text("gone on elsewhere")
    mirror.of(str(tmp_path / "there"), folder).push()
    assert configure.resumed([url]) == here
    assert (here / "record.json").read_text() == "gone on elsewhere"


def test_a_url_without_a_run_is_told(train, tmp_path):
    with pytest.raises(ConfigError, match=r"run\.resume=file://.*/nowhere: no run is stored there"):
        train("one", f"run.resume=file://{tmp_path}/nowhere")
    assert not (tmp_path / "one/runs").exists()


def test_a_storage_that_fails_meanwhile_ends_no_run_before_its_end(train, tmp_path, monkeypatch, capsys):
    put = places.Place.put

    def fails(self, source, target):
        if source.name == "last.pt":
            raise OSError("planted: no room")
        put(self, source, target)

    with monkeypatch.context() as patch:
        patch.setattr(places.Place, "put", fails)
        with pytest.raises(TrainingFailedError, match=r"the run is over and kept in run, .*run\.resume=run sends what"):
            train("one", f"run.storage={tmp_path / 'there'}", "training.max_steps=3")
    assert capsys.readouterr().out.count("planted: no room; the run goes on") == 1
    assert steps(tmp_path / "one/run") == [1, 2, 3]
    train("one", "run.resume=run")
    assert "checkpoints/last.pt" in files(str(tmp_path / "there/run"), tmp_path)


def test_a_cross_validation_goes_on_on_a_machine_that_has_nothing(cross, storage, whole, tmp_path, monkeypatch):
    cross("study", f"run.storage={storage}", workers=1)
    shutil.rmtree(tmp_path / "study")
    there, root = fsspec.url_to_fs(storage)
    there.rm(f"{root}/study/fold-2", recursive=True)
    (at,) = there.glob(f"{root}/study/*/kfold.json")
    document = json.loads(there.cat_file(at))
    document["folds"][2] = {"fold": 2, "folder": "fold-2", "status": "pending"}
    there.pipe_file(at, json.dumps(document).encode())
    monkeypatch.chdir(tmp_path)
    study = kfold.prepare([f"run.resume={storage if '://' in storage else f'file://{storage}'}/study"])
    ended = kfold.run(study, load(study.settings.recipe.name))
    assert (ended.status, metrics(ended)) == ("finished", metrics(whole))
    assert losses(ended, 2) == losses(whole, 2)
    found = files(f"{storage}/study", tmp_path)
    assert json.loads(found["kfold.json"])["status"] == "finished"
    assert "fold-2/checkpoints/last.pt" in found
