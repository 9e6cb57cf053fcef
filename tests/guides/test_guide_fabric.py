"""Fabric's guide: compile before setup, after it, by it, and reapplied over the strategy's wrapper."""

import lightning
import pytest
import torch
from guide_programs import Classifier, batches
from torch.nn import functional as F

import hotloop
from hotloop.integrations import fabric as ours
from hotloop.testing import assert_compiled, captured_step_emulation


def train(how):
    """Train six steps with the model compiled at one of the guide's places; return it and its losses."""
    fabric = lightning.Fabric(accelerator="cpu", devices=1)
    torch.manual_seed(1)
    module = Classifier()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.125)
    if how == "before":
        hotloop.compile(module, "aot_eager")
    if how in ("by setup", "over"):
        model, optimizer = ours.setup(fabric, module, optimizer, preset="aot_eager", reapply=how == "over")
    else:
        model, optimizer = fabric.setup(module, optimizer)
    if how == "after":
        hotloop.compile(model, "aot_eager")
    losses = []
    for ids, labels in batches(6):
        loss = F.cross_entropy(model(ids), labels)
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return model, losses


@pytest.mark.parametrize("how", ["before", "after", "by setup", "over"])
def test_each_place_compiles_trains_as_eager_and_keeps_the_names(how):
    plain, eager = train(None)
    model, losses = train(how)
    assert losses == pytest.approx(eager, rel=1e-5)
    assert list(model.state_dict()) == list(plain.state_dict())
    assert_compiled(model)


def test_what_the_user_compiled_is_told_and_runs_as_it_was_given(caplog):
    fabric = lightning.Fabric(accelerator="cpu", devices=1)
    module = Classifier()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.125)
    with caplog.at_level("WARNING", "hotloop"):
        model, _ = ours.setup(fabric, torch.compile(module, backend="eager"), optimizer)
    assert "compile" in caplog.text
    assert torch.isfinite(model(batches(1)[0][0])).all()


def test_a_loop_around_fabrics_backward_captures_a_step_as_eager():
    left = []
    for run in ("eager", "eager+graph"):
        fabric = lightning.Fabric(accelerator="cpu", devices=1)
        torch.manual_seed(1)
        model = Classifier()
        model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.125, fused=True))
        with captured_step_emulation(), ours.loop(fabric, model, optimizer, run=run) as loop:

            @loop.step
            def train_step(ids, labels, model=model, optimizer=optimizer, fabric=fabric):
                loss = F.cross_entropy(model(ids), labels)
                fabric.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                return loss

            left.append([train_step(*batch).item() for batch in batches(12)])
            assert run in str(loop.status())
    assert left[0] == left[1]
