"""The store of earlier costs: believed only where it makes sense, merged, bounded, and never worth a run."""

import json
import logging
import os
import subprocess
import sys
import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from hotloop.cache import CostStore, TierCosts, costs, key_of
from hotloop.cache.keys import fingerprint


def differing(one, other):
    """Name the parts that are not the same in two keys."""
    return [name for name in {**one.parts, **other.parts} if one.parts.get(name) != other.parts.get(name)]


class Net(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.inner = nn.Linear(width, width)

    def forward(self, x):
        return self.inner(x).relu()


@pytest.fixture
def key():
    return key_of(Net(), torch.zeros(2, 4))


@pytest.fixture
def store(tmp_path):
    return CostStore(tmp_path / "costs")


def file_of(store):
    (path,) = store.folder.glob("costs-*.json")
    return path


def test_what_was_put_is_there_for_another_store(store, key):
    assert store.get(key) is None
    store.put(key, "full", TierCosts(cold_seconds=30.0, step_seconds=0.1, eager_seconds=0.2, verdict="proven"))
    found = CostStore(store.folder).get(key)["full"]
    assert (found.cold_seconds, found.warm_seconds, found.step_seconds) == (30.0, None, 0.1)
    assert (found.verdict, found.runs) == ("proven", 1)
    assert abs(found.when - time.time()) < 60


def test_a_clock_that_went_back_two_hours_loses_no_costs(store, key, monkeypatch):
    store.put(key, "full", TierCosts(cold_seconds=30.0))
    now = time.time()
    monkeypatch.setattr(costs.time, "time", lambda: now - 7200)
    store.put(key, "full", TierCosts(step_seconds=0.1))
    found = store.get(key)["full"]
    assert (found.cold_seconds, found.step_seconds, found.runs) == (30.0, 0.1, 2)


def test_figures_join_by_their_median_and_a_verdict_is_the_latest(store, key):
    for seconds in (1.0, 100.0, 2.0):
        store.put(key, "full", TierCosts(step_seconds=seconds, verdict="proven"))
    store.put(key, "full", TierCosts(verdict="declined", reason=".item() at train.py:3"))
    store.put(key, "eager", TierCosts(step_seconds=4.0))
    found = store.get(key)
    assert (found["full"].step_seconds, found["full"].runs) == (2.0, 4)
    assert (found["full"].verdict, found["full"].reason) == ("declined", ".item() at train.py:3")
    assert found["eager"].step_seconds == 4.0


def test_a_verdict_stays_when_a_later_run_measures_only(store, key):
    store.put(key, "full", TierCosts(verdict="declined", reason="why"))
    store.put(key, "full", TierCosts(step_seconds=1.0))
    assert store.get(key)["full"].reason == "why"


def test_only_the_last_values_are_kept(store, key):
    for _ in range(costs.KEPT):
        store.put(key, "full", TierCosts(step_seconds=100.0))
    for _ in range(costs.KEPT):
        store.put(key, "full", TierCosts(step_seconds=1.0))
    assert store.get(key)["full"].step_seconds == 1.0


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0, 1e9, "3", True])
def test_a_figure_that_cannot_be_is_refused(store, key, value):
    with pytest.raises(ValueError, match="step_seconds"):
        store.put(key, "full", TierCosts(step_seconds=value))
    assert store.get(key) is None


def spoiled(document, change):
    tiers = document["tiers"]["full"]
    changes = {
        "nan": lambda: tiers["figures"].update(step_seconds=[float("nan")]),
        "negative": lambda: tiers["figures"].update(step_seconds=[-1.0]),
        "huge": lambda: tiers["figures"].update(step_seconds=[1e300]),
        "text": lambda: tiers["figures"].update(step_seconds=["1"]),
        "unknown figure": lambda: tiers["figures"].update(other=[1.0]),
        "no list": lambda: tiers["figures"].update(step_seconds=1.0),
        "no values": lambda: tiers["figures"].update(step_seconds=[]),
        "verdict": lambda: tiers.update(verdict="maybe", reason=""),
        "reason": lambda: tiers.update(verdict="proven", reason="x" * 10**4),
        "runs": lambda: tiers.update(runs=0),
        "future": lambda: tiers.update(when=time.time() + 1e6),
        "schema": lambda: document.update(schema=99),
        "tiers": lambda: document.update(tiers=[]),
    }
    changes[change]()
    return json.dumps(document)


@pytest.mark.parametrize(
    "change",
    ["nan", "negative", "huge", "text", "unknown figure", "no list", "no values", "verdict", "reason", "runs", "future", "schema", "tiers"],
)  # fmt: skip
def test_an_entry_that_makes_no_sense_is_a_miss_said_once_and_replaced(store, key, change, caplog):
    store.put(key, "full", TierCosts(step_seconds=1.0))
    path = file_of(store)
    path.write_text(spoiled(json.loads(path.read_text()), change))
    with caplog.at_level(logging.WARNING, "hotloop"):
        assert store.get(key) is None
        assert store.get(key) is None
    assert len(caplog.records) == 1
    assert str(path) in caplog.text
    store.put(key, "full", TierCosts(step_seconds=2.0))
    assert store.get(key)["full"].step_seconds == 2.0


@pytest.mark.campaign
@given(st.binary(max_size=200) | st.recursive(st.none() | st.booleans() | st.floats() | st.text(), lambda x: st.lists(x) | st.dictionaries(st.sampled_from(["schema", "tiers", "full", "figures", "runs", "when"]), x)).map(lambda v: json.dumps(v).encode()))  # fmt: skip
def test_any_file_is_read_without_an_error(tmp_path_factory, text):
    store, key = CostStore(tmp_path_factory.mktemp("any")), key_of(Net(), ())
    store.put(key, "full", TierCosts())
    file_of(store).write_bytes(text)
    assert not store.get(key)


class Plain(nn.Module):
    """Keeps a dropout probability as transformers' attention does, and prints an object that has no text of its own."""

    def __init__(self, dropout):
        super().__init__()
        self.attention_dropout = dropout

    def forward(self, x):
        return nn.functional.dropout(x, self.attention_dropout, self.training)

    def extra_repr(self):
        return f"hook={object()}"


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (nn.Dropout(0.1), nn.Dropout(0.3)),
        (nn.Conv2d(4, 4, 3, stride=1), nn.Conv2d(4, 4, 3, stride=4)),
        (nn.LayerNorm(4, eps=1e-5), nn.LayerNorm(4, eps=1e-6)),
        (Plain(0.1), Plain(0.2)),
    ],
)
def test_settings_that_change_what_is_compiled_change_the_key(one, other):
    first, second = (nn.Sequential(nn.Conv2d(4, 4, 3), made) for made in (one, other))
    inputs = torch.zeros(1, 4, 8, 8)
    assert differing(key_of(first, inputs), key_of(second, inputs)) == ["model"]
    assert fingerprint(first) != fingerprint(second)


def test_equal_settings_give_equal_keys_whatever_is_printed_of_objects():
    assert key_of(Plain(0.1), torch.zeros(2)) == key_of(Plain(0.1), torch.zeros(2))


def test_a_module_that_cannot_be_printed_has_a_key():
    class Fails(nn.Linear):
        def extra_repr(self):
            raise ValueError("the user's")

    assert key_of(Fails(2, 2), torch.zeros(2)) == key_of(Fails(2, 2), torch.zeros(2))


@pytest.mark.parametrize("mode", [0o620, 0o602])
def test_a_file_that_others_may_write_to_is_not_believed(store, key, mode, caplog):
    store.put(key, "full", TierCosts(step_seconds=1.0))
    assert file_of(store).stat().st_mode & 0o777 == 0o600
    file_of(store).chmod(mode)
    assert store.get(key) is None
    assert "another user" in caplog.text


def test_a_file_of_another_user_is_not_believed(store, key, monkeypatch):
    store.put(key, "full", TierCosts(step_seconds=1.0))
    monkeypatch.setattr(os, "getuid", lambda: 12345678)
    assert store.get(key) is None


@pytest.mark.parametrize("kind", ["link", "pipe", "folder", "large"])
def test_what_is_no_small_file_of_its_own_is_not_read(store, key, tmp_path, kind):
    store.put(key, "full", TierCosts(step_seconds=1.0))
    path = file_of(store)
    path.rename(tmp_path / "elsewhere")
    if kind == "link":
        path.symlink_to(tmp_path / "elsewhere")
    elif kind == "pipe":
        os.mkfifo(path, 0o600)
    elif kind == "folder":
        path.mkdir()
    else:
        path.write_text(" " * (costs.MAX_BYTES + 1))
        path.chmod(0o600)
    assert store.get(key) is None


@pytest.mark.parametrize("place", ["file in the way", "missing home"])
def test_a_folder_that_cannot_be_is_said_once_and_the_run_goes_on(tmp_path, monkeypatch, key, place, caplog):
    (tmp_path / "file").write_text("")
    monkeypatch.delenv("HOTLOOP_CACHE_DIR", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "file"))
    if place == "missing home":
        monkeypatch.setattr("pathlib.Path.home", lambda: (_ for _ in ()).throw(RuntimeError("no home")))
    store = CostStore()
    for _ in range(2):
        store.put(key, "full", TierCosts(step_seconds=1.0))
        assert store.get(key) is None
    assert len(caplog.records) == 1
    assert "goes on without" in caplog.text


def test_a_full_disk_leaves_the_old_entry_and_no_rest(store, key, monkeypatch, caplog):
    store.put(key, "full", TierCosts(step_seconds=1.0))

    def full(*_args, **_kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pathlib.Path.replace", full)
    store.put(key, "full", TierCosts(step_seconds=9.0))
    assert store.get(key)["full"].step_seconds == 1.0
    assert [path.suffix for path in store.folder.iterdir()] == [".json"]
    assert "No space left" in caplog.text


def test_the_oldest_entries_and_torn_files_are_removed(store, monkeypatch):
    monkeypatch.setattr(costs, "MAX_ENTRIES", 3)
    keys = [key_of(Net(), torch.zeros(size)) for size in range(5)]
    for age, key in enumerate(keys):
        store.put(key, "full", TierCosts(step_seconds=1.0))
        for path in store.folder.glob(f"costs-{key}.json"):
            os.utime(path, (age, age))
    torn = store.folder / "costs-x.part"
    torn.write_text("{")
    os.utime(torn, (0, 0))
    store.put(keys[4], "full", TierCosts(step_seconds=1.0))
    assert [store.get(key) is not None for key in keys] == [False, False, True, True, True]
    assert not torn.exists()


@pytest.mark.campaign
def test_many_processes_at_once_leave_a_whole_file(store, key):
    program = """
import sys, pickle
from hotloop.cache import CostStore, TierCosts, Key
key = Key({"a": "b"})
for i in range(60):
    CostStore(sys.argv[1]).put(key, f"tier{sys.argv[2]}", TierCosts(step_seconds=float(i)))
    assert CostStore(sys.argv[1]).get(key)
"""
    running = [subprocess.Popen([sys.executable, "-c", program, str(store.folder), str(n)]) for n in range(2)]
    assert [process.wait(900) for process in running] == [0, 0]
    assert [path.suffix for path in store.folder.iterdir()] == [".json"]


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"HOTLOOP_CACHE_DIR": "/a/b", "XDG_CACHE_HOME": "/c"}, "/a/b"),
        ({"XDG_CACHE_HOME": "/c"}, "/c/hotloop"),
        ({"XDG_CACHE_HOME": "relative", "HOME": "/h"}, "/h/.cache/hotloop"),
        ({"HOTLOOP_CACHE_DIR": ""}, "None"),
    ],
)
def test_the_folder_follows_the_environment(monkeypatch, environment, expected):
    for name in ("HOTLOOP_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert str(CostStore().folder) == expected


class TestKey:
    def test_is_the_same_for_another_instance_and_another_process(self):
        # In processes of its own: a test before this one may have left another precision of matrix products in force.
        program = (
            "import torch; from torch import nn; from hotloop.cache import key_of\n"
            "for _ in range(2): print(key_of(nn.Linear(3, 4), [torch.zeros(2, 3), {'a': 1}], step=max))"
        )
        keys = []
        for seed in ("7", "8"):
            env = {**os.environ, "PYTHONHASHSEED": seed}
            said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=env, check=True)
            keys += said.stdout.split()
        assert len(keys) == 4
        assert len(set(keys)) == 1

    def test_weights_training_flag_and_learning_rate_do_not_count(self):
        one, other = Net(), Net().eval()
        optimizers = [torch.optim.SGD(net.parameters(), lr=lr) for net, lr in ((one, 0.1), (other, 0.2))]
        assert key_of(one, 1, optimizers=optimizers[0]) == key_of(other, 1, optimizers=optimizers[1])

    @pytest.mark.parametrize(
        ("part", "change"),
        [
            ("model", {"models": Net(5)}),
            ("model", {"models": Net().double()}),
            ("inputs", {"inputs": torch.zeros(3, 4)}),
            ("inputs", {"inputs": torch.zeros(2, 4, dtype=torch.double)}),
            ("inputs", {"inputs": [torch.zeros(2, 4), True]}),
            ("optimizer", {"optimizers": torch.optim.AdamW([torch.zeros(1)])}),
            ("step", {"step": lambda x: x + 1}),
            ("precision", {"autocast": torch.bfloat16}),
        ],
    )
    def test_tells_which_part_differs(self, part, change):
        first = {"models": Net(), "inputs": torch.zeros(2, 4), "step": lambda x: x + 2}
        assert differing(key_of(**first), key_of(**{**first, **change})) == [part]

    def test_matmul_precision_counts(self):
        before, first = torch.get_float32_matmul_precision(), key_of(Net(), ())
        try:
            torch.set_float32_matmul_precision("high")
            assert differing(first, key_of(Net(), ())) == ["precision"]
        finally:
            torch.set_float32_matmul_precision(before)

    def test_a_changed_forward_counts_and_where_it_stands_does_not(self):
        def made(body):
            names = {"nn": nn}
            exec(body, names)
            return names["Toy"]()

        text = "class Toy(nn.Module):\n    def forward(self, x):\n        return x + {}\n"
        first = key_of(made(text.format(1)), ())
        assert first == key_of(made("\n\n" + text.format(1)), ())
        assert differing(first, key_of(made(text.format(2)), ())) == ["model"]
