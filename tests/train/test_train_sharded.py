"""``run.strategy=fsdp2``: trained as on one device, kept in checkpoints that one device reads, and resumed bit by bit."""

import contextlib
import subprocess
import sys
import textwrap

import pytest
import torch
from training_fixtures import assert_alike, hotloop_command, losses

from hotloop import record
from hotloop.errors import ConfigError
from hotloop.train import checkpoint, compiling, sharding, start
from hotloop.train.ranks import check_presets

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
        print(all(torch.equal(sharding.whole(found[name]), value) for name, value in values.items()))
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


def test_a_model_that_no_strategy_has_sharded_is_refused():
    with pytest.raises(ConfigError, match=r"has sharded none of its models\. Set them up by net = fabric\.setup"):
        sharding.check_optimizers({"model": torch.nn.Linear(2, 2)}, [])


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
            assert_alike(found[part], wanted[part], rtol=1e-4, atol=1e-6)
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
