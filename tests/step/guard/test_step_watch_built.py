"""What classes of the user's add to Python's own, and what runs where the step makes an object."""

from __future__ import annotations

import collections
import dataclasses
import enum
from typing import NamedTuple

import pytest
import torch
from test_step_watch import changing, dropped
from torch import nn
from torch.nn import functional as F

WEIGHT = 1.0


def of_global():
    return WEIGHT


class Weights(NamedTuple):
    entropy: float = 1.0

    def total(self):
        return self.entropy * WEIGHT


class Settings(dict):
    def total(self):
        return self["entropy"] * WEIGHT


class Ordered(collections.OrderedDict):
    def total(self):
        return self["entropy"] * WEIGHT


class Items(list):
    weight = 1.0

    def total(self):
        return self[0] * WEIGHT


class Rate(float):
    def total(self):
        return self * WEIGHT


class Phase(enum.Enum):
    WARM = "warm"

    @property
    def weight(self):
        return TABLE[self.value]


class Level(enum.Enum):
    HIGH = [1.0]


class Scaled(nn.Parameter):
    def total(self):
        return WEIGHT


TABLE = {"warm": 1.0}


class Made:
    def __init__(self):
        self.weight = WEIGHT


class MadeAnew:
    def __new__(cls):
        made = super().__new__(cls)
        made.weight = WEIGHT
        return made


@dataclasses.dataclass
class Later:
    weight: float = 0.0

    def __post_init__(self):
        self.weight = WEIGHT


@dataclasses.dataclass
class Default:
    weight: float = dataclasses.field(default_factory=of_global)


class Criterion(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = WEIGHT


def sets_global(_):
    globals()["WEIGHT"] = -1.0


def total(held):
    def read():
        return held.total()

    return read


def made_by(held):
    def read():
        return held.default_factory()

    return read


KINDS = {
    "a method of a named tuple": (Weights, total, sets_global),
    "a method of a dict": (lambda: Settings(entropy=1.0), total, sets_global),
    "a method of an ordered dict": (lambda: Ordered(entropy=1.0), total, sets_global),
    "a method of a list": (lambda: Items([1.0]), total, sets_global),
    "an attribute of a list": (
        lambda: Items([1.0]),
        lambda held: lambda: held.weight,
        lambda held: setattr(held, "weight", -1.0),
    ),
    "a method of a number": (lambda: Rate(1.0), total, sets_global),
    "a method of a parameter": (lambda: Scaled(torch.ones(1)), total, sets_global),
    "a property of an enum": (lambda: Phase.WARM, lambda held: lambda: held.weight, lambda _: TABLE.update(warm=-1.0)),
    "the value of an enum": (
        lambda: Level.HIGH,
        lambda held: lambda: held.value[0],
        lambda held: held.value.__setitem__(0, -1.0),
    ),
    "a factory of defaults": (
        lambda: collections.defaultdict(lambda: 1.0),
        made_by,
        lambda held: setattr(held, "default_factory", lambda: -1.0),
    ),
    "the order of a dict": (
        lambda: {"first": 1.0, "second": -1.0},
        lambda held: lambda: next(iter(held.values())),
        lambda held: held.update(first=held.pop("first")),
    ),
    "a constructor": (int, lambda _: lambda: Made().weight, sets_global),
    "__new__": (int, lambda _: lambda: MadeAnew().weight, sets_global),
    "__post_init__": (int, lambda _: lambda: Later().weight, sets_global),
    "a default of a dataclass": (int, lambda _: lambda: Default().weight, sets_global),
    "the constructor of a module": (int, lambda _: lambda: Criterion().weight, sets_global),
}


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_users_class_reads(both, kind, monkeypatch):
    make, reader_of, change = KINDS[kind]

    def program(run):
        monkeypatch.setitem(globals(), "WEIGHT", 1.0)
        TABLE["warm"], Level.HIGH.value[0] = 1.0, 1.0
        held = make()
        read = reader_of(held)
        return changing(lambda _: lambda logits, y: F.cross_entropy(logits, y) * read(), lambda *_: change(held))(run)

    dropped(both, program, "")
