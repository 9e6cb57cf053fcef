"""Freezing and unfreezing parameters after the compile; torch 2.11 leaves a gradient out without a word."""

import copy

import pytest
from compiling_models import Tied, one, tokens, train

import hotloop


@pytest.mark.campaign
@pytest.mark.parametrize("regions", ["whole", "blocks"])
@pytest.mark.parametrize("first", [True, False], ids=["freeze later", "unfreeze later"])
def test_a_parameter_that_is_frozen_or_unfrozen_later(first, regions):
    model = Tied(layers=2, tied=False)
    model.blocks[0].qkv.weight.requires_grad_(first)
    model.embed.weight.requires_grad_(first)
    reference = copy.deepcopy(model)
    hotloop.compile(model, "aot_eager", regions=regions)
    batch = [(tokens(), tokens())]
    train(model, batch).assert_equal(train(reference, batch))
    for candidate in (model, reference):
        candidate.blocks[0].qkv.weight.requires_grad_(not first)
        candidate.embed.weight.requires_grad_(not first)
    mine, its = train(model, batch), train(reference, batch)
    assert (mine.gradients[0]["embed.weight"] is None) == first
    mine.assert_equal(its)
    assert one(model).state == "compiled"
