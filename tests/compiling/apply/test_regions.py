"""Whole or by blocks: the numbers are eager's, equal blocks are compiled once, and nothing of the component stays eager."""

import copy

import pytest
import torch
from compiling_models import (
    Counter,
    Net,
    Stack,
    Tied,
    against_eager,
    one,
    real_aot_eager,
    rows,
    tokens,
    train,
)
from torch import nn

import hotloop
from hotloop._torch import backends


@pytest.fixture
def counter(monkeypatch):
    """Counts what aot_eager is asked to compile."""
    compiler = Counter(inner=real_aot_eager())
    monkeypatch.setattr(backends, "aot_eager", lambda: compiler)
    return compiler


@pytest.mark.campaign
@pytest.mark.parametrize(("regions", "tied"), [("whole", True), ("blocks", True), ("blocks", False), ("auto", True)])
def test_numbers_are_eagers_and_equal_blocks_are_compiled_once(counter, regions, tied):
    batches = [(tokens(seed=s), tokens(seed=s + 9)) for s in range(2)]
    status = against_eager(Tied(layers=4, p=0.2, tied=tied), batches, regions=regions)
    assert status.state == "compiled"
    if regions == "blocks":
        assert counter.calls == 3  # embedding, one of four blocks, head
        assert status.regions == ("Block", "rest")
        assert status.frames_compiled == 6 * 2
    else:
        assert counter.calls == 1
        assert status.regions == ("whole",)


def test_each_block_trains_its_own_parameters():
    model = hotloop.compile(Tied(layers=4), "aot_eager", regions="blocks")
    with torch.no_grad():
        for scale, block in enumerate(model.blocks, start=1):
            block.out.weight.mul_(scale)
    train(model, [(tokens(), tokens())])
    before = copy.deepcopy(model.state_dict())
    train(model, [(tokens(seed=1), tokens(seed=2))])
    moved = [(model.state_dict()[f"blocks.{i}.out.weight"] - before[f"blocks.{i}.out.weight"]) for i in range(4)]
    assert all(m.abs().max() > 0 for m in moved)
    assert not any(torch.equal(moved[0], other) for other in moved[1:])


def test_blocks_of_one_class_that_differ_are_compiled_each(counter):
    class Wide(nn.Module):
        def __init__(self, width, p):
            super().__init__()
            self.up, self.down, self.drop = nn.Linear(8, width), nn.Linear(width, 8), nn.Dropout(p)

        def forward(self, x):
            return self.drop(self.down(self.up(x).relu()))

    model = Stack(Wide(16, 0.1), Wide(16, 0.1), Wide(24, 0.1), Wide(16, 0.5))
    status = against_eager(model, [rows(seed=s) for s in range(2)], regions="blocks")
    assert status.state == "compiled"
    assert counter.calls == 2 + 3


@pytest.mark.campaign
def test_the_class_declares_its_blocks_as_diffusers_does():
    class Declares(Tied):
        _repeated_blocks = ("Block",)

    model = hotloop.compile(Declares(), "aot_eager")
    model(tokens())
    assert one(model).regions == ("Block", "rest")
    model = hotloop.compile(Declares(), "aot_eager", regions="whole")
    model(tokens())
    assert one(model).regions == ("whole",)


def test_no_repeated_blocks_is_said_and_compiles_whole(caplog):
    status = against_eager(Net(), [rows()], regions="blocks")
    assert status.regions == ("whole",)
    assert "has no repeated blocks: compiled whole" in caplog.text


def test_a_splitter_that_fails_costs_nothing_but_the_regions(monkeypatch, caplog):
    from hotloop.compiling.apply import regions

    def broken(*args, **kwargs):
        raise RuntimeError("splitter bug")

    monkeypatch.setattr(regions, "split_module", broken)
    status = against_eager(Tied(), [(tokens(), tokens())] * 2, regions="blocks")
    assert (status.state, status.regions) == ("compiled", ("whole",))
    assert "splitter bug" in caplog.text
