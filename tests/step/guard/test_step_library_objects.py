"""Objects that a step meets only behind a library's calls, properties and registries: what they hold is in force."""

from __future__ import annotations

import dataclasses
import importlib
import sys

import numpy as np
import pytest
import torch
from step_programs import Classifier, batches
from torch.nn import functional as F
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR

STEPS, AT = 26, 14
SOURCE = """
import argparse


class Holder:
    def __init__(self, inner):
        self._inner, self.hooks = inner, [inner]

    def get(self):
        return self._inner

    def weight(self):
        return self._inner.get_last_lr()[0]

    def run_hooks(self):
        return sum(hook.weight() for hook in self.hooks)


class Flag:
    def __init__(self):
        self._value = 1.0

    @property
    def value(self):
        return self._value


class Flags:
    def __init__(self):
        self.__dict__["_flags"] = {"weight": Flag()}

    def __getattr__(self, name):
        return self.__dict__["_flags"][name].value


class Table:
    def __init__(self, values):
        self._values = values

    def weight(self):
        return float(self._values.sum())


class Renamed:
    names = {"weight": "_w"}

    def __init__(self):
        self._w = 1.0

    def __getattribute__(self, key):
        return super().__getattribute__(super().__getattribute__("names").get(key, key))


class Single:
    _made = None

    def __init__(self):
        self.weight = 1.0

    @classmethod
    def instance(cls):
        cls._made = cls._made or cls()
        return cls._made


ARGUMENTS = argparse.Namespace(weight=1.0)
TABLE = {"one": argparse.Namespace(weight=1.0)}


def arguments():
    return ARGUMENTS


def entry(name):
    return TABLE[name]
"""


@pytest.fixture
def library(tmp_path, monkeypatch):
    """A package as an installer leaves it."""
    folder = tmp_path / "site-packages"
    folder.mkdir()
    (folder / "somebodys_objects.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(str(folder))
    yield importlib.import_module("somebodys_objects")
    del sys.modules["somebodys_objects"]


class Hook:
    def __init__(self):
        self.scale = 1.0

    def weight(self):
        return self.scale


def training(script):
    """A program whose loss is weighted by what `script(optimizer)` gives: a function, and one that changes its value."""

    def program(run):
        model = Classifier().to(run.device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=2**-6, fused=True)
        weight, change = script(optimizer)

        @run.loop(model, optimizer).step
        def train_step(x, y):
            loss = F.cross_entropy(model(x), y) * weight()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        for number, (x, y) in enumerate(batches(run.device, STEPS)):
            if number == AT:
                change()
            run.note(train_step(x, y))
        return model, optimizer

    return program


def dropped(both, script, name):
    """The program ends as eager's, and its capture was dropped once, for what has this name."""
    run = both.equal(training(script), exact=True, replays=6)
    assert len(run.dropped) == 1
    assert name in run.dropped[0]


@pytest.mark.parametrize("read", ["last_epoch", "get_last_lr", "weight"])
def test_a_scheduler_that_a_library_holds(both, library, read):
    def script(optimizer):
        scheduler = StepLR(optimizer, 1, 0.5)
        holder = library.Holder(scheduler)
        reads = {
            "last_epoch": lambda: 1 + holder.get().last_epoch,
            "get_last_lr": lambda: holder.get().get_last_lr()[0],
            "weight": holder.weight,
        }
        return reads[read], scheduler.step

    dropped(both, script, "last_epoch" if read == "last_epoch" else "_last_lr")


def test_a_scheduler_that_watches_a_metric(both, library):
    def script(optimizer):
        scheduler = ReduceLROnPlateau(optimizer, patience=0)
        holder = library.Holder(scheduler)
        return lambda: min(4.0, holder.get().best), lambda: scheduler.step(1.0)

    dropped(both, script, "best")


def test_a_hook_of_ones_own_that_a_library_calls(both, library):
    def script(_):
        hook = Hook()
        return library.Holder(hook).run_hooks, lambda: setattr(hook, "scale", 3.0)

    dropped(both, script, "scale")


def test_a_hook_that_is_added_to_a_librarys_list(both, library):
    def script(_):
        holder = library.Holder(Hook())
        return holder.run_hooks, lambda: holder.hooks.append(Hook())

    dropped(both, script, "hooks")


def test_flags_that_a_library_keeps_in_a_table(both, library):
    def script(_):
        flags = library.Flags()
        return lambda: flags.weight, lambda: setattr(flags._flags["weight"], "_value", 3.0)

    dropped(both, script, "_value")


def test_an_attribute_that_a_class_gives_for_another(both, library):
    def script(_):
        config = library.Renamed()
        return lambda: config.weight, lambda: setattr(config, "_w", 3.0)

    dropped(both, script, "_w")


@pytest.mark.parametrize("place", ["module", "table", "function", "entry", "singleton"])
def test_what_a_library_keeps_in_its_module_and_gives_away(both, library, place):
    reads = {
        "module": lambda: library.ARGUMENTS,
        "table": lambda: library.TABLE["one"],
        "function": library.arguments,
        "entry": lambda: library.entry("one"),
        "singleton": library.Single.instance,
    }[place]

    def script(_):
        reads().weight = 1.0
        return lambda: reads().weight, lambda: setattr(reads(), "weight", 3.0)

    dropped(both, script, "weight")


def test_an_array_that_a_librarys_method_computes_with(both, library):
    def script(_):
        table = library.Table(np.ones(4))

        def change():
            table._values += 1

        return table.weight, change

    dropped(both, script, "_values")


@dataclasses.dataclass
class Result:
    loss: torch.Tensor
    doubled: torch.Tensor | None = None

    def target(self):
        return self.doubled


def test_what_a_step_makes_and_returns_is_no_state_that_it_changes(both):
    def program(run):
        model = Classifier().to(run.device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=2**-6, fused=True)

        @run.loop(model, optimizer).step
        def train_step(x, y):
            result = Result(F.cross_entropy(model(x), y))
            result.doubled = 2 * result.loss
            result.target().backward()
            optimizer.step()
            optimizer.zero_grad()
            return result

        for x, y in batches(run.device, STEPS):
            run.note(train_step(x, y).loss)
        return model, optimizer

    assert not both.equal(program, exact=True, replays=16).dropped


def test_flags_of_absl(both):
    flags = pytest.importorskip("absl.flags")

    def scripts(held):
        def script(_):
            values = flags.FlagValues()
            holder = flags.DEFINE_float("weight", 1.0, "", flag_values=values)
            values(["program"])
            reads = {"values": lambda: values.weight, "holder": lambda: holder.value}
            return reads[held], lambda: setattr(values, "weight", 3.0)

        return script

    dropped(both, scripts("values"), "weight")
    dropped(both, scripts("holder"), "weight")


@pytest.mark.campaign
def test_a_config_of_transformers_by_its_other_name(both):
    transformers = pytest.importorskip("transformers")

    def script(_):
        config = transformers.GPT2Config(n_embd=8)
        return lambda: 1 / config.hidden_size, lambda: setattr(config, "n_embd", 16)

    dropped(both, script, "n_embd")


@pytest.mark.campaign
def test_an_array_that_a_library_computes_with(both):
    preprocessing = pytest.importorskip("sklearn.preprocessing")

    def script(_):
        scaler = preprocessing.StandardScaler().fit(np.arange(4.0)[:, None])

        def change():
            scaler.mean_ += 1

        return lambda: float(scaler.transform(np.ones((1, 1)))[0, 0]), change

    dropped(both, script, "mean_")


@pytest.mark.filterwarnings("ignore:GPU available but not used")
@pytest.mark.parametrize("read", ["current_epoch", "max_epochs"])
def test_a_property_of_lightnings_trainer(both, read):
    pl = pytest.importorskip("lightning.pytorch")

    def script(_):
        trainer = pl.Trainer(max_epochs=5, accelerator="cpu", logger=False, enable_checkpointing=False)
        module = pl.LightningModule()
        module.trainer = trainer
        progress = trainer.fit_loop.epoch_progress.current
        reads = {"current_epoch": lambda: 1.0 + module.current_epoch, "max_epochs": lambda: module.trainer.max_epochs}
        changes = {
            "current_epoch": lambda: setattr(progress, "completed", 3),
            "max_epochs": lambda: setattr(trainer.fit_loop, "max_epochs", 9),
        }
        return reads[read], changes[read]

    dropped(both, script, {"current_epoch": "completed", "max_epochs": "max_epochs"}[read])


def test_the_learning_rate_of_transformers_trainer(both, tmp_path):
    transformers = pytest.importorskip("transformers")

    def script(optimizer):
        scheduler = StepLR(optimizer, 1, 0.5)
        arguments = transformers.TrainingArguments(str(tmp_path), use_cpu=True, report_to=[])
        trainer = transformers.Trainer(Classifier(), arguments, optimizers=(optimizer, scheduler))
        return trainer._get_learning_rate, scheduler.step

    dropped(both, script, "_last_lr")


def test_types_whose_module_is_no_text(both):
    """The type of Cython's types gives an attribute of its instances there: a step that met one was declined."""
    fast = pytest.importorskip("sklearn.metrics._pairwise_fast")
    of_types = {type(type(one)) for one in vars(fast).values() if not isinstance(type(one).__class__.__module__, str)}
    if not of_types:
        pytest.skip("the module text is one since another version of Cython")

    def script(_):
        kinds = [*of_types, int]
        return lambda: float(sum(isinstance(kind, type) for kind in kinds)), kinds.pop

    dropped(both, script, "kinds")
