"""A LightningModule and its data go through the same door: settings, run, record, resuming, folds and search."""

import dataclasses
import json
import textwrap
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from hotloop import recipes, record
from hotloop.cli import app
from hotloop.errors import ConfigError, TrainingFailedError
from hotloop.integrations.lightning import owned_step
from hotloop.step.loop import loop
from hotloop.train import checkpoint, configure, program, requests, start
from hotloop.train.account import Account

pytestmark = pytest.mark.filterwarnings("default")  # the framework warns of its own use of torch

DIGITS = Path(__file__).parent.parent.parent / "examples" / "lightning_digits.py"
PROGRAM = """
    import os
    import signal

    import lightning.pytorch as pl
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    import hotloop


    class Module(pl.LightningModule):
        '''A small one.'''

        def __init__(self, lr: float = 0.05, bad_at: int | None = None):
            super().__init__()
            self.save_hyperparameters()
            self.net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1))

        def training_step(self, batch, batch_idx):
            step, loss = self.global_step + 1, (self.net(batch[0]) - batch[1]).pow(2).mean()
            if os.environ.get("STOP_AT") == str(step):
                signal.raise_signal(signal.SIGINT)
            if os.environ.get("KILL_AT") == str(step):
                os._exit(9)
            return loss * float("nan") if step == self.hparams.bad_at else loss

        def validation_step(self, batch, batch_idx):
            self.log("error", (self.net(batch[0]) - batch[1]).pow(2).mean())

        def configure_optimizers(self):
            optimizer = torch.optim.Adam(self.parameters(), lr=self.hparams.lr)
            schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": "error"}}


    class Data(pl.LightningDataModule):
        def __init__(self, rows: int = 20, fold: hotloop.Fold | None = None):
            super().__init__()
            self.rows, self.fold = rows, fold or hotloop.Fold()

        def setup(self, stage):
            x = torch.randn(self.rows, 4, generator=torch.Generator().manual_seed(0))
            train, held = self.fold.split(self.rows)
            self.train, self.held = (TensorDataset(x[side], x[side].sum(1, keepdim=True)) for side in (train, held))

        def train_dataloader(self):
            return DataLoader(self.train, batch_size=4, shuffle=True)

        def val_dataloader(self):
            return DataLoader(self.held, batch_size=4)


    class Watched(Module):
        def configure_callbacks(self):
            return [pl.callbacks.ModelCheckpoint(monitor="error", save_top_k=1)]

        def on_train_end(self):
            for callback in self.trainer.checkpoint_callbacks:
                if path := getattr(callback, "best_model_path", ""):
                    self.trainer.strategy.checkpoint_io.load_checkpoint(path)


    class Keeps(Module):
        def __init__(self, size: hotloop.Fold | None = None):
            pl.LightningModule.__init__(self)
            self.save_hyperparameters({"size": object()})


    class Loud(Module):
        def __init__(self, data: int = 1):
            super().__init__()
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "fits.py"
    path.write_text(textwrap.dedent(PROGRAM))
    return path


@pytest.fixture
def named(file):
    return [f"{file}:Module", f"data={file}:Data", "training.num_epochs=3", "run.device=cpu"]


def train(*overrides):
    begun = start.prepare(overrides)
    return recipes.load(begun.settings.recipe.name).train(begun)


def said(*arguments, code=0):
    found = CliRunner().invoke(app, list(arguments))
    assert found.exit_code == code, found.output
    return found.output


def weights(folder):
    return checkpoint.load(folder / "checkpoints" / "last.pt")


def test_the_parameters_of_both_are_the_settings(named, file):
    lines = said("train", *named, "--help")
    assert "program.lr=0.05" in lines
    assert "program.data.rows=20" in lines
    assert "fold" not in lines.partition("Settings of")[2]
    found = configure.load([*named, "data.rows=40", "program.lr=0.1"])
    assert (found.recipe.name, found.program) == (f"{file}:Module,{file}:Data", {"data": {"rows": 40}, "lr": 0.1})
    with pytest.raises(ConfigError, match=r"unknown setting program\.data\.row: did you mean program\.data\.rows"):
        start.prepare([*named, "data.row=3"])
    with pytest.raises(ConfigError, match=r"program\.data\.rows='many': expected an integer"):
        start.prepare([*named, "data.rows=many"])
    with pytest.raises(ConfigError, match=r"training\.learning_rate"):
        start.prepare([*named, "training.learning_rate=1"])


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["{file}:Module"], r"Module is a LightningModule: name its LightningDataModule too, data=.*fits\.py:Data"),
        (["data={file}:Data"], "expected the LightningModule that it is for"),
        (["{file}:Data", "data={file}:Data"], "expected a class that inherits from LightningModule"),
        (["{file}:Module", "data={file}:Module"], "expected a class that inherits from LightningDataModule"),
        (["{file}:Loud", "data={file}:Data"], "its __init__ takes data, which is the group"),
    ],
)
def test_what_is_no_module_with_its_data_is_told(file, overrides, message):
    with pytest.raises(ConfigError, match=message):
        start.prepare([one.format(file=file) for one in overrides])


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ("", r"data=.*fits\.py:Data$"),
        ("class Digits(Data): pass", r"data=.*fits\.py:Data or data=.*fits\.py:Digits$"),
        ("del Data", r"data=FILE\.py:CLASS \(.*fits\.py has none\)$"),
    ],
)
def test_the_data_classes_of_a_modules_file_are_named(file, more, said):
    file.write_text(f"{file.read_text()}\n{more}\n")
    with pytest.raises(ConfigError, match=said):
        start.prepare([f"{file}:Module"])


def test_hparams_that_no_checkpoint_can_keep_are_told_before_the_fit(file, tmp_path):
    with pytest.raises(ConfigError, match=r"hparams .*cannot be kept in a checkpoint"):
        train(f"{file}:Keeps", f"data={file}:Data", f"run.folder={tmp_path / 'run'}")


def test_a_fit_leaves_a_run(named, tmp_path):
    folder = tmp_path / "run"
    outcome = train(*named, "recipe.goal=min:error", f"run.folder={folder}", "run.logger=csv")
    assert (outcome.status, outcome.step) == ("finished", 12)
    found = record.load(folder)
    assert [one["step"] for one in found["steps"]] == list(range(1, 13))
    assert all(one["loss"] > 0 and one["seconds"] > 0 and one["learning_rate"] > 0 for one in found["steps"])
    assert [(one["step"], one["epoch"]) for one in found["metrics"]] == [(4, 1), (8, 2), (12, 3)]
    assert outcome.best["error"] == min(one["error"] for one in found["metrics"])
    assert "program.data.rows=20" in "\n".join(found["told"]["program"])
    assert (folder / "report.html").is_file()
    assert list(folder.glob("logs/**/metrics.csv"))
    judged = json.loads(said("eval", f"run={folder}", "--json"))
    assert judged["metrics"]["error"] == pytest.approx(outcome.best["error"], rel=1e-6)
    assert judged["step"] == outcome.best_step


def test_the_checkpoint_is_lightnings_too(named, file, tmp_path):
    train(*named, "program.lr=0.01", f"run.folder={tmp_path / 'run'}")
    path = tmp_path / "run" / "checkpoints" / "last.pt"
    module = program.load(configure.load(named).recipe.name).call({}).module
    found = type(module).load_from_checkpoint(path)
    assert found.hparams.lr == 0.01
    kept = checkpoint.load(path)["model"]["model"]
    assert all(torch.equal(value, kept[name]) for name, value in found.state_dict().items())


def test_a_callback_of_the_modules_own_keeps_its_checkpoints(file, tmp_path):
    folder = tmp_path / "run"
    train(f"{file}:Watched", f"data={file}:Data", "training.num_epochs=4", "run.device=cpu", f"run.folder={folder}")
    (best,) = folder.rglob("*.ckpt")
    errors = [one["error"] for one in record.load(folder)["metrics"]]
    assert checkpoint.load(best)["position"]["step"] == 4 * (1 + errors.index(min(errors)))
    assert (folder / "checkpoints" / "last.pt").is_file()


@pytest.mark.parametrize(
    ("stop", "more"),
    [
        *((stop, ()) for stop in (2, 4, 6, 9)),  # within an epoch, and in its last step
        *((stop, ("training.max_steps=10",)) for stop in (2, 4, 6, 9)),
        *((stop, ("seeded",)) for stop in (4, 6)),
    ],
)
def test_a_fit_interrupted_and_resumed_is_the_one_that_was_not(named, tmp_path, monkeypatch, stop, more):
    if more == ("seeded",):  # the loader draws its order from a generator of its own
        own = 'shuffle=True, generator=vars(self).setdefault("own", torch.Generator().manual_seed(1))'
        file = tmp_path / "fits.py"
        file.write_text(file.read_text().replace("shuffle=True", own))
        more = ()
    named, whole, parts = [*named, *more], tmp_path / "whole", tmp_path / "parts"
    train(*named, f"run.folder={whole}")
    monkeypatch.setenv("STOP_AT", str(stop))
    assert train(*named, f"run.folder={parts}").status == "interrupted"
    monkeypatch.delenv("STOP_AT")
    assert weights(parts)["position"]["step"] == stop
    assert train(f"run.resume={parts}").status == "finished"
    _same(whole, parts)


@pytest.mark.campaign
@pytest.mark.parametrize("kill", [1, 3, 5, 8, 12])
@pytest.mark.some_of(3)
def test_a_fit_that_was_killed_is_resumed(named, tmp_path, monkeypatch, kill):
    import subprocess
    import sys

    whole, parts = tmp_path / "whole", tmp_path / "parts"
    train(*named, f"run.folder={whole}")
    monkeypatch.setenv("KILL_AT", str(kill))
    command = [
        sys.executable,
        "-m",
        "hotloop",
        "train",
        *named,
        f"run.folder={parts}",
        "training.checkpoint_every_steps=2",
    ]
    assert subprocess.run(command, check=False, timeout=900, capture_output=True).returncode == 9
    monkeypatch.delenv("KILL_AT")
    train(f"run.resume={parts}")
    _same(whole, parts)


def _same(whole, parts):
    one, other = weights(whole), weights(parts)
    assert one["position"] == other["position"]
    assert all(torch.equal(value, other["model"]["model"][name]) for name, value in one["model"]["model"].items())
    assert one["lr_schedulers"] == other["lr_schedulers"]
    losses = [[step["loss"] for step in record.load(folder)["steps"]] for folder in (whole, parts)]
    assert losses[0] == losses[1]
    assert [one["error"] for one in record.load(whole)["metrics"]] == [
        one["error"] for one in record.load(parts)["metrics"]
    ]


def test_a_fit_stops_early_and_at_max_steps(named, tmp_path):
    early = train(
        *named, "training.num_epochs=30", "program.lr=1e-9", "recipe.goal=max:error",
        "training.early_stopping_patience=2", f"run.folder={tmp_path / 'early'}",
    )  # fmt: skip
    assert early.status == "finished"
    assert early.step == early.best_step + 8
    assert train(*named, "training.max_steps=6", f"run.folder={tmp_path / 'short'}").step == 6


@pytest.mark.parametrize("setting", ["training.num_epochs=2", "training.max_steps=7"])
def test_a_fit_that_is_past_its_new_end_is_refused(named, tmp_path, setting):
    train(*named, f"run.folder={tmp_path / 'run'}")
    with pytest.raises(ConfigError, match=rf"{setting}: run .* is past that, it has done 12 steps, 3 epochs"):
        train(f"run.resume={tmp_path / 'run'}", setting)


def test_a_loss_that_is_nan_ends_the_fit_with_a_sound_checkpoint(named, tmp_path):
    with pytest.raises(TrainingFailedError, match=r"step 6: the loss is nan.*Kept: .*last\.pt"):
        train(*named, "program.bad_at=6", f"run.folder={tmp_path / 'run'}")
    assert weights(tmp_path / "run")["position"]["step"] == 4
    assert record.load(tmp_path / "run")["status"] == "failed"


def test_gradients_are_accumulated_and_steps_counted(named, tmp_path):
    outcome = train(*named, "training.gradient_accumulation=2", f"run.folder={tmp_path / 'run'}")
    assert outcome.step == 6
    assert [one["step"] for one in record.load(tmp_path / "run")["steps"]] == list(range(1, 7))


@pytest.mark.parametrize(("asked", "running"), [("auto", "eager"), ("true", "aot_eager")])
def test_a_hot_loop_owns_the_step(named, tmp_path, asked, running):
    folder = tmp_path / "run"
    outcome = train(
        *named, f"training.optimization.use_torch_compile={asked}", "compile.preset=aot_eager",
        "training.num_epochs=5", f"run.folder={folder}",
    )  # fmt: skip
    assert outcome.components["model"]["running"] == running
    found = record.load(folder)
    assert bool(found["decisions"]) == (asked == "auto")
    assert found["components"]["model"]["requested"] in (asked, running)
    assert len(found["steps"]) == 20
    assert found["settings"]["run"]["seed"] == 0


@pytest.mark.parametrize(
    ("settings", "layout"),
    [(["auto", "compile.layout=as-given"], "as-given"), (["true", "compile.preset=aot_eager"], "auto")],
)
def test_layout_and_sentinel_are_of_the_loop_that_owns_the_step(named, tmp_path, monkeypatch, settings, layout):
    found = []
    monkeypatch.setattr(
        owned_step, "Loop", lambda *given, **named: found.append(loop.Loop(*given, **named)) or found[0]
    )
    asked, *more = settings
    train(
        *named, f"training.optimization.use_torch_compile={asked}", "compile.sentinel=0.25", *more,
        f"run.folder={tmp_path / 'run'}",
    )  # fmt: skip
    assert (found[0].context.layout, found[0]._sentinel_share) == (layout, 0.25)


def test_a_dry_run_checks_and_writes_nothing(named, file, tmp_path):
    shown = said("train", *named, "recipe.goal=min:error", f"run.folder={tmp_path / 'run'}", "--dry-run")
    assert "Batch: [0] float32 (4, 4), [1] float32 (4, 1)" in shown
    assert "Steps: 12" in shown
    assert not (tmp_path / "run").exists()
    assert "are error. Set: recipe.goal=max:error" in said(
        "train", *named, "recipe.goal=max:accuracy", "--dry-run", code=2
    )
    file.write_text(file.read_text().replace('self.log("error"', 'self.logged("error"'))
    assert "no attribute 'logged'" in said("train", *named, "--dry-run", code=2)
    file.write_text(file.read_text().replace("def val_dataloader", "def other_dataloader"))
    assert "Dry run: all but" in said("train", *named, "--dry-run")


def test_folds_are_those_that_the_data_splits(named, tmp_path):
    said("kfold", *named, "kfold.n_splits=4", "recipe.goal=min:error", f"run.folder={tmp_path / 'cv'}")
    document = json.loads((tmp_path / "cv" / "kfold.json").read_text())
    assert [one["status"] for one in document["folds"]] == ["finished"] * 4
    held_out = [record.load(tmp_path / "cv" / f"fold-{fold}")["metrics"] for fold in range(4)]
    assert len({one[-1]["error"] for one in held_out}) == 4


def test_a_pair_without_a_fold_is_told_where_to_take_one(named, file):
    file.write_text(file.read_text().replace(", fold: hotloop.Fold | None = None", "").replace("fold or ", ""))
    found = CliRunner().invoke(app, ["kfold", *named, "kfold.n_splits=4", "recipe.goal=min:error"])
    assert isinstance(found.exception, ConfigError)
    assert "neither module nor data takes a fold. Give __init__ of the data the parameter" in str(found.exception)


@pytest.mark.campaign
def test_a_search_varies_the_settings_of_both(tmp_path):
    folder = tmp_path / "search"
    said(
        "hpo", f"{DIGITS}:Classifier", f"data={DIGITS}:Digits", "hpo.metric=accuracy", "hpo.sampler=random",
        "hpo.n_trials=2", "hpo.pruner=none", "training.num_epochs=1", "hpo.space.data.batch_size={choices: [64, 128]}",
        f"hpo.folder={folder}",
    )  # fmt: skip
    trials = json.loads((folder / "study.json").read_text())["trials"]
    assert {name for one in trials for name in one["values"]} == {
        "program.lr", "program.width", "program.data.batch_size"
    }  # fmt: skip
    assert all(one["state"].lower().startswith("complete") for one in trials)


def test_the_example_learns(tmp_path):
    outcome = train(
        f"{DIGITS}:Classifier", f"data={DIGITS}:Digits", "program.lr=1e-2", "training.num_epochs=8",
        "recipe.goal=max:accuracy", f"run.folder={tmp_path / 'run'}",
    )  # fmt: skip
    assert outcome.best["accuracy"] > 0.9
    assert dataclasses.asdict(outcome)["status"] == "finished"


def test_save_now_is_answered_after_the_step_and_changes_nothing_of_the_training(named, tmp_path, monkeypatch):
    monkeypatch.setattr(requests, "EVERY_SECONDS", 0.0)
    whole, run, saved = tmp_path / "whole", tmp_path / "run", []
    train(*named, f"run.folder={whole}")
    was = Account.step

    def observed(self, entry, events):
        was(self, entry, events)
        if entry["step"] == 2:
            requests.ask(run, requests.SAVE)
        if entry["step"] == 3:
            saved.extend([weights(run)["position"]["step"], requests.is_asked(run, requests.SAVE)])

    monkeypatch.setattr(Account, "step", observed)
    train(*named, f"run.folder={run}")
    assert saved == [2, False]
    assert not (run / "requests").exists()
    _same(whole, run)
