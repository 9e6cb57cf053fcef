"""A program that takes fabric runs on several devices: as one device with the doubled batch, and it ends as one."""

import signal
import textwrap
from types import SimpleNamespace

import pytest
import torch
from shared import is_gone, once
from training_fixtures import hotloop_command, losses

from hotloop import Workload, recipes, record
from hotloop.errors import ConfigError
from hotloop.recipes import program as program_recipe
from hotloop.train import checkpoint, configure, start
from hotloop.train.ranks import Devices, Ranks, check, check_shares

PROGRAM = """
    import os
    import pathlib

    import torch
    from lightning.fabric import Fabric
    from torch.nn import functional as F
    from torch.utils.data import DataLoader, TensorDataset

    import hotloop


    def make(
        batch: int = 4, shuffle: bool = False, share: bool = True, lr: float = 0.05, *,
        fabric: Fabric | None = None, fold: hotloop.Fold | None = None,
    ):
        fabric = fabric or Fabric(accelerator="cpu", devices=1)
        x = torch.randn(32, 4, generator=torch.Generator().manual_seed(0))
        y = x.sum(1, keepdim=True)
        model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.5 * shuffle), torch.nn.Linear(8, 1))
        optimizer = torch.optim.Adam(model.parameters(), lr=lr)
        net, stepping = fabric.setup(model, optimizer)
        train = fold.split(32)[0] if fold else list(range(32))
        loader = DataLoader(TensorDataset(x[train], y[train]), batch_size=batch, shuffle=shuffle)
        loader = fabric.setup_dataloaders(loader) if share else loader
        steps = 0
        if "OPEN" in os.environ and fabric.global_rank == 0:
            os.chmod(os.environ["OPEN"], 0o777)
        if "PIDS" in os.environ:
            (pathlib.Path(os.environ["PIDS"]) / f"rank-{fabric.global_rank}").write_text(str(os.getpid()))

        def step(a, b):
            nonlocal steps
            steps += 1
            for name, number in (("KILL", 9), ("STOP", 2)):
                if os.environ.get(name) == f"{fabric.global_rank}:{steps}":
                    os.kill(os.getpid(), number)
            if "IN_THE_WAY" in os.environ:
                pathlib.Path(os.environ["IN_THE_WAY"]).touch()
            if os.environ.get("RAISE") == f"{fabric.global_rank}:{steps}":
                raise ValueError("broken here")
            loss = F.mse_loss(net(a), b)
            fabric.backward(loss)
            stepping.step()
            stepping.zero_grad()
            return loss

        def metrics():
            model.eval()
            with torch.no_grad():
                return {"error": F.mse_loss(model(x), y), "mixed": "mixed" in fabric._precision.precision}

        return hotloop.Workload(model, optimizer, step, loader, metrics=metrics)


    def alone(batch: int = 4):
        return make(batch)
"""


@pytest.fixture
def given(tmp_path):
    path = tmp_path / "ranks.py"
    path.write_text(textwrap.dedent(PROGRAM))
    return [f"{path}:make", "training.num_epochs=3", "run.accelerator=cpu"]


def train(*overrides, **more):
    return hotloop_command("train", *overrides, **more)


def test_one_device_is_fabric_in_this_process(given, tmp_path):
    begun = start.prepare([*given, f"run.folder={tmp_path / 'run'}", "run.precision=bf16-mixed"])
    outcome = recipes.load(begun.settings.recipe.name).train(begun)
    assert (outcome.status, outcome.step) == ("finished", 24)
    kept = checkpoint.load(tmp_path / "run" / "checkpoints" / "last.pt")
    several = configure.from_dict(kept["settings"], ["run.devices=2"])
    assert recipes.load(begun.settings.recipe.name).evaluate(several, kept["model"])["mixed"] == 1


@pytest.mark.parametrize("setting", ["run.devices=2", "run.precision=bf16-mixed", "run.accelerator=cpu"])
def test_a_program_that_takes_no_fabric_refuses_devices(given, setting):
    with pytest.raises(ConfigError, match=rf"{setting}: the function of .* takes no fabric"):
        start.prepare([given[0].replace(":make", ":alone"), setting])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["run.devices=3", "run.accelerator=cuda"], r"run\.devices=3 with run\.accelerator=cuda: at most 2 of cuda"),
        (["run.devices=999", "run.accelerator=cpu"], r"run\.devices=999 with run\.accelerator=cpu: at most"),
        (["run.precision=16-mixed", "run.accelerator=cpu"], "Lightning scales no losses on a CPU"),
        (["run.precision=16-mixed", "run.accelerator=cuda", "run.devices=2", "run.strategy=fsdp2"], "sharded models"),
    ],
)
def test_devices_and_a_precision_that_are_not_there_are_refused(given, monkeypatch, settings, message):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ConfigError, match=message):
        check(start.prepare([*given, *settings]).settings)


def test_processes_with_the_same_first_batch_are_refused():
    class Two(Ranks):
        size = 2

        def gathered(self, value):
            return [value, other if other is not None else value]

    other = (6.0, 1.0)
    check_shares(Two(), (torch.ones(3), {"labels": torch.ones(1)}), "Do so.")
    other = None
    with pytest.raises(ConfigError, match=r"run\.devices=2: all devices have the same first batch.* Do so\."):
        check_shares(Two(), (torch.ones(3), {"labels": torch.ones(1)}), "Do so.")
    check_shares(Ranks(), (torch.ones(3),), "Do so.")


@pytest.mark.parametrize("holds", [False, True])
def test_what_scales_the_losses_is_kept_in_checkpoints(given, holds):
    scaler = torch.amp.GradScaler("cpu")
    fabric = SimpleNamespace(strategy=SimpleNamespace(precision=SimpleNamespace(scaler=scaler)))
    model, settings = torch.nn.Linear(1, 1), start.prepare(given).settings
    workload = Workload(model, torch.optim.SGD(model.parameters()), len, [], state=[scaler] if holds else ())
    found = program_recipe._own(workload, settings, Devices(fabric, Ranks()))
    assert [one is scaler for one in found.holdings().state] == [True]


@pytest.mark.campaign
def test_two_devices_are_one_with_the_doubled_batch(given, tmp_path):
    train(*given, "program.batch=8", f"run.folder={tmp_path / 'one'}")
    train(*given, "run.devices=2", f"run.folder={tmp_path / 'two'}")
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=1e-5)
    one, two = (checkpoint.load(tmp_path / name / "checkpoints" / "last.pt")["model"] for name in ("one", "two"))
    for name, value in one["model"].items():
        torch.testing.assert_close(two["model"][name], value, rtol=1e-5, atol=1e-6)
    assert record.load(tmp_path / "two")["metrics"][-1]["error"] == pytest.approx(
        record.load(tmp_path / "one")["metrics"][-1]["error"], rel=1e-4
    )
    assert not list((tmp_path / "two").glob("rank*"))


@pytest.mark.campaign
@pytest.mark.long
def test_a_run_whose_process_was_killed_or_stopped_is_resumed_bit_for_bit(given, tmp_path):
    both = [*given, "run.devices=2", "program.shuffle=true", "training.checkpoint_every_steps=2"]
    train(*both, f"run.folder={tmp_path / 'whole'}")
    said = train(*both, f"run.folder={tmp_path / 'killed'}", code=1, KILL="1:6")
    assert "rank 1 of 2 was lost: SIGKILL" in said
    assert f"hotloop train run.resume={tmp_path / 'killed'}" in said
    train(*both, f"run.folder={tmp_path / 'stopped'}", code=130, STOP="0:7")
    for name in ("killed", "stopped"):
        train(f"run.resume={tmp_path / name}")
        assert losses(tmp_path / name) == losses(tmp_path / "whole")
    said = train(f"run.resume={tmp_path / 'whole'}", "run.devices=1", code=2)
    assert "cannot change while a run is resumed" in said


@pytest.mark.campaign
def test_the_others_end_with_the_first_process(given, tmp_path):
    train(
        *given, "run.devices=2", f"run.folder={tmp_path / 'run'}", code=-signal.SIGKILL, KILL="0:6", PIDS=str(tmp_path)
    )
    other = int((tmp_path / "rank-1").read_text())
    once(lambda: is_gone(other))


@pytest.mark.campaign
def test_an_error_of_one_process_is_told(given, tmp_path):
    said = train(*given, "run.devices=2", f"run.folder={tmp_path / 'run'}", code=1, RAISE="1:3")
    assert "step 3: rank 1 of 2 was lost: exit code 1: [rank1]: ValueError: broken here" in said  # torch names the rank
