"""What code asks that would look for ``_orig_mod`` or ``OptimizedModule``."""

import copy

import pytest
import torch
from torch import nn

import hotloop


def model():
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))


def with_a_compiled_part():
    whole = model()
    hotloop.compile(whole[0], "aot_eager")
    return whole


def compiled_by_its_user():
    whole = model()
    whole.compile(backend="eager")
    return whole


YES = {
    "compiled": lambda: hotloop.compile(model(), "aot_eager"),
    "a part": with_a_compiled_part,
    "a mapping": lambda: hotloop.compile({"lens": model()}, "aot_eager"),
    "a function": lambda: hotloop.compile(torch.square, "aot_eager"),
    "torch's wrapper": lambda: torch.compile(model(), backend="eager"),
    "torch's compile in place": compiled_by_its_user,
    "torch's compiled function": lambda: torch.compile(lambda x: x + 1, backend="eager"),
    "torch's compiled method": lambda: torch.compile(model().forward, backend="eager"),
}
NO = {
    "plain": model,
    "no preset": lambda: hotloop.compile(model(), "none"),
    "taken off": lambda: hotloop.uncompile(hotloop.compile(model(), "aot_eager")),
    "a copy": lambda: copy.deepcopy(hotloop.compile(model(), "aot_eager")),
    "a plain function": lambda: torch.square,
}


@pytest.mark.parametrize("case", YES)
def test_what_is_compiled(case):
    assert hotloop.is_compiled(YES[case]())


@pytest.mark.parametrize("case", NO)
def test_what_is_not(case):
    assert not hotloop.is_compiled(NO[case]())
