"""Folds that run at the same time are those of one process; a worker that is killed costs no fold; GPUs are shared out."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch
from shared import once

from hotloop import record
from hotloop.errors import ConfigError
from hotloop.recipes import load
from hotloop.report import folds as report
from hotloop.train import configure, kfold, workers
from hotloop.train.search import command
from hotloop.train.search.preparing import prepared

PROGRAM = """
    import json, os, signal, time
    from pathlib import Path

    import torch
    from torch.nn import functional as F

    import hotloop
    import hotloop.errors

    HERE = Path(__file__).parent


    def make(lr: float = 0.1, act: str = "", *, fold: hotloop.Fold | None = None):
        fold = fold or hotloop.Fold()
        rows, held_out = fold.split(24, labels=[row % 2 for row in range(24)])
        x, y = torch.arange(24.0)[:, None] % 2, torch.arange(24) % 2
        model = torch.nn.Linear(1, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=lr)
        steps = []

        def step(a, b):
            loss = F.cross_entropy(model(a), b)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        def before(a, b):
            steps.append(a)
            marks = [HERE / f"{act}-{number}" for number in range(3)]
            if fold.number == 1 and len(steps) == {"dies": 3, "always": 1}.get(act):
                left = [one for one in marks if not one.exists()]
                if act == "always" or len(left) == 3:
                    left[0].touch()
                    os.kill(os.getpid(), signal.SIGKILL)
            if act == "waits" and len(steps) == 3:
                (HERE / f"waits-{fold.number}").write_text(str(os.getpid()))
                time.sleep(0.2)
                while not (HERE / "go").exists():
                    time.sleep(0.05)
            if act == "wrong" and fold.number == 1:
                raise hotloop.errors.ConfigError("planted: nobody can use this")
            return a, b

        def metrics():
            with torch.no_grad():
                right = (model(x[held_out]).argmax(1) == y[held_out]).float().mean()
            return {"accuracy": right, "first": float(held_out[0])}

        batches = [(x[rows], y[rows])] * 4
        return hotloop.Workload(model, optimizer, step, batches, metrics=metrics, before=before)
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    (tmp_path / "own.py").write_text(textwrap.dedent(PROGRAM))
    monkeypatch.setenv("HOTLOOP_CACHE_DIR", "")
    return f"{tmp_path / 'own.py'}:make"


@pytest.fixture
def cross(own, tmp_path):
    """Run a cross-validation of three folds of four steps, each of which is saved."""

    def run(folder, *more, workers=2):
        settings = ["kfold.n_splits=3", f"kfold.workers={workers}", "training.num_epochs=1", *more]
        given = [own, f"run.folder={tmp_path / folder}", "training.checkpoint_every_steps=1"]
        study = kfold.prepare([*given, *settings, "recipe.goal=max:accuracy"])
        return kfold.run(study, load(study.settings.recipe.name))

    return run


def metrics(ended):
    return [(one["best"], one["last"], one["best_step"]) for one in ended.document["folds"]]


def starts(ended):
    return [record.load(ended.folder / f"fold-{fold}")["starts"] for fold in range(3)]


def losses(ended, fold):
    return [one["loss"] for one in record.load(ended.folder / f"fold-{fold}")["steps"]]


@pytest.fixture
def whole(cross):
    return cross("whole", workers=1)


@pytest.mark.campaign
def test_a_killed_worker_costs_no_fold_and_no_step_is_trained_twice(cross, whole, capsys):
    ended = cross("study", "program.act=dies")
    assert ended.status == "finished"
    assert metrics(ended) == metrics(whole)
    assert starts(ended) == [1, 2, 1]
    assert losses(ended, 1) == losses(whole, 1)
    assert "Fold 1: its worker died (SIGKILL); it goes on from its checkpoint" in capsys.readouterr().out


@pytest.mark.campaign
def test_a_fold_whose_workers_all_die_fails_alone(cross):
    ended = cross("study", "program.act=always")
    assert ended.status == "failed"
    assert [one["status"] for one in ended.document["folds"]] == ["finished", "failed", "finished"]
    assert "died (SIGKILL), and so did the one before" in ended.document["folds"][1]["error"]
    assert starts(ended)[1] == 2


@pytest.mark.campaign
@pytest.mark.parametrize("number", [pytest.param(signal.SIGINT, marks=pytest.mark.long), signal.SIGKILL])
def test_a_command_that_is_stopped_or_killed_goes_on_and_comes_to_the_same(cross, whole, own, tmp_path, number):
    folder = tmp_path / "study"
    arguments = [
        "kfold", own, "kfold.n_splits=3", "kfold.workers=2", "training.num_epochs=1", f"run.folder={folder}",
        "training.checkpoint_every_steps=1", "recipe.goal=max:accuracy", "program.act=waits",
    ]  # fmt: skip
    process = subprocess.Popen([sys.executable, "-m", "hotloop", *arguments])
    once(lambda: all((tmp_path / f"waits-{fold}").exists() for fold in range(2)))
    process.send_signal(number)
    if number == signal.SIGKILL:
        process.wait(300)
    else:  # each worker has heard of it
        logs = [folder / "workers" / f"{worker}.log" for worker in (1, 2)]
        once(lambda: all("finishing this step" in log.read_text() for log in logs))
    (tmp_path / "go").touch()
    code = process.wait(300)
    assert code == (130 if number == signal.SIGINT else -signal.SIGKILL)
    if number == signal.SIGINT:
        left = report.load(folder)
        assert left["status"] == "interrupted"
        assert [one["status"] for one in left["folds"]] == ["interrupted", "interrupted", "pending"]
    # At once: workers whose parent was killed may still be saving, and have the folders.
    study = kfold.prepare([f"run.resume={folder}"])
    ended = kfold.run(study, load(study.settings.recipe.name))
    assert ended.status == "finished"
    assert metrics(ended) == metrics(whole)
    assert [losses(ended, fold) for fold in range(3)] == [losses(whole, fold) for fold in range(3)]


# -- GPUs --------------------------------------------------------------------------------------------------------------


@pytest.fixture
def machine(monkeypatch):
    """A machine with so many GPUs."""

    def have(count, visible=""):
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        if visible:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        else:
            monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    return have


def seen(settings, many):
    return [workers.environment(settings, many, one).get("CUDA_VISIBLE_DEVICES") for one in range(1, many + 1)]


@pytest.mark.parametrize(
    ("count", "visible", "more", "each"),
    [
        (4, "", [], ["0", "1", "2", "3"]),
        (4, "", ["run.devices=2"], ["0,1", "2,3"]),
        (5, "", ["run.devices=2"], ["0,1", "2,3"]),
        (2, "3,GPU-5d8f", [], ["3", "GPU-5d8f"]),
        (0, "", [], [None]),
        (1, "", ["run.devices=2"], [None]),
        (4, "", ["run.accelerator=cpu"], [None]),
    ],
)
def test_auto_is_a_worker_for_each_share_of_the_gpus(own, machine, count, visible, more, each):  # noqa: PLR0917 - a machine, and what follows
    machine(count, visible)
    settings = configure.load([own, *more])
    assert workers.count("auto", settings) == len(each)
    assert seen(settings, len(each)) == each


@pytest.mark.parametrize("trial", [[], ["+hpo.trial.run.devices=2"]])
def test_a_search_has_a_worker_for_each_share_of_its_trials(own, machine, trial):
    machine(4)
    settings = prepared(configure.load_search([own, "hpo.workers=auto", "recipe.goal=max:accuracy",
                                               "hpo.space.program.lr.log=[1.0e-3,1.0]", *trial]))  # fmt: skip
    assert command.with_workers(settings).hpo.workers == (2 if trial else 4)


def returns(what):
    return {"told": what, "gpus": os.environ.get("CUDA_VISIBLE_DEVICES")}


def refuses():
    raise ConfigError("planted")


def dies():
    print("last words", flush=True)
    os._exit(3)


def waits():
    print("began", flush=True)
    time.sleep(600)


def ended(pool):
    found = []
    once(lambda: found.extend(pool.ended()) or not pool.running)
    return found


def test_a_worker_returns_raises_our_errors_dies_or_is_interrupted(tmp_path, monkeypatch):
    here = Path(__file__).parent
    monkeypatch.setenv("PYTHONPATH", f"{here}{os.pathsep}{here.parent}")
    found = {}
    for name, given in {"returns": {"what": [1]}, "refuses": {}, "dies": {}}.items():
        pool = workers.Workers(f"test_train_workers:{name}", tmp_path / name)
        pool.start(1, given, {"CUDA_VISIBLE_DEVICES": "2,3"})
        (found[name],) = ended(pool)
    assert found["returns"].result == {"told": [1], "gpus": "2,3"}
    assert isinstance(found["refuses"].error, ConfigError)
    assert found["dies"].died == "exit code 3: last words"
    pool = workers.Workers("test_train_workers:waits", tmp_path / "waits")
    pool.start(1, {})
    once(lambda: "began" in pool.log(1).read_text())
    pool.interrupt()
    (one,) = ended(pool)
    assert isinstance(one.error, KeyboardInterrupt)
