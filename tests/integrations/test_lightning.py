"""The Trainer's callback, beyond the conformance suite."""

import runpy
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from fitting import SmallClassifier, inventory, small_batches
from lightning.pytorch.plugins import MixedPrecision
from test_lightning_conformance import Losses, Task, loader
from torch.nn import functional as F

import hotloop
from hotloop.errors import ConfigError
from hotloop.integrations.lightning import HotLoop
from hotloop.testing import assert_max_recompiles, captured_step_emulation

pytestmark = pytest.mark.filterwarnings("default")  # the framework warns of its own use of torch


class Sgd(Task):
    """A module with an optimizer that is bit-identical recorded and eager."""

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.125, momentum=0.5, fused=True)


def fit(module=Sgd, *callbacks, batches=8, epochs=1, validate=False, wrap=lambda model: model, **settings):
    torch.manual_seed(1)
    model, losses = module(SmallClassifier()), Losses()
    torch.manual_seed(2)
    trainer = pl.Trainer(
        accelerator="cpu", devices=1, max_epochs=epochs, callbacks=[losses, *callbacks], logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, **settings,
    )  # fmt: skip
    more = {"val_dataloaders": loader(small_batches(2))} if validate else {}
    trainer.fit(wrap(model), loader(small_batches(batches)), **more)
    return model, losses.seen, trainer


def same(one, other):
    torch.testing.assert_close(one[1], other[1], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(dict(one[0].state_dict()), dict(other[0].state_dict()), rtol=1e-5, atol=1e-6)
    assert one[2].callback_metrics.keys() == other[2].callback_metrics.keys()
    for name, value in one[2].callback_metrics.items():
        torch.testing.assert_close(value, other[2].callback_metrics[name], rtol=1e-5, atol=1e-6)


class Unfused(Sgd):
    def configure_optimizers(self):  # Lightning clips no gradients of a fused optimizer
        return torch.optim.SGD(self.parameters(), lr=0.125, momentum=0.5)


SETTINGS = {
    "bf16 and clipping": lambda: {"module": Unfused, "precision": "bf16-mixed", "gradient_clip_val": 0.1},
    "16-mixed": lambda: {"plugins": [MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", 256.0))]},
    "sanity check and validation": lambda: {"num_sanity_val_steps": 1, "validate": True, "epochs": 2},
}


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_a_captured_step_is_eagers(settings):
    module = settings().get("module", Sgd)
    eager = fit(module, **{name: one for name, one in settings().items() if name != "module"})
    hot = HotLoop(run="eager+graph")
    with captured_step_emulation():
        ours = fit(module, hot, **{name: one for name, one in settings().items() if name != "module"})
    same(eager, ours)
    assert hot.status().loop.tier == "eager+graph", hot.status()
    assert hot.status().owned
    assert not hot.status().why


def test_a_scaler_with_clipping_and_an_optimizer_that_is_not_fused():
    def settings():  # the first scale overflows: two steps are skipped
        scaled = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", 2.0**127, growth_interval=3))
        return {"plugins": [scaled], "gradient_clip_val": 0.1}

    eager, hot = fit(Unfused, **settings()), HotLoop(run="eager+graph")
    with captured_step_emulation():
        same(eager, fit(Unfused, hot, **settings()))
    assert hot.status().loop.tier == "eager+graph", hot.status()


class ReadsTheEpoch(Sgd):
    def training_step(self, batch, batch_idx):
        ids, labels = batch
        loss = F.cross_entropy(self.net(ids), labels) * (1 + self.current_epoch)
        self.log_dict({"loss": loss, "epoch": float(self.current_epoch)}, on_epoch=True)
        return {"loss": loss, "scaled": loss.detach() / 2}


def test_what_a_step_reads_of_the_trainer_is_never_frozen():
    eager = fit(ReadsTheEpoch, epochs=2, batches=10)
    hot = HotLoop(run="eager+graph")
    with captured_step_emulation():
        ours = fit(ReadsTheEpoch, hot, epochs=2, batches=10)
    same(eager, ours)


class ReadsAround(Sgd):
    """A module whose step reads objects of the fit: hyper-parameters, a data module, a callback, the progress."""

    reads = "hparams"

    def __init__(self, net):
        super().__init__(net)
        self.save_hyperparameters({"scale": 1.0})

    def scale(self):
        if self.reads == "hparams":
            return self.hparams.scale
        if self.reads == "callback":
            return next(one.scale for one in self.trainer.callbacks if isinstance(one, Anneals))
        return 1.0 + self.trainer.fit_loop.epoch_progress.current.completed

    def training_step(self, batch, batch_idx):
        ids, labels = batch
        return F.cross_entropy(self.net(ids), labels) * self.scale()


class Anneals(pl.Callback):
    scale = 1.0

    def on_train_epoch_start(self, trainer, pl_module):
        self.scale = pl_module.hparams.scale = 1.0 + trainer.current_epoch


@pytest.mark.parametrize("reads", ["hparams", "callback", "progress"])
def test_what_a_step_reads_of_a_fits_objects_is_never_frozen(reads):
    made = type("Reads", (ReadsAround,), {"reads": reads})
    eager = fit(made, Anneals(), epochs=3, batches=10)
    hot = HotLoop(run="eager+graph")
    with captured_step_emulation():
        same(eager, fit(made, Anneals(), hot, epochs=3, batches=10))


class Manual(Sgd):
    def __init__(self, net):
        super().__init__(net)
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        ids, labels = batch
        optimizer = self.optimizers()
        loss = F.cross_entropy(self.net(ids), labels)
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        return {"loss": loss.detach()}


class Watches(pl.Callback):
    def on_after_backward(self, trainer, pl_module):
        self.seen = [one.grad.norm() for one in pl_module.parameters()]


@pytest.mark.campaign
def test_what_keeps_the_step_the_trainers_own_is_said_and_the_module_compiled_in_place():
    for module, callbacks, reason in (
        (Manual, [], "manual optimization"),
        (Sgd, [Watches()], "Watches.on_after_backward"),
    ):
        hot = HotLoop(run="aot_eager")
        same(fit(module, *callbacks), fit(module, *callbacks, hot))
        told = hot.status()
        assert not told.owned
        assert reason in str(told)
        assert told.model.components["model"].state == "compiled", told
    quiet = HotLoop()
    fit(Manual, quiet)
    assert 'HotLoop(run="default")' in str(quiet.status())


class AlsoTested(Sgd):
    def test_step(self, batch, batch_idx):
        self.validation_step(batch, batch_idx)


def test_validate_and_test_compile_once_each_and_restore_the_module():
    torch.manual_seed(1)
    model = AlsoTested(SmallClassifier())
    hot, batches = HotLoop(run="aot_eager"), loader(small_batches(2))
    quiet = {
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
    }
    pl.Trainer(accelerator="cpu", devices=1, **quiet).validate(model, batches, verbose=False)
    before = inventory(model)  # with what an eager Trainer leaves
    trainer = pl.Trainer(accelerator="cpu", devices=1, callbacks=[hot], **quiet)
    with assert_max_recompiles(0), hotloop.watch() as seen:
        found = [trainer.validate(model, batches, verbose=False), trainer.test(model, batches, verbose=False)]
        again = [trainer.validate(model, batches, verbose=False), trainer.test(model, batches, verbose=False)]
    assert found == again
    assert sum(isinstance(one, hotloop.events.Compiled) for one in seen) == 2, "validation_step and test_step"
    assert list(found[0][0].values()) == list(found[1][0].values())
    assert hot.status().model.components["model"].state == "compiled"
    assert inventory(model) == before


class Fails(Sgd):
    def training_step(self, batch, batch_idx):
        if batch_idx == 5:
            raise KeyError("the user's own")
        return super().training_step(batch, batch_idx)


@pytest.mark.campaign
def test_an_exception_restores_the_module_and_comes_through():
    torch.manual_seed(1)
    held = []
    for callbacks in ([], [HotLoop(run="aot_eager")]):
        with pytest.raises(KeyError, match="the user's own"):
            fit(Fails, *callbacks, wrap=lambda model: held.append(model) or model)
    assert inventory(held[0]) == inventory(held[1])


def test_an_unknown_tier_is_refused():
    with pytest.raises(ConfigError, match="nonesuch"):
        HotLoop(run="nonesuch")


def test_the_example_fits_with_hotloop(monkeypatch, capsys):
    example = Path(__file__).parents[2] / "examples" / "lightning_transformer.py"
    monkeypatch.setattr("sys.argv", [str(example), "--run", "eager", "--batches", "4"])
    runpy.run_path(str(example), run_name="__main__")
    said = capsys.readouterr().out
    assert "hotloop in Lightning's Trainer (asked for: eager)" in said
