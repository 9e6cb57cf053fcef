"""The store of earlier costs: believed only where it makes sense, bounded, and never worth a run; and its keys."""

import json
import os

import pytest
import torch
from torch import nn

from hotloop.cache import CostStore, TierCosts, key_of

CPU = torch.device("cpu")


class Net(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.inner = nn.Linear(width, width)

    def forward(self, x):
        return self.inner(x).relu()


@pytest.fixture
def store(tmp_path):
    return CostStore(tmp_path / "costs")


def test_what_was_put_is_there_for_another_store(store):
    assert store.get("program") == {}
    store.put("program", "full", TierCosts(ratio=0.5, cold_seconds=30.0))
    store.put("program", "full", TierCosts(ratio=0.6, warm_seconds=4.0))
    store.put("another", "full", TierCosts(ratio=0.7))
    other = CostStore(store.path.parent)
    assert other.get("program") == {"full": TierCosts(ratio=0.6, cold_seconds=30.0, warm_seconds=4.0)}
    assert store.path.stat().st_mode & 0o77 == 0


@pytest.mark.parametrize(
    "change",
    [
        lambda document: document.update(schema=0),
        lambda document: document.update(programs=[]),
        lambda document: document["programs"]["program"].update(full=7),
        lambda document: document["programs"]["program"]["full"].update(ratio=-1),
        lambda document: document["programs"]["program"]["full"].update(ratio="1"),
        lambda document: document["programs"]["program"]["full"].update(evil=1),
        lambda document: document["programs"]["program"]["full"].pop("ratio"),
    ],
)
def test_a_file_that_makes_no_sense_is_a_miss_said_once_and_replaced(store, change, caplog):
    store.put("program", "full", TierCosts(ratio=0.5))
    document = json.loads(store.path.read_text())
    change(document)
    store.path.write_text(json.dumps(document))
    assert store.get("program") == store.get("program") == {}
    assert caplog.text.count("are not used") == 1
    store.put("program", "full", TierCosts(ratio=0.5))
    assert store.get("program")


@pytest.mark.parametrize(
    "change", [lambda path: path.chmod(0o666), lambda path: path.rename(path.with_name("elsewhere"))]
)
def test_a_file_that_others_may_write_to_and_a_link_are_not_believed(store, change, caplog):
    store.put("program", "full", TierCosts(ratio=0.5))
    change(store.path)
    if not store.path.exists():
        store.path.symlink_to("elsewhere")
    assert store.get("program") == {}
    assert "are not used" in caplog.text


def test_a_file_of_another_user_is_not_believed(store, monkeypatch):
    store.put("program", "full", TierCosts(ratio=0.5))
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    assert store.get("program") == {}


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"HOTLOOP_CACHE_DIR": "/a/b", "XDG_CACHE_HOME": "/c"}, "/a/b/costs.json"),
        ({"XDG_CACHE_HOME": "/c"}, "/c/hotloop/costs.json"),
        ({"XDG_CACHE_HOME": "relative", "HOME": "/h"}, "/h/.cache/hotloop/costs.json"),
        ({"HOTLOOP_CACHE_DIR": ""}, "None"),
    ],
)
def test_the_folder_follows_the_environment(monkeypatch, environment, expected):
    for name in ("HOTLOOP_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert str(CostStore().path) == expected


# -- keys ---------------------------------------------------------------------------------------------------------------


class Fails(nn.Linear):
    def extra_repr(self):
        raise ValueError("the user's")


def key(**changes):
    given = {"models": [Net()], "inputs": torch.zeros(2, 4), "optimizers": [], "step": Net.forward}
    return key_of(**{**given, "autocast": None, "device": CPU, **changes})


def sgd(rate):
    return torch.optim.SGD([torch.zeros(1)], lr=rate)


@pytest.mark.parametrize(
    ("one", "other", "equal"),
    [
        ({"models": [nn.Dropout(0.1)]}, {"models": [nn.Dropout(0.3)]}, False),
        ({"models": [nn.Conv2d(4, 4, 3)]}, {"models": [nn.Conv2d(4, 4, 3, stride=4)]}, False),
        ({"models": [nn.LayerNorm(4, eps=1e-5)]}, {"models": [nn.LayerNorm(4, eps=1e-6)]}, False),
        ({"models": [Fails(2, 2)]}, {"models": [Fails(2, 2)]}, True),
        ({"models": [Net(5)]}, {}, False),
        ({"models": [Net().double()]}, {}, False),
        ({"models": [Net().eval()]}, {}, True),
        ({"inputs": torch.zeros(3, 4)}, {}, False),
        ({"inputs": torch.zeros(2, 4, dtype=torch.double)}, {}, False),
        ({"inputs": [torch.zeros(2, 4), True]}, {}, False),
        ({"optimizers": [sgd(0.1)]}, {"optimizers": [sgd(0.2)]}, True),
        ({"optimizers": [torch.optim.AdamW([torch.zeros(1)])]}, {"optimizers": [sgd(0.2)]}, False),
        ({"step": lambda x: x + 1}, {"step": lambda x: x + 2}, False),
        ({"autocast": torch.bfloat16}, {}, False),
    ],
)
def test_what_changes_the_costs_changes_the_key_and_nothing_else(one, other, equal):
    assert (key(**one) == key(**other)) is equal
