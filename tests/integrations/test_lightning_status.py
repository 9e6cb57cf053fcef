"""The status of the Trainer's callback is useful at any time, and still describes a fit after it."""

import lightning.pytorch as pl
import pytest
import torch
from fitting import SmallClassifier, small_batches
from lightning.pytorch.callbacks import EarlyStopping
from test_lightning import AlsoTested, Manual, Sgd
from test_lightning_conformance import Losses, loader

import hotloop
from hotloop import events as ev
from hotloop.errors import ConfigError
from hotloop.integrations.lightning import HotLoop

pytestmark = pytest.mark.filterwarnings("default")  # the framework warns of its own use of torch

QUIET = {
    "accelerator": "cpu",
    "devices": 1,
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "enable_checkpointing": False,
}


def trained(*callbacks, module=AlsoTested, batches=None, **settings):
    """Return a Trainer, and the module that it has fitted."""
    torch.manual_seed(1)
    model = module(SmallClassifier())
    trainer = pl.Trainer(callbacks=list(callbacks), **{"max_epochs": 1, **QUIET, **settings})
    trainer.fit(model, loader(batches or small_batches(8)), loader(small_batches(2)))
    return trainer, model


def compiles(events):
    return [one.function for one in events if isinstance(one, ev.Compiled)]


def short(batches):
    """Append a short batch, as a loader does that drops no rows."""
    return [*batches, tuple(one[:3] for one in batches[0])]


@pytest.mark.campaign
def test_validate_after_a_fit_keeps_the_fits_status():
    hot = HotLoop("aot_eager")
    with hotloop.watch() as fitted:
        trainer, model = trained(hot)
    assert sorted(compiles(fitted)) == ["training_step", "validation_step"]
    of_fit, record = hot.status(), hot.record
    first = trainer.validate(model, loader(small_batches(2)), verbose=False)
    trainer.test(model, loader(small_batches(2)), verbose=False)
    told = hot.status()
    assert (told.stage, told.running, told.loop, told.model) == ("fit", "aot_eager", of_fit.loop, of_fit.model)
    assert (told.after.stage, told.after.running) == ("test", "aot_eager")
    assert told.to_dict()["after"]["model"]["components"]["model"]["state"] == "compiled"
    assert hot.record is record
    eager, same_model = trained()
    again = eager.validate(same_model, loader(small_batches(2)), verbose=False)
    assert first[0]["val_loss"] == pytest.approx(again[0]["val_loss"], rel=1e-4)


def test_before_anything_the_status_says_what_to_do():
    told = HotLoop("full").status()
    assert (told.stage, told.running, told.owned) == ("", "", False)
    assert "(asked for: full), nothing has run yet in this process" in str(told)
    assert "Trainer(callbacks=[HotLoop()])" in told.hints[0]
    assert "ddp_spawn" in told.hints[0], "which runs the fit in processes of its own"


@pytest.mark.campaign
def test_two_callbacks_are_refused_before_anything_runs():
    losses, hot = Losses(), HotLoop("aot_eager")
    for pair in ((HotLoop(), hot), (hot, hot)):
        with pytest.raises(ConfigError, match=r"expected one HotLoop, since a training step has one owner"):
            trained(losses, *pair)
    assert losses.seen == []
    trained(hot)
    assert hot.status().running == "aot_eager"


def stopped_early(*callbacks):
    return trained(EarlyStopping("val_loss", patience=1, mode="max"), *callbacks, max_epochs=6)


def overfitted(*callbacks):
    return trained(*callbacks, overfit_batches=1, max_epochs=8)


def run_fast(*callbacks):
    return trained(*callbacks, fast_dev_run=6)


@pytest.mark.campaign
@pytest.mark.parametrize("program", [stopped_early, overfitted, run_fast])
def test_what_people_ask_of_a_trainer_ends_as_without_the_callback(program, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # a Tuner writes its checkpoint here
    (eager, expected), hot = program(), HotLoop("aot_eager")
    trainer, found = program(hot)
    assert trainer.global_step == eager.global_step
    torch.testing.assert_close(dict(found.state_dict()), dict(expected.state_dict()), rtol=1e-4, atol=1e-5)
    assert hot.status().running == "aot_eager"


def test_a_step_of_the_trainers_own_has_its_reason_and_a_hint_in_the_status():
    hot = HotLoop()
    trained(hot, module=Manual)
    told = hot.status()
    assert (told.running, told.owned) == ("eager", False)
    assert told.why[0].startswith("manual optimization")
    assert 'HotLoop(run="default")' in told.hints[0]


def test_a_fit_that_goes_on_counts_the_steps_that_are_to_come(tmp_path):
    """A compile that pays over a whole run may not pay over its last steps."""
    trainer, _ = trained(max_steps=5)
    trainer.save_checkpoint(tmp_path / "middle.ckpt")
    hot = HotLoop()
    trainer = pl.Trainer(callbacks=[hot], max_epochs=2, **QUIET)
    told = []
    hot_start = hot.on_train_start

    def start(*args):
        hot_start(*args)
        told.append(hot.loop.context.total_steps)

    hot.on_train_start = start
    trainer.fit(Sgd(SmallClassifier()), loader(small_batches(8)), ckpt_path=tmp_path / "middle.ckpt")
    assert told == [11]
