"""Loggers by name: what reaches them, how runs nest, and that none of them ends a run."""

import contextlib
import csv
import dataclasses
import json
import os
import signal
import subprocess
import sys

import pytest

from hotloop import recipes, record
from hotloop.errors import ConfigError, MissingExtraError, RunPrunedError
from hotloop.train import fit, start, tracking
from hotloop.train.within import Within


def mlflow():
    """MLflow's client."""
    from mlflow.tracking import MlflowClient

    return MlflowClient


@pytest.fixture
def run(prepare):
    """Train a tiny run within something."""

    def train(within=None, **more):
        begun = prepare(training__max_steps=3, **more)
        begun = dataclasses.replace(begun, within=within or Within())
        return recipes.load("criteria").train(begun)

    return train


@pytest.mark.campaign
def test_compile_facts_are_logged_with_the_metrics(tmp_path, run):
    run(
        run__logger="csv",
        training__optimization__use_torch_compile="true",
        compile__preset="aot_eager",
        compile__measure_eager_steps=1,
    )
    with (tmp_path / "run" / "logs" / "start-1" / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    last = {key: value for row in rows for key, value in row.items() if value}
    assert float(last["compile_seconds"]) > 0
    assert float(last["recompiles"]) == 0
    assert {"loss", "learning_rate", "validation_f1"} <= last.keys()


def test_several_loggers_get_the_same_each_so_many_steps(tmp_path, run):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run(run__logger="[csv,tensorboard]", run__log_every=2)
    folder = tmp_path / "run" / "logs" / "start-1"
    with (folder / "metrics.csv").open() as file:
        steps = [int(row["step"]) for row in csv.DictReader(file) if row["loss"]]
    seen = EventAccumulator(str(folder))
    seen.Reload()
    assert steps == [one.step for one in seen.Scalars("loss")] == [2]
    assert [one.step for one in seen.Scalars("validation_f1")] == [3]
    assert len(record.load(tmp_path / "run")["steps"]) == 3


@pytest.mark.campaign
@pytest.mark.filterwarnings("ignore")  # as above
def test_a_resumed_run_is_the_same_run_of_mlflows(tmp_path, run):
    client = mlflow()(f"sqlite:///{tmp_path}/run/mlflow.db")
    run(run__logger="mlflow")
    recipes.load("criteria").train(start.prepare([f"run.resume={tmp_path / 'run'}", "training.max_steps=5"]))
    (only,) = client.search_runs([client.get_experiment_by_name("criteria").experiment_id])
    assert [one.step for one in client.get_metric_history(only.info.run_id, "loss")] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("happens", "ended"),
    [
        (lambda: None, ("finished", "success")),
        (lambda: signal.raise_signal(signal.SIGINT), ("interrupted", "KILLED")),
        (lambda: fail(RuntimeError("planted")), ("failed", "failed")),
        (lambda: fail(RunPrunedError("planted")), ("pruned", "KILLED")),
        (lambda: fail(KeyboardInterrupt()), ("interrupted", "KILLED")),
    ],
)
def test_a_run_is_ended_as_it_ended(tmp_path, run, monkeypatch, happens, ended):
    heard = []

    class Logger:
        def log_metrics(self, *_, **__):
            pass

        def finalize(self, how):
            heard.append(how)

    act = fit._Fitting.step
    monkeypatch.setattr(fit._Fitting, "step", lambda self, batches: [act(self, batches), happens()])
    monkeypatch.setattr(tracking, "_begun", lambda *_: Logger())
    with contextlib.suppress(RuntimeError, KeyboardInterrupt):
        run(run__logger="csv")
    assert (record.load(tmp_path / "run")["status"], *heard) == ended


def fail(error):
    raise error


WANDB = """
import dataclasses, sys
from hotloop import recipes
from hotloop.train import start
from hotloop.train.within import Within
begun = start.prepare(sys.argv[1:])
recipes.load("criteria").train(dataclasses.replace(begun, within=Within(study="search", trial=2, fold=1)))
"""


@pytest.mark.campaign
def test_weights_and_biases_groups_by_study(tmp_path, prepare):
    from training_fixtures import overrides

    # In a process of its own: wandb keeps a service running, and reads its mode from the environment.
    given = overrides(tmp_path, run__logger="wandb", training__max_steps=3)
    environment = {"WANDB_MODE": "offline", "WANDB_SILENT": "true", "HOTLOOP_CACHE_DIR": ""}
    ended = subprocess.run(
        [sys.executable, "-c", WANDB, *given], capture_output=True, text=True, check=False, timeout=900,
        env={**os.environ, **environment},
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    (file,) = (tmp_path / "run" / "logs" / "wandb").glob("offline-run-*/*.wandb")
    kept = file.read_bytes()  # records of protobuf, in which text stands as it is
    for word in ("search", "trial-2/fold-1", "validation_f1", "compile_seconds", "hotloop-criteria"):
        assert word.encode() in kept, word
    assert (tmp_path / "run" / "logs" / "wandb-run").read_text() in file.name


def test_a_logger_that_fails_is_said_once_and_the_run_goes_on(tmp_path, run, monkeypatch, capsys):
    class Broken:
        def log_metrics(self, *_, **__):
            raise OSError("disk [full]")

    monkeypatch.setattr(tracking, "_begun", lambda *_: Broken())
    assert run(run__logger="csv").status == "finished"
    assert capsys.readouterr().out.count("run.logger=csv fails (OSError: disk [full]); the run goes on without it") == 1
    assert record.load(tmp_path / "run")["status"] == "finished"


def test_a_logger_that_cannot_begin_ends_the_run_before_it_trains(tmp_path, run, monkeypatch):
    def refuse(*_):
        raise RuntimeError("no server at http://nowhere")

    monkeypatch.setattr(tracking, "_mlflow", refuse)
    with pytest.raises(ConfigError, match=r"run\.logger=mlflow cannot begin: RuntimeError: no server"):
        run(run__logger="mlflow")
    assert json.loads(json.dumps(record.load(tmp_path / "run")["steps"])) == []


@pytest.mark.parametrize("name", ["tensorboard", "mlflow", "wandb"])
def test_a_missing_package_names_the_extra(run, monkeypatch, name):
    monkeypatch.setattr(tracking.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(MissingExtraError, match=rf"hotloop\[{name}\]"):
        run(run__logger=name)
