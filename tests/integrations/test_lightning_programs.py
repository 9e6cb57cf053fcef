"""Training steps as people write them, owned by a loop: decorated, logging what changes, with settings of all kinds."""

import lightning.pytorch as pl
import pytest
import torch
import torchmetrics
from fitting import SmallClassifier, small_batches
from test_lightning import Sgd, fit, same
from test_lightning_conformance import Looks, loader
from torch.nn import functional as F

import hotloop
from hotloop.integrations.lightning import HotLoop
from hotloop.testing import captured_step_emulation

pytestmark = pytest.mark.filterwarnings("default")  # the framework warns of its own use of torch


class ReadsTheNumber(Sgd):
    def training_step(self, batch, batch_idx):
        ids, labels = batch
        loss = F.cross_entropy(self.net(ids), labels)
        if batch_idx % 5 == 0:
            self.log("every_fifth", loss)
        return loss * (1 + batch_idx / 64)


@pytest.mark.campaign
def test_a_step_that_reads_the_number_of_its_batch_is_compiled_from_the_start():
    """Each number occurs once, so waiting for a number to repeat would compile nothing."""
    eager, hot = fit(ReadsTheNumber, batches=16), HotLoop("aot_eager")
    same(eager, fit(ReadsTheNumber, hot, batches=16))
    assert {one.name: one.steps for one in hot.status().loop.tiers} == {"aot_eager": 16, "eager": 0}
    assert hot.status().notes == []


def test_a_number_that_changes_is_named_where_it_keeps_a_step_from_being_captured():
    eager, hot = fit(ReadsTheNumber, batches=12), HotLoop("eager+graph")
    with captured_step_emulation():
        same(eager, fit(ReadsTheNumber, hot, batches=12))
    declined = {one.name: one.why for one in hot.status().loop.tiers if one.state == "declined"}
    assert "batch_idx, which changes from step to step" in declined["eager+graph"], hot.status()
    assert "on_train_batch_start" in hot.status().notes[0]


class WarmsUp(Sgd):
    def training_step(self, batch, batch_idx):
        ids, labels = batch
        return F.cross_entropy(self.net(ids), labels) * min(1.0, self.global_step / 8)


class LogsANumber(Sgd):
    def training_step(self, batch, batch_idx):
        ids, labels = batch
        self.log("weight", 0.5)
        return F.cross_entropy(self.net(ids), labels)


@pytest.mark.parametrize(
    ("module", "cause", "remedy"),
    [
        (WarmsUp, "trainer.global_step, which changes", "have on_train_batch_start write it into"),
        (LogsANumber, "returns a Python number", "log a number in on_train_batch_end, or a tensor"),
    ],
)
def test_what_keeps_a_step_from_being_captured_has_a_remedy_that_a_module_can_follow(module, cause, remedy):
    eager, hot = fit(module, batches=12), HotLoop("eager+graph")
    with captured_step_emulation():
        same(eager, fit(module, hot, batches=12))
    declined = {one.name: one.why for one in hot.status().loop.tiers if one.state == "declined"}
    assert cause in declined["eager+graph"], hot.status()
    assert remedy in hot.status().hints[-1], hot.status()


class MeasuresValidation(Sgd):
    """A module with metrics of the validation alone, as most have."""

    def __init__(self, net):
        super().__init__(net)
        accuracy = torchmetrics.Accuracy("multiclass", num_classes=3)
        self.measured = torchmetrics.MetricCollection({"accuracy": accuracy}, prefix="val_")

    def validation_step(self, batch, batch_idx):
        ids, labels = batch
        self.measured.update(self.net(ids), labels)

    def on_validation_epoch_end(self):
        self.log_dict(self.measured.compute())
        self.measured.reset()


@pytest.mark.campaign
def test_metrics_of_a_validation_keep_no_step_from_being_compiled():
    """Their code reaches Python's own caches (of regular expressions, say), in which every compile writes."""
    eager, hot = fit(MeasuresValidation, batches=12, validate=True), HotLoop("aot_eager")
    same(eager, fit(MeasuresValidation, hot, batches=12, validate=True))
    assert hot.status().running == "aot_eager", hot.status()


class Kept(pl.Callback):
    """A callback that keeps the logged values, batch by batch."""

    def __init__(self):
        self.seen = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.seen.append({name: float(value) for name, value in trainer.callback_metrics.items()})


class LogsWhatChanges(Sgd):
    def training_step(self, batch, batch_idx):
        ids, labels = batch
        count = torch.zeros(())
        self.log("count", count)
        count += 1
        self.log_dict({"bias": self.net.head.bias[0], "counted": count})
        return F.cross_entropy(self.net(ids), labels)


class LogsInClipping(Sgd):
    def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
        self.log("norm", torch.nn.utils.clip_grad_norm_(self.parameters(), 0.5))


@pytest.mark.parametrize("module", [LogsWhatChanges, LogsInClipping])
@pytest.mark.parametrize("run", ["aot_eager", "eager+graph"])
def test_what_is_logged_has_the_value_of_that_moment_wherever_it_is_logged(module, run):
    eager, ours, hot = Kept(), Kept(), HotLoop(run)
    fit(module, eager, batches=16)
    with captured_step_emulation():
        fit(module, ours, hot, batches=16)
    assert hot.status().loop.tier == run, hot.status()
    for expected, found in zip(eager.seen, ours.seen, strict=True):
        assert found == pytest.approx(expected, rel=1e-4)


def test_a_step_of_the_trainers_own_has_a_record_too(tmp_path):
    hot = HotLoop("aot_eager", record=tmp_path)
    fit(Sgd, Looks(), hot, batches=4)
    for record in (hot.record.document, hotloop.record.load(tmp_path)):
        assert record["status"] == "finished"
        assert record["settings"]["run"] == "aot_eager"
        assert "Looks.on_after_backward" in record["decisions"][0]["reason"]
        assert [one["step"] for one in record["steps"]] == [1, 2, 3, 4]
        assert record["components"]["model"]["compiles"] > 0
        assert any(one["kind"] == "compiled" for one in record["events"])


class SkipsShortBatches(Sgd):
    """A module that skips the update of some batches in Lightning's way: its step returns nothing."""

    def training_step(self, batch, batch_idx):
        ids, labels = batch
        loss = F.cross_entropy(self.net(ids), labels)
        self.log("seen", loss)
        return loss if len(ids) == 6 else None

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.0625, fused=True)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class SkipsAndClips(SkipsShortBatches):
    """A module with clipping of its own, which Lightning calls without a backward too."""

    def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
        self.log("clipped", float(sum(one.grad is not None for one in self.parameters())))
        torch.nn.utils.clip_grad_norm_(self.parameters(), 0.5)


class Grads(Kept):
    """A callback that keeps the gradients after each batch as well."""

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        found = {name: one.grad.clone() for name, one in pl_module.named_parameters() if one.grad is not None}
        self.seen[-1] = self.seen[-1], bool(outputs), trainer.global_step, found


@pytest.mark.parametrize("module", [SkipsShortBatches, SkipsAndClips])
@pytest.mark.parametrize("run", ["auto", "eager", "aot_eager", "eager+graph"])
def test_a_step_that_returns_nothing_is_skipped_as_lightning_skips_it(module, run):
    left = []
    full = small_batches(4)
    batches = loader([*full, *(tuple(one[:3] for one in batch) for batch in full[:2]), *full])
    for callbacks in ((), (HotLoop(run),)):
        kept = Grads()
        torch.manual_seed(1)
        model = module(SmallClassifier())
        trainer = pl.Trainer(
            accelerator="cpu", devices=1, max_epochs=2, callbacks=[kept, *callbacks], logger=False,
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip
        with captured_step_emulation():
            trainer.fit(model, batches)
        left.append((kept.seen, dict(model.state_dict()), trainer.optimizers[0].state_dict()["state"]))
    assert callbacks[0].status().owned
    assert [len(one[3]) for one in left[0][0][4:6]] == [0, 0], "Lightning leaves no gradient behind"
    torch.testing.assert_close(left[1], left[0], rtol=1e-4, atol=1e-5)
