"""Values that a step's code gets at by a name: of a module, of the environment, put together, or through a method."""

from __future__ import annotations

import contextvars
import ctypes
import importlib
import multiprocessing
import os
import sys
import types
import weakref

import pytest
from test_step_watch import changing, dropped
from torch.nn import functional as F

WEIGHT = 1.0


class Table(dict):
    weight = 1.0


KEPT = Table()
"""What a weak reference is of."""


class Numbered:
    def __init__(self):
        self.weight_0 = 1.0


def in_a_closure(held):
    return lambda: held.weight


def imported(_):
    def read():
        import settings_of_this_test

        return settings_of_this_test.weight

    return read


def one_imported(_):
    def read():
        from settings_of_this_test import weight

        return weight

    return read


def by_a_text(_):
    return lambda: importlib.import_module("settings_of_this_test").weight


def of_all_modules(_):
    return lambda: sys.modules["settings_of_this_test"].weight


def of_its_own_module(_):
    return lambda: sys.modules[__name__].WEIGHT


def evaluated(held):
    return lambda: eval("held.weight", {"held": held})


class Kind(type):
    """What it says of a class is found at none of the class's own."""

    @property
    def weight(cls):
        return cls.of_all


def of_a_class(held):
    return lambda: held.weight


def put_together(held):
    index = 0
    return lambda: getattr(held, f"weight_{index}")


def through_a_method(held):
    get = held.get
    return lambda: get("weight")


def referred(held):
    held.weight = 1.0
    reference = weakref.ref(held)
    return lambda: reference().weight


def set_weight(held):
    held.weight = -1.0


def set_value(held):
    held.value = -1.0


KINDS = {
    "a module in a closure": ("module", in_a_closure, set_weight),
    "a module that the step imports": ("module", imported, set_weight),
    "a name that the step imports": ("module", one_imported, set_weight),
    "a module by a text": ("module", by_a_text, set_weight),
    "one of all modules": ("module", of_all_modules, set_weight),
    "the module of the step": (globals, of_its_own_module, lambda held: held.update(WEIGHT=-1.0)),
    "a text that is evaluated": ("module", evaluated, set_weight),
    "a global in a text": (globals, lambda _: lambda: eval("WEIGHT"), lambda held: held.update(WEIGHT=-1.0)),
    "a property of a class": (
        lambda: Kind("Settings", (), {"of_all": 1.0}),
        of_a_class,
        lambda held: setattr(held, "of_all", -1.0),
    ),
    "a number in C": (lambda: ctypes.c_double(1.0), lambda held: lambda: held.value, set_value),
    "a number that processes share": (
        lambda: multiprocessing.Value("d", 1.0),
        lambda held: lambda: held.value,
        set_value,
    ),
    "memory that processes share": (
        lambda: multiprocessing.RawArray("d", [1.0]),
        lambda held: lambda: held[0],
        lambda held: held.__setitem__(0, -1.0),
    ),
    "a name that is put together": (Numbered, put_together, lambda held: setattr(held, "weight_0", -1.0)),
    "a method of a dictionary": (lambda: {"weight": 1.0}, through_a_method, lambda held: held.update(weight=-1.0)),
    "an attribute of a dictionary": (Table, in_a_closure, set_weight),
    "a weak reference": (lambda: KEPT, referred, set_weight),
    "a context variable": (
        lambda: contextvars.ContextVar("weight", default=1.0),
        lambda held: lambda: float(held.get()),
        lambda held: held.set(-1.0),
    ),
    "the environment": (
        lambda: os.environ,
        lambda _: lambda: float(os.environ.get("WEIGHT_OF_THIS_TEST", "1")),
        lambda held: held.update(WEIGHT_OF_THIS_TEST="-1"),
    ),
    "globals": (globals, lambda _: lambda: globals()["WEIGHT"], lambda held: held.update(WEIGHT=-1.0)),
}


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_step_reads_by_name(both, kind, tmp_path, monkeypatch):
    make, reader_of, change = KINDS[kind]
    module = types.ModuleType("settings_of_this_test")
    module.__file__, module.weight = str(tmp_path / "settings_of_this_test.py"), 1.0
    monkeypatch.setitem(sys.modules, module.__name__, module)

    def program(run):
        monkeypatch.setenv("WEIGHT_OF_THIS_TEST", "1")
        monkeypatch.setitem(globals(), "WEIGHT", 1.0)
        module.weight = 1.0
        held = module if make == "module" else make()
        read = reader_of(held)
        return changing(lambda _: lambda logits, y: F.cross_entropy(logits, y) * read(), lambda *_: change(held))(run)

    dropped(both, program, "")


@pytest.mark.parametrize("kept", [None, 1.0], ids=["first set later", "there before"])
def test_what_a_program_keeps_on_a_parameter(both, kept):
    """Layer-wise rates, say: set on the parameters once they are known, and read by the step where they are there."""

    def program(run):
        def loss_of(model):
            (first, *_) = model.parameters()
            if kept is not None:
                first.rate = kept
            return lambda logits, y: F.cross_entropy(logits, y) * getattr(first, "rate", 1.0)

        return changing(loss_of, lambda model, _: setattr(next(model.parameters()), "rate", -1.0))(run)

    dropped(both, program, "rate")
