"""Loggers by name: what reaches them, how runs nest, and that none of them ends a run."""

import contextlib
import csv
import dataclasses
import json
import os
import signal
import subprocess
import sys
import threading
import time
import types

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


def test_what_a_run_is_within_is_told_from_the_outside_in():
    assert Within().levels("run") == (("run", "run"),)
    assert Within(study="s", trial=3).levels("run") == (("study", "s"), ("trial", "trial-3"))
    assert Within(study="s", trial=3, fold=0).levels("run") == (
        ("study", "s"),
        ("trial", "trial-3"),
        ("fold", "fold-0"),
    )
    assert Within(study="s", fold=1).levels("run") == (("study", "s"), ("fold", "fold-1"))


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
    assert last["running"] == "model aot_eager, loss none"
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
    assert record.load(tmp_path / "run")["measurements"]["logging_step_ms"] > 0


def test_a_slow_logger_holds_up_no_step_and_gets_all(tmp_path, run, monkeypatch):
    heard, may_go_on = [], threading.Event()

    class Slow:
        def log_metrics(self, figures, step):
            assert may_go_on.wait(600)
            heard.append(step)

        def finalize(self, how):
            heard.append(how)

    act = fit._Fitting.step

    def step(self, batches):
        act(self, batches)
        if self.position.step == 3:  # all steps are done, and nothing was passed on yet
            assert not heard
            may_go_on.set()

    monkeypatch.setattr(fit._Fitting, "step", step)
    monkeypatch.setattr(tracking, "_csv", lambda *_: Slow())
    monkeypatch.setattr(tracking, "_tell_running", lambda *_: None)
    assert run(run__logger="csv").status == "finished"
    assert [step for step in heard if step in (1, 2)] == [1, 2]
    assert heard[-1] == "success"


def test_an_interrupted_run_leaves_a_logger_that_hangs_also_where_no_more_may_wait(tmp_path, run, monkeypatch, capsys):
    may_go_on = threading.Event()

    class Hanging:
        def log_metrics(self, *_, **__):
            may_go_on.wait(600)

        def finalize(self, how):
            pass

    act = fit._Fitting.step

    def step(self, batches):
        act(self, batches)
        if self.position.step == 2:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(fit._Fitting, "step", step)
    monkeypatch.setattr(tracking, "_csv", lambda *_: Hanging())
    monkeypatch.setattr(tracking, "_WAITING", 2)
    monkeypatch.setattr(tracking, "_PATIENCE_SECONDS", 0.1)
    try:
        assert run(run__logger="csv").status == "interrupted"
        assert record.load(tmp_path / "run")["status"] == "interrupted"
        assert "run.logger=csv is slow, and left" in capsys.readouterr().out
    finally:
        may_go_on.set()


def test_a_logger_that_would_end_its_thread_is_left(run, monkeypatch, capsys):
    class Exits:
        def log_metrics(self, *_, **__):
            raise SystemExit("no login")

        def finalize(self, how):
            pass

    monkeypatch.setattr(tracking, "_csv", lambda *_: Exits())
    assert run(run__logger="csv").status == "finished"
    assert "run.logger=csv fails (SystemExit: no login); the run goes on without it" in capsys.readouterr().out


def test_a_logger_that_cannot_begin_ends_those_before_it(run, monkeypatch):
    heard = []

    def refuse(*_):
        raise RuntimeError("no server at http://nowhere")

    monkeypatch.setattr(tracking, "_csv", lambda *_: types.SimpleNamespace(finalize=heard.append))
    monkeypatch.setattr(tracking, "_mlflow", refuse)
    with pytest.raises(ConfigError, match=r"run\.logger=mlflow cannot begin"):
        run(run__logger="[csv,mlflow]")
    assert heard == ["failed"]


def test_tensorboard_has_the_words_too(tmp_path, run):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run(run__logger="tensorboard")
    seen = EventAccumulator(str(tmp_path / "run" / "logs" / "start-1"))
    seen.Reload()
    tags = seen.Tags()
    assert {"loss", "validation_f1", "recompiles"} <= set(tags["scalars"])
    assert any("running" in tag for tag in tags["tensors"])


@pytest.mark.campaign
@pytest.mark.filterwarnings("ignore")  # SQLAlchemy deprecates what MLflow does
def test_mlflow_nests_study_trial_and_fold_in_one_store(tmp_path, run):
    client = mlflow()(f"sqlite:///{tmp_path}/mlflow.db")
    for trial, fold in ((0, 0), (0, 1), (1, None)):
        within = Within(study="search", trial=trial, fold=fold, folder=tmp_path)
        run(within, run__logger="mlflow", run__folder=tmp_path / f"run-{trial}-{fold}")
    place = client.get_experiment_by_name("search").experiment_id
    by_name = {one.info.run_name: one for one in client.search_runs([place])}
    assert set(by_name) == {"search", "trial-0", "trial-0/fold-0", "trial-0/fold-1", "trial-1"}
    above = {name: one.data.tags.get("mlflow.parentRunId") for name, one in by_name.items()}
    ids = {name: one.info.run_id for name, one in by_name.items()}
    assert above == {
        "search": None, "trial-0": ids["search"], "trial-0/fold-0": ids["trial-0"], "trial-0/fold-1": ids["trial-0"],
        "trial-1": ids["search"],
    }  # fmt: skip
    leaf = by_name["trial-0/fold-1"]
    assert {"loss", "validation_f1", "compile_seconds"} <= leaf.data.metrics.keys()
    assert (leaf.info.status, leaf.data.tags["hotloop.running"]) == ("FINISHED", "model none, loss none")
    assert leaf.data.params["training/batch_size"] == "4"


@pytest.mark.campaign
@pytest.mark.filterwarnings("ignore")  # as above
def test_a_resumed_run_is_the_same_run_of_mlflows(tmp_path, run):
    client = mlflow()(f"sqlite:///{tmp_path}/run/mlflow.db")
    run(run__logger="mlflow")
    recipes.load("criteria").train(start.prepare([f"run.resume={tmp_path / 'run'}", "training.max_steps=5"]))
    (only,) = client.search_runs([client.get_experiment_by_name("criteria").experiment_id])
    assert [one.step for one in client.get_metric_history(only.info.run_id, "loss")] == [1, 2, 3, 4, 5]


@pytest.mark.campaign
@pytest.mark.filterwarnings("ignore")  # as above
def test_studies_of_one_name_are_told_apart_by_their_folders(tmp_path, run):
    client = mlflow()(f"sqlite:///{tmp_path}/mlflow.db")
    for place in ("one", "two"):
        (tmp_path / place).mkdir()
        within = Within(study="recipe/search", trial=0, folder=tmp_path / place)
        run(
            within,
            run__logger="mlflow",
            run__tracking=f"sqlite:///{tmp_path}/mlflow.db",
            run__folder=tmp_path / f"run-{place}",
        )
    found = client.search_runs([client.get_experiment_by_name("recipe/search").experiment_id])
    above = {one.data.tags["hotloop.folder"]: one.info.run_id for one in found if "hotloop.level" in one.data.tags}
    assert set(above) == {str(tmp_path / "one"), str(tmp_path / "two")}
    trials = [one for one in found if "hotloop.level" not in one.data.tags]
    assert {one.data.tags["mlflow.parentRunId"] for one in trials} == set(above.values())


STORES = """
import os, sys
from hotloop import recipes
from hotloop.train import start
from hotloop.train.tracking import Tracking
before = os.environ.get("MLFLOW_TRACKING_URI")
class Record: document = {"starts": 1}
class Interrupt: signal = None
Tracking(start.prepare(sys.argv[1:]), Record, print, Interrupt)
assert os.environ.get("MLFLOW_TRACKING_URI") == before
"""


@pytest.mark.campaign
@pytest.mark.long
def test_two_workers_may_open_a_fresh_store_of_mlflows_at_once(tmp_path):
    mlflow()
    from training_fixtures import overrides

    both = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", STORES, *overrides(tmp_path, run__logger="mlflow", run__folder=tmp_path)],
            stderr=subprocess.PIPE, text=True,
        )
        for _ in range(2)
    ]  # fmt: skip
    said = [one.communicate(timeout=900)[1] for one in both]
    assert [one.returncode for one in both] == [0, 0], said


def test_a_store_is_opened_by_one_at_a_time(tmp_path, prepare, monkeypatch):
    inside, most = [], []

    class Logger:
        run_id, tags = "x", None

        def __init__(self, **_):
            inside.append(1)
            most.append(len(inside))
            time.sleep(0.1)
            inside.pop()

        def log_hyperparams(self, _):
            os.environ["MLFLOW_TRACKING_URI"] = "sqlite:///elsewhere"

    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setattr(tracking, "_installed", lambda _: None)
    monkeypatch.setattr(tracking, "require", lambda *_: types.SimpleNamespace(MLFlowLogger=Logger))
    begun = prepare(run__folder=tmp_path)
    threads = [threading.Thread(target=tracking._mlflow, args=(begun, "start-1")) for _ in range(3)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert most == [1, 1, 1]
    assert "MLFLOW_TRACKING_URI" not in os.environ


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
    monkeypatch.setattr(tracking, "_csv", lambda *_: Logger())
    monkeypatch.setattr(tracking, "_PATIENCE_SECONDS", 300.0)
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

    monkeypatch.setattr(tracking, "_csv", lambda *_: Broken())
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
