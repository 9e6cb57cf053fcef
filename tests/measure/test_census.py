"""The census tells inputs apart as a compiler would, counts them in bounded memory, and finds what varies."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest
import torch

from hotloop.measure import Census, signature


def inputs(length, **kwargs):
    return signature((torch.zeros(4, length),), {"y": torch.zeros(4, dtype=torch.int64), **kwargs})


class Batch(dict):
    pass


X = torch.zeros(4, 8)
DIFFERENT = {
    "shape": ((X,), (torch.zeros(4, 9),)),
    "rank": ((X,), (X[None],)),
    "dtype": ((X,), (X.half(),)),
    "device": ((X,), (X.to("meta"),)),
    "requires_grad": ((X,), (X.clone().requires_grad_(),)),
    "strides": ((X,), (torch.zeros(8, 4).t(),)),
    "subclass": ((X,), (torch.nn.Parameter(X, requires_grad=False),)),
    "layout": ((torch.eye(3),), (torch.eye(3).to_sparse(),)),
    "container": (((X,),), ([X],)),
    "mapping's type": (({"x": X},), (Batch(x=X),)),
    "key": (({"x": X},), ({"z": X},)),
    "value": ((X, 1), (X, 2)),
    "bool and int": ((X, True), (X, 1)),
    "int and float": ((X, 1), (X, 1.0)),
    "signed zeros": ((X, 0.0), (X, -0.0)),
    "signed zeros of a complex number": ((X, 0j), (X, -0j)),
    "signed zeros of numpy's": ((X, np.float32(0.0)), (X, np.float32(-0.0))),
    "types of keys": (({1: X},), ({True: X},)),
    "types in a set": ((X, frozenset({1})), (X, frozenset({1.0}))),
    "ranges": ((X, range(0, 3, 2)), (X, range(0, 4, 2))),
    "None": ((X, None), (X, False)),
    "another object": ((X, object()), (X, object())),
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_signatures_differ_where_a_compiler_would_tell_inputs_apart(name):
    one, other = DIFFERENT[name]
    assert signature(one, {}) != signature(other, {})
    assert signature(one, {}) == signature(one, {})


@pytest.mark.parametrize(
    "value",
    [float("nan"), complex("nan"), np.float64("nan"), {1: 2}, 1.5, 3, "text", None, torch.float32, torch.Size([2])],
)
def test_equal_inputs_have_equal_signatures(value):
    a, b = (signature((torch.ones(2, 3), [value]), {"x": torch.ones(1)}) for _ in range(2))
    assert a == b
    assert hash(a) == hash(b)
    assert a.exact


def test_values_that_cannot_be_compared_are_told_by_type_and_said_to_be():
    one, other = (signature((np.full(3, value), {value}), {}) for value in (1, 2))
    assert one == other
    assert not one.exact
    assert str(one) == "args[0] numpy.ndarray, args[1] builtins.set"


class Hashing:
    def __hash__(self):
        raise ValueError("of what it holds")


def test_an_object_whose_hash_fails_is_told_by_type():
    assert not signature((Hashing(),), {}).exact


def test_objects_that_compare_by_value_are_alike():
    class Size:
        def __init__(self, sides):
            self.sides = sides

        def __eq__(self, other):
            return self.sides == other.sides

        def __hash__(self):
            return hash(self.sides)

        def __repr__(self):
            return f"Size({self.sides})"

    one, other, third = (signature((Size(sides),), {}) for sides in (2, 2, 3))
    assert one == other != third
    assert one.exact
    assert str(third) == "args[0] Size(3)"


def test_signatures_hold_no_tensor():
    x = torch.ones(3, 3).t().requires_grad_()
    kept, died = signature((x,), {}), weakref.ref(x)
    del x
    gc.collect()
    assert died() is None
    assert "float32[3, 3]" in str(kept)


def test_varying_dims_are_named_as_the_author_knows_them():
    census = Census()
    for length in (8, 12, 8, 16):
        batch = {"input_ids": torch.zeros(2, length), "labels": torch.zeros(2)}
        census.note(signature((batch, torch.zeros(3, length)), {"mask": torch.zeros(1, 2)}))
    found = {(each.name, each.dim): (each.least, each.most, each.distinct) for each in census.varying_dims()}
    assert found == {("args[0].input_ids", 1): (8, 16, 3), ("args[1]", 1): (8, 16, 3)}


class Task:
    """Equal by its name, as tasks are in a table."""

    def __init__(self, name, weight, sizes=(1, 2)):
        self.name, self.weight, self.sizes = name, weight, [*sizes]

    def __eq__(self, other):
        return self.name == other.name

    def __hash__(self):
        return hash(self.name)


def test_equal_objects_that_hold_other_values_are_told_apart():
    """A recording for one would go on with its weight."""
    first = signature((Task("a", 1.0),), {})
    assert first == signature((Task("a", 1.0),), {})
    assert first != signature((Task("a", 2.0),), {})
    assert first != signature((Task("a", 1.0, (1, 3)),), {})
