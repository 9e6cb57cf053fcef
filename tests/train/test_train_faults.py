"""Runs whose disk is full, whose folder another process holds, and whose files are torn: nothing is lost in silence."""

import contextlib
import errno
import fcntl
import logging
import os
import shutil
import signal
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from test_train_fit import assert_same, load, metrics, stop_at
from training_fixtures import held_elsewhere, overrides

from hotloop import recipes, record, report
from hotloop.errors import ConfigError, TrainingFailedError
from hotloop.train import checkpoint, conf_files, configure, fit, kfold_state, saving, start, turn
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
    monkeypatch.setattr(saving, "RETRY_SECONDS", 0.0)
    return state


def resumed(folder, *more):
    return recipes.load("criteria").train(start.prepare([f"run.resume={folder}", *more]))


# -- a full disk ----------------------------------------------------------------------------------------------------


def test_a_run_whose_last_checkpoint_is_not_on_disk_fails_and_says_which_is(tmp_path, train, disk, monkeypatch, capsys):
    train(run__folder=tmp_path / "whole")
    with (
        monkeypatch.context() as patch,
        pytest.raises(
            TrainingFailedError, match=r"step 18, and not all of it is on disk: last\.pt is of step 9"
        ) as failed,
    ):
        stop_at(patch, 12, lambda: disk.update(full=True))
        train(training__checkpoint_every_steps=13)
    for word in ("No space left on device", "Make room", "run.on_full_disk=wait", f"run.resume={tmp_path / 'run'}"):
        assert word in str(failed.value)
    assert capsys.readouterr().out.count("No space left on device; the run goes on, and tries again every") == 1
    assert disk["refused"] > 3, "it is tried again with each step"
    assert record.load(tmp_path / "run")["status"] == "failed"
    disk["full"] = False
    assert resumed(tmp_path / "run").status == "finished"
    assert_same(load(tmp_path / "whole"), load(tmp_path / "run"))
    assert metrics(tmp_path / "whole") == metrics(tmp_path / "run")


def test_a_disk_with_room_again_has_the_state_of_the_next_step(tmp_path, train, disk, monkeypatch, capsys):
    disk["room_after"] = 2
    stop_at(monkeypatch, 11, lambda: disk.update(full=True))
    assert train(training__checkpoint_every_steps=11).status == "finished"
    assert disk["refused"] == 2
    assert "last.pt is written again, at step 13" in capsys.readouterr().out


def test_a_run_that_waits_for_room_loses_nothing(tmp_path, train, disk, capsys):
    train(run__folder=tmp_path / "whole")
    disk.update(full=True, room_after=5)
    assert train(run__on_full_disk="wait").status == "finished"
    assert disk["refused"] == 5
    assert capsys.readouterr().out.count("No space left on device; the run waits for room") == 1
    assert_same(load(tmp_path / "whole"), load(tmp_path / "run"))
    assert_same(load(tmp_path / "whole", "best.pt"), load(tmp_path / "run", "best.pt"))


def test_a_wish_to_stop_ends_the_wait_and_says_what_is_on_disk(train, disk, monkeypatch, capsys):
    disk["full"] = True
    monkeypatch.setattr(saving, "RETRY_SECONDS", 3600.0)
    monkeypatch.setattr(saving.time, "sleep", lambda _: signal.raise_signal(signal.SIGTERM))
    with pytest.raises(
        TrainingFailedError, match=r"not all of it is on disk: no last\.pt, no best\.pt \(.*No checkpoint"
    ):
        train(run__on_full_disk="wait")
    assert "and saved" not in capsys.readouterr().out


def test_a_best_checkpoint_that_failed_is_told_beside_the_last_one(train, disk, monkeypatch):
    kept = checkpoint.save

    def save(path, document):
        disk["full"] = path.name == checkpoint.BEST
        kept(path, document)

    monkeypatch.setattr(checkpoint, "save", save)
    with pytest.raises(TrainingFailedError, match=r"is on disk: last\.pt is of step 18, no best\.pt \("):
        train()


def test_a_resumed_run_tells_the_checkpoints_of_its_earlier_start(tmp_path, train, disk):
    train(training__max_steps=9)
    disk["full"] = True
    with pytest.raises(TrainingFailedError, match=r"is on disk: last\.pt is of step 9 \("):
        resumed(tmp_path / "run", "training.max_steps=18")


def test_several_processes_write_a_checkpoint_every_so_many_minutes_and_not_with_each_step(monkeypatch):
    minute, written = [0], []
    monkeypatch.setattr(saving.time, "monotonic", lambda: 60.0 * minute[0])
    monkeypatch.setattr(checkpoint, "save", lambda *_: written.append(minute[0]))
    settings = SimpleNamespace(
        training=SimpleNamespace(checkpoint_every_steps=None, checkpoint_every_minutes=10.0),
        run=SimpleNamespace(on_full_disk="continue"),
    )
    within, kept = SimpleNamespace(trial=None, keeps=None), SimpleNamespace(push=lambda _: None)
    both = [
        saving.Checkpoints(
            SimpleNamespace(folder=Path("x"), settings=settings, within=within, leads=leads, kept=kept), print, None
        )
        for leads in (True, False)
    ]
    for minute[0] in range(1, 41):
        due = [one.is_due(minute[0]) for one in both]
        if any(due):
            for one in both:
                one.save("last.pt", {})
    assert written == [10, 20, 30, 40]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize("wrapped", [False, True])
def test_a_full_disk_is_waited_for(train, monkeypatch, capsys, number, wrapped):
    def fails(document, file):
        try:
            raise OSError(number, os.strerror(number))
        except OSError:
            if wrapped:  # as torch's own writer does
                raise RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 6464 vs 6358")  # noqa: B904
            raise

    monkeypatch.setattr(torch, "save", fails)
    monkeypatch.setattr(saving, "RETRY_SECONDS", 3600.0)
    monkeypatch.setattr(saving.time, "sleep", lambda _: signal.raise_signal(signal.SIGTERM))
    with pytest.raises(TrainingFailedError, match=os.strerror(number)):
        train(run__on_full_disk="wait")
    assert f"{os.strerror(number)}; the run waits for room" in capsys.readouterr().out


@pytest.mark.parametrize("error", [OSError(errno.EIO, "Input/output error"), RuntimeError("of a tensor's own")])
def test_what_is_no_full_disk_is_not_waited_for(train, monkeypatch, capsys, error):
    def fails(document, file):
        raise error

    monkeypatch.setattr(torch, "save", fails)
    monkeypatch.setattr(saving.time, "sleep", lambda _: pytest.fail("the run waits for what does not come"))
    monkeypatch.setattr(saving, "RETRY_SECONDS", 3600.0)
    with pytest.raises(TrainingFailedError, match="no last"):
        train(run__on_full_disk="wait")
    assert f"{error}; the run goes on" in capsys.readouterr().out


def test_a_trial_with_a_value_is_worth_more_than_its_checkpoint(tmp_path, prepare, disk):
    disk["full"] = True
    begun = prepare()
    within = start.Within(study="s", trial=3, folder=tmp_path)
    assert recipes.load("criteria").train(start.Start(begun.settings, begun.folder, within=within)).status == "finished"


# -- two processes --------------------------------------------------------------------------------------------------


def test_one_process_trains_in_a_folder(tmp_path, train):
    train(training__max_steps=2)
    with (
        held_elsewhere(tmp_path / "run") as other,
        pytest.raises(
            ConfigError, match=rf"process {other.pid} on .*, since 2.*, trains there\. Wait for it, or stop it"
        ),
    ):
        start.prepare([f"run.resume={tmp_path / 'run'}"])
    # Dead by now, without a word: its lock is nobody's.
    assert resumed(tmp_path / "run", "training.max_steps=4").step == 4


@pytest.mark.filterwarnings("ignore:flock not supported on this filesystem:UserWarning")
@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOTSUP])
def test_without_flock_a_folder_has_one_process_and_a_dead_one_keeps_nobody_out(tmp_path, monkeypatch, number):
    def no_flock(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", no_flock)
    folder = tmp_path / "run"
    with held_elsewhere(folder, lacks=number) as other:
        old = time.time() - 3600
        for path in folder.iterdir():  # of a run that goes on for long
            os.utime(path, (old, old))
        with (
            pytest.raises(ConfigError, match=rf"process {other.pid} on .*, since 2.*, trains there"),
            turn.folder_held(folder),
        ):
            pass
    # Dead by now, without a word.
    with turn.folder_held(folder), turn.folder_held(folder):
        ours = rf"process {os.getpid()} on .* trains there"
        with pytest.raises(AssertionError, match=ours), held_elsewhere(folder, lacks=number):
            pass
        shutil.rmtree(folder)
        turn.hold_again(folder)
        with pytest.raises(AssertionError, match="trains there"), held_elsewhere(folder, lacks=number):
            pass
    with held_elsewhere(folder, lacks=number):
        pass


def test_two_runs_that_begin_at_once_do_not_share_a_folder(tmp_path, prepare):
    begun = prepare()
    (tmp_path / "run").mkdir()
    with held_elsewhere(tmp_path / "run"), pytest.raises(ConfigError, match="trains there"):
        recipes.load("criteria").train(begun)
    assert not (tmp_path / "run" / "settings.yaml").exists()


@pytest.mark.parametrize("wish", [signal.SIGINT, signal.SIGTERM])
def test_a_wish_to_stop_while_the_report_is_written_ends_behind_it(tmp_path, train, monkeypatch, capfd, wish):
    write = report.write_html

    def stopped(*args):
        signal.raise_signal(wish)
        return write(*args)

    monkeypatch.setattr(report, "write_html", stopped)
    own = signal.signal(wish, lambda *_: pytest.fail("nobody holds the signal"))
    try:
        with pytest.raises(KeyboardInterrupt, match=wish.name):
            train()
    finally:
        signal.signal(wish, own)
    assert f"{wish.name}: writing the report, then stopping" in capfd.readouterr().err
    assert (tmp_path / "run" / "report.html").is_file()
    assert record.load(tmp_path / "run")["status"] == "finished"


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


@pytest.mark.parametrize("kept", [0, 1, 40, 100, 0.5, -3])
def test_torn_settings_are_told_and_never_taken_for_others(tmp_path, train, monkeypatch, caplog, kept):
    with monkeypatch.context() as patch, pytest.raises(RuntimeError):
        patch.setattr(fit._Fitting, "step", lambda *_: (_ for _ in ()).throw(RuntimeError))
        train()
    settings = tmp_path / "run" / "settings.yaml"
    text = settings.read_text()
    settings.write_text(text[: int(kept * len(text)) if isinstance(kept, float) else kept])
    with pytest.raises(ConfigError, match=r"settings\.yaml cannot be read as YAML: the file is torn"):
        start.prepare([f"run.resume={tmp_path / 'run'}"])
    torn = settings.read_text()
    shutil.rmtree(tmp_path / "run")
    train(training__max_steps=2)
    settings.write_text(torn)
    with caplog.at_level(logging.WARNING):
        assert resumed(tmp_path / "run", "training.max_steps=3").step == 3
    assert "the file is torn" in caplog.text
    assert "The settings in" in caplog.text
    assert configure.load([], settings).training.max_steps == 3


def test_settings_that_lost_their_beginning_are_torn_as_well(tmp_path, train, monkeypatch):
    with monkeypatch.context() as patch, pytest.raises(RuntimeError):
        patch.setattr(fit._Fitting, "step", lambda *_: (_ for _ in ()).throw(RuntimeError))
        train()
    settings = tmp_path / "run" / "settings.yaml"
    settings.write_text(settings.read_text().partition("\n")[2])
    with pytest.raises(ConfigError, match="the file is torn"):
        start.prepare([f"run.resume={tmp_path / 'run'}"])


def test_settings_that_an_editor_of_windows_has_saved_are_not_torn(tmp_path):
    file, text = tmp_path / "settings.yaml", f"{conf_files.BEGIN}\ntraining: {{batch_size: 3}}\n{conf_files.END}\n"
    for head in (b"", b"\xef\xbb\xbf"):
        file.write_bytes(head + text.replace("\n", "\r\n").encode())
        for of_run in (False, True):
            assert conf_files.read(file, of_run=of_run) == {"training": {"batch_size": 3}}
        file.write_bytes(head + text.replace("\n", "\r\n").encode()[:-8])
        with pytest.raises(ConfigError, match="the file is torn"):
            conf_files.read(file)


def test_settings_are_read_through_a_link_for_config_alone(tmp_path):
    (tmp_path / "mine.yaml").write_text("training: {batch_size: 3}\n")
    (tmp_path / "run").mkdir()
    link = tmp_path / "run" / "settings.yaml"
    link.symlink_to(tmp_path / "mine.yaml")
    assert configure.load(["recipe=digits"], link).training.batch_size == 3
    link.with_name(document.SETTINGS).symlink_to(tmp_path / "mine.yaml")
    for read in (lambda: conf_files.read(link), lambda: document.read_settings(link.parent)):
        with pytest.raises(ConfigError, match="cannot be read: it is no regular file, but a link") as refused:
            read()
        assert "--config" not in str(refused.value)


def test_a_run_that_left_no_checkpoint_says_that_it_begins_at_step_0(tmp_path, train, monkeypatch, capsys):
    with monkeypatch.context() as patch, pytest.raises(RuntimeError):
        patch.setattr(fit._Fitting, "step", lambda *_: (_ for _ in ()).throw(RuntimeError))
        train()
    assert "holds no checkpoint" not in capsys.readouterr().out
    assert resumed(tmp_path / "run", "training.max_steps=1").step == 1
    assert f"{tmp_path / 'run'} holds no checkpoint, so training begins at step 0" in capsys.readouterr().out
    assert resumed(tmp_path / "run", "training.max_steps=2").step == 2
    assert "holds no checkpoint" not in capsys.readouterr().out


def test_a_run_whose_folder_of_checkpoints_is_a_link_is_not_gone_on_with(tmp_path, train):
    train(training__max_steps=1)
    folder, elsewhere = tmp_path / "run" / "checkpoints", tmp_path / "elsewhere"
    folder.rename(elsewhere)
    folder.symlink_to(elsewhere)
    before = {one.name: one.stat().st_mtime_ns for one in elsewhere.iterdir()}
    with pytest.raises(ConfigError, match=r"run/checkpoints is a link to another folder: remove it"):
        resumed(tmp_path / "run", "training.max_steps=2")
    assert {one.name: one.stat().st_mtime_ns for one in elsewhere.iterdir()} == before


def test_a_lock_that_is_a_link_is_named_and_no_room_is_asked_for(tmp_path, train):
    train(training__max_steps=1)
    lock = tmp_path / "run" / "run.lock"
    lock.unlink(missing_ok=True)
    lock.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match=r"run\.lock is a link: remove it") as refused:
        resumed(tmp_path / "run", "training.max_steps=2")
    assert "Make room" not in str(refused.value)


@pytest.mark.parametrize("text", ["", "\n", "#\n", "# my settings\n"])
def test_a_file_without_settings_leaves_the_defaults(tmp_path, text):
    (tmp_path / "mine.yaml").write_text(text)
    assert conf_files.read(tmp_path / "mine.yaml") == {}
    (tmp_path / "mine.yaml").write_text(conf_files.BEGIN[:14])
    with pytest.raises(ConfigError, match="the file is torn"):
        conf_files.read(tmp_path / "mine.yaml")


NINE = ",".join(["x"] * 9)
BOMB = f"a: &a0 [{NINE}]\n" + "".join(f"b{at}: &a{at} [{','.join([f'*a{at - 1}'] * 9)}]\n" for at in range(1, 9))


@pytest.mark.parametrize("text", [BOMB, "training: &a\n  num_epochs: *a\n"])
@pytest.mark.parametrize("place", ["mine.yaml", "training/mine.yaml"])
def test_yaml_whose_aliases_explode_is_refused(tmp_path, text, place):
    (tmp_path / place).parent.mkdir(exist_ok=True)
    (tmp_path / place).write_text(text)
    with pytest.raises(
        ConfigError, match=r"mine\.yaml cannot be read as YAML: its aliases .* make more than 100,000 values"
    ):
        configure.load([], tmp_path / place.replace("training/mine.yaml", ""))


@pytest.mark.parametrize("deep", [900, 30_000])
@pytest.mark.parametrize("signs", ["[]", ("{a: ", "}")])
def test_yaml_that_is_nested_without_end_is_refused(tmp_path, deep, signs):
    (tmp_path / "mine.yaml").write_text(f"training: {signs[0] * deep}{signs[1] * deep}")
    # PyYAML from 6.0.4 on has a limit of its own, 1000, and reads ahead.
    said = r"(it has more than 50 mappings or lists within each|.*\s*exceeded maximum nesting depth)"
    with pytest.raises(ConfigError, match=rf"mine\.yaml cannot be read as YAML: {said}"):
        configure.load([], tmp_path / "mine.yaml")


def test_yaml_with_a_few_aliases_is_read(tmp_path):
    (tmp_path / "mine.yaml").write_text("training: &a {num_epochs: 2}\nhpo: {trial: {training: *a}}\n")
    settings = configure.load([], tmp_path / "mine.yaml")
    assert settings.training.num_epochs == settings.hpo.trial["training"]["num_epochs"] == 2


# -- folders --------------------------------------------------------------------------------------------------------


def test_a_folder_that_is_removed_while_the_run_goes_on_is_made_again(tmp_path, train, monkeypatch, caplog):
    stop_at(monkeypatch, 12, lambda: shutil.rmtree(tmp_path / "run"))
    with caplog.at_level(logging.WARNING):
        assert train().status == "finished"
    assert "was removed while the run goes on" in caplog.text
    assert [step["step"] for step in record.load(tmp_path / "run")["steps"]] == list(range(1, 19))
    assert load(tmp_path / "run")["position"]["step"] == 18
    assert kfold_state.facts(tmp_path / "run")["last"]


def test_a_folder_that_is_made_again_is_locked_again(tmp_path, train, monkeypatch):
    stop_at(monkeypatch, 12, lambda: shutil.rmtree(tmp_path / "run"))
    tried = []

    def another_process(self, status):
        tried.append(status)
        with pytest.raises(AssertionError, match="trains there"), held_elsewhere(tmp_path / "run"):
            pass

    monkeypatch.setattr(fit.Tracking, "close", another_process)
    assert train(training__checkpoint_every_steps=13).status == "finished"
    assert tried == ["finished"]


def test_a_run_whose_folder_another_process_has_taken_meanwhile_ends_and_leaves_it_alone(tmp_path, train, monkeypatch):
    with contextlib.ExitStack() as stack:

        def taken():
            shutil.rmtree(tmp_path / "run")
            stack.enter_context(held_elsewhere(tmp_path / "run"))

        stop_at(monkeypatch, 12, taken)
        with pytest.raises(ConfigError, match=r"was removed while the run went on, and process \d+ on .* trains there"):
            train(training__checkpoint_every_steps=13)
        assert {path.name for path in (tmp_path / "run").iterdir()} == {"run.lock", "run.lock.json"}


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    with pytest.raises(
        ConfigError,
        match=r"run\.folder=/proc/run cannot be written: .*Make room, change its permissions, or name another",
    ):
        recipes.load("criteria").train(start.prepare([*overrides(tmp_path), "run.folder=/proc/run"]))
