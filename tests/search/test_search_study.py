"""A study: which trial is next, what becomes of the dead, and which values are drawn."""

import dataclasses
import json
import subprocess
import sys

import optuna
import pytest
import search_objectives as objectives

from hotloop.errors import ConfigError, DataError, MissingExtraError, RunPrunedError, SearchStoppedError, StepLostError
from hotloop.train.search import command, document, trial
from hotloop.train.search.study import Study, masked


@pytest.fixture
def open_study(compose, tmp_path):
    def opened(*more, folder="study", **named):
        settings = compose(*more, **{"hpo__folder": tmp_path / folder, **named})
        study = Study(settings, tmp_path / folder)
        study.begin()
        return study

    return opened


@pytest.fixture
def work(open_study):
    """Run a worker in this process, and return its study."""

    def run(objective, *more, **named):
        study = open_study(*more, **named)
        study.run(objective)
        return study

    return run


def found(study):
    return document.build(study, importances=False)["trials"]


def states(study):
    return [one["state"] for one in found(study)]


def values(study):
    return [one["values"] for one in found(study) if one["state"] in ("complete", "pruned")]


def test_a_worker_runs_every_trial_and_more_go_on(work, open_study):
    study = work(objectives.quadratic)
    assert states(study) == ["complete"] * 4
    first = values(study)
    again = open_study(hpo__n_trials=6)
    assert again.left() == 2
    again.run(objectives.quadratic)
    assert states(again) == ["complete"] * 6
    assert values(again)[:4] == first


@pytest.mark.parametrize("sampler", ["tpe", "random", "qmc", "gp", "cmaes"])
def test_a_search_that_goes_on_in_a_new_process_draws_as_one_that_was_not_stopped(work, open_study, sampler):
    more = {"hpo__sampler": sampler, "hpo__startup_trials": 3}
    whole = work(objectives.quadratic, hpo__n_trials=8, folder="whole", **more)
    work(objectives.quadratic, hpo__n_trials=5, **more)
    assert values(work(objectives.quadratic, hpo__n_trials=8, **more)) == values(whole)


@pytest.mark.parametrize("pruner", ["median", "hyperband", "successive_halving"])
def test_pruners_end_trials_that_are_worse_and_keep_the_best(work, pruner):
    study = work(objectives.quadratic, hpo__n_trials=30, hpo__pruner=pruner, hpo__startup_trials=3)
    assert "pruned" in states(study)
    assert set(states(study)) <= {"complete", "pruned"}
    best = study.best()
    assert best.value == max(one["value"] for one in found(study) if one["state"] == "complete")


def test_failures_are_written_down_and_end_nothing(work):
    study = work(objectives.every_third_fails, hpo__n_trials=6)
    assert states(study) == ["failed", "failed", "complete"] * 2
    causes = [one["cause"] for one in found(study)]
    assert causes[0] == "RuntimeError: planted in trial 0"
    assert causes[1].endswith("is nan")


def test_a_search_in_which_trial_after_trial_fails_stops(open_study):
    study = open_study(hpo__n_trials=20)
    with pytest.raises(SearchStoppedError, match=r"5 trials failed one after another.*planted: no trial can work"):
        study.run(objectives.fails)
    assert len(found(study)) == 5


def ends(error, at=1):
    """An objective that raises in one of its calls, and works in the others."""
    calls = []

    def objective(asked):
        calls.append(asked.number)
        if len(calls) - 1 == at:
            raise error
        return objectives.quadratic(asked)

    return objective


@pytest.mark.parametrize("error", [KeyboardInterrupt(), DataError("no rows"), MissingExtraError("no peft")])
def test_an_error_that_any_trial_would_meet_ends_the_search_and_burns_no_trial(open_study, error):
    whole = open_study(folder="whole")
    whole.run(objectives.quadratic)
    study = open_study()
    with pytest.raises(type(error)):
        study.run(ends(error))
    assert states(study) == ["complete", "interrupted"]
    again = open_study()
    again.run(objectives.quadratic)
    assert values(again) == values(whole)


@pytest.mark.parametrize(
    ("error", "state", "cause"),
    [
        (ConfigError("training.learning_rate=1: too high"), "failed", "training.learning_rate=1: too high"),
        (RunPrunedError("not worth it"), "pruned", "not worth it"),
    ],
)
def test_what_ends_a_trial_ends_no_other_and_is_its_cause(work, error, state, cause):
    study = work(ends(error))
    assert states(study) == ["complete", state, "complete", "complete"]
    assert found(study)[1]["cause"] == cause


def test_a_lost_gpu_ends_the_worker_and_is_written_down(open_study):
    study = open_study()
    with pytest.raises(StepLostError):
        study.run(ends(StepLostError("the GPU is lost")))
    assert states(study) == ["complete", "failed"]


def test_a_study_keeps_its_settings(work, open_study):
    work(objectives.quadratic, hpo__metric="accuracy")
    with pytest.raises(ConfigError, match=r"begun with other settings: hpo\.metric\. Go on with those"):
        open_study(hpo__metric="f1")
    open_study(hpo__metric="accuracy", hpo__workers=3, run__device="cpu")


DIES = """
import os, signal, sys
from pathlib import Path
import search_objectives as objectives
from hotloop.train import configure
from hotloop.train.search.study import Study

def dies(asked):
    if asked.number == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    return objectives.quadratic(asked)

settings = configure.load(sys.argv[1:])
Study(settings, Path(settings.hpo.folder)).run(dies)
"""


def test_a_search_that_was_killed_goes_on_to_the_values_of_one_that_was_not(work, tmp_path):
    given = {"hpo.folder": tmp_path / "study", "hpo.sampler": "tpe", "hpo.pruner": "none", "hpo.n_trials": 6}
    arguments = [f"{name}={value}" for name, value in {**given, "hpo.startup_trials": 2}.items()]
    killed = subprocess.run([sys.executable, "-c", DIES, *arguments], check=False, timeout=300)
    assert killed.returncode == -9
    more = {"hpo__n_trials": 6, "hpo__sampler": "tpe", "hpo__startup_trials": 2}
    study = work(objectives.quadratic, **more)
    assert states(study).count("interrupted") == 1
    assert values(study) == values(work(objectives.quadratic, folder="whole", **more))


def test_a_folder_has_the_trials_of_one_study(work, compose, tmp_path):
    document.write(work(objectives.quadratic))
    with pytest.raises(ConfigError, match="holds the study criteria/search: name another"):
        document.check_folder(compose(hpo__name="other"), tmp_path / "study")
    (tmp_path / "study" / "study.db").unlink()
    with pytest.raises(SearchStoppedError, match=r"study\.db is not there any more, and has the trials"):
        document.check_folder(compose(), tmp_path / "study")


@pytest.mark.parametrize("kept", ["record.jsonl", "kfold.json"])
def test_a_search_is_not_put_into_the_folder_of_a_run(compose, tmp_path, kept):
    (tmp_path / "study").mkdir()
    (tmp_path / "study" / kept).touch()
    with pytest.raises(ConfigError, match="holds a run, whose report would be overwritten"):
        command.search(compose(), print)


def test_only_the_best_trial_keeps_its_checkpoints(open_study):
    def objective(asked):
        (asked.folder / "checkpoints").mkdir(parents=True, exist_ok=True)
        (asked.folder / "checkpoints" / "best.pt").touch()
        return objectives.quadratic(asked)

    study = open_study(hpo__n_trials=6)
    study.run(objective)
    kept = [path.relative_to(study.folder / "trials").as_posix() for path in study.folder.rglob("*.pt")]
    assert kept == [f"{study.best().number:04d}/checkpoints/best.pt"]


def test_a_nested_search_returns_overrides(compose, tmp_path):
    given = compose(kfold__n_splits=3, kfold__fold=0, kfold__inner_trials=3)
    lines = []
    chosen = command.nested(given, tmp_path / "inner", 3, lines.append, objective=objectives.quadratic)
    assert any(one.startswith("training.learning_rate=") for one in chosen)
    assert sum("complete" in one for one in lines) == 3
    with pytest.raises(ConfigError, match="a search within a fold has no say in"):
        command.nested(compose("+hpo.trial.run.seed=3", kfold__n_splits=3, kfold__fold=0), tmp_path / "other", 3, print)


def test_a_password_is_in_no_run(compose, tmp_path):
    url = "postgresql://me:secret@host/base"
    assert masked(url) == "postgresql://me:***@host/base"
    settings = compose(hpo__storage=f"'{url}'")
    for made in (trial.settings_of(settings, {}, tmp_path), trial.best_settings(settings, {})):
        assert "secret" not in json.dumps(
            dataclasses.asdict(made) if dataclasses.is_dataclass(made) else made.model_dump()
        )
    document.write_settings(settings, tmp_path)
    assert (tmp_path / document.SETTINGS).stat().st_mode & 0o777 == 0o600


def test_a_storage_of_another_kind_or_without_a_server_is_refused(open_study):
    for url in ("mysql://host/base", "nonsense"):
        with pytest.raises(ConfigError, match=r"hpo\.storage"):
            open_study(hpo__storage=f"'{url}'")


def test_a_trial_whose_worker_was_killed_before_it_named_itself_is_run_again(tmp_path, search):
    search("quadratic", hpo__n_trials=2)
    optuna.load_study(study_name=None, storage=f"sqlite:///{tmp_path / 'study' / 'study.db'}").ask()
    ended, _ = search("quadratic", hpo__n_trials=4)
    assert [one["state"] for one in ended.document["trials"]].count("complete") == 4
