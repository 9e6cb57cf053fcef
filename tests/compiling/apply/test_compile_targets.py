"""Everything that can be handed to `hotloop.compile`: containers, mappings, pipelines, callables, a LightningModule."""

import copy
import inspect
import pickle

import pytest
import torch
import torch.nn.functional as F
from compiling_models import Net, Tied, against_eager, assert_same, one, rows
from torch import nn

import hotloop
from hotloop.errors import ConfigError


class Holds(nn.Module):
    """A list of layers in a module."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8), nn.GELU(), nn.BatchNorm1d(8)])

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.Sequential(nn.Linear(8, 8), nn.GELU()),
        lambda: nn.Sequential(nn.Sequential(nn.Linear(8, 8)), nn.Sequential(nn.BatchNorm1d(8), nn.Dropout(0.2))),
        Holds,
        lambda: nn.Linear(8, 8),
        lambda: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True),
    ],
    ids=["sequential", "nested", "module list", "one layer", "torch's own block"],
)
def test_containers_really_compile(make):
    batches = [rows(seed=s) for s in range(2)]
    status = against_eager(make(), batches, tolerance={"rtol": 1e-5, "atol": 1e-6})
    assert status.state == "compiled"
    assert (status.compiles, status.frames_compiled, status.frames_eager) == (1, 2, 0)


def test_a_mapping_is_compiled_in_place_by_component():
    parts = {"net": Net(), "head": nn.Linear(8, 2), "loss": F.mse_loss, "name": "not a part"}
    net, head = parts["net"], parts["head"]
    assert hotloop.compile(parts, "aot_eager") is parts
    assert parts["net"] is net
    assert parts["head"] is head
    assert parts["loss"] is not F.mse_loss
    parts["loss"](parts["head"](parts["net"](rows())), rows(width=2)).backward()
    status = hotloop.status(parts)
    assert {name: part.state for name, part in status.components.items()} == dict.fromkeys(
        ("net", "head", "loss"), "compiled"
    )
    assert status.skipped == ("name",)
    assert "name" in str(status)
    hotloop.uncompile(parts)
    assert parts["loss"] is F.mse_loss
    assert {part.state for part in hotloop.status(parts).components.values()} == {"eager"}


class Pipeline:
    """What a diffusers pipeline looks like from outside."""

    def __init__(self, **parts):
        self.components = parts
        for name, part in parts.items():
            setattr(self, name, part)


@pytest.mark.parametrize("denoiser", ["unet", "transformer"])
def test_a_pipeline_compiles_its_denoiser_and_names_the_others(denoiser):
    pipe = Pipeline(**{denoiser: Net(), "vae": Net(), "text_encoder": Tied(), "scheduler": object(), "safety": None})
    hotloop.compile(pipe, "aot_eager")
    getattr(pipe, denoiser)(rows())
    status = hotloop.status(pipe)
    assert status.components[denoiser].state == "compiled"
    assert {status.components[name].state for name in ("vae", "text_encoder")} == {"eager"}
    assert set(status.skipped) == {"scheduler", "safety"}
    for name in ("vae", "text_encoder"):
        assert name in status.hint
    assert "preset" in status.hint
    assert status.hint in str(status).replace("\n", " ").replace("  ", " ") or "vae" in str(status)
    hotloop.compile(pipe, {denoiser: "aot_eager", "vae": "aot_eager"})
    pipe.vae(rows())
    assert hotloop.status(pipe).components["vae"].state == "compiled"
    hotloop.uncompile(pipe)
    assert hotloop.status(pipe).components[denoiser].state == "eager"


def loss_function(prediction, target, *, weight=1.0):
    """Squared error, weighted."""
    return weight * (prediction - target).square().mean()


def test_a_plain_function_comes_back_as_a_new_one():
    compiled = hotloop.compile(loss_function, "aot_eager")
    assert compiled is not loss_function
    assert compiled.__name__ == "loss_function"
    assert compiled.__doc__ == loss_function.__doc__
    assert inspect.signature(compiled) == inspect.signature(loss_function)
    x = rows().requires_grad_()
    compiled(x, rows(seed=1), weight=2.0).backward()
    y = rows().requires_grad_()
    loss_function(y, rows(seed=1), weight=2.0).backward()
    assert_same(x.grad, y.grad)
    status = hotloop.status(compiled)
    assert status.components["loss_function"].state == "compiled"
    assert hotloop.uncompile(compiled) is loss_function
    assert hotloop.compile(compiled, "aot_eager").__wrapped__ is loss_function
    assert pickle.loads(pickle.dumps(compiled)) is loss_function
    assert hotloop.status(loss_function).components["loss_function"].state == "eager"


def test_what_cannot_be_compiled_is_said():
    for wrong in (42, "model", None, [Net()]):
        with pytest.raises(ConfigError, match="cannot compile"):
            hotloop.compile(wrong)
    with pytest.raises(ConfigError, match="nothing to compile"):
        hotloop.compile({})
    wrapped = torch.compile(Net(), backend="aot_eager")
    with pytest.raises(ConfigError, match="_orig_mod"):
        hotloop.compile(wrapped)


def test_a_module_that_torch_compiled_in_place_is_taken_over(caplog):
    caplog.set_level("INFO", "hotloop")
    model = Net()
    model.compile(backend="eager")
    hotloop.compile(model, "aot_eager")
    model(rows())
    assert one(model).state == "compiled"
    assert "hotloop.compile compiles over it" in caplog.text


@pytest.fixture
def lightning_module():
    pytest.importorskip("lightning", reason="lightning is not installed")
    import lightning.pytorch as pl

    class Own(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.net, self.head = Net(p=0.0), nn.Linear(8, 1)

        def forward(self, x):
            return self.head(self.net(x))

        def training_step(self, batch, index):
            return self(batch).square().mean()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    class WithoutForward(Own):
        forward = pl.LightningModule.forward

        def training_step(self, batch, index):
            return self.head(self.net(batch)).square().mean()

    return {"own forward": Own, "without": WithoutForward}


@pytest.mark.parametrize("kind", ["own forward", "without"])
@pytest.mark.filterwarnings("ignore")  # the Trainer warns of workers, loggers and of torch's own deprecations
def test_a_lightning_module(lightning_module, kind, tmp_path):
    import lightning.pytorch as pl

    torch.manual_seed(0)
    model = lightning_module[kind]()
    reference = copy.deepcopy(model)
    hotloop.compile(model, "aot_eager")
    batches = [rows(seed=s) for s in range(4)]
    for candidate in (reference, model):
        trainer = pl.Trainer(
            max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
            enable_model_summary=False, default_root_dir=tmp_path,
        )  # fmt: skip
        trainer.fit(candidate, torch.utils.data.DataLoader(batches, batch_size=None))
    for name, value in model.state_dict().items():
        assert_same(value, reference.state_dict()[name])
    status = one(model)
    assert status.state == "compiled", status
    assert status.frames_compiled == 4, "training_step is one graph"
    assert list(model.state_dict()) == list(reference.state_dict())
