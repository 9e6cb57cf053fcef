"""A loop whose ``run`` is a preset of the user's own: it runs, its options reach the compiler, and it is named."""

from __future__ import annotations

import pytest
import torch
from step_programs import STEPS, Classifier, batches, plain_step

import hotloop
from hotloop.errors import ConfigError
from hotloop.step.tiers import Tier, tier_of_setting
from hotloop.testing import captured_step_emulation


def train(run, steps=STEPS):
    torch.manual_seed(0)
    model = Classifier()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2**-6, fused=True)
    with hotloop.Loop(model, optimizer, run=run) as loop:
        step = loop.step(plain_step(model, optimizer))
        losses = [step(*batch).item() for batch in batches("cpu", steps)]
        return losses, loop.context.compiled.status(), loop.tier.name


def test_a_preset_of_ones_own_runs_under_its_name():
    eager, _, _ = train("eager")
    losses, status, tier = train(hotloop.Preset(name="mine", backend="aot_eager"))
    assert tier == "mine"
    assert {part.running for part in status.components.values()} == {"mine"}
    assert losses == eager


def test_its_name_may_ask_for_a_captured_step():
    eager, _, _ = train("eager")
    with captured_step_emulation():
        losses, status, tier = train(hotloop.Preset(name="mine+graph", backend="aot_eager"))
    assert tier == "mine+graph"
    assert losses == eager


def test_its_options_and_dynamic_reach_the_compiler():
    own = hotloop.Preset(name="padded", options={"shape_padding": True}, dynamic=True)
    model = Classifier()
    with hotloop.Loop(model, torch.optim.SGD(model.parameters()), run=own) as loop:
        settings = loop.context.compiled.settings(loop.policy.start)
    assert settings["preset"].options == {"shape_padding": True, "fallback_random": True}
    assert settings["preset"].dynamic is True
    assert "dynamic" not in settings


def test_a_shipped_preset_is_the_tier_of_its_name():
    assert tier_of_setting(hotloop.presets.get("inductor")) == tier_of_setting("inductor") == Tier("inductor")
    assert tier_of_setting(hotloop.Preset(name="off", backend="eager")) == Tier("eager")


@pytest.mark.parametrize("name", ["full", "default", "", "auto", "Eager+graph", "INDUCTOR"])
def test_a_name_of_hotloops_own_is_refused(name):
    with pytest.raises(ConfigError, match=r"name .* is taken by hotloop or empty; expected a name of its own"):
        tier_of_setting(hotloop.Preset(name=name, options={"shape_padding": True}))


def test_graphs_in_graphs_are_refused():
    with pytest.raises(ConfigError, match=r"cannot be nested: leave \+graph out of its name, or triton.cudagraphs"):
        tier_of_setting(hotloop.Preset(name="mine+graph", options={"triton.cudagraphs": True}))


def test_an_unknown_option_is_refused_before_the_first_step():
    with pytest.raises(ConfigError, match=r"option 'shape_paddings' does not exist .*shape_padding"):
        tier_of_setting(hotloop.Preset(name="mine", options={"shape_paddings": True}))
