"""A user's own compile is recognised, left as it is, and reported."""

import pytest
import torch
from test_lightning import Sgd, fit
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
