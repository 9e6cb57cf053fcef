"""A LightningModule on several devices: fitted as on one with the doubled batch, in one folder, and resumed bit by bit."""

import textwrap
from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler
from training_fixtures import hotloop_command

from hotloop import record
from hotloop.errors import ConfigError, TrainingFailedError
from hotloop.train import checkpoint, start
from hotloop.train.lightning_trainer import check_rates
from hotloop.train.ranks import Ranks, check
from hotloop.train.resumable import Place

PROGRAM = """
    import os

    import lightning.pytorch as pl
    import torch
    from torch.distributed.fsdp import fully_shard
    from torch.utils.data import DataLoader, TensorDataset


    class Module(pl.LightningModule):
        def __init__(self, dropout: float = 0.0, sync: bool = True, norm: bool = False):
            super().__init__()
            self.save_hyperparameters()
            norms = [torch.nn.BatchNorm1d(8)] if norm else []
            self.net = torch.nn.Sequential(
                torch.nn.Linear(4, 8), *norms, torch.nn.ReLU(), torch.nn.Dropout(dropout), torch.nn.Linear(8, 1)
            )

        def training_step(self, batch, batch_idx):
            if os.environ.get("KILL") == f"{self.global_rank}:{self.global_step + 1}":
                os.kill(os.getpid(), 9)
            if os.environ.get("STOP") == f"{self.global_rank}:{self.global_step + 1}":
                os.kill(os.getpid(), 2)
            return (self.net(batch[0]) - batch[1]).pow(2).mean()

        def validation_step(self, batch, batch_idx):
            loss = (self.net(batch[0]) - batch[1]).pow(2).mean()
            self.log("error", loss, sync_dist=self.hparams.sync, batch_size=len(batch[0]))

        def configure_optimizers(self):
            optimizer = torch.optim.Adam(self.parameters(), lr=0.05)
            schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.3)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": "error"}}


    class Sharded(Module):
        def configure_model(self):
            if self.device_mesh is not None:
                fully_shard(self.net, mesh=self.device_mesh["data_parallel"])


    class Data(pl.LightningDataModule):
        def __init__(self, batch: int = 4, shuffle: bool = False, same: bool = False):
            super().__init__()
            self.batch, self.shuffle, self.same = batch, shuffle, same

        def setup(self, stage):
            x = torch.randn(48, 4, generator=torch.Generator().manual_seed(0))
            self.train, self.held = (TensorDataset(one, one.sum(1, keepdim=True)) for one in (x[:32], x[32:]))

        def train_dataloader(self):
            if self.same:
                return [batch for batch in DataLoader(self.train, batch_size=self.batch)]
            return DataLoader(self.train, batch_size=self.batch, shuffle=self.shuffle)

        def val_dataloader(self):
            return DataLoader(self.held, batch_size=self.batch)
"""
BOTH = ["run.devices=2", "run.accelerator=cpu"]


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "fits.py"
    path.write_text(textwrap.dedent(PROGRAM))
    return path


def named(file, module="Module"):
    return [f"{file}:{module}", f"data={file}:Data", "training.num_epochs=3", "recipe.goal=min:error"]


def train(*overrides, **more):
    return hotloop_command("train", *overrides, **more)


def losses(folder):
    return [step["loss"] for step in record.load(folder)["steps"]]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["run.device=cpu", "run.devices=2"], r"run\.device=cpu with run\.devices=2: it names the one device"),
        (["run.device=cpu", "run.accelerator=cpu"], r"run\.device=cpu with run\.accelerator=cpu: it names the one"),
        (["run.device=cpu", "run.precision=16-mixed"], r"run\.precision=16-mixed: Lightning has no float16 on a CPU"),
        (["run.devices=2", "run.accelerator=mps"], "an Apple machine has one"),
    ],
)
def test_devices_that_a_trainer_cannot_have_are_refused(file, settings, message):
    with pytest.raises(ConfigError, match=message):
        check(start.prepare([*named(file), *settings]).settings)


def test_learning_rates_that_differ_end_the_run():
    class Two(Ranks):
        def gathered(self, value):
            return [value, 0.1]

    trained = [torch.nn.Parameter(torch.ones(1))]
    trainers = [SimpleNamespace(optimizers=[torch.optim.SGD(trained, lr=rate)]) for rate in (0.1, 0.01)]
    check_rates(Two(), trainers[0])
    with pytest.raises(TrainingFailedError, match=r"differ from here on \(0\.01, 0\.1\).*sync_dist=True"):
        check_rates(Two(), trainers[1])


def test_a_resumed_epoch_is_shuffled_as_it_was():
    rows = list(range(32))
    make = lambda: DataLoader(rows, sampler=DistributedSampler(rows, num_replicas=2, rank=1))  # noqa: E731
    whole, place = make(), Place(checkpoint.random_state(), skip=3, epoch=2)
    whole.sampler.set_epoch(2)
    assert [int(one) for one in place.follow(make())] == [int(one) for one in whole][3:]


@pytest.mark.campaign
@pytest.mark.parametrize(("strategy", "module"), [("ddp", "Module"), ("fsdp2", "Sharded")])
@pytest.mark.some_of(2)
def test_two_devices_are_one_with_the_doubled_batch(file, tmp_path, strategy, module):
    one, two = tmp_path / "one", tmp_path / "two"
    given = [*named(file, module), "training.num_epochs=8"]
    # All rows in one batch: the Trainer's own sampler shuffles them for several devices.
    train(*given, "program.data.batch=32", "run.accelerator=cpu", f"run.folder={one}")
    train(*given, "program.data.batch=16", *BOTH, f"run.strategy={strategy}", f"run.folder={two}")
    assert losses(two) == pytest.approx(losses(one), rel=1e-4)
    found, wanted = (checkpoint.load(folder / "checkpoints" / "best.pt") for folder in (two, one))
    assert found["position"]["step"] == wanted["position"]["step"]
    for name, value in wanted["model"]["model"].items():
        torch.testing.assert_close(found["model"]["model"][name], value, rtol=1e-4, atol=1e-6)
    assert record.load(two)["metrics"][-1]["error"] == pytest.approx(record.load(one)["metrics"][-1]["error"], rel=1e-3)
    assert not list(two.glob("rank*"))
    assert "error" in hotloop_command("eval", f"run={two}")


PACED = """
    import contextlib
    from unittest import mock

    import torch
    from fits import Data, Sharded
    from hotloop.decide import guard
    from hotloop.measure import Timing
    from hotloop.step.policy.agreed_auto import AgreedAuto
    from hotloop.testing import captured_step_emulation

    timed, planted = AgreedAuto.timed, contextlib.ExitStack()

    def paced(self, ran, timing):
        seconds = {"eager": 0.1, "eager+graph": 0.005}[ran.tier] if ran.kind == "run" else timing.seconds
        return timed(self, ran, Timing(seconds, seconds))

    planted.enter_context(mock.patch.object(AgreedAuto, "timed", paced))
    planted.enter_context(mock.patch.object(guard, "SLOWER_SECONDS", 600.0))  # preparing takes real time
    planted.enter_context(captured_step_emulation())

    class Paced(Sharded):
        def __init__(self, kind: str = "AdamW"):
            super().__init__(dropout=0.1)
            self.kind = kind

        def training_step(self, batch, batch_idx):  # a step that reads its number is not captured
            return (self.net(batch[0]) - batch[1]).pow(2).mean()

        def configure_optimizers(self):
            return getattr(torch.optim, self.kind)(self.parameters(), lr=2**-6, fused=True)
"""


@pytest.mark.campaign
@pytest.mark.long
def test_auto_captures_a_sharded_module_and_trains_as_eager(file, tmp_path):
    paced = tmp_path / "paced.py"
    paced.write_text(textwrap.dedent(PACED))
    given = [
        f"{paced}:Paced", f"data={paced}:Data", *BOTH, "run.strategy=fsdp2", "recipe.goal=min:error",
        "training.max_grad_norm=null", "training.num_epochs=30",
    ]  # fmt: skip
    for compiled in ("false", "auto"):
        train(*given, f"training.optimization.use_torch_compile={compiled}", f"run.folder={tmp_path / compiled}")
    assert losses(tmp_path / "auto") == losses(tmp_path / "false")
    ran = [step["running"] for step in record.load(tmp_path / "auto")["steps"]]
    assert ran.count("eager+graph") > 60
    kept = [tmp_path / one / "checkpoints" / "last.pt" for one in ("auto", "false")]
    found, wanted = (checkpoint.load(one)["model"]["model"] for one in kept)
    assert all(torch.equal(found[name], value) for name, value in wanted.items())
    said = train(*given, "program.kind=SGD", f"run.folder={tmp_path / 'sgd'}", code=2)
    assert "torch's fused kernel of SGD takes no shares of parameters" in " ".join(said.split())


@pytest.mark.campaign
@pytest.mark.parametrize(("strategy", "module"), [("ddp", "Module"), ("fsdp2", "Sharded")])
@pytest.mark.long
def test_a_fit_whose_process_was_killed_or_stopped_is_resumed_bit_for_bit(file, tmp_path, strategy, module):
    given = [
        *named(file, module), *BOTH, f"run.strategy={strategy}", "program.dropout=0.5", "program.norm=true",
        "program.data.shuffle=true", "training.checkpoint_every_steps=3",
    ]  # fmt: skip
    train(*given, f"run.folder={tmp_path / 'whole'}")
    said = train(*given, f"run.folder={tmp_path / 'killed'}", code=1, KILL="1:6")
    assert "rank 1 of 2 was killed by SIGKILL" in said
    train(*given, f"run.folder={tmp_path / 'stopped'}", code=130, STOP="0:7")
    wanted = checkpoint.load(tmp_path / "whole" / "checkpoints" / "last.pt")
    for name in ("killed", "stopped"):
        train(f"run.resume={tmp_path / name}")
        assert losses(tmp_path / name) == losses(tmp_path / "whole")
        found = checkpoint.load(tmp_path / name / "checkpoints" / "last.pt")
        for key, value in wanted["model"]["model"].items():
            assert torch.equal(found["model"]["model"][key], value), key


@pytest.mark.campaign
@pytest.mark.parametrize(
    ("settings", "message", "code"),
    [
        (["run.strategy=fsdp2"], "Module has no configure_model, in which a LightningModule shards itself", 2),
        (["program.sync=false"], "Log it by self.log(..., sync_dist=True)", 1),
        (["program.data.same=true"], "all devices have the same first batch", 2),
    ],
)
@pytest.mark.some_of(3)
def test_a_fit_that_several_devices_would_make_wrong_is_refused(file, tmp_path, settings, message, code):
    said = train(*named(file), *BOTH, *settings, "training.num_epochs=6", f"run.folder={tmp_path / 'run'}", code=code)
    assert message in " ".join(said.split())
