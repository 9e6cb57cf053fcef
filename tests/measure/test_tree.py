"""Nested arguments come apart and go together again, exactly."""

from __future__ import annotations

import collections
import dataclasses
from typing import NamedTuple

import pytest
import torch

from hotloop.measure import flatten, unflatten
from hotloop.measure.tree import names


class Pair(NamedTuple):
    x: object
    y: object


@dataclasses.dataclass(frozen=True, slots=True)
class Slotted:
    x: object
    scale: float = 1.0


@dataclasses.dataclass
class Derived:
    x: object
    calls: int = 0
    late: object = dataclasses.field(init=False)

    def __post_init__(self):
        self.calls += 1
        self.late = [self.x]
        self.note = "kept"


class Bag(dict):
    pass


class Stack(list):
    pass


def same(a, b):
    """Equal types all the way down; tensors by identity, since round trips copy no tensor."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return a is b
    if isinstance(a, dict | collections.UserDict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a) and same_attributes(a, b)
    if isinstance(a, list | tuple) and not isinstance(a, torch.Size):
        return len(a) == len(b) and all(map(same, a, b))
    if dataclasses.is_dataclass(a):
        return all(same(getattr(a, f.name), getattr(b, f.name)) for f in dataclasses.fields(a)) and same_attributes(
            a, b
        )
    return a == b


def same_attributes(a, b):
    a, b = (
        {key: value for key, value in getattr(each, "__dict__", {}).items() if key not in ("data", "_encodings")}
        for each in (a, b)
    )
    return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)


T = torch.arange(4.0)
BAG = Bag(x=T, n=1)
BAG.offset = torch.ones(1)
CASES = {
    "tensor": T,
    "none": None,
    "empty": ((), [], {}),
    "nested": ([T, (1, None)], {"a": {"b": T + 1, 3: "x"}}),
    "named tuple": Pair(T, Pair(None, 2)),
    "structseq": torch.max(torch.ones(2, 2), dim=0),
    "size is a leaf": (torch.Size([2, 3]),),
    "slotted frozen dataclass": Slotted(T, 0.5),
    "dataclass with derived attributes": Derived(T),
    "ordered": collections.OrderedDict(b=T, a=1),
    "defaultdict": collections.defaultdict(list, {"a": [T]}),
    "subclasses": (BAG, Stack([T, 1])),
    "user dict": collections.UserDict({"data": T, "b": 2}),
    "set is a leaf": [{1, 2}],
    "packed sequence": torch.nn.utils.rnn.pack_sequence([torch.ones(3), torch.ones(2)]),
}


@pytest.mark.parametrize("name", CASES)
def test_a_round_trip_gives_the_same_values_in_the_same_types(name):
    leaves, structure = flatten(CASES[name])
    rebuilt = unflatten(structure, leaves)
    assert same(rebuilt, CASES[name])
    assert flatten(rebuilt)[1] == structure
    assert hash(flatten(rebuilt)[1]) == hash(structure)
    assert len(names(structure)) == len(leaves)


def test_a_defaultdict_stays_one():
    leaves, structure = flatten(collections.defaultdict(list, a=1))
    rebuilt = unflatten(structure, leaves)
    assert rebuilt["new"] == []


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ((1, 2), [1, 2]),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
        (Pair(1, 2), (1, 2)),
        ([1, [2]], [[1], 2]),
        ({"a": 1}, Bag(a=1)),
        ("leaf", ("leaf",)),
        (Slotted(1), Derived(1)),
    ],
)
def test_structures_differ_where_the_containers_do(one, other):
    assert flatten(one)[1] != flatten(other)[1]


@pytest.mark.parametrize("leaves", [[1], [1, 2, 3]])
def test_a_wrong_number_of_leaves_is_refused(leaves):
    _, structure = flatten((1, 2))
    with pytest.raises(ValueError, match=f"2 places for leaves, {len(leaves)} were given"):
        unflatten(structure, leaves)


def test_transformers_batches_and_outputs_keep_their_types():
    transformers = pytest.importorskip("transformers")
    from transformers.modeling_outputs import BaseModelOutput

    batch = transformers.BatchEncoding({"input_ids": T, "attention_mask": T + 1})
    batch._encodings = [object()]  # one a batch, by identity: it must not make every batch's structure another one
    leaves, structure = flatten((batch, BaseModelOutput(last_hidden_state=T)))
    twin = transformers.BatchEncoding({"input_ids": T, "attention_mask": T + 1})
    twin._encodings = [object()]
    assert flatten((twin, BaseModelOutput(last_hidden_state=T)))[1] == structure
    encoded, output = unflatten(structure, leaves)
    assert type(encoded) is transformers.BatchEncoding
    assert encoded.input_ids is T
    assert encoded._encodings == batch._encodings
    assert type(output) is BaseModelOutput
    assert output.last_hidden_state is T
    assert output["last_hidden_state"] is T
    assert output.hidden_states is None
    assert sum(leaf is T for leaf in leaves) == 2  # an output's attribute is its item, no second leaf


def test_names_say_where_a_leaf_stands():
    _, structure = flatten(({"input_ids": 1, 7: 2}, [Pair(3, 4)], Slotted(5)))
    assert names(structure) == ["[0].input_ids", "[0][7]", "[1][0].x", "[1][0].y", "[2].x", "[2].scale"]
