import json
import signal
import zipfile

import pytest
import torch
from training_fixtures import assert_same, load, losses, tiny_encoder

from hotloop import recipes, record
from hotloop.errors import ConfigError, DataError, HotloopError, TrainingFailedError
from hotloop.train import checkpoint, fit, start
from hotloop.train.search import preparing
from hotloop.train.supervised import Supervised


def metrics(folder):
    return [{k: v for k, v in entry.items() if k != "time"} for entry in record.load(folder)["metrics"]]


def stop_at(monkeypatch, step, act):
    """Do something at the end of one step of the run that comes next."""
    whole = fit._Fitting.step

    def acting(self, batches):
        whole(self, batches)
        if self.position.step == step:
            act()

    monkeypatch.setattr(fit._Fitting, "step", acting)


@pytest.mark.parametrize("stop", [1, 5, 9])
def test_a_run_interrupted_and_resumed_is_the_run_that_was_not(tmp_path, train, monkeypatch, stop):
    settings = {"training__gradient_accumulation": 2, "training__num_epochs": 3, "training__batch_size": 3}
    train(**settings, run__folder=tmp_path / "whole")
    assert load(tmp_path / "whole")["position"]["step"] == 18
    with monkeypatch.context() as patch:
        stop_at(patch, stop, lambda: signal.raise_signal(signal.SIGINT))
        outcome = train(**settings)
    assert (outcome.status, outcome.step) == ("interrupted", stop)
    assert record.load(tmp_path / "run")["status"] == "interrupted"
    resumed = recipes.load("criteria").train(start.prepare([f"run.resume={tmp_path / 'run'}"]))
    assert resumed.status == "finished"
    assert_same(load(tmp_path / "whole"), load(tmp_path / "run"))
    assert_same(load(tmp_path / "whole", "best.pt"), load(tmp_path / "run", "best.pt"))
    assert losses(tmp_path / "whole") == losses(tmp_path / "run")
    assert metrics(tmp_path / "whole") == metrics(tmp_path / "run")
    assert record.load(tmp_path / "run")["status"] == "finished"


def test_a_run_that_died_goes_on_from_its_last_periodic_checkpoint(tmp_path, train, monkeypatch):
    train(run__folder=tmp_path / "whole")

    def die():
        raise RuntimeError("planted")

    with monkeypatch.context() as patch:
        stop_at(patch, 8, die)
        with pytest.raises(RuntimeError, match="planted"):
            train(training__checkpoint_every_steps=3)
    assert load(tmp_path / "run")["position"]["step"] == 6
    assert record.load(tmp_path / "run")["status"] == "failed"
    recipes.load("criteria").train(start.prepare([f"run.resume={tmp_path / 'run'}"]))
    assert_same(load(tmp_path / "whole"), load(tmp_path / "run"))


def test_the_record_holds_what_a_reader_needs(tmp_path, train):
    train(training__max_steps=6)
    document = record.load(tmp_path / "run")
    assert document["status"] == "finished"
    assert [entry["step"] for entry in document["steps"]] == [1, 2, 3, 4, 5, 6]
    assert all({"seconds", "loss", "learning_rate", "running"} <= entry.keys() for entry in document["steps"])
    assert {entry["running"] for entry in document["steps"]} == {"none"}
    found = set(document["metrics"][0]) - {"step", "epoch", "split", "time"}
    assert found == set(preparing.METRICS["criteria"])
    assert {"step", "epoch", "split"} <= document["metrics"][0].keys()
    assert document["settings"]["training"]["max_steps"] == 6
    assert {"torch", "python", "device_name", "hotloop", "packages", "cuda"} <= document["environment"].keys()
    measured = document["measurements"]
    assert {"cold_seconds", "steady_step_ms", "peak_memory_bytes", "samples_per_second"} <= measured.keys()
    assert document["components"]["model"]["running"] == "none"
    assert (tmp_path / "run" / "report.html").stat().st_size > 1000
    assert (tmp_path / "run" / "settings.yaml").is_file()


def test_the_settings_of_a_run_repeat_it(tmp_path, train):
    train()
    again = start.prepare([f"run.folder={tmp_path / 'again'}"], tmp_path / "run" / "settings.yaml")
    recipes.load("criteria").train(again)
    assert losses(tmp_path / "run") == losses(tmp_path / "again")


def test_early_stopping_ends_the_run_once_f1_no_longer_improves(train):
    outcome = train(training__num_epochs=20, training__learning_rate=1e-12, training__early_stopping_patience=2)
    assert (outcome.status, outcome.step, outcome.best_step) == ("finished", 27, 9)


def test_a_loss_that_is_not_finite_ends_the_run_before_it_is_written(tmp_path, train, monkeypatch):
    def poison():
        criteria = fit._Fitting.step

        def step(self, batches):
            if self.position.step == 4:
                for batch in batches:
                    batch.labels.fill_(float("nan"))
            return criteria(self, batches)

        monkeypatch.setattr(fit._Fitting, "step", step)

    poison()
    with pytest.raises(
        HotloopError, match=r"step 5: the loss is nan.*lower training\.learning_rate(.|\n)*run\.resume="
    ):
        train(training__checkpoint_every_steps=2)
    document = record.load(tmp_path / "run")
    assert document["status"] == "failed"
    assert "the loss is nan" in document["error"]
    assert all(torch.isfinite(tensor).all() for tensor in load(tmp_path / "run")["model"]["model"].values())
    assert (tmp_path / "run" / "report.html").is_file()


def test_running_out_of_memory_names_what_to_change(train, monkeypatch):
    def take(self, batch, step):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.")

    monkeypatch.setattr(Supervised, "take", take)
    with pytest.raises(HotloopError, match=r"step 1: out of memory(.|\n)*training\.batch_size(.|\n)*No checkpoint"):
        train()


def test_a_folder_that_holds_a_run_is_not_written_over(tmp_path, train, prepare):
    train(training__max_steps=1)
    with pytest.raises(ConfigError, match=r"holds a run already: go on with it by run\.resume="):
        prepare()
    with pytest.raises(ConfigError, match="holds a run already"):
        prepare(run__folder=tmp_path / "not there" / ".." / "run")


def test_a_resumed_run_keeps_its_data_and_model_and_may_change_its_rate(tmp_path, train):
    train(training__max_steps=2)
    again = [f"run.resume={tmp_path / 'run'}"]
    with pytest.raises(ConfigError, match=r"data\.sample_size=.* cannot change"):
        start.prepare([*again, "data.sample_size=20"])
    changed = start.prepare(
        [*again, "training.learning_rate=0.5", "training.max_steps=4", "training.warmup_fraction=0"]
    )
    recipes.load("criteria").train(changed)
    steps = record.load(tmp_path / "run")["steps"]
    assert steps[2]["learning_rate"] == pytest.approx(0.25)
    (tmp_path / "pairs.csv").rename(tmp_path / "moved.csv")
    again.append(f"data.path={tmp_path / 'moved.csv'}")
    assert recipes.load("criteria").train(start.prepare([*again, "data.on_bad_rows=skip"])).status == "finished"
    (tmp_path / "moved.csv").write_text((tmp_path / "moved.csv").read_text().replace("x1,", "y1,"))
    with pytest.raises(DataError, match="trained on other data"):
        recipes.load("criteria").train(start.prepare(again))


def test_resuming_a_run_that_is_done_trains_nothing(tmp_path, train):
    train()
    outcome = recipes.load("criteria").train(
        start.prepare([f"run.resume={tmp_path / 'run' / 'checkpoints' / 'last.pt'}"])
    )
    assert (outcome.status, outcome.step) == ("finished", 18)
    assert len(record.load(tmp_path / "run")["steps"]) == 18


@pytest.mark.parametrize("content", [b"", b"not a checkpoint", b"PK\x03\x04torn"])
def test_a_checkpoint_that_cannot_be_read_is_refused(tmp_path, content):
    path = tmp_path / "last.pt"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match="cannot be read"):
        checkpoint.load(path)
    with pytest.raises(ConfigError, match="no such file"):
        checkpoint.load(tmp_path / "other.pt")


OF_FOCUS = {"recipe": {"name": "focus"}}


def test_no_changed_byte_of_a_checkpoint_is_trained_on(tmp_path):
    path = tmp_path / "last.pt"
    kept = {"model": {"model": {"w": torch.arange(9.0)}}, "others": {}, "settings": OF_FOCUS, "position": {"step": 3}}
    torch.serialization.set_crc32_options(compute_crc32=False)  # a program's own affair
    try:
        checkpoint.save(path, kept)
        assert not torch.serialization.get_crc32_options()
    finally:
        torch.serialization.set_crc32_options(compute_crc32=True)
    whole, refused = path.read_bytes(), 0
    for at in range(0, len(whole), 3):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :])
        try:
            assert repr(checkpoint.load(path)) == repr({"schema": checkpoint.SCHEMA_VERSION, **kept})  # a date, say
        except ConfigError as error:
            refused += 1
            assert "has changed since it was written" in str(error)  # noqa: PT017 - some bytes mean nothing
    assert refused > len(whole) / 6
    at = whole.index(torch.arange(9.0).numpy().tobytes())
    path.write_bytes(whole[: at + 7] + b"\x41" + whole[at + 8 :])
    with pytest.raises(ConfigError, match="has another checksum than it was written with"):
        checkpoint.load(path)


def test_a_checkpoint_that_is_packed_fills_no_memory(tmp_path):
    torch.save({"schema": 2}, tmp_path / "plain.pt")
    with zipfile.ZipFile(tmp_path / "plain.pt") as plain, zipfile.ZipFile(tmp_path / "last.pt", "w", 8) as packed:
        for name in plain.namelist():
            packed.writestr(name, plain.read(name))
    with pytest.raises(ConfigError, match="a part of it is packed"):
        checkpoint.load(tmp_path / "last.pt")


def test_a_checkpoint_executes_nothing(tmp_path):
    class Bomb:
        def __reduce__(self):
            return (json.loads, ("1",))

    torch.save({"schema": 1, "model": Bomb()}, tmp_path / "last.pt")
    with pytest.raises(ConfigError, match="cannot be read") as refused:
        checkpoint.load(tmp_path / "last.pt")
    assert "weights_only=False" not in str(refused.value)  # torch advises to switch it off


def test_a_checkpoint_that_fails_to_write_leaves_the_former(tmp_path):
    whole = {"model": {}, "others": {}, "settings": OF_FOCUS, "position": {"step": 3}}
    path = tmp_path / "last.pt"
    checkpoint.save(path, whole)
    with pytest.raises(TrainingFailedError, match=r"last\.pt cannot be written .*<lambda>.* tensors and plain values"):
        checkpoint.save(path, {"a": lambda: None})
    assert checkpoint.load(path) == {"schema": checkpoint.SCHEMA_VERSION, **whole}
    assert [one.name for one in tmp_path.iterdir()] == ["last.pt"]


def test_accumulated_batches_make_the_step_of_one_large_batch(tmp_path, train):
    plain = {"model__name": tiny_encoder(dropout=0.0), "training__max_steps": 4}
    train(**plain, run__folder=tmp_path / "large")
    train(**plain, run__folder=tmp_path / "small", training__batch_size=2, training__gradient_accumulation=2)
    assert losses(tmp_path / "small") == pytest.approx(losses(tmp_path / "large"), rel=1e-5)
    small, large = (load(tmp_path / name)["model"]["model"] for name in ("small", "large"))
    # Adam turns rounding in a gradient that is nearly zero into a step of up to the learning rate: the head is robust.
    assert torch.allclose(small["net.classifier.weight"], large["net.classifier.weight"], atol=1e-4)


def test_bf16_runs_and_keeps_its_parameters_in_float32(tmp_path, train):
    assert train(training__optimization__use_bf16="true", training__max_steps=2).status == "finished"
    assert {tensor.dtype for tensor in load(tmp_path / "run")["model"]["model"].values()} == {torch.float32}


def test_a_report_that_fails_does_not_take_the_run_with_it(train, monkeypatch, capsys):
    from hotloop import report

    def fail(*_):
        raise ValueError("planted")

    monkeypatch.setattr(report, "write_html", fail)
    assert train(training__max_steps=1).status == "finished"
    assert "The report cannot be written (ValueError: planted)" in capsys.readouterr().out


def test_the_record_has_what_was_said_of_the_data_and_the_settings_that_are_read(train, tmp_path):
    train(training__max_steps=1, compile__preset="inductor")
    document = record.load(tmp_path / "run")
    assert document["told"]["data"][0].startswith("train 36 pairs in 18 groups")
    assert document["told"]["settings"][0].startswith("compile.preset='inductor' has no effect while")
    assert {"data", "model", "training"} <= set(document["settings"])
    assert not {"compile", "pictures", "hpo"} & set(document["settings"])
