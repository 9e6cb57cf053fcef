"""Training steps as people write them, owned by a loop: decorated, logging what changes, with settings of all kinds."""

import functools

import lightning.pytorch as pl
import pytest
import torch
import torchmetrics
from fitting import SmallClassifier, small_batches
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from test_lightning import Sgd, fit, same
from test_lightning_conformance import Looks, loader
from torch.nn import functional as F

import hotloop
from hotloop.errors import ConfigError
from hotloop.integrations.lightning import HotLoop
from hotloop.testing import captured_step_emulation

pytestmark = pytest.mark.filterwarnings("default")  # the framework warns of its own use of torch


class AnyArguments(Sgd):
    def training_step(self, *args):
        (ids, labels), at = args
        return F.cross_entropy(self.net(ids), labels) * (1 + at % 3)


def by_number(function):
    @functools.wraps(function)
    def call(self, *args):
        return function(self, *args) * (1 + args[1] % 3)

    return call


class Decorated(Sgd):
    @by_number
    def training_step(self, batch, batch_idx):
        ids, labels = batch
        return F.cross_entropy(self.net(ids), labels)


@pytest.mark.campaign
@pytest.mark.parametrize("module", [AnyArguments, Decorated])
@pytest.mark.parametrize("run", ["aot_eager", "eager+graph"])
def test_a_step_whose_arguments_cannot_be_told_gets_those_that_the_trainer_gives(module, run):
    eager = fit(module)
    with captured_step_emulation():
        same(eager, fit(module, HotLoop(run)))


class ReadsTheNumber(Sgd):
    def training_step(self, batch, batch_idx):
        ids, labels = batch
        loss = F.cross_entropy(self.net(ids), labels)
        if batch_idx % 5 == 0:
            self.log("every_fifth", loss)
        return loss * (1 + batch_idx / 64)


@pytest.mark.campaign
@pytest.mark.parametrize("module", [ReadsTheNumber, AnyArguments, Decorated])
def test_a_step_that_reads_the_number_of_its_batch_is_compiled_from_the_start(module):
    """Each number occurs once, so waiting for a number to repeat would compile nothing."""
    eager, hot = fit(module, batches=16), HotLoop("aot_eager")
    same(eager, fit(module, hot, batches=16))
    assert {one.name: one.steps for one in hot.status().loop.tiers} == {"aot_eager": 16, "eager": 0}
    assert hot.status().notes == []


@pytest.mark.parametrize("module", [ReadsTheNumber, AnyArguments, Decorated])
def test_a_number_that_changes_is_named_where_it_keeps_a_step_from_being_captured(module):
    eager, hot = fit(module, batches=12), HotLoop("eager+graph")
    with captured_step_emulation():
        same(eager, fit(module, hot, batches=12))
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


class MeasuresEpochs(Sgd):
    """A module that logs a metric object, as on Lightning's pages; the metric changes from epoch to epoch."""

    def __init__(self, net):
        super().__init__(net)
        self.accuracy = torchmetrics.Accuracy("multiclass", num_classes=3)

    def validation_step(self, batch, batch_idx):
        ids, labels = batch
        self.accuracy(self.net(ids), labels)
        self.log("val_accuracy", self.accuracy)


@pytest.mark.parametrize("module", [MeasuresValidation, MeasuresEpochs])
def test_metrics_of_a_validation_leave_a_captured_step_in_force(module):
    eager, hot = fit(module, epochs=8, validate=True), HotLoop("eager+graph")
    with captured_step_emulation():
        same(eager, fit(module, hot, epochs=8, validate=True))
    assert hot.status().running == "eager+graph", hot.status()
    assert "recorded anew" not in str(hot.status())


def test_a_number_that_stays_is_captured():
    eager, hot = fit(ReadsTheNumber, epochs=10, overfit_batches=1), HotLoop("eager+graph")
    with captured_step_emulation():
        same(eager, fit(ReadsTheNumber, hot, epochs=10, overfit_batches=1))
    assert hot.status().running == "eager+graph", hot.status()


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


def test_settings_that_there_are_not_are_refused_when_the_callback_is_made():
    for setting in ("sentinle", "state", "model"):
        with pytest.raises(ConfigError, match=rf"HotLoop\({setting}=.*there is no such setting: .*sentinel"):
            HotLoop("full", **{setting: None})


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


def test_a_fit_that_fails_in_a_step_of_the_trainers_own_has_a_failed_record():
    class Mine(Exception):
        pass

    class Stops(Looks):
        def on_train_batch_end(self, *args):
            raise Mine

    hot = HotLoop("aot_eager")
    with pytest.raises(Mine):
        fit(Sgd, Stops(), hot)
    assert hot.record.document["status"] == "failed"


def test_what_was_compiled_before_the_fit_stays_compiled_after_it():
    hot, models = HotLoop("aot_eager"), []

    def wrap(model):
        models.append(hotloop.compile(model, "aot_eager"))
        return model

    fit(Sgd, hot, wrap=wrap)
    assert hotloop.status(models[0]).components["model"].running == "aot_eager"
    assert "compiled already (by hotloop)" in hot.record.document["decisions"][0]["reason"]


class TakesItOut(pl.Callback):
    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if batch_idx == 4:
            trainer.callbacks = [one for one in trainer.callbacks if not isinstance(one, HotLoop)]


@pytest.mark.campaign
def test_a_callback_that_is_taken_out_in_a_fit_leaves_the_rest_of_it_to_the_trainer(caplog):
    eager = fit()
    ours = fit(Sgd, HotLoop("aot_eager"), TakesItOut())
    same(eager, ours)
    assert "not among trainer.callbacks any more" in caplog.text
    assert not {"training_step", "optimizer_step", "backward"} & set(vars(ours[0]))


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


class TakesLabelsOut(Sgd):
    def training_step(self, batch, batch_idx):
        labels = batch.pop("labels")
        return F.cross_entropy(self.net(batch["ids"]), labels)


@pytest.mark.parametrize("run", ["aot_eager", "eager+graph"])
def test_a_step_that_takes_labels_out_of_its_batch_trains_as_eager_and_says_why(run):
    left = []
    for callbacks in ((), (HotLoop(run),)):
        torch.manual_seed(1)
        model = TakesLabelsOut(SmallClassifier())
        trainer = pl.Trainer(
            accelerator="cpu", devices=1, max_epochs=1, callbacks=list(callbacks), logger=False,
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip
        batches = [dict(zip(("ids", "labels"), batch, strict=True)) for batch in small_batches(8)]
        with captured_step_emulation():
            trainer.fit(model, loader(batches))
        left.append(dict(model.state_dict()))
    torch.testing.assert_close(left[1], left[0], rtol=0, atol=0)
    told = callbacks[0].status()
    assert told.running == "eager"
    assert "the step changes the dict or list that holds its argument labels" in " ".join(str(told).split())


class ReturnsNoLoss(Sgd):
    returned = {"losses": 1}

    def training_step(self, batch, batch_idx):
        return self.returned


@pytest.mark.parametrize("returned", [{"losses": 1}, {"loss": None}, 3.0, ["loss"]])
def test_what_lightning_refuses_of_a_step_is_refused_in_its_words(returned):
    module = type("Refused", (ReturnsNoLoss,), {"returned": returned})
    said = []
    for callbacks in ((), (HotLoop("aot_eager"),)):
        with pytest.raises(MisconfigurationException) as refused:
            fit(module, *callbacks)
        said.append(str(refused.value))
    assert said[0] == said[1]
