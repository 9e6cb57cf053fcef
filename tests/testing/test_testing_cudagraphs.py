"""The emulation of CUDA graphs: what it flags, what it passes, and what its messages say."""

import pytest
import torch
from lifetime_cases import CASES, World

import hotloop
from hotloop.errors import StaleOutputError
from hotloop.testing import cudagraph_emulation

EVERY = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


def eager(case):
    return case.program(World(lambda module: module))


@EVERY
def test_plain_compile_is_flagged_or_right(case):
    expected = eager(case)
    with cudagraph_emulation() as emulation:
        world = World(lambda module: torch.compile(module, backend=emulation.backend))
        if case.flagged:
            with pytest.raises(StaleOutputError):
                case.program(world)
        else:
            assert case.program(world) == expected


@EVERY
def test_hotloops_compile_is_right_by_default(case):
    expected = eager(case)
    with cudagraph_emulation():
        world = World(lambda module: hotloop.compile(module, "reduce-overhead"))
        if case.hotloop == "raises":
            with pytest.raises(StaleOutputError, match="marked between a forward and its backward"):
                case.program(world)
        else:
            assert case.program(world) == expected


@EVERY
def test_strict_lifetime_is_never_silently_wrong(case):
    expected = eager(case)
    with cudagraph_emulation():
        world = World(lambda module: hotloop.compile(module, "reduce-overhead", strict_lifetime=True))
        try:
            found = case.program(world)
        except StaleOutputError:
            return
        assert found == expected
