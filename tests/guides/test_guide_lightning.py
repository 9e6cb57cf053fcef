"""Lightning's guide: compile before fit or by the callback, logging, options, benchmarks, breaks and recompiles."""

import time

import lightning.pytorch as pl
import pytest
import torch
from guide_programs import Classifier, batches
from torch.nn import functional as F
from torch.utils.data import DataLoader

import hotloop
from hotloop.errors import ConfigError
from hotloop.integrations.lightning import HotLoop
from hotloop.testing import captured_step_emulation

pytestmark = pytest.mark.filterwarnings("default")  # the framework warns of its own use of torch


class Module(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = Classifier()

    def training_step(self, batch, batch_idx):
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        self.log("train_loss", loss, batch_size=len(batch[1]))
        return loss + self.penalty(batch)

    def penalty(self, batch):
        return 0.0

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", F.cross_entropy(self.net(batch[0]), batch[1]), batch_size=len(batch[1]))

    def predict_step(self, batch, batch_idx):
        return self.net(batch[0]).argmax(1)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.125, momentum=0.5, fused=True)


class Losses(pl.Callback):
    def __init__(self):
        self.seen = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.seen.append(float(outputs["loss"]))


class Benchmark(pl.Callback):
    """The guide's callback: the median seconds between the start and the end of a batch."""

    def __init__(self):
        self.times = []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.began = time.perf_counter()

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.times.append(time.perf_counter() - self.began)

    def median(self):
        return float(torch.tensor(self.times).median())


def trainer(*callbacks, **settings):
    return pl.Trainer(
        accelerator="cpu", devices=1, max_epochs=1, callbacks=list(callbacks), logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, **settings,
    )  # fmt: skip


def loader(given):
    return DataLoader(given, batch_size=None)


def fit(*callbacks, module=Module, prepare=lambda model: model, given=None, **settings):
    torch.manual_seed(1)
    model, losses = module(), Losses()
    made = trainer(losses, *callbacks, **settings)
    made.fit(prepare(model), loader(given or batches(8)), loader(batches(2)))
    return model, losses.seen, dict(made.callback_metrics)


def same(one, other):
    assert one[1] == pytest.approx(other[1], rel=1e-5)
    torch.testing.assert_close(dict(one[0].state_dict()), dict(other[0].state_dict()), rtol=1e-5, atol=1e-6)
    assert {"train_loss", "val_loss"} <= one[2].keys() == other[2].keys()
    torch.testing.assert_close(one[2], other[2], rtol=1e-5, atol=1e-6)


def kinds(events):
    return [one.kind for one in events]


@pytest.mark.parametrize("by", ["compile before fit", "callback"])
def test_step_methods_that_log_are_compiled_whole_validation_too_and_train_as_eager(by):
    eager = fit()
    with hotloop.watch() as events:
        if by == "callback":
            ours = fit(HotLoop("aot_eager"))
        else:  # fullgraph raises where self.log breaks the graph
            ours = fit(prepare=lambda model: hotloop.compile(model, "aot_eager", fullgraph=True))
    same(ours, eager)
    functions = {one.function for one in events if one.kind == "compiled"}
    assert {"training_step", "validation_step"} <= functions, functions
    assert not {"graph_break", "recompiled"} & set(kinds(events))


def test_after_the_fit_the_module_is_as_before_and_predicts():
    hot = HotLoop("aot_eager")
    model, *_ = fit(hot)
    assert "asked for: aot_eager" in str(hot.status())
    assert not hotloop.is_compiled(model)
    found = trainer(HotLoop("aot_eager")).predict(model, loader(batches(2)))
    assert all(torch.equal(one, model.net(ids).argmax(1)) for one, (ids, _) in zip(found, batches(2), strict=True))


def test_a_captured_step_trains_as_eager():
    eager, hot = fit(given=batches(16)), HotLoop("eager+graph")
    with captured_step_emulation():
        same(fit(hot, given=batches(16)), eager)
    assert hot.status().owned
    assert "eager+graph" in str(hot.status())


def test_options_and_presets_of_ones_own():
    eager = fit()
    same(fit(HotLoop(hotloop.Preset(name="mine", backend="aot_eager", dynamic=False))), eager)
    options = {"shape_padding": True, "triton.cudagraphs": True}
    assert HotLoop(hotloop.Preset(name="fast", options=options)).status().asked == "fast"
    with pytest.raises(ConfigError, match=r"option 'shape_paddin' does not exist.*shape_padding"):
        HotLoop(hotloop.Preset(name="fast", options={"shape_paddin": True}))


def test_the_guides_benchmark_callback_times_each_batch_beside_hotloop():
    eager, ours = Benchmark(), Benchmark()
    same(fit(ours, HotLoop("aot_eager")), fit(eager))
    assert len(ours.times) == len(eager.times) == 8
    assert ours.median() > 0


class Breaks(Module):
    def penalty(self, batch):
        print("in the step")
        torch._dynamo.graph_break()
        return 0.0


class Sizes(Module):
    def penalty(self, batch):
        return self.net.head.weight.sum() * len(batch[0]) * 1e-3


def test_a_graph_break_is_named_with_its_line_and_what_to_do():
    with hotloop.watch() as events:
        fit(module=Breaks, prepare=lambda model: hotloop.compile(model, "aot_eager"))
    broken = [one for one in events if one.kind == "graph_break"]
    assert broken
    assert broken[0].file.endswith("test_guide_lightning.py")
    assert broken[0].source
    assert broken[0].reason
    assert broken[0].hint


def test_a_recompile_names_the_argument_and_its_values(caplog):
    given = [*batches(3), *batches(3, rows=6)]
    with hotloop.watch() as events:
        fit(module=Sizes, prepare=lambda model: hotloop.compile(model, "aot_eager", dynamic=False), given=given)
    again = [one for one in events if one.kind == "recompiled"]
    assert again
    assert again[0].function == "training_step"
    assert "batch[0]" in again[0].reason
    assert "4" in again[0].reason
    assert "6" in again[0].reason
