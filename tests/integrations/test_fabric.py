"""Fabric: compile before and after setup, the user's own compile, precision, and the example."""

import lightning
import pytest
import torch
from fitting import SmallClassifier, Task, small_batches
from test_fabric_conformance import eager, fit_with_fabric

import hotloop
from hotloop.errors import ConfigError
from hotloop.integrations.fabric import loop as fabric_loop
from hotloop.integrations.fabric import setup
from hotloop.testing import captured_step_emulation


def parts():
    torch.manual_seed(0)
    model = SmallClassifier()
    return lightning.Fabric(accelerator="cpu", devices=1), model, torch.optim.SGD(model.parameters(), lr=0.125)


def call(model):
    model(small_batches(1)[0][0]).sum().backward()


@pytest.mark.parametrize("reapply", [None, True, False])
def test_what_the_user_compiled_is_recognised_and_reapplied_as_fabric_does(reapply, caplog):
    fabric, module, optimizer = parts()
    with caplog.at_level("WARNING", "hotloop"):
        model, optimizer = setup(fabric, torch.compile(module, backend="eager"), optimizer, reapply=reapply)
    assert "preset='default' is not applied: the model runs as it was given: torch compiled the model" in caplog.text
    call(model)
    (part,) = hotloop.status(model).components.values()
    assert (part.requested, part.running, part.state) == ("none", "as-given", "as-given")
    assert part.causes[0].reason.startswith("torch compiled the model")
    original = model.get_submodule("_original_module")
    assert ("_orig_mod" in dict(original.named_children())) == (reapply is False)  # Fabric's own _reapply_compile
    loop = fabric_loop(fabric, model, optimizer, run="full")
    assert loop.context.base_tier.name == "as-given"
    loop.close()


def test_a_loop_wants_what_setup_returned():
    fabric, module, optimizer = parts()
    with pytest.raises(ConfigError, match=r"hand over what fabric\.setup\(\) returned"):
        fabric_loop(fabric, module, optimizer)


def test_settings_are_refused_before_anything_is_set_up():
    fabric, module, optimizer = parts()
    with pytest.raises(ConfigError, match="fulll"):
        setup(fabric, module, optimizer, preset="fulll")
    assert not fabric._models_setup


def test_a_captured_step_under_bf16_is_eagers():
    left = []
    for run in (None, "eager+graph"):
        torch.manual_seed(1)
        task = Task(model=SmallClassifier(), batches=small_batches(10), run=run)
        torch.manual_seed(2)

        def hot(fabric, model, optimizer, task):
            loop = fabric_loop(fabric, model, optimizer, run=task.run)
            return loop.step, lambda: {"status": loop.status(), "remove": loop.close}

        with captured_step_emulation():
            left.append(fit_with_fabric(task, hot if run else eager, "bf16-mixed"))
    plain, ours = left
    torch.testing.assert_close(dict(ours.model.state_dict()), dict(plain.model.state_dict()), rtol=1e-5, atol=1e-6)
    assert ours.status.tier == "eager+graph", ours.status
