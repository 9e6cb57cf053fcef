"""Presets and component settings: names, nearest names, ladders, and what is refused before anything starts."""

import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotloop import presets
from hotloop.config import component_config
from hotloop.errors import ConfigError
from hotloop.presets import Preset
from hotloop.step.tiers import ASKED


@pytest.mark.parametrize("name", presets.NAMES)
def test_names_are_found_in_any_case_and_ladders_end_in_none(name):
    assert presets.get(name.upper()) is presets.PRESETS[name]
    assert presets.get(f" {name.replace('-', '_')} ").name == name
    rungs = component_config(name).ladder_of(presets.get(name))
    assert (rungs[0].name, rungs[-1].name) == (name, "none")
    assert len({rung.name for rung in rungs}) == len(rungs)


def test_the_ladders_are_those_of_the_documentation():
    ladders = {
        name: [rung.name for rung in component_config(name).ladder_of(presets.get(name))] for name in presets.NAMES
    }
    assert ladders["triton"] == ["triton", "inductor", "aot_eager", "none"]
    assert ladders["default"] == ["default", "aot_eager", "none"]
    assert ladders["aot_eager"] == ["aot_eager", "none"]
    assert ladders["none"] == ["none"]


@pytest.mark.parametrize(
    ("wrong", "near"),
    [("tritn", "triton"), ("max-autotun", "max-autotune"), ("AOT", "aot_eager"), ("defualt", "default")],
)
def test_a_wrong_name_gets_the_nearest(wrong, near):
    with pytest.raises(ConfigError, match=f"did you mean .*'{near}'"):
        presets.get(wrong)


@given(
    st.text().filter(lambda name: name.strip().lower().replace("_", "-") not in presets.NAMES and name != "aot_eager")
)
def test_any_other_name_is_a_config_error(name):
    with pytest.raises(ConfigError, match="expected one of"):
        presets.get(name)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"backend": "tensorrt"}, "backend 'tensorrt'"),
        ({"mode": "fast"}, "mode 'fast'.*expected one of"),
        ({"mode": "max-autotune", "options": {"shape_padding": True}}, "both mode 'max-autotune' and options"),
        ({"dynamic": "yes"}, "dynamic 'yes'"),
    ],
)
def test_a_preset_of_ones_own_is_checked_where_it_is_made(settings, message):
    with pytest.raises(ConfigError, match=message):
        Preset(name="mine", **settings)


def test_a_preset_from_a_config_file_adds_to_its_base():
    mine = presets.from_mapping("mine", {"base": "Inductor", "options": {"shape_padding": True}, "dynamic": True})
    assert dict(mine.options) == {**presets.get("inductor").options, "shape_padding": True}
    assert (mine.name, mine.dynamic, mine.ladder) == ("mine", True, presets.get("inductor").ladder)
    swapped = presets.from_mapping("mine", {"base": "inductor", "mode": "max-autotune"})
    assert dict(swapped.options) == {}


@pytest.mark.parametrize(
    ("mapping", "message"),
    [
        ({"base": "indctor"}, "did you mean 'inductor'"),
        ({"option": {}}, "setting 'option' does not exist.*'options'"),
        ({"options": "shape_padding"}, "expected a mapping"),
        ({"ladder": ["aot"]}, "preset 'aot' does not exist"),
    ],
)
def test_a_wrong_preset_in_a_config_file_is_named(mapping, message):
    with pytest.raises(ConfigError, match=message):
        presets.from_mapping("mine", mapping)


@pytest.mark.parametrize("run", sorted({"auto", *ASKED, "inductor+graph"}))
def test_a_run_of_a_loops_is_no_preset_and_told_from_one(run):
    with pytest.raises(ConfigError, match=re.escape(f"Loop(model, optimizer, run={run!r}); to compile in place")):
        presets.get(run.upper())


def test_presets_are_values():
    first, second = Preset(name="a", options={"x": 1}), Preset(name="a", options={"x": 1})
    assert first == second
    assert len({first, second}) == 1
    assert first.key == Preset(name="b", options={"x": 1}).key
    with pytest.raises(TypeError):
        first.options["x"] = 2


def test_the_table_is_json():
    for preset in presets.PRESETS.values():
        assert json.loads(json.dumps(preset.to_dict()))["name"] == preset.name


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"regions": "block"}, "regions 'block'"),
        ({"dynamic": "auto"}, "dynamic 'auto'"),
        ({"options": ["shape_padding"]}, "expected a mapping"),
        ({"ladder": "aot_eager"}, "expected a sequence of presets"),
        ({"ladder": ["aot"]}, "preset 'aot' does not exist"),
        ({"inference": "nope"}, "preset 'nope' does not exist"),
    ],
)
def test_settings_that_do_not_fit_are_refused_by_name(settings, message):
    with pytest.raises(ConfigError, match=message):
        component_config("default", **settings)


def test_what_is_unset_is_the_presets():
    mine = Preset(name="mine", dynamic=True, options={"shape_padding": True})
    assert component_config(mine).training.dynamic is True
    assert component_config(mine, dynamic=None).training.dynamic is None
    merged = component_config(mine, options={"max_autotune": True}).training
    assert dict(merged.options) == {"shape_padding": True, "max_autotune": True}
    assert component_config("default", inference="none").inference.name == "none"
