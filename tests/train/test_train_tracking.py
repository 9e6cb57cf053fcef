"""Loggers by name: what reaches them, how runs nest, and that none of them ends a run."""

import csv
import dataclasses
import json

import pytest

from hotloop import recipes, record
from hotloop.errors import ConfigError, MissingExtraError
from hotloop.train import tracking
from hotloop.train.within import Within


@pytest.fixture
def run(prepare):
    """Train a tiny run within something."""

    def train(within=None, **more):
        begun = prepare(training__max_steps=3, **more)
        begun = dataclasses.replace(begun, within=within or Within())
        return recipes.load("criteria").train(begun)

    return train


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


def fail(error):
    raise error


def test_a_logger_that_fails_is_said_once_and_the_run_goes_on(tmp_path, run, monkeypatch, capsys):
    class Broken:
        def log_metrics(self, *_, **__):
            raise OSError("disk [full]")

    monkeypatch.setattr(tracking, "_begun", lambda *_: Broken())
    assert run(run__logger="csv").status == "finished"
    assert capsys.readouterr().out.count("run.logger=csv fails (OSError: disk [full]); the run goes on without it") == 1
    assert record.load(tmp_path / "run")["status"] == "finished"


def test_a_logger_that_cannot_begin_ends_the_run_before_it_trains(tmp_path, run, monkeypatch):
    def refuse(*_, **__):
        raise RuntimeError("no server at http://nowhere")

    monkeypatch.setattr("lightning.pytorch.loggers.MLFlowLogger", refuse)
    with pytest.raises(ConfigError, match=r"run\.logger=mlflow cannot begin: RuntimeError: no server"):
        run(run__logger="mlflow")
    assert json.loads(json.dumps(record.load(tmp_path / "run")["steps"])) == []


@pytest.mark.parametrize("name", ["tensorboard", "mlflow", "wandb"])
def test_a_missing_package_names_the_extra(run, monkeypatch, name):
    monkeypatch.setattr(tracking.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(MissingExtraError, match=rf"hotloop\[{name}\]"):
        run(run__logger=name)
