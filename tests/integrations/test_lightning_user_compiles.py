"""A user's own compile is recognised, left as it is, and reported."""

import lightning.pytorch as pl
import pytest
import torch
from fitting import inventory
from test_lightning import Sgd, fit, same
from torch.nn import functional as F

import hotloop
from hotloop.integrations.lightning import HotLoop

pytestmark = pytest.mark.filterwarnings("default")  # the framework warns of its own use of torch


class Wraps(Sgd):
    """A module that compiles a part where it makes it, as people write it."""

    def __init__(self, net):
        super().__init__(net)
        self.net = torch.compile(net, backend="eager")


class WrapsWhenConfigured(Sgd):
    """A module that compiles in a hook which the Trainer calls after its callbacks' setup."""

    def configure_model(self):
        if "_orig_mod" not in dict(self.net.named_children()):
            self.net = torch.compile(self.net, backend="eager")


class InPlaceInSetup(Sgd):
    def setup(self, stage):
        self.net.compile(backend="eager")


class StepOfTheObject(Sgd):
    def __init__(self, net):
        super().__init__(net)
        self.training_step = torch.compile(self.training_step, backend="eager")


class Decorated(Sgd):
    @torch.compile(backend="eager")
    def training_step(self, batch, batch_idx):
        ids, labels = batch
        return F.cross_entropy(self.net(ids), labels)


def in_place(model):
    model.compile(backend="eager")
    return model


def by_hotloop(model):
    return hotloop.compile(model, "aot_eager")


def part_by_hotloop(model):
    hotloop.compile(model.net, "aot_eager")
    return model


CASES = {
    "the whole module": {"wrap": lambda model: torch.compile(model, backend="eager")},
    "a part": {"module": Wraps},
    "a part, in configure_model": {"module": WrapsWhenConfigured},
    "module.compile()": {"wrap": in_place},
    "compile() of a part, in setup": {"module": InPlaceInSetup},
    "a step": {"module": StepOfTheObject},
    "a step's decorator": {"module": Decorated},
    "hotloop.compile": {"wrap": by_hotloop},
    "hotloop.compile of a part": {"wrap": part_by_hotloop},
}


@pytest.mark.parametrize("run", ["auto", "aot_eager"])
@pytest.mark.parametrize("case", CASES)
def test_each_way_to_compile_is_recognised_and_left_as_it_is(case, run):
    settings = {"module": Sgd, "batches": 4, **CASES[case]}
    eager, hot, module = fit(batches=4), HotLoop(run), settings.pop("module")
    torch.testing.assert_close(fit(module, hot, **settings)[1], eager[1], rtol=1e-5, atol=1e-6)
    told = hot.status()
    assert told.given
    assert not told.owned
    (why,) = told.why
    assert f"compiled already (by {'hotloop' if 'hotloop' in case else 'torch'})" in why
    assert why in str(told)
    assert told.running == ("aot_eager" if "hotloop" in case else "as-given")


def test_a_step_that_torch_compiled_on_the_object_runs_compiled():
    """A loop would call the class's method, so none owns the step."""
    with hotloop.watch() as events:
        fit(StepOfTheObject, HotLoop("aot_eager"), batches=2)
    assert [one for one in events if isinstance(one, hotloop.events.Compiled)]


def test_an_evaluation_takes_it_as_it_is_as_well():
    from fitting import SmallClassifier, small_batches
    from test_lightning_conformance import loader

    torch.manual_seed(1)
    hot, model = HotLoop("aot_eager"), Wraps(SmallClassifier())
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
    trainer = pl.Trainer(accelerator="cpu", devices=1, callbacks=[hot], logger=False, **quiet)
    trainer.validate(model, loader(small_batches(2)), verbose=False)
    before = inventory(model)
    trainer.validate(model, loader(small_batches(2)), verbose=False)
    assert inventory(model) == before
    told = hot.status()
    assert (told.stage, told.running, told.why) == ("validate", "as-given", [])
    assert "compiled already (by torch)" in told.notes[0]


class Doubles(Sgd):
    """A module with a step on the object in front of the class's, as a test or a notebook sets it."""

    name = "training_step"

    def __init__(self, net):
        super().__init__(net)
        own = getattr(self, self.name)
        setattr(self, self.name, lambda *args, **settings: self.twice(own, *args, **settings))

    def twice(self, own, batch, batch_idx):
        return own(batch, batch_idx) * 2


class DoublesTheGradients(Doubles):
    name = "backward"

    def twice(self, own, loss):
        return own(loss * 2)


class DoublesWhatIsLogged(Doubles):
    name = "log"

    def twice(self, own, name, value, **settings):
        own(name, value * 2, **settings)


@pytest.mark.parametrize("module", [Doubles, DoublesTheGradients, DoublesWhatIsLogged])
@pytest.mark.parametrize("run", ["eager", "aot_eager"])
def test_a_method_that_was_set_on_the_object_is_what_runs(module, run):
    hot = HotLoop(run)
    same(fit(module, batches=4), fit(module, hot, batches=4))
    assert not hot.status().owned
    assert f"{module.name} was set on this one {module.__name__}" in str(hot.status())
