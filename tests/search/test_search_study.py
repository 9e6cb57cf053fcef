"""The study in one process: who takes what, what becomes of the dead, and what a worker writes down."""

import contextlib
import errno
import gc
import json
import math
import multiprocessing
import platform
import queue
import sqlite3
import subprocess
import sys
import threading
from types import SimpleNamespace

import optuna
import pytest
import search_objectives as objectives

from hotloop.errors import (
    ConfigError,
    DataError,
    MissingExtraError,
    RunPrunedError,
    SearchStoppedError,
    StepLostError,
    TrainingFailedError,
)
from hotloop.record.process import started
from hotloop.report import study as study_report
from hotloop.train import configure, failures
from hotloop.train.search import document, nested, samplers, space, storage, supervise, trial
from hotloop.train.search.study import WORKER, Outcome, Study, write_outcome
from hotloop.train.search.told import SearchBegan, TrialBegan, TrialEnded, TrialReported, from_dict, line, to_dict
from hotloop.train.search.work import Worker
from hotloop.train.turn import turn


@pytest.fixture
def open_study(compose, tmp_path):
    found = []

    def opened(*more, since=0, **named):
        found.append(Study(compose(*more, **named), tmp_path / "study", lambda text: None, since))
        return found[-1]

    yield opened
    for one in found:
        one.storage.close()


@pytest.fixture
def work(open_study):
    """Run a worker in this process; give its study and what it told."""

    def run(objective, *more, **named):
        study, heard = open_study(*more, since=None, **named), []
        Worker(study, heard.append, objective).run()
        return study, heard

    return run


def states(study):
    return [one["state"] for one in document.build(study, importances=False)["trials"]]


def values(study):
    return {one["number"]: one["values"] for one in document.build(study, importances=False)["trials"]}


def test_a_worker_runs_every_trial_and_tells_of_it(work):
    study, heard = work(objectives.quadratic)
    assert states(study) == ["complete"] * 4
    kinds = [TrialBegan, TrialReported, TrialReported, TrialReported, TrialEnded]
    assert [type(one) for one in heard] == kinds * 4
    assert all(from_dict(json.loads(json.dumps(to_dict(one)))) == one for one in heard)
    assert "trial 3 complete" in line(heard[-1])
    best = document.build(study, importances=False)["best"]
    expected = min(range(4), key=lambda number: abs(math.log10(values(study)[number]["training.learning_rate"]) + 4))
    assert best == expected


def test_more_trials_go_on_and_done_ones_count(work):
    work(objectives.quadratic)
    study, heard = work(objectives.quadratic, hpo__n_trials=6)
    assert len([one for one in heard if isinstance(one, TrialBegan)]) == 2
    assert sorted(values(study)) == [0, 1, 2, 3, 4, 5]


@pytest.mark.campaign
def test_a_random_search_draws_by_the_trial_alone(work, open_study, compose, tmp_path):
    first = values(work(objectives.quadratic)[0])
    settings = compose(hpo__folder=tmp_path / "other", hpo__n_trials=2)
    for trials in (2, 4):
        nested(settings, tmp_path / "other", trials, objectives.quadratic)
    again = {one["number"]: one["values"] for one in study_report.SCHEMA.load(tmp_path / "other")["trials"]}
    assert again == first


@pytest.mark.parametrize("sampler", ["tpe", "gp", "cmaes", "qmc"])
def test_samplers_go_on_in_a_new_process_and_stay_in_the_space(work, sampler):
    for trials in (3, 6):
        study, _ = work(objectives.quadratic, hpo__sampler=sampler, hpo__n_trials=trials, hpo__startup_trials=2)
    found = values(study)
    assert len(found) == 6
    assert len({one["training.learning_rate"] for one in found.values()}) > 2, "gp may try an end of a range twice"
    assert all(one["training.batch_size"] in (16, 32) for one in found.values())


@pytest.mark.campaign
@pytest.mark.parametrize("pruner", ["median", "successive_halving", "hyperband"])
def test_pruners_end_what_is_worse_and_keep_the_best(work, pruner):
    def by_number(asked):
        for step in range(1, 10):
            asked.report(step, -float(asked.number))
        return -float(asked.number)

    settings = {"hpo__pruner": pruner, "hpo__n_trials": 12, "hpo__startup_trials": 2, "hpo__reduction_factor": 3}
    study, heard = work(by_number, "training.num_epochs=9", **settings)
    ended = {one.number: one for one in heard if isinstance(one, TrialEnded)}
    assert ended[0].state == "complete"
    pruned = [one for one in ended.values() if one.state == "pruned"]
    assert pruned
    assert all(pruner in one.cause for one in pruned)
    assert states(study).count("pruned") == len(pruned)


def test_failures_are_written_down_and_end_nothing(work):
    study, _ = work(objectives.every_third_fails, hpo__n_trials=6)
    found = {one["number"]: one for one in document.build(study, importances=False)["trials"]}
    assert [found[number]["state"] for number in range(6)] == ["failed", "failed", "complete"] * 2
    assert found[0]["cause"] == "RuntimeError: planted in trial 0"
    assert "nan" in found[1]["cause"]
    again, heard = work(objectives.quadratic, hpo__n_trials=6)
    assert heard == [], "what failed is over"


def test_a_trial_whose_first_validation_is_nan_is_judged_by_a_later_one(work, monkeypatch):
    def train(start, console):
        for step, f1 in enumerate([math.nan, 0.9, 0.5], 1):
            start.within.validated(step, step, {"f1": f1})
        return SimpleNamespace(status="finished", stop=False)

    monkeypatch.setattr(trial, "_recipe", lambda name: SimpleNamespace(train=train))
    study, _ = work(trial.train, hpo__n_trials=1)
    assert study.best().values == [0.9]


def test_a_search_in_which_every_trial_fails_stops_and_says_why(work, open_study):
    with pytest.raises(
        SearchStoppedError, match=r"every trial fails \(5 of 5\).*Trials 0, 1, 2, 3, 4: RuntimeError: planted"
    ):
        work(objectives.fails, hpo__n_trials=50)
    study, heard = work(objectives.quadratic, hpo__n_trials=7)
    assert [one.state for one in heard if isinstance(one, TrialEnded)] == ["complete"] * 2, "mended, it goes on"


def test_an_interrupted_trial_is_open_again_with_its_values(work, open_study):
    def interrupts(asked):
        if asked.number == 1:
            raise KeyboardInterrupt
        return 1.0

    with pytest.raises(KeyboardInterrupt):
        work(interrupts)
    study, heard = work(objectives.quadratic)
    found = document.build(study, importances=False)["trials"]
    assert [(one["number"], one["attempt"], one["state"]) for one in found[1:3]] == [
        (1, 1, "interrupted"),
        (1, 2, "complete"),
    ]
    assert found[1]["values"] == found[2]["values"]
    again = next(one for one in heard if isinstance(one, TrialBegan) and one.number == 1)
    assert "trial 1 began (worker 1, attempt 2)" in line(again)


def test_a_full_disk_stops_the_search_and_leaves_the_trial_open(work, open_study):
    def full(asked):
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(SearchStoppedError, match=r"disk of .* is full"):
        work(full)
    assert states(open_study()) == ["interrupted"]
    study, _ = work(objectives.quadratic)
    assert states(study) == ["interrupted", *["complete"] * 4]


@pytest.mark.parametrize("name", ["data.path", "training.batch_size_of_others", "other.training.batch_size"])
@pytest.mark.parametrize("kind", [ConfigError, DataError, MissingExtraError, SearchStoppedError])
def test_a_mistake_in_the_set_up_stops_the_search_and_burns_no_trial(work, open_study, kind, name):
    def refuses(asked):
        raise kind(f"{name}=pairs.csv: planted")

    with pytest.raises(kind, match="planted"):
        work(refuses)
    assert states(open_study()) == ["interrupted"]
    study, _ = work(objectives.quadratic)
    assert states(study) == ["interrupted", *["complete"] * 4]


def test_values_that_a_recipe_refuses_fail_their_trial_alone(work):
    def refuses(asked):
        if asked.number == 0:
            raise ConfigError("training.batch_size=16: planted, too large")
        return 1.0

    assert states(work(refuses)[0]) == ["failed", *["complete"] * 3]


def test_the_cause_of_a_failed_trial_promises_no_checkpoint(work, tmp_path):
    def fails(asked):
        if asked.number:
            return 1.0
        (tmp_path / "last.pt").touch()
        raise failures.with_checkpoint(TrainingFailedError("the loss is nan"), "step 3", tmp_path, tmp_path / "last.pt")

    _, heard = work(fails, hpo__n_trials=2)
    assert [one.cause for one in heard if isinstance(one, TrialEnded)] == ["step 3: the loss is nan", ""]


def test_a_storage_that_fails_as_a_trial_begins_fails_no_trial(work, monkeypatch):
    import sqlite3

    fails, left = [True, False, True], Study.left
    monkeypatch.setattr(Study, "left", lambda self, *_: _away() if fails and fails.pop() else left(self))

    def _away():
        raise sqlite3.OperationalError("planted: it is away")

    study, _ = work(objectives.quadratic, hpo__n_trials=2)
    assert states(study) == ["interrupted", "complete", "interrupted", "complete"]
    fails += [True] * 9
    with pytest.raises(SearchStoppedError, match="planted: it is away"):
        work(objectives.quadratic, hpo__n_trials=3)


def test_a_lost_gpu_ends_the_worker_after_the_trial_is_written_down(work, open_study):
    def lost(asked):
        raise StepLostError("the context is lost")

    with pytest.raises(StepLostError):
        work(lost)
    assert states(open_study()) == ["failed"]


def dead(process):
    """What a process that is gone called itself."""
    program = "import json; from hotloop import record; print(json.dumps(record.this_process()))"
    return json.loads(
        subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    )


def test_what_died_is_begun_again_once(open_study):
    study, gone = open_study(hpo__n_trials=1), dead(None)
    seen = []
    for _ in range(2):
        taken = study.take()
        seen.append((taken.attempt, space.parse(study.settings).suggest(taken.trial, study.settings)))
        taken.trial.set_user_attr(WORKER, gone)
    assert [attempt for attempt, _ in seen] == [1, 2]
    assert seen[0][1] == seen[1][1]
    assert study.take() is None
    assert states(study) == ["died", "died"]
    assert open_study(hpo__n_trials=1, since=None).take().attempt == 3, "a new command: all may have been killed"
    assert document.build(study, importances=False)["trials"][0]["cause"] == "its worker died"


@pytest.mark.parametrize("drawn", range(5))
def test_whoever_died_while_drawing_changes_no_value(open_study, compose, tmp_path, drawn):
    other = Study(compose(hpo__folder=tmp_path / "other"), tmp_path / "other", lambda text: None, 0)
    searched = space.parse(other.settings)
    assert len(searched.searched) == 5
    expected = searched.suggest(other.take().trial, other.settings)
    study = open_study()
    for attempt in (1, 2):  # the second has the whole of them, and a third, which dies as the first did, less again
        taken = study.take()
        assert (taken.number, taken.attempt) == (0, attempt)
        if attempt == 1:
            for one in searched.searched[:drawn]:
                one.suggest(taken.trial)
        else:
            assert searched.suggest(taken.trial, study.settings) == expected
        taken.trial.set_user_attr(WORKER, dead(None))
    again = open_study(since=None)
    searched.searched[0].suggest((third := again.take()).trial)
    third.trial.set_user_attr(WORKER, dead(None))
    fourth = again.take()
    assert (fourth.number, fourth.attempt) == (0, 4)
    assert searched.suggest(fourth.trial, again.settings) == expected
    other.storage.close()


def test_a_trial_whose_taking_was_written_but_not_answered_is_taken_again(open_study, monkeypatch):
    study, write = open_study(hpo__n_trials=1), optuna.Trial.set_user_attr

    def lost(trial, key, value):
        write(trial, key, value)
        if key == WORKER:
            monkeypatch.undo()
            raise sqlite3.OperationalError("planted: the answer is lost")

    monkeypatch.setattr(optuna.Trial, "set_user_attr", lost)
    taken = study.take()
    assert (taken.number, taken.attempt) == (0, 2)


def test_the_document_says_which_submitted_run_goes_on_with_the_study(open_study, monkeypatch):
    monkeypatch.setenv("HOTLOOP_SUBMITTED", "20260101-abcd")
    study = open_study(since=None)
    monkeypatch.delenv("HOTLOOP_SUBMITTED")
    assert document.build(study, importances=False)["submitted"] == "20260101-abcd"  # also where it is only looked at
    assert document.build(open_study(since=None), importances=False)["submitted"] is None


def test_a_worker_that_died_behind_its_trial_has_lost_nothing(open_study):
    study = open_study(hpo__n_trials=1)
    taken = study.take()
    taken.trial.set_user_attr(WORKER, dead(None))
    write_outcome(taken.folder, Outcome("complete", 0.75))
    assert study.take() is None
    assert states(study) == ["complete"]
    assert document.build(study, importances=False)["trials"][0]["value"] == 0.75


def test_a_trial_whose_worker_died_is_not_over_when_the_same_command_begins(open_study):
    study = open_study(hpo__n_trials=4)
    study.finish(study.take(), Outcome("complete", 0.75))
    study.finish(study.take(), Outcome("interrupted", cause="interrupted"))
    study.take()  # of a worker that lives
    study.take().trial.set_user_attr(WORKER, dead(None))
    again = open_study(hpo__n_trials=4, since=None)
    assert supervise._began(again) == SearchBegan(4, 1, {"number": 0, "value": 0.75, "values": {}})
    assert (again.left(), again.take().number) == (2, 2)


def test_an_outcome_that_an_earlier_study_left_is_nobodys(open_study, tmp_path):
    write_outcome(tmp_path / "study" / "trials" / "0000", Outcome("complete", 0.75))
    study = open_study(hpo__n_trials=1)
    study.take().trial.set_user_attr(WORKER, dead(None))
    assert study.take().attempt == 2
    assert states(study)[0] == "died"


def test_a_folder_has_the_trials_of_one_study(open_study, compose, tmp_path):
    document.write(open_study(hpo__n_trials=1))
    document.check_folder(compose(), tmp_path / "study")
    with pytest.raises(
        ConfigError, match=r"holds the study criteria/search, and this is criteria/other: .*hpo\.folder"
    ):
        document.check_folder(compose(hpo__name="other"), tmp_path / "study")


@pytest.mark.parametrize("kept", ["record.jsonl", "record.json", "kfold.json"])
def test_a_search_is_not_put_into_the_folder_of_a_run(compose, tmp_path, kept):
    (tmp_path / "study").mkdir()
    (tmp_path / "study" / kept).write_text("")
    with pytest.raises(ConfigError, match=r"hpo\.folder=.*study holds a run, whose report would be overwritten"):
        supervise.search(compose(), lambda _: None, "search_objectives:quadratic")
    assert [one.name for one in (tmp_path / "study").iterdir()] == [kept]


def test_a_study_in_which_no_trial_is_over_takes_other_settings(open_study):
    study = open_study(hpo__metric="lss")
    assert study.finish(study.take(), Outcome("interrupted", cause="no such metric"))
    with pytest.raises(ConfigError, match=r"begun with other settings: .*hpo\.metric"):
        open_study(hpo__metric="loss")  # whoever only reads it
    study = open_study(since=None, hpo__metric="loss")
    assert study.study.direction.name == "MINIMIZE"
    assert study.trials() == []
    taken = study.take()
    with pytest.raises(ConfigError, match=r'begun with other settings: hpo\.direction "minimize", now "maximize"'):
        open_study(since=None, hpo__metric="f1")  # a trial runs
    assert study.finish(taken, Outcome("failed", cause="planted"))
    with pytest.raises(ConfigError, match=r"begun with other settings: .*; or delete .*study, in which no trial is"):
        open_study(since=None, hpo__metric="f1")
    assert study.finish(study.take(), Outcome("complete", 0.75))
    with pytest.raises(ConfigError, match=r"other settings: hpo\.direction .*hpo\.folder=\.\.\.$"):
        open_study(since=None, hpo__metric="f1")


@pytest.mark.parametrize(("log", "level"), [("wal", 1), ("delete", 2)])
def test_a_commit_waits_for_the_disk_where_there_is_no_write_ahead_log(tmp_path, log, level):
    with contextlib.closing(sqlite3.connect(tmp_path / "study.db")) as file:
        file.execute(f"PRAGMA journal_mode={log}")
        storage._without_waiting(file, None)
        assert file.execute("PRAGMA synchronous").fetchone() == (level,)


def test_nobody_takes_a_trial_while_a_study_is_begun_anew(open_study, monkeypatch, tmp_path):
    study, look, said = open_study(hpo__metric="lss"), Study._is_empty, []
    assert study.finish(study.take(), Outcome("interrupted", cause="no such metric"))
    (tmp_path / "study" / "trials").mkdir(exist_ok=True)

    def looks(self):
        with pytest.raises(sqlite3.OperationalError, match="locked"), turn(tmp_path / "study" / "study.db.turn", 0):
            pass
        return look(self)

    monkeypatch.setattr(Study, "_is_empty", looks)
    settings = study.settings.model_copy(update={"hpo": study.settings.hpo.model_copy(update={"metric": "loss"})})
    begun = Study(settings, tmp_path / "study", said.append)
    assert begun.trials() == []
    begun.storage.close()
    (line,) = said  # and no word of trials that were lost
    assert line.startswith("No trial of the study was over, so it begins with these settings")


def test_a_study_that_another_command_has_just_begun_is_not_begun_anew(open_study):
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        running = {"pid": other.pid, "host": platform.node(), "process_started": started(other.pid)}
        open_study(since=None, hpo__metric="loss").study.set_user_attr("hotloop:commands", [running])
        with pytest.raises(ConfigError, match=r'begun with other settings: hpo\.direction "minimize", now "maximize"'):
            open_study(since=None, hpo__metric="f1")
        assert open_study(since=None, hpo__metric="loss").study.user_attrs["hotloop:commands"][0] == running
        other.communicate()
    assert open_study(since=None, hpo__metric="f1").study.direction.name == "MAXIMIZE"


def test_a_program_of_ones_own_has_a_study_folder_by_its_files_name(tmp_path):
    found = configure.load([f"recipe={tmp_path / 'train.py'}:make", "hpo.name=first"])
    assert found.hpo.folder == "runs/train.py-make/first"
    assert configure.load(["recipe=digits"]).hpo.folder == "runs/digits/search"


@pytest.mark.parametrize("storage", ["null", "sqlite:///{}/elsewhere.db"])
def test_a_file_that_is_deleted_takes_no_trial_and_nothing_that_is_known(open_study, compose, tmp_path, storage):
    storage = storage.format(tmp_path)
    study = open_study(hpo__storage=storage)
    assert study.finish(study.take(), Outcome("complete", 0.75))
    document.write_settings(study.settings, study.folder)
    document.write(study)
    kept = (study.folder / study_report.DOCUMENT).read_text()
    for file in (*study.folder.glob("study.db*"), *tmp_path.glob("elsewhere.db*")):
        file.unlink()
    study.storage.patiently = lambda what, say: what()
    with pytest.raises(SearchStoppedError, match=r"does not answer.*not there any more.*the same command goes on"):
        study.take()
    with pytest.raises(SearchStoppedError, match=r"has the 1 trials .*put it back"):
        document.check_folder(compose(hpo__storage=storage), study.folder)
    found, note = document.refresh(study.folder)
    assert "put it back" in note
    assert (found["best"], document.best_values(found)) == (0, {})
    assert (study.folder / study_report.DOCUMENT).read_text() == kept


def test_whoever_died_while_taking_leaves_the_trial_open(open_study):
    study = open_study(hpo__n_trials=1)
    with study.storage.turn():
        study.study.enqueue_trial({}, user_attrs={"hotloop:number": 0, "hotloop:attempt": 1})
    assert study.take().number == 0, "died before it was asked for"
    open_study(hpo__n_trials=2)
    study.study.enqueue_trial({}, user_attrs={"hotloop:number": 1, "hotloop:attempt": 1})
    study.study.ask()  # ... and died here
    more = open_study(hpo__n_trials=2)
    taken = more.take()
    assert (taken.number, taken.attempt) == (1, 2)


def test_a_silent_worker_of_another_machine_loses_its_trial(open_study, monkeypatch):
    study = open_study(hpo__n_trials=1, hpo__heartbeat_seconds=600)
    slow = study.take()
    slow.trial.set_user_attr(WORKER, {"host": "elsewhere", "pid": 1, "process_started": 1})
    assert study.take() is None, "it may live"
    study.storage.optuna.grace_period = -1
    taken = study.take()
    assert taken.attempt == 2
    assert not study.finish(slow, Outcome("complete", 1.0)), "others have it"
    assert study.finish(taken, Outcome("complete", 0.5))
    assert document.build(study, importances=False)["trials"][-1]["value"] == 0.5


def test_a_study_keeps_its_settings(open_study):
    study = open_study()
    assert study.finish(study.take(), Outcome("complete", 0.75))
    open_study(hpo__n_trials=9, hpo__workers=3, run__device="cpu")
    free = [
        "compile.preset=aot_eager",
        "training.optimization.use_torch_compile=true",
        "training.eval_batch_size=7",
        "cache.share=share",
    ]
    open_study(*free, "training.checkpoint_every_steps=3", "run.project=other", "run.tracking=there")
    with pytest.raises(ConfigError, match=r"run\.seed"):
        open_study("run.seed=77")
    with pytest.raises(ConfigError, match=r"training\.num_epochs 1, now 2.*hpo\.name"):
        open_study("training.num_epochs=2")
    with pytest.raises(ConfigError, match=r"hpo\.space\.training\.learning_rate\.log"):
        open_study("hpo.space.training.learning_rate.log=[1e-5,1e-4]")


def test_a_study_that_is_refused_leaves_no_connection_open(open_study, compose, monkeypatch, tmp_path):
    open_study()
    closed, close = [], storage.Storage.close
    monkeypatch.setattr(storage.Storage, "close", lambda self: closed.append(1) or close(self))
    with pytest.raises(ConfigError, match=r"run\.seed"):
        Study(compose("run.seed=77"), tmp_path / "study", lambda text: None, 0)
    assert closed == [1]


def _race(folder, numbers):
    sys.path += folder["path"]
    from hotloop.train import configure

    study = Study(configure.from_dict(folder["settings"]), folder["folder"], lambda text: None)
    while taken := study.take():
        numbers.put(taken.number)
        study.finish(taken, Outcome("complete", float(taken.number)))
    study.storage.close()


def all_taken_once(numbers, processes):
    for one in processes:
        one.start()
    for one in processes:
        one.join(900)
    assert sorted(numbers.get(timeout=900) for _ in range(30)) == list(range(30))
    assert numbers.empty()


def about(compose, tmp_path, **named):
    from hotloop.train import configure

    settings = configure.to_dict(compose(hpo__n_trials=30, **named))
    return {"settings": settings, "folder": tmp_path / "study", "path": sys.path}


@pytest.mark.campaign
def test_no_trial_is_taken_twice_by_processes(compose, tmp_path):
    context = multiprocessing.get_context("spawn")
    numbers, given = context.Queue(), about(compose, tmp_path)
    all_taken_once(numbers, [context.Process(target=_race, args=(given, numbers)) for _ in range(3)])


@pytest.mark.campaign
def test_no_trial_is_taken_twice_on_postgresql(compose, tmp_path, postgresql):
    numbers, given = queue.Queue(), about(compose, tmp_path, hpo__storage=f"'{postgresql.url}'", hpo__name="race")
    all_taken_once(numbers, [threading.Thread(target=_race, args=(given, numbers)) for _ in range(4)])


def test_a_nested_search_gives_overrides(compose, tmp_path):
    said = []
    found = nested(compose(), tmp_path / "inner", 5, objectives.quadratic, said.append)
    assert [one.split(" ", 2)[:2] for one in said] == [["trial", str(one)] for one in range(5) for _ in range(2)]
    assert {one.split("=")[0] for one in found} == set(space_names(compose()))
    assert nested(compose(), tmp_path / "inner", 5, objectives.fails) == found, "what is done is not run again"
    with pytest.raises(SearchStoppedError, match="planted"):
        nested(compose(), tmp_path / "failing", 5, objectives.fails)


def test_trials_of_later_searches_count_among_those_that_share_what_is_compiled(compose, tmp_path):
    runs = []

    def noting(asked):
        runs.append(asked.runs)
        return objectives.quadratic(asked)

    nested(compose(), tmp_path / "alone", 3, noting)
    nested(compose(), tmp_path / "more", 3, noting, later=24)
    assert runs == [1.0, 1.0, 1.0, 27 / 8, 26 / 8, 25 / 8], "two batch sizes, four dropouts: 8 kinds of code"


def space_names(settings):
    return [one.name for one in space.parse(settings).searched]


def test_a_pruned_trial_is_one_whatever_the_recipe_wraps_it_in(work):
    def prunes(asked):
        raise RunPrunedError("enough")

    study, heard = work(prunes, hpo__n_trials=2)
    assert states(study) == ["pruned", "pruned"]
    assert document.build(study, importances=False)["best"] is None


def test_a_password_is_in_no_run(compose, tmp_path):
    from hotloop.train import configure
    from hotloop.train.search.storage import masked
    from hotloop.train.search.trial import best_settings, settings_of

    settings = compose(hpo__storage="'postgresql://me:s3cret@host/db?password=s3cret&a=b'")
    for one in (settings_of(settings, {}, tmp_path), best_settings(settings, {})):
        assert "s3cret" not in configure.to_yaml(one)
        assert one.hpo.storage == "postgresql://me:***@host/db?password=***&a=b"
    assert masked("sqlite:////tmp/a@b:c@d") == "sqlite:////tmp/a@b:c@d"
    assert masked("postgresql://me@host:5432/db") == "postgresql://me@host:5432/db"


def test_two_trials_that_end_together_leave_the_best_one_its_checkpoints(open_study, monkeypatch):
    def worker(value):
        def trains(asked):
            (asked.folder / "checkpoints").mkdir(parents=True)
            (asked.folder / "checkpoints" / "best.pt").touch()
            return value

        return Worker(open_study(hpo__n_trials=2), lambda told: None, trains)

    good, better = worker(0.9), worker(0.95)
    first, second = good.study.take(), better.study.take()
    finish = better.study.finish

    def later(taken, outcome):
        write_outcome(taken.folder, outcome)  # written beside its run, and not yet in the storage
        good.one(first)
        return finish(taken, outcome)

    monkeypatch.setattr(better.study, "finish", later)
    better.one(second)
    assert [path.parents[1] for path in better.study.folder.rglob("*.pt")] == [second.folder]


def test_ctrl_c_while_a_trials_end_is_written_waits_for_it(open_study, monkeypatch):
    study, heard = open_study(hpo__n_trials=3), []
    finish, at = study._finish, iter([True])

    def interrupted(*given):
        if next(at, False):
            raise KeyboardInterrupt
        return finish(*given)

    monkeypatch.setattr(study, "_finish", interrupted)
    with pytest.raises(KeyboardInterrupt):
        Worker(study, heard.append, objectives.quadratic).run()
    assert states(study) == ["complete"]
    assert [one.state for one in heard if isinstance(one, TrialEnded)] == ["complete"]


def test_a_trial_that_ends_while_the_document_is_written_is_no_trouble(work, monkeypatch):
    study, _ = work(objectives.quadratic, hpo__n_trials=5)
    everything = study.trials()
    best = study.best().number
    earlier = [one for one in everything if one.number != best]  # what a look at the storage showed a moment before
    looks = iter([earlier])
    monkeypatch.setattr(study, "trials", lambda: next(looks, everything))
    found = document.build(study, importances=False)
    assert found["best"] in [one["number"] for one in found["trials"]]
    assert (len(found["trials"]), found["left"]) == (4, 1)
    assert document.best_values(found)


@pytest.mark.campaign
def test_a_search_by_tpe_draws_by_what_is_in_the_storage_whatever_its_process_knows(work, compose, tmp_path):
    named = {"hpo__sampler": "tpe", "hpo__startup_trials": 2, "hpo__n_trials": 5}
    whole = values(work(objectives.quadratic, **named)[0])
    settings = compose(hpo__folder=tmp_path / "other", **named)
    for trials in (2, 3, 5):  # each time as in a process of its own
        nested(settings, tmp_path / "other", trials, objectives.quadratic)
    assert {one["number"]: one["values"] for one in study_report.SCHEMA.load(tmp_path / "other")["trials"]} == whole


@pytest.mark.parametrize(("sampler", "place"), [("tpe", "_search_space"), ("gp", "_intersection_search_space")])
def test_a_sampler_goes_on_with_what_the_one_before_found_out(compose, work, open_study, sampler, place):
    named = {"hpo__sampler": sampler, "hpo__startup_trials": 2}
    study, _ = work(objectives.quadratic, hpo__n_trials=8, **named)
    later = open_study(hpo__n_trials=10, **named)  # another process, which knows of nothing yet
    later.take()
    settings, trial = later.settings, later.trials()[-1]
    known = {}
    for number in (8, 9):
        fresh, kept = samplers.sampler(settings, number), samplers.sampler(settings, number, known)
        spaces = [one.infer_relative_search_space(later.study, trial) for one in (fresh, kept)]
        assert spaces[0] == spaces[1]
        assert spaces[0]
        assert known[place] is getattr(kept, place)
    assert known[place]._cached_trial_number == 8  # not from the first trial on again


def test_a_storage_that_was_emptied_is_told_before_its_trials_are_run_again(tmp_path, compose):
    (tmp_path / "study" / "trials" / "0000").mkdir(parents=True)
    (tmp_path / "study" / "study.db").touch()
    said = []
    Study(compose(), tmp_path / "study", said.append).storage.close()
    assert len(said) == 1
    assert "study.db holds no trial, though" in said[0]
    assert said[0].endswith("all of them are run again")


def test_a_storage_that_is_damaged_is_told_to_be_replaced(tmp_path, compose):
    (tmp_path / "study").mkdir()
    (tmp_path / "study" / "study.db").write_bytes(b"no database" * 400)
    with pytest.raises(SearchStoppedError, match=r"is not a database\. Put a copy of it back, or search anew"):
        Study(compose(), tmp_path / "study", print)


def test_a_study_of_an_earlier_version_is_gone_on_with():
    """It kept the settings of all recipes, and had none that came later."""
    from hotloop.train.search import study

    settings = configure.load(["recipe=digits"])
    ours = study.comparable(settings)
    earlier = {key: value for key, value in ours.items() if key not in ("training.num_epochs", "digits.layers")}
    earlier |= {"focus.layers": 2, "data.path": None, "hpo.space.program.lr": None}
    assert study.differences(study._as_now(earlier, ours, settings), ours) == []
    assert study.differences(study._as_now(earlier | {"digits.heads": 2}, ours, settings), ours) == [
        "digits.heads 2, now 4"
    ]
    earlier, ours = ours | {"recipe.goal": None}, ours | {"recipe.goal": "max:accuracy"}  # trials had no goal
    assert study.differences(study._as_now(earlier, ours, settings), ours) == []


def test_the_median_pruner_reads_the_other_trials_once_a_second(compose, monkeypatch):
    read, now = [], [0.0]
    monkeypatch.setattr(samplers.time, "monotonic", lambda: now[0])

    def get_trials(**_):
        read.append(1)
        done = {"state": optuna.trial.TrialState.COMPLETE, "value": 1.0, "intermediate_values": {1: 1.0, 2: 1.0}}
        return [optuna.create_trial(**done) for _ in range(3)]

    study = SimpleNamespace(direction=optuna.study.StudyDirection.MAXIMIZE, get_trials=get_trials)
    made = samplers.pruner(compose(hpo__pruner="median", hpo__startup_trials=2), 2)
    bad, good = (
        SimpleNamespace(number=number, last_step=1, intermediate_values={1: value})
        for number, value in enumerate((0.5, 2.0))
    )
    assert [made.prune(study, bad), made.prune(study, bad), len(read)] == [True, True, 1]
    assert [made.prune(study, good), len(read)] == [False, 2]  # a trial begins with what is over by then
    now[0] += 1.5
    assert [made.prune(study, good), len(read)] == [False, 3]


def test_a_commit_does_not_wait_for_the_disk(open_study):
    with open_study().storage.optuna.engine.connect() as connection:
        assert connection.exec_driver_sql("PRAGMA synchronous").scalar() == 1  # NORMAL
        assert connection.exec_driver_sql("PRAGMA journal_mode").scalar() == "wal"


def test_what_a_first_trial_leaves_is_looked_through_once(work, monkeypatch):
    frozen = []
    monkeypatch.setattr(gc, "freeze", lambda: frozen.append(1))
    monkeypatch.setattr(trial, "train", objectives.quadratic)
    work(objectives.quadratic)
    assert frozen == [1]
