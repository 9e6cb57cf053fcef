"""Runs whose disk is full, whose folder another process holds, and whose files are torn: nothing is lost in silence."""

import contextlib
from pathlib import Path
from types import SimpleNamespace

import pytest
from test_train_fit import metrics, stop_at
from training_fixtures import assert_same, held_elsewhere, load, overrides

from hotloop import recipes, record, report
from hotloop.errors import ConfigError, TrainingFailedError
from hotloop.train import checkpoint, conf_files, configure, fit, saving, start
from hotloop.train.search import document

FULL = OSError(28, "No space left on device")


@pytest.fixture
def disk(monkeypatch):
    """A disk on which checkpoints find room while ``disk["full"]`` is False; it counts what it refused."""
    state = {"full": False, "refused": 0, "room_after": None}
    whole = checkpoint.whole

    @contextlib.contextmanager
    def limited(path, **more):
        with whole(path, **more) as file:
            yield file
            if state["full"]:
                state["refused"] += 1
                state["full"] = state["refused"] != state["room_after"]
                raise OSError(*FULL.args)

    monkeypatch.setattr(checkpoint, "whole", limited)
    return state


def resumed(folder, *more):
    return recipes.load("criteria").train(start.prepare([f"run.resume={folder}", *more]))


# -- a full disk ----------------------------------------------------------------------------------------------------


def test_a_run_whose_last_checkpoint_is_not_on_disk_fails_and_says_which_is(tmp_path, train, disk, monkeypatch, capsys):
    train(run__folder=tmp_path / "whole")
    with (
        monkeypatch.context() as patch,
        pytest.raises(TrainingFailedError, match="step 18, and no checkpoint has it") as failed,
    ):
        stop_at(patch, 12, lambda: disk.update(full=True))
        train(training__checkpoint_every_steps=13)
    for word in ("No space left on device", f"run.resume={tmp_path / 'run'}"):
        assert word in str(failed.value)
    assert "No space left on device; the run goes on, and the former last.pt stays" in capsys.readouterr().out
    assert record.load(tmp_path / "run")["status"] == "failed"
    disk["full"] = False
    assert resumed(tmp_path / "run").status == "finished"
    assert_same(load(tmp_path / "whole"), load(tmp_path / "run"))
    assert metrics(tmp_path / "whole") == metrics(tmp_path / "run")


def test_several_processes_write_a_checkpoint_every_so_many_minutes_and_not_with_each_step(monkeypatch):
    minute, written = [0], []
    monkeypatch.setattr(saving.time, "monotonic", lambda: 60.0 * minute[0])
    monkeypatch.setattr(checkpoint, "save", lambda *_: written.append(minute[0]))
    settings = SimpleNamespace(
        training=SimpleNamespace(checkpoint_every_steps=None, checkpoint_every_minutes=10.0),
    )
    within = SimpleNamespace(trial=None, keeps=None)
    both = [
        saving.Checkpoints(
            SimpleNamespace(folder=Path("x"), settings=settings, within=within, leads=leads, copy=None), print
        )
        for leads in (True, False)
    ]
    for minute[0] in range(1, 41):
        due = [one.is_due(minute[0]) for one in both]
        if any(due):
            both[0].save("last.pt", {})
    assert written == [10, 20, 30, 40]


def test_a_trial_with_a_value_is_worth_more_than_its_checkpoint(tmp_path, prepare, disk):
    disk["full"] = True
    begun = prepare()
    within = start.Within(study="s", trial=3, folder=tmp_path)
    assert recipes.load("criteria").train(start.Start(begun.settings, begun.folder, within=within)).status == "finished"


# -- two processes --------------------------------------------------------------------------------------------------


def test_one_process_trains_in_a_folder(tmp_path, train):
    train(training__max_steps=2)
    with (
        held_elsewhere(tmp_path / "run"),
        pytest.raises(ConfigError, match=r"another process trains there\. Wait for it, or stop it"),
    ):
        start.prepare([f"run.resume={tmp_path / 'run'}"])
    # Dead by now, without a word: its lock is nobody's.
    assert resumed(tmp_path / "run", "training.max_steps=4").step == 4


# -- what was done twice --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("died", ["before_a_checkpoint", "in_a_step", "in_a_validation"])
def test_what_an_earlier_start_did_twice_is_listed_once(tmp_path, train, monkeypatch, capsys, died):
    settings = {"training__checkpoint_every_steps": {"before_a_checkpoint": 100, "in_a_step": 5}.get(died, 9)}
    train(**settings, run__folder=tmp_path / "whole")

    save = fit._Fitting.save

    def die():
        raise RuntimeError("planted")

    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="planted"):
        if died == "in_a_validation":  # listed, and not saved yet
            patch.setattr(fit._Fitting, "settle", lambda _: die())
            patch.setattr(
                fit._Fitting, "save", lambda self, name: None if self.position.validated_step > 0 else save(self, name)
            )
        else:
            stop_at(patch, 8, die)
        train(**settings)
    assert len(record.load(tmp_path / "run")["steps"]) == {"in_a_validation": 9}.get(died, 8)
    capsys.readouterr()
    assert resumed(tmp_path / "run").status == "finished"
    document = record.load(tmp_path / "run")
    assert [step["step"] for step in document["steps"]] == list(range(1, 19))
    assert metrics(tmp_path / "run") == metrics(tmp_path / "whole")
    cut = {name: many for name, many in document["cuts"][0].items() if name != "time"}
    expected = {"before_a_checkpoint": {"step": 0, "steps": 8}, "in_a_step": {"step": 5, "steps": 3}}
    assert cut == expected.get(died, {"step": 9, "metrics": 1})
    if "steps" in cut:
        said = f"leaves out {cut['steps']} steps that were done after step {cut['step']}"
        assert said in capsys.readouterr().out
        page = report.write_html(document, tmp_path / "page.html").read_text()
        assert f"Resumed at step {cut['step']}: {cut['steps']} steps that an earlier start did after it" in page


# -- torn files -----------------------------------------------------------------------------------------------------


def test_settings_are_read_through_a_link_for_config_alone(tmp_path):
    (tmp_path / "mine.yaml").write_text("training: {batch_size: 3}\n")
    (tmp_path / "run").mkdir()
    link = tmp_path / "run" / "settings.yaml"
    link.symlink_to(tmp_path / "mine.yaml")
    assert configure.load(["recipe=focus"], link).training.batch_size == 3
    link.with_name(document.SETTINGS).symlink_to(tmp_path / "mine.yaml")
    for read in (lambda: conf_files.read(link), lambda: document.refresh(link.parent)):
        with pytest.raises(ConfigError, match="cannot be read: it is no regular file, but a link") as refused:
            read()
        assert "--config" not in str(refused.value)


def test_a_run_whose_folder_of_checkpoints_is_a_link_is_not_gone_on_with(tmp_path, train):
    train(training__max_steps=1)
    folder, elsewhere = tmp_path / "run" / "checkpoints", tmp_path / "elsewhere"
    folder.rename(elsewhere)
    folder.symlink_to(elsewhere)
    before = {one.name: one.stat().st_mtime_ns for one in elsewhere.iterdir()}
    with pytest.raises(ConfigError, match=r"run/checkpoints is a link to another folder: remove it"):
        resumed(tmp_path / "run", "training.max_steps=2")
    assert {one.name: one.stat().st_mtime_ns for one in elsewhere.iterdir()} == before


# -- folders --------------------------------------------------------------------------------------------------------


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    with pytest.raises(
        ConfigError,
        match=r"run\.folder=/proc/run cannot be written: .*Make room, change its permissions, or name another",
    ):
        recipes.load("criteria").train(start.prepare([*overrides(tmp_path), "run.folder=/proc/run"]))
