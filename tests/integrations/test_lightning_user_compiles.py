"""A user's own compile is recognised, left as it is, and reported with the hint for that case."""

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


WRAPPED = (
    "torch.compile wraps self.net: taken as it is",
    "assign the module itself where the class has self.net = torch.compile(...)",
)
STEP = ("torch.compile was applied to self.training_step", "leave torch.compile out at training_step")
CASES = {
    "the whole module": (
        {"wrap": lambda model: torch.compile(model, backend="eager")},
        "the Trainer was given torch.compile(module)",
        "hand fit() the module itself, without torch.compile",
    ),
    "a part": ({"module": Wraps}, *WRAPPED),
    "a part, in configure_model": ({"module": WrapsWhenConfigured}, *WRAPPED),
    "module.compile()": (
        {"wrap": in_place},
        "Sgd.compile() was called on the module itself, which compiles module(x): the Trainer calls training_step",
        "leave module.compile() out: HotLoop compiles training_step itself",
    ),
    "compile() of a part, in setup": (
        {"module": InPlaceInSetup},
        "self.net was compiled in place, by module.compile()",
        "leave net.compile() out",
    ),
    "a step": ({"module": StepOfTheObject}, *STEP),
    "a step's decorator": ({"module": Decorated}, *STEP),
    "hotloop.compile": (
        {"wrap": by_hotloop},
        "the module was compiled in place before fit, by hotloop.compile",
        "leave hotloop.compile out: with HotLoop(run='aot_eager') a loop owns the step",
    ),
    "hotloop.compile of a part": (
        {"wrap": part_by_hotloop},
        "self.net was compiled in place before fit, by hotloop.compile",
        "leave hotloop.compile out: with HotLoop(run='aot_eager') a loop owns the step",
    ),
}


@pytest.mark.parametrize("run", ["auto", "aot_eager"])
@pytest.mark.parametrize("case", CASES)
def test_each_way_to_compile_is_recognised_and_has_its_own_hint(case, run):
    settings, what, hint = CASES[case]
    settings = {"module": Sgd, "batches": 4, **settings}
    eager, hot, module = fit(batches=4), HotLoop(run), settings.pop("module")
    torch.testing.assert_close(fit(module, hot, **settings)[1], eager[1], rtol=1e-5, atol=1e-6)
    told = hot.status()
    assert not told.owned
    assert told.given
    assert len(told.why) == len(told.hints) == 1, told
    assert told.why[0].startswith(what)
    assert told.hints[0].startswith(hint)
    assert told.running == ("aot_eager" if "hotloop" in case else "as-given")
    assert what in str(told)
    assert hint in str(told)


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
    assert (told.stage, told.running, told.why) == ("validate", "as-given", ())
    assert told.notes[0].startswith("torch.compile wraps self.net")


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
