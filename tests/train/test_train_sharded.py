"""``run.strategy=fsdp2``: trained as on one device, kept in checkpoints that one device reads, and resumed bit by bit."""

import contextlib
import subprocess
import sys
import textwrap

import pytest
import torch
from training_fixtures import hotloop_command

from hotloop import record
from hotloop.errors import ConfigError
from hotloop.train import checkpoint, compiling, sharding, start
from hotloop.train.ranks import check, check_presets

PROGRAM = """
    import os

    import torch
    from lightning.fabric import Fabric
    from torch.nn import functional as F
    from torch.utils.data import DataLoader, TensorDataset

    import hotloop


    class Block(torch.nn.Module):
        def __init__(self, norm, dropout):
            super().__init__()
            self.inner, self.norm, self.drop = torch.nn.Linear(7, 7), norm(7), torch.nn.Dropout(dropout)

        def forward(self, x):
            return x + self.drop(torch.relu(self.norm(self.inner(x))))


    class Average:
        def __init__(self, model):
            self.parameters = dict(model.named_parameters())
            self.kept = {name: one.detach().clone() for name, one in self.parameters.items()}

        def update(self):
            for name, one in self.parameters.items():
                self.kept[name].lerp_(one.detach(), 0.1)

        def exchange(self):
            for name, one in self.parameters.items():
                former = one.detach().clone()
                one.data.copy_(self.kept[name])
                self.kept[name].copy_(former)

        def state_dict(self):
            return self.kept

        def load_state_dict(self, state):
            for name, value in state.items():
                self.kept[name].copy_(value)


    def make(
        batch: int = 4, shuffle: bool = False, norm: str = "LayerNorm", apart: bool = False, *,
        fabric: Fabric | None = None,
    ):
        fabric = fabric or Fabric(accelerator="cpu", devices=1)
        x = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
        y = x.sum(1, keepdim=True)
        blocks = [Block(getattr(torch.nn, norm), 0.5 * shuffle) for _ in range(2)]
        model = torch.nn.Sequential(torch.nn.Linear(4, 7), *blocks, torch.nn.Linear(7, 1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        if apart:
            net = fabric.setup(model)
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
            stepping = fabric.setup_optimizers(optimizer)
        else:
            net, stepping = fabric.setup(model, optimizer)
        loader = fabric.setup_dataloaders(DataLoader(TensorDataset(x, y), batch_size=2 * batch, shuffle=shuffle))
        average, steps = Average(model), 0

        def step(a, b):
            nonlocal steps
            steps += 1
            if os.environ.get("KILL") == f"{fabric.global_rank}:{steps}":
                os.kill(os.getpid(), 9)
            total = 0.0
            for part in range(2):
                with fabric.no_backward_sync(net, enabled=part == 0):
                    loss = F.mse_loss(net(a[part::2]), b[part::2]) / 2
                    fabric.backward(loss)
                total += loss.detach()
            fabric.clip_gradients(net, stepping, max_norm=1.0)
            stepping.step()
            stepping.zero_grad()
            average.update()
            return total

        def metrics():
            model.eval()
            average.exchange()
            with torch.no_grad():
                found = F.mse_loss(model(x), y)
            average.exchange()
            return {"error": found}

        return hotloop.Workload(model, optimizer, step, loader, metrics=metrics, state=average)
"""

PACED = """
    import contextlib
    import os
    import time
    from unittest import mock

    import torch
    from lightning.fabric import Fabric
    from torch.nn import functional as F
    from torch.utils.data import DataLoader, TensorDataset

    import hotloop
    from hotloop.decide import guard
    from hotloop.measure import Timing
    from hotloop.step.policy.agreed_auto import AgreedAuto
    from hotloop.testing import captured_step_emulation
    from hotloop.train import fit

    timed, written, planted = AgreedAuto.timed, fit.write_settings, contextlib.ExitStack()

    def paced(self, ran, timing):
        seconds = {"eager": 0.1, "eager+graph": 0.005}[ran.tier] if ran.kind == "run" else timing.seconds
        return timed(self, ran, Timing(seconds, seconds))

    def late(*given):
        if os.environ.get("LOCAL_RANK", "0") == "0":  # the other process waits for nothing of it
            time.sleep(1)
        written(*given)

    planted.enter_context(mock.patch.object(AgreedAuto, "timed", paced))
    planted.enter_context(mock.patch.object(fit, "write_settings", late))
    planted.enter_context(mock.patch.object(guard, "SLOWER_SECONDS", 600.0))  # preparing takes real time
    planted.enter_context(captured_step_emulation())

    class Block(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.norm, self.drop = torch.nn.Linear(8, 8), torch.nn.LayerNorm(8), torch.nn.Dropout(0.1)

        def forward(self, x):
            return x + self.drop(torch.relu(self.norm(self.inner(x))))

    def make(lr: float = 2**-6, *, fabric: Fabric | None = None, fold: hotloop.Fold | None = None):
        fabric = fabric or Fabric(accelerator="cpu", devices=1)
        x = torch.randn(160, 4, generator=torch.Generator().manual_seed(0))
        y = x.sum(1, keepdim=True)
        rows, others = (fold or hotloop.Fold()).split(len(x))
        model = torch.nn.Sequential(torch.nn.Linear(4, 8), Block(), Block(), torch.nn.Linear(8, 1))
        net, stepping = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=lr, fused=True))
        loader = fabric.setup_dataloaders(DataLoader(TensorDataset(x[rows], y[rows]), batch_size=8))

        def step(a, b):
            total = 0.0
            for part in range(2):
                with fabric.no_backward_sync(net, enabled=part == 0):
                    loss = F.mse_loss(net(a[part::2]), b[part::2]) / 2
                    fabric.backward(loss)
                total += loss.detach()
            fabric.clip_gradients(net, stepping, max_norm=1.0, error_if_nonfinite=False)
            stepping.step()
            stepping.zero_grad()
            return total

        def metrics():
            model.eval()
            with torch.no_grad():
                return {"error": F.mse_loss(net(x[others]), y[others])}

        return hotloop.Workload(model, stepping.optimizer, step, loader, metrics=metrics)
"""

ALONE = """
    import torch
    from torch import distributed
    from torch.distributed.device_mesh import init_device_mesh

    from hotloop.errors import ConfigError
    from hotloop.train import sharding
    from hotloop.train.average import Average

    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("data_parallel", "tensor_parallel"))
    make = lambda: torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(3, 3)) for _ in range(2)))
    model = make()
    before = torch.optim.AdamW(model.parameters())
    sharding.shard(model, mesh)
    sharding.shard(model, mesh)
    print([name for name, one in model.named_modules() if type(one).__name__.startswith("FSDP")])
    for optimizer in (before, torch.optim.LBFGS(model.parameters()), torch.optim.AdamW(model.parameters())):
        try:
            sharding.check_optimizers({"model": model}, [optimizer])
        except ConfigError as error:
            print(error)

    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    kept = [sharding.state_of(one) for one in (model, optimizer)]
    plain = make()
    other = torch.optim.AdamW(plain.parameters())
    for one, state in zip((plain, other), kept):
        one.load_state_dict(state)
    print(all(torch.equal(model.state_dict()[name].full_tensor(), value) for name, value in plain.state_dict().items()))

    again = sharding.shard(make(), mesh)
    optimizer = torch.optim.AdamW(again.parameters())
    for one, state in zip((again, optimizer), (plain.state_dict(), other.state_dict())):
        one.load_state_dict(sharding.shares_of(one, state))
    print(all(torch.equal(again.state_dict()[name].full_tensor(), value) for name, value in kept[0].items()))
    for number, values in kept[1]["state"].items():
        found = optimizer.state_dict()["state"][number]
        print(all(torch.equal(sharding.local(found[name]), value) for name, value in values.items()))
    print(sorted({type(value).__name__ for value in found.values()}))

    single, x = sharding.shard(torch.nn.Linear(3, 1), mesh), torch.ones(1, 3)
    average = Average(single, 0.5)
    with torch.no_grad():
        for one in single.parameters():
            one.zero_()
        single(x)  # gathers them, and they stay so
        with average.in_place():
            print(bool(single(x)))
        print(bool(single(x)))
    distributed.destroy_process_group()
"""


@pytest.fixture
def given(tmp_path):
    path = tmp_path / "sharded.py"
    path.write_text(textwrap.dedent(PROGRAM))
    return [f"{path}:make", "training.num_epochs=3", "run.accelerator=cpu", "recipe.goal=min:error"]


SHARDED = ["run.devices=2", "run.strategy=fsdp2"]


def train(*overrides, **more):
    return hotloop_command("train", *overrides, **more)


def losses(folder):
    return [step["loss"] for step in record.load(folder)["steps"]]


def assert_near(found, wanted):
    """Compare two states, tensor by tensor, within rounding."""
    assert type(found) is type(wanted)
    if isinstance(wanted, dict):
        assert list(found) == list(wanted)
        for name, value in wanted.items():
            assert_near(found[name], value)
    elif isinstance(wanted, list | tuple):
        for one, other in zip(found, wanted, strict=True):
            assert_near(one, other)
    elif isinstance(wanted, torch.Tensor):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-6)
    else:
        assert found == wanted


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            ["run.precision=16-mixed", "run.accelerator=cuda"],
            r"run\.precision=16-mixed with run\.strategy=fsdp2: .*bf16",
        ),
    ],
)
def test_what_does_not_go_with_sharding_is_refused(given, monkeypatch, settings, message):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ConfigError, match=message):
        check(start.prepare([*given, *SHARDED, *settings]).settings)


def beside_eager(tmp_path, command, *settings, folder="run.folder", runs=("",)):
    """Run a command with auto, which captures steps, and without; losses and weights are the same, bit by bit."""
    path = tmp_path / "paced.py"
    path.write_text(textwrap.dedent(PACED))
    given = [f"{path}:make", "run.devices=2", "run.accelerator=cpu", "recipe.goal=min:error"]
    given += ["training.early_stopping_patience=null", *settings]
    for compiled in ("false", "auto"):
        more = f"training.optimization.use_torch_compile={compiled}", f"{folder}={tmp_path / compiled}"
        hotloop_command(command, *given, *more)
    for run in runs:
        assert losses(tmp_path / "auto" / run) == losses(tmp_path / "false" / run)
        ran = [step["running"] for step in record.load(tmp_path / "auto" / run)["steps"]]
        assert ran.count("eager+graph") > 60
        kept = [tmp_path / one / run / "checkpoints" / "best.pt" for one in ("auto", "false")]
        found, wanted = (checkpoint.load(one)["model"]["model"] for one in kept)
        assert all(torch.equal(found[name], value) for name, value in wanted.items())


@pytest.mark.campaign
@pytest.mark.parametrize("strategy", ["fsdp2", pytest.param("ddp", marks=pytest.mark.long)])
def test_auto_captures_a_step_of_two_devices_and_trains_as_eager(tmp_path, strategy):
    """The step averages by Fabric's no_backward_sync(enabled=False), which leaves FSDP2 averaging nothing behind it."""
    beside_eager(tmp_path, "train", f"run.strategy={strategy}", "training.num_epochs=16")


@pytest.mark.campaign
@pytest.mark.long
def test_auto_captures_the_sharded_steps_of_each_fold(tmp_path):
    folds = ["kfold.n_splits=2", "training.num_epochs=26"]
    beside_eager(tmp_path, "kfold", "run.strategy=fsdp2", *folds, runs=("fold-0", "fold-1"))


@pytest.mark.campaign
@pytest.mark.long
def test_auto_captures_the_sharded_steps_of_each_trial(tmp_path):
    rates = "hpo.space.program.lr.choices=[0.0078125,0.015625]"
    settings = ["hpo.n_trials=2", rates, "hpo.pruner=none", "training.num_epochs=16", "hpo.keep_checkpoints=all"]
    runs = ("trials/0000", "trials/0001")
    beside_eager(tmp_path, "hpo", "run.strategy=fsdp2", *settings, folder="hpo.folder", runs=runs)


@pytest.mark.parametrize(
    ("kind", "more", "why"),
    [
        ("SGD", {"fused": True}, r"torch's fused kernel of SGD takes no shares of parameters\. Leave fused=True out"),
        ("Adagrad", {"fused": True}, "torch's fused kernel of Adagrad takes no shares"),
        ("Adafactor", {}, "torch's Adafactor cannot step shares of parameters"),
        ("Rprop", {}, r"torch's Rprop cannot step shares of parameters\. Use another optimizer"),
        ("AdamW", {"fused": True}, None),
        ("SGD", {}, None),
    ],
)
def test_an_optimizer_that_cannot_step_shares_is_refused(kind, more, why):
    optimizer = getattr(torch.optim, kind)([torch.nn.Parameter(torch.ones(1))], **more)
    with pytest.raises(ConfigError, match=why) if why else contextlib.nullcontext():
        sharding.check_steps(optimizer)


class Own(torch.optim.Optimizer):
    """An optimizer with a kernel of its own, which it calls fused as torch does."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.1, "fused": True})


def test_a_fused_optimizer_that_is_not_torchs_is_not_refused():
    sharding.check_steps(Own([torch.nn.Parameter(torch.ones(1))]))


def test_parameters_laid_out_channels_last_are_refused():
    model = torch.nn.Sequential(torch.nn.Conv2d(2, 4, 3)).to(memory_format=torch.channels_last)
    with pytest.raises(
        ConfigError, match=r"parameter 0\.weight of the Sequential is not contiguous.*run\.strategy=ddp"
    ):
        sharding.shard(model, None)


def test_one_device_has_nothing_to_shard(given):
    with pytest.raises(ConfigError, match=r"run\.strategy='fsdp2' has no effect while run\.devices=1"):
        start.prepare([*given, "run.strategy=fsdp2"])


def test_a_parameter_without_a_dimension_is_refused():
    model = torch.nn.Linear(2, 2)
    model.scale = torch.nn.Parameter(torch.tensor(1.0))
    with pytest.raises(ConfigError, match=r"parameter scale of the Linear has no dimension to shard"):
        sharding.shard(model, None)


def test_a_model_that_no_strategy_has_sharded_is_refused():
    with pytest.raises(ConfigError, match=r"has sharded none of its models\. Set them up by net = fabric\.setup"):
        sharding.check_optimizers({"model": torch.nn.Linear(2, 2)}, [])


def test_state_without_shares_stays_the_object_that_it_was():
    model = torch.nn.BatchNorm1d(2)
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    state, other = sharding.state_of(model), optimizer.state_dict()
    assert state["weight"].data_ptr() == model.weight.data_ptr()
    assert sharding.shares_of(model, state) is state
    assert sharding.shares_of(optimizer, other) is other
    assert sharding.own({"model": model}) == {}


@pytest.mark.parametrize(("strategy", "refused"), [("fsdp2", True), ("ddp", False)])
def test_presets_that_capture_for_themselves_are_refused(given, strategy, refused):
    compiled = ["training.optimization.use_torch_compile=true", "compile.preset=reduce-overhead"]
    settings = start.prepare([*given, "run.devices=2", f"run.strategy={strategy}", *compiled]).settings
    words = r"compile\.preset=reduce-overhead with run\.strategy=fsdp2: it captures CUDA graphs"
    with pytest.raises(ConfigError, match=words) if refused else contextlib.nullcontext():
        check_presets(settings, compiling.plan(settings, ["model"])["model"])


@pytest.mark.campaign
def test_shares_become_the_state_of_one_device_and_are_made_of_it_again():
    command = [sys.executable, "-W", "ignore", "-c", textwrap.dedent(ALONE)]
    said = subprocess.run(command, check=True, timeout=900, capture_output=True, text=True).stdout.splitlines()
    assert said[0] == "['', '0', '1']"
    assert "the AdamW holds parameters that no model of the Workload has any more" in said[1]
    assert "net, stepping = fabric.setup(model, optimizer), or make it after the model was set up" in said[1]
    assert "the state of LBFGS has other shapes than its parameters" in said[2]
    assert said[3:] == ["True"] * 6 + ["['DTensor', 'Tensor']", "True", "False"]


@pytest.mark.campaign
def test_two_sharded_devices_are_one_with_the_doubled_batch(given, tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    train(*given, "program.batch=8", f"run.folder={one}")
    train(*given, *SHARDED, f"run.folder={two}")
    assert losses(two) == pytest.approx(losses(one), rel=1e-4)
    for name in ("best.pt", "last.pt"):
        found, wanted = (checkpoint.load(folder / "checkpoints" / name) for folder in (two, one))
        for part in ("model", "others"):
            assert_near(found[part], wanted[part])
    assert record.load(two)["metrics"][-1]["error"] == pytest.approx(record.load(one)["metrics"][-1]["error"], rel=1e-3)

    plain = torch.nn.Linear(4, 7)
    weights = torch.load(two / "checkpoints" / "best.pt", weights_only=True)["model"]["model"]
    plain.load_state_dict({name[2:]: value for name, value in weights.items() if name.startswith("0.")})
    assert "error" in hotloop_command("eval", f"run={two}")
    hotloop_command("export", str(two))


@pytest.mark.campaign
@pytest.mark.long
def test_a_killed_sharded_run_is_resumed_bit_for_bit(given, tmp_path):
    program = ["program.apart=true", "program.shuffle=true", "program.norm=BatchNorm1d"]
    both = [*given, *SHARDED, *program, "training.checkpoint_every_steps=2"]
    train(*both, f"run.folder={tmp_path / 'whole'}")
    said = train(*both, f"run.folder={tmp_path / 'killed'}", code=1, KILL="1:6")
    assert "rank 1 of 2 was lost: SIGKILL" in said
    train(f"run.resume={tmp_path / 'killed'}")
    assert losses(tmp_path / "killed") == losses(tmp_path / "whole")
    found, wanted = (checkpoint.load(tmp_path / name / "checkpoints" / "last.pt") for name in ("killed", "whole"))
    for name, value in wanted["model"]["model"].items():
        assert torch.equal(found["model"]["model"][name], value)
    own = wanted["of_ranks"][0]["buffers"]["model"]
    assert not torch.equal(own["1.norm.running_mean"], wanted["model"]["model"]["1.norm.running_mean"])
    assert torch.equal(found["of_ranks"][0]["buffers"]["model"]["1.norm.running_mean"], own["1.norm.running_mean"])

    said = train(f"run.resume={tmp_path / 'whole'}", "run.strategy=ddp", "training.num_epochs=4")
    assert "2 processes, ddp" in said


@pytest.mark.campaign
@pytest.mark.long
def test_sharded_blocks_are_compiled_in_place(given, tmp_path):
    compiled = ["training.optimization.use_torch_compile=true", "compile.preset=aot_eager"]
    folder = tmp_path / "run"
    said = train(*given, *SHARDED, *compiled, "compile.measure_eager_steps=2", f"run.folder={folder}")
    assert "Model compiled with graph optimization (aot_eager)" in said
    train(*given, *SHARDED, f"run.folder={tmp_path / 'eager'}")
    assert losses(folder) == pytest.approx(losses(tmp_path / "eager"), rel=1e-4)
