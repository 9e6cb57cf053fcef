"""A program that takes fabric runs on several devices: as one device with the doubled batch, and it ends as one."""

import dataclasses
import signal
import textwrap
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from shared import free_port, is_gone, once
from training_fixtures import hotloop_command

from hotloop import Workload, recipes, record
from hotloop.errors import ConfigError
from hotloop.recipes import program as program_recipe
from hotloop.train import checkpoint, configure, ranks, start
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


def losses(folder):
    return [step["loss"] for step in record.load(folder)["steps"]]


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
    ("there", "message"),
    [
        (0, r"run\.accelerator=cuda: torch sees no CUDA device here; set run\.accelerator=cpu"),
        (1, r"run\.devices=3: torch sees 1 CUDA device here; set run\.devices=1 or lower"),
        (2, r"run\.devices=3: torch sees 2 CUDA devices here; set run\.devices=2 or lower"),
    ],
)
def test_cuda_devices_that_are_not_there_are_refused(given, monkeypatch, there, message):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: there)
    with pytest.raises(ConfigError, match=message):
        check(start.prepare([*given, "run.devices=3", "run.accelerator=cuda"]).settings)


def test_devices_and_a_precision_that_are_not_there_are_refused(given):
    for settings, message in (
        (
            ["run.devices=999", "run.accelerator=cpu"],
            r"run\.devices=999: on CPUs each is a process, and this machine has",
        ),
        (["run.precision=16-mixed", "run.accelerator=cpu"], r"16-mixed: Lightning has no float16 on a CPU; set run\."),
        (["run.devices=2", "run.accelerator=mps"], "an Apple machine has one"),
    ):
        begun = start.prepare([*given, *settings])
        with pytest.raises(ConfigError, match=message):
            check(begun.settings)
        with pytest.raises(ConfigError, match=message):  # in a dry run as well
            recipes.load(begun.settings.recipe.name).train(dataclasses.replace(begun, dry=True))


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


def test_the_end_of_another_process_is_heard_of_long_after_that_of_its_connection(monkeypatch):
    now = [0.0]
    clock = SimpleNamespace(monotonic=lambda: now[0], sleep=lambda seconds: now.append(now.pop() + seconds))
    monkeypatch.setattr(ranks, "time", clock)
    several = object.__new__(ranks.Several)
    several._lost = lambda: "rank 1 of 2 ended" if now[0] > 20 else ""
    assert several.explain(ValueError("this process's own")) is None
    assert now[0] < 3
    assert str(several.explain(RuntimeError("Connection closed by peer [127.0.0.1]:1"))) == "rank 1 of 2 ended"


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
    assert "run.devices cannot change while a run is resumed" in said


@pytest.mark.campaign
@pytest.mark.long
def test_each_fold_is_of_two_processes(given, tmp_path):
    folds = [*given, "kfold.n_splits=2", "training.num_epochs=1"]
    hotloop_command("kfold", *folds, "program.batch=8", f"run.folder={tmp_path / 'one'}")
    hotloop_command("kfold", *folds, "run.devices=2", f"run.folder={tmp_path / 'two'}")
    for fold in ("fold-0", "fold-1"):
        assert losses(tmp_path / "two" / fold) == pytest.approx(losses(tmp_path / "one" / fold), rel=1e-5)


@pytest.mark.campaign
@pytest.mark.long
def test_each_trial_is_of_two_processes_and_all_of_them_end_where_it_is_pruned(given, tmp_path):
    search = [
        "hpo.metric=error",
        "hpo.n_trials=3",
        "hpo.pruner=median",
        "hpo.startup_trials=1",
        f"hpo.folder={tmp_path / 's'}",
    ]
    rates = [
        "hpo.space.program.lr={choices: [0.05, 0.001, 0.02]}",
        "hpo.enqueue=[{program.lr: 0.05}, {program.lr: 0.001}]",
    ]
    said = hotloop_command("hpo", *given, "run.devices=2", *search, *rates)
    assert "trial 0 complete" in said
    assert "trial 1 pruned" in said
    assert "Search finished" in said


@pytest.mark.campaign
def test_the_others_end_with_the_first_process(given, tmp_path):
    train(
        *given, "run.devices=2", f"run.folder={tmp_path / 'run'}", code=-signal.SIGKILL, KILL="0:6", PIDS=str(tmp_path)
    )
    other = int((tmp_path / "rank-1").read_text())
    once(lambda: is_gone(other))


@pytest.mark.campaign
def test_a_process_ends_where_the_first_one_cannot_take_what_is_shared(given, tmp_path):
    (tmp_path / "share").mkdir(mode=0o755)
    met = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    shared = ["run.devices=2", f"cache.share={tmp_path / 'share'}", "training.optimization.use_torch_compile=true"]

    def process(rank, code):  # started by no other one, which would kill it at its own end
        own = {"LOCAL_RANK": str(rank), "NODE_RANK": "0", "HOTLOOP_CACHE_DIR": str(tmp_path / "cache")}
        more = {ranks._JOINED: "1", "OPEN": str(tmp_path / "share")}
        return train(*given, *shared, f"run.folder={tmp_path / f'rank-{rank}'}", code=code, **met, **own, **more)

    with ThreadPoolExecutor() as both:
        first, other = both.map(process, (0, 1), (2, 1))
    assert f"anybody may write to {tmp_path / 'share'}" in first
    assert "the first process has ended the run" in other


@pytest.mark.campaign
def test_a_full_disk_ends_all_processes(given, tmp_path):
    folder = tmp_path / "run"
    said = train(*given, "run.devices=2", f"run.folder={folder}", code=1, IN_THE_WAY=str(folder / "checkpoints"))
    assert "the run is at step 12, and its last.pt is not on disk" in said


@pytest.mark.campaign
def test_an_error_of_one_process_is_told(given, tmp_path):
    said = train(*given, "run.devices=2", f"run.folder={tmp_path / 'run'}", code=1, RAISE="1:3")
    assert "step 3: rank 1 of 2 was lost: exit code 1: ValueError: broken here" in said


@pytest.mark.campaign
def test_loaders_that_no_device_shares_are_refused(given, tmp_path):
    said = train(*given, "run.devices=2", "program.share=false", f"run.folder={tmp_path / 'run'}", code=2)
    assert "all devices have the same first batch" in said
