"""The form of settings: made of their schema, read back whole, with all that is wrong beside its field."""

import html
import json
import re
import shlex
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from run_folders import a_run, a_study

from hotloop.train import configure, grammar
from hotloop.train.search import space
from hotloop.ui import compilation, drafts, fields, processes, ranges

PARTS = ["unet", "text_encoder", "text_encoder_2", "vae", "loss"]
USUAL = {"recipe": "diffusion"}

PROGRAM = '''
from typing import Annotated, Literal
import hotloop

def make(lr: Annotated[float, hotloop.Range(0, 1)] = 1e-3, kind: Literal["plain", "nan"] = "plain", width: int = 4):
    """Make it.

    Args:
        lr: the rate of it.
    """
'''


SEARCHED = PROGRAM.replace("hotloop.Range(0, 1)]", "hotloop.Range(0, 1), hotloop.Search(log=(1e-5, 1e-1))]")


def draft(**typed):
    found = drafts.of({**USUAL, **typed}, {"diffusion": PARTS, "digits": ["model", "loss"]}, Path("runs"))
    found.read()
    return found


def component(name, on=True, mode="as above", inference="none"):
    return {f"part.{name}.mode": mode, f"part.{name}.inference": inference, **({f"part.{name}.on": "on"} if on else {})}


def test_the_form_of_every_recipe_shows_every_setting_and_stands_for_the_defaults():
    for recipe in drafts.RECIPES:
        found = drafts.of({"recipe": recipe}, {}, Path("runs"))
        shown = {one.name for one in found.fields}
        model = configure.model(recipe)
        for name in ("training.learning_rate", "run.seed", "hpo.n_trials"):
            assert name in shown
        sent = {one.name: found.typed(one) for one in found.fields}
        again = drafts.of({"recipe": recipe, **sent}, {}, Path("runs"))
        again.read()
        assert (again.errors, again.changes) == ({}, {}), recipe
        assert configure.build(again.values()) == configure.load([f"recipe={recipe}"])
        assert model is not None


def test_what_is_changed_becomes_the_command_and_the_file():
    found = draft(**{"training.batch_size": "8", "training.learning_rate": "1e-4", "data.sample_size": "64"})
    assert not found.errors
    assert found.command == (
        "hotloop train recipe=diffusion training.batch_size=8 training.learning_rate=0.0001 data.sample_size=64"
    )
    again = configure.load(found.overrides)
    assert again == configure.build(found.values())
    assert "batch_size: 8" in found.yaml()


def test_all_that_is_wrong_is_said_at_once_beside_its_field():
    found = draft(**{
        "training.batch_size": "0", "training.learning_rate": "fast", "training.optimizer": "Adom", "run.seed": "-1",
        "training.optimizer_options": "{a", "name": "../a",
    })  # fmt: skip
    assert set(found.errors) == {
        "training.batch_size", "training.learning_rate", "training.optimizer", "run.seed",
        "training.optimizer_options", "name",
    }  # fmt: skip
    assert "equal to 1" in found.errors["training.batch_size"]


@pytest.mark.parametrize(
    "typed", ["0,001", "1.000,5", "1'000,5", "1,000.5", "1,000,000", "1'000", "1 000", "1.000.000"]
)
def test_a_number_in_another_countrys_format_is_refused_and_never_read_as_another(typed):
    wrong = draft(**{"training.learning_rate": typed}).errors["training.learning_rate"]
    assert "with a point" in wrong
    assert "training.learning_rate" not in draft(**{"training.learning_rate": typed}).changes


def test_settings_that_do_not_fit_together_are_said_beside_the_first_that_is_named():
    both = draft(**{"training.optimization.use_bf16": "true", "training.optimization.use_fp16": "true"})
    assert "leave one out" in str(both.errors)


def test_what_nothing_reads_is_left_out_and_said_beside_its_field():
    found = draft(**{"pictures.buckets": "3", "run.project": "mine"})
    assert not found.errors
    assert "pictures" not in found.command  # a command would be refused for it
    assert "run.project=mine" in found.command  # which is said by the run, and may stay
    assert found.notes["pictures.buckets"].startswith("not used while pictures.source=digits: ")
    assert "pictures=folder" in found.notes["pictures.buckets"]
    assert "f-pictures.buckets" in found.grey
    assert not draft(**{"pictures.buckets": "three"}).errors
    read = draft(**{"choice.pictures": "folder", "pictures.path": "x", "pictures.buckets": "3"})
    assert "pictures.buckets=3" in read.command
    assert "f-pictures.buckets" not in read.grey


def test_what_the_mode_does_not_read_is_grey_and_kept():
    typed = {"compile.strict": "true", **component("unet", mode="aot_eager")}
    none = draft(**typed)
    assert {
        "f-compile.strict",
        "f-compile.layout",
        "inference",
        "part-unet",
        "part-mode-unet",
        "part-inference-unet",
    } < set(none.grey)
    assert none.notes["compile.strict"] == "not used with NONE"
    assert "compile.strict=true" in none.command
    auto = draft(mode="auto", **typed, **component("loss", inference="default"))
    assert {"part-unet", "part-mode-unet", "f-compile.measure_eager_steps"} < set(auto.grey)
    assert not {"inference", "part-inference-unet", "f-compile.layout", "f-compile.strict"} & set(auto.grey)
    default = draft(mode="default", **typed, **component("loss", on=False))
    assert not {"part-unet", "part-mode-unet", "f-compile.strict", "part-loss"} & set(default.grey)
    assert "part-mode-loss" in default.grey  # its switch is off
    assert default.notes["compile.layout"] == "not used with DEFAULT"


def test_a_layout_and_a_sentinel_go_with_auto():
    typed = {"compile.layout": "as-given", "compile.sentinel": "0.05"}
    auto = draft(mode="auto", **typed)
    assert not auto.errors
    assert "compile.layout=as-given compile.sentinel=0.05" in auto.command
    other = draft(mode="default", **typed)
    assert not other.errors
    assert "layout" not in other.command
    assert "sentinel" not in other.command


def test_a_layout_that_this_machine_cannot_try_is_greyed_with_its_reason(client):
    text = client.get("/training?recipe=diffusion").text
    assert re.search(r'<option value="channels_last" disabled>channels_last \(auto tries it on a GPU only\)', text)
    assert 'name="compile.sentinel" value="0.01"' in text


def test_grey_controls_have_their_reason_for_a_screen_reader(client):
    text = client.get("/training?recipe=diffusion").text
    control = re.search(r'<select id="f-compile.strict"[^>]*>', text)[0]
    assert 'aria-disabled="true"' in control
    assert 'aria-describedby="about-compile.strict note-compile.strict"' in control
    assert re.search(r'id="note-compile.strict"><span class="quiet"> not used with NONE<', text)
    switch = re.search(r'<input type="checkbox" id="part-unet"[^>]*>', text)[0]
    assert 'aria-disabled="true"' in switch
    assert 'aria-describedby="why-mode note-part.unet"' in switch
    again = client.post("/training/preview", data={**USUAL, "mode": "default", "part.unet.mode": "as above"}).text
    greyed = re.search(r'id="grey" hidden data-controls="([^"]*)"', again)[1].split()
    assert "part-unet" not in greyed
    assert "f-compile.strict" not in greyed
    assert "f-pictures.path" in greyed


@pytest.mark.parametrize(
    ("mode", "said"),
    [
        ("none", []),
        ("auto", ["use_torch_compile=auto"]),
        ("triton", ["use_torch_compile=true", "compile.preset=triton"]),
    ],
)
def test_a_mode_is_settings(mode, said):
    found = draft(mode=mode, **component("unet"))
    assert [one for one in said if one not in found.command] == []
    assert compilation.mode_of(found.values()) == mode


def test_each_component_has_a_switch_and_a_mode_of_its_own():
    found = draft(
        mode="default",
        **component("unet", mode="aot_eager", inference="as above"),
        **component("vae", inference="inductor"),
    )
    parts = found.values()["compile"]["components"]
    assert parts["unet"] == {"training": "aot_eager"}
    assert parts["vae"] == {"training": None, "inference": "inductor"}
    assert parts["text_encoder"] == {"training": "none", "inference": "none"}
    off = draft(mode="default", **component("unet", on=False))
    assert off.values()["compile"]["components"]["unet"]["training"] == "none"


def test_what_is_to_be_done_is_given_only_the_groups_that_it_uses():
    typed = {"kfold.n_splits": "2", "hpo.n_trials": "7"}
    once = draft(**typed)
    assert (once.command, once.errors) == ("hotloop train recipe=diffusion", {})
    assert "cross-validation" in once.notes["kfold.n_splits"]
    assert draft(verb="kfold", **typed).command == "hotloop kfold recipe=diffusion kfold.n_splits=2"
    inner = draft(verb="kfold", **typed, **{"kfold.inner_trials": "3"})
    assert "hpo.n_trials=7" in inner.command  # each fold searches
    assert not draft(**{"hpo.n_trials": "many"}).errors


def test_the_settings_of_a_fold_are_those_of_a_cross_validation(client, root):
    folder = a_run(root / "fold-1")
    settings = configure.load(["recipe=digits", "kfold.n_splits=2", "kfold.fold=1"])
    (folder / "settings.yaml").write_text(configure.to_yaml(settings))
    assert "hotloop kfold recipe=digits kfold.n_splits=2 kfold.fold=1" in client.get("/training?from=fold-1").text


def test_the_best_settings_of_a_search_fill_the_form(client, root):
    folder = a_study(root / "search")
    button = "Train with its best settings"
    assert button not in client.get("/run?run=search").text
    settings = configure.load(["recipe=digits", "training.batch_size=8"])
    (folder / "best.yaml").write_text(configure.to_yaml(settings))
    assert f'href="/training?from=search">{button}' in client.get("/run/head?run=search").text
    assert "hotloop train recipe=digits training.batch_size=8<" in client.get("/training?from=search").text


def test_a_start_that_failed_leads_back_to_its_settings(client, root):
    folder = root / "digits" / "a"
    folder.mkdir(parents=True)
    arguments = ["kfold", "recipe=digits", "training.batch_size=8", "kfold.n_splits=2", f"run.folder={folder}"]
    (folder / processes.START).write_text(json.dumps({"pid": 0, "arguments": arguments}))
    assert 'href="/training?from=digits/a">Back to its settings' in client.get("/run?run=digits/a").text
    text = client.get("/training?from=digits/a").text
    assert "hotloop kfold recipe=digits training.batch_size=8 kfold.n_splits=2<" in text
    (folder / processes.START).write_text(json.dumps({"pid": 0, "arguments": ["train", "nonesuch=<b>", "a.b=["]}))
    refused = client.get("/training?from=digits/a")
    assert refused.status_code == 422
    assert "<b>" not in refused.text


def test_a_setting_that_is_fixed_is_said_to_be_out_of_the_search(client, monkeypatch):
    monkeypatch.setattr(processes, "ask", lambda *_: (0, "", ""))
    typed = {"recipe": "digits", "verb": "hpo", "training.learning_rate": "0.002"}
    assert "fixed here, so the search does not vary it" in client.post("/training/preview", data=typed).text
    said = client.post("/training/check", data=typed).text
    assert "the search does not vary it: training.learning_rate." in said
    assert "vary it" not in client.post("/training/preview", data={**typed, "verb": "train"}).text
    varied = {**typed, "hpo.space": "{training: {learning_rate: {log: [0.001, 0.1]}}}"}
    assert "vary it" not in client.post("/training/preview", data=varied).text


def rows(*given):
    """A form with these ranges: each the setting, the kind, and what else is typed."""
    found = {"verb": "hpo", "range.rows": ",".join(map(str, range(len(given))))}
    for number, (setting, kind, more) in enumerate(given):
        found |= {f"range.{number}.setting": setting, f"range.{number}.kind": kind}
        found |= {f"range.{number}.{part}": value for part, value in more.items()}
    return found


def as_typed(found):
    """What a browser sends of the ranges that a form shows."""
    return {"verb": "hpo", "range.rows": ",".join(one.number for one in found.ranges)} | {
        f"range.{one.number}.{part}": getattr(one, part) for one in found.ranges for part in ranges.PARTS
    }


@pytest.mark.parametrize("recipe", drafts.RECIPES)
def test_the_ranges_of_a_form_that_nobody_changed_are_the_defaults(recipe):
    found = drafts.of({"recipe": recipe, "verb": "hpo"}, {}, Path("runs"))
    assert found.ranges
    again = drafts.of({"recipe": recipe, **as_typed(found)}, {}, Path("runs"))
    again.read()
    assert (again.errors, again.changes) == ({}, {})
    assert again.overrides == [f"recipe={recipe}"]


def test_ranges_become_the_space_that_the_search_is_sent():
    found = draft(**rows(
        ("training.learning_rate", "log", {"low": "1e-4", "high": "1e-2", "step": "left over"}),
        ("training.weight_decay", "float", {"low": "0", "high": "0.1", "step": "0.05"}),
        ("diffusion.width", "float", {"low": "16", "high": "64", "step": "16"}),
        ("training.batch_size", "choices", {"choices": "16, 32", "low": "left over"}),
        ("training.optimizer", "choices", {"choices": "AdamW, SGD", "when": "{training.batch_size: 16}"}),
    ))  # fmt: skip
    assert not found.errors
    searched = configure.load_search(found.overrides).hpo.space
    kept = dict(ranges.leaves(searched))
    assert kept == {
        "training.learning_rate": {"log": [1e-4, 1e-2]},
        "training.weight_decay": {"float": [0, 0.1], "step": 0.05},
        "diffusion.width": {"int": [16, 64], "step": 16},  # it takes whole numbers alone
        "training.batch_size": {"choices": [16, 32]},
        "training.optimizer": {"choices": ["AdamW", "SGD"], "when": {"training.batch_size": 16}},
    }
    space.parse(configure.load_search(found.overrides))


def test_a_changed_range_leaves_a_field_that_fixes_another_setting_alone():
    usual = draft(verb="hpo")
    at = {one.setting: one for one in usual.ranges}
    typed = as_typed(usual) | {
        at["training.batch_size"].slot + ".choices": "8, 16", "training.learning_rate": "0.003", "training.batch_size": "4",
    }  # fmt: skip
    found = draft(**typed)
    assert not found.errors
    searched = dict(ranges.leaves(configure.load_search(found.overrides).hpo.space))
    assert "training.learning_rate" not in searched  # its field fixes it
    assert searched["training.batch_size"] == {"choices": [8, 16]}  # its range was changed as well
    assert found.notes["training.learning_rate"] == "fixed here, so the search does not vary it"
    assert "fixes it" in found.notes[at["training.learning_rate"].slot]
    assert "the search varies it" in found.notes["training.batch_size"]


def test_a_range_that_is_taken_out_of_the_form_is_out_of_the_search():
    usual = draft(verb="hpo")
    names = [one.setting for one in usual.ranges]
    sent = as_typed(usual) | {"range.rows": ",".join(one.number for one in usual.ranges if one.setting != names[0])}
    found = draft(**sent)
    assert [name for name, _ in ranges.leaves(configure.load_search(found.overrides).hpo.space)] == names[1:]
    nothing = draft(verb="hpo", **{"range.rows": ""})
    assert "add a range" in nothing.errors["hpo.space"]


@pytest.mark.parametrize(
    ("setting", "kind", "more", "said"),
    [
        ("training.learning_rate", "log", {"low": "0,001", "high": "0.1"}, "low=0,001: write numbers with a point"),
        (
            "training.learning_rate",
            "log",
            {"low": "0.1", "high": "1,000.5"},
            "high=1,000.5: write numbers with a point",
        ),
        ("training.learning_rate", "log", {"low": "0.1", "high": "[1"}, "high=[1: cannot be read"),
        ("training.learning_rate", "log", {"low": "0.1", "high": "1", "when": "{"}, "only while={: cannot be read"),
        ("training.batch_size", "choices", {"choices": "8,,16"}, "values=8,,16: cannot be read"),
        ("training.learning_rate", "log", {"low": "0.1", "high": "0.01"}, "lower one first"),
        ("training.learning_rate", "log", {"low": "0", "high": "0.01"}, "above 0; choose range"),
        ("training.learning_rate", "float", {"high": "0.01"}, "low: expected a number"),
        ("training.learning_rate", "float", {"low": "fast", "high": "1"}, "low=fast: expected a number"),
        ("training.batch_size", "log", {"low": "1.5", "high": "8"}, "expected two integers"),
        ("training.batch_size", "float", {"low": "0", "high": "8"}, "equal to 1"),
        ("training.batch_size", "choices", {"choices": "0,1"}, "put a space behind each comma"),
        ("training.batch_size", "choices", {"choices": ""}, "expected what is to be tried"),
        ("training.batch_size", "choices", {"choices": "8, x"}, "a valid integer"),
        ("training.weight_decay", "float", {"low": "0", "high": "1", "step": "3"}, "within the range"),
        ("", "float", {"low": "0", "high": "1"}, "choose the setting"),
        ("training.typo", "float", {"low": "0", "high": "1"}, "unknown"),
        ("training.batch_size", "choices", {"choices": "8", "when": "x"}, "expected settings with their values"),
        ("training.batch_size", "other", {"low": "1", "high": "2"}, "expected one of range"),
    ],
)
def test_a_range_that_cannot_be_is_said_in_its_row(setting, kind, more, said):
    found = draft(**rows(("training.warmup_fraction", "float", {"low": "0", "high": "0.1"}), (setting, kind, more)))
    assert set(found.errors) == {"range.1"}
    assert said in found.errors["range.1"]


def test_the_settings_of_trials_can_be_emptied():
    found = draft(verb="hpo", **{"hpo.trial": "{}"})
    assert "hpo.trial=" in found.command
    settings = configure.load_search(found.overrides)
    assert not space.trial_changes(settings)


def test_a_setting_has_one_range_and_a_row_that_nobody_filled_is_none():
    twice = draft(**rows(*[("training.batch_size", "choices", {"choices": "8"})] * 2, ("", "float", {})))
    assert set(twice.errors) == {"range.1"}
    assert "has a range above" in twice.errors["range.1"]


def test_a_refused_form_has_its_ranges_as_they_were_typed(client):
    typed = rows(("training.learning_rate", "log", {"low": "0,1", "high": "<b>"}), ("", "choices", {"choices": "1, 2"}))
    answer = client.post("/training/start", data={**USUAL, **typed})
    assert answer.status_code == 422
    text = html.unescape(answer.text)
    for number, part, value in ((0, "low", "0,1"), (0, "high", "<b>"), (1, "choices", "1, 2")):
        assert f'name="range.{number}.{part}" value="{value}"' in text
    assert re.search(r'id="note-range.0"><span class="wrong">low=0,1: write numbers', text)
    assert '<a href="#note-range.0" data-mend>Range of learning rate</a>' in text
    assert client.post("/training/preview", data={**USUAL, **typed}).text.count("write numbers with a point") == 1


def _row(found, setting):
    return next(one.slot for one in found.ranges if one.setting == setting)


def test_a_range_of_another_kind_of_file_is_kept_as_it_is_written():
    odd = "{training: {batch_size: {choices: 8}, learning_rate: 3}}"
    found = draft(verb="hpo", **{"hpo.space": odd})
    again = draft(**as_typed(found))
    assert again.changes["hpo.space"] == found.changes["hpo.space"]
    assert sorted(again.errors.values()) == [
        "choices=8: expected a list",
        again.errors[_row(again, "training.learning_rate")],
    ]


@pytest.mark.campaign
def test_the_ranges_that_a_program_declares_are_rows(client, tmp_path):
    (tmp_path / "train.py").write_text(SEARCHED)
    name = f"{tmp_path}/train.py:make"
    text = client.get(client.post("/training/read", data={"program": name}).headers["location"]).text
    assert "<option selected>program.lr</option>" in text
    assert 'value="1e-05"' in text
    found = drafts.of({"program": name, "verb": "hpo"}, {}, tmp_path)
    sent = as_typed(found) | {"recipe.goal": "min:loss"}
    usual = drafts.of({"program": name, **sent}, {}, tmp_path)
    usual.read()
    assert (usual.errors, usual.changes) == ({}, {"recipe.goal": "min:loss"})  # nothing is sent of what it declares
    fixed = drafts.of({"program": name, **sent, "program.lr": "0.01"}, {}, tmp_path)
    fixed.read()
    assert fixed.notes["program.lr"] == "fixed here, so the search does not vary it"
    row = next(one for one in fixed.ranges if one.setting == "program.lr")
    assert "its field has another value" in fixed.notes[row.slot]
    without = drafts.of({"program": name, **sent, "range.rows": ""}, {}, tmp_path)
    without.read()
    assert "add a range" in without.errors["hpo.space"]
    outside = drafts.of({"program": name, **sent, f"range.{row.number}.high": "2"}, {}, tmp_path)
    outside.read()
    assert "at most 1" in outside.errors[row.slot]


def test_a_range_that_is_taken_out_of_a_search_is_out():
    space = "{training: {learning_rate: {float: [0.1, 0.2]}}}"
    found = draft(verb="hpo", **{"hpo.space": space})
    assert not found.errors
    kept = {name: one for name, one in found.values()["hpo"]["space"]["training"].items() if one is not None}
    assert set(kept) == {"learning_rate"}
    assert kept["learning_rate"]["float"] == [0.1, 0.2]
    assert kept["learning_rate"]["log"] is None
    assert configure.load_search(found.overrides).hpo.space["training"]["weight_decay"] is None


def test_by_default_the_unet_alone_is_switched_on():
    assert {one.name: one.on for one in compilation.parts(draft().base, PARTS)} == {
        "unet": True, "text_encoder": False, "text_encoder_2": False, "vae": False, "loss": False,
    }  # fmt: skip


def test_what_this_machine_cannot_run_is_greyed_with_its_reason(client):
    text = client.get("/training").text
    row = re.search(r'<tr class="off">(.*?)</tr>', text, re.DOTALL)[1]
    assert 'value="triton"' in row
    assert "disabled" in row
    assert "Not here: no GPU that torch can use" in row
    assert re.search(r'id="mode-default"[^>]*>', text)[0].count("disabled") == 0


def test_what_a_mode_does_not_use_says_why(client):
    text = client.get("/training?recipe=diffusion").text
    assert "With NONE nothing is compiled" in text
    assert re.search(r'for="part-text_encoder_2">text_encoder_2</label> <span class="quiet">SDXL only<', text)
    assert not re.search(r'for="part-unet">unet</label> <span class="quiet">', text)


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(min_size=1), inner, max_size=3),
    max_leaves=6,
)


@given(values)
def test_a_value_is_written_so_that_it_is_read_back(value):
    assert grammar.parse(fields.to_text(value)) == value


@given(st.text())
def test_any_text_is_one_argument_and_one_value(text):
    assert grammar.parse(fields.to_text(text)) == text


def test_a_form_that_is_wrong_comes_back_with_all_that_was_typed(client, monkeypatch):
    monkeypatch.setattr(processes, "start", lambda *_: pytest.fail("it was started"))
    typed = {
        "recipe": "diffusion",
        "training.batch_size": "zero",
        "diffusion.width": "24",
        "mode": "auto",
        "name": "mine",
    }
    answer = client.post("/training/start", data=typed)
    assert answer.status_code == 422
    text = html.unescape(answer.text)
    assert 'value="zero"' in text
    assert 'value="24"' in text
    assert 'value="mine"' in text
    assert re.search(r'id="mode-auto"[^>]* checked', text)
    assert 'aria-invalid="true"' in text
    assert "Input should be" in text


def test_a_name_that_cannot_be_is_told_its_limit_or_one_that_is_free(root):
    (root / "digits" / "one-2").mkdir(parents=True)
    (root / "digits" / "one").mkdir()

    def wrong(name):
        found = drafts.of({"recipe": "digits", "name": name}, {}, root)
        found.read()
        return found.errors.get("name", "")

    assert "at most 80 letters" in wrong("x" * 81)
    assert "x" * 30 not in wrong("x" * 81)
    assert not wrong("x" * 80)
    assert wrong("one").endswith("choose another name, such as one-3")
    assert wrong("one-2").endswith("such as one-3")


def test_the_address_of_a_refused_form_leads_to_the_form(client):
    for path in ("/training/start", "/training/queue"):
        answer = client.get(path)
        assert (answer.status_code, answer.headers["location"]) == (307, "/training")


def test_start_begins_a_process_in_a_folder_below_the_runs_and_shows_it(client, root, monkeypatch):
    began = []
    monkeypatch.setattr(processes, "start", lambda folder, arguments: began.append((folder, arguments)))
    answer = client.post("/training/start", data={"recipe": "digits", "name": "first", "training.num_epochs": "1"})
    assert answer.headers["location"] == "/run?run=digits%2Ffirst"
    folder, arguments = began[0]
    assert folder == root / "digits" / "first"
    assert arguments == ["train", "recipe=digits", "training.num_epochs=1", f"run.folder={folder}"]
    a_run(folder)
    assert "is there already" in client.post("/training/start", data={"recipe": "digits", "name": "first"}).text


@pytest.mark.campaign
def test_the_command_the_check_and_the_start_name_one_folder(client, root, tmp_path, monkeypatch):
    asked, began = [], []
    (tmp_path / "train.py").write_text(PROGRAM)
    typed = {"program": f"{tmp_path}/train.py:make", "name": "ui-prog"}
    shown = html.unescape(client.post("/training/preview", data=typed).text)
    monkeypatch.setattr(processes, "ask", lambda arguments, seconds: asked.append(arguments) or (0, "", ""))
    monkeypatch.setattr(processes, "start", lambda folder, arguments: began.append(arguments))
    client.post("/training/check", data=typed)
    client.post("/training/start", data=typed)
    assert began[0][-1] == f"run.folder={root}/train.py-make/ui-prog"
    assert asked[0] == [*began[0], "--dry-run"]
    command = re.search(r'<pre class="log" id="command"[^>]*>(.*?)</pre>', shown)[1]
    assert shlex.split(command) == ["hotloop", *began[0]]


def test_a_name_that_is_taken_is_said_beside_it_and_nothing_is_checked(client, root, monkeypatch):
    monkeypatch.setattr(processes, "ask", lambda *_: pytest.fail("it was checked"))
    a_run(root / "digits" / "first")
    typed = {"recipe": "digits", "name": "first"}
    text = client.post("/training/preview", data=typed).text
    assert re.search(r'id="note-name"[^>]*><span class="wrong">[^<]*is there already', text)
    assert "Nothing was checked" in client.post("/training/check", data=typed).text


def test_the_page_opens_on_the_recipe_that_the_command_line_opens_on(client):
    assert f'data-draft="{configure.load([]).recipe.name}"' in client.get("/training").text


def test_the_help_of_a_field_calls_null_empty_as_the_field_does():
    about = {one.name: one.help for one in draft().fields}
    assert about["training.max_steps"].startswith(
        "Stop after this many optimizer steps, whatever num_epochs says; empty"
    )
    assert ". Empty holds out" in about["kfold.n_splits"]
    assert ". Not set leaves it to the preset" in about["compile.dynamic"]
    assert [name for name, words in about.items() if re.search(r"\bnull\b", words)] == ["hpo.space"]  # within a mapping


def test_a_mistake_is_said_once_with_a_link_to_its_field(client):
    typed = {"recipe": "digits", "training.learning_rate": "0,001"}
    for path in ("/training/preview", "/training/start"):
        text = client.post(path, data=typed).text
        assert text.count("write numbers with a point") == 1, path
        assert '<a href="#note-training.learning_rate" data-mend>Learning rate</a>' in text, path
    assert "with a point" not in client.post("/training/check", data=typed).text


def test_a_search_and_a_cross_validation_are_started_as_such(client, monkeypatch):
    began = []
    monkeypatch.setattr(processes, "start", lambda folder, arguments: began.append(arguments))
    client.post("/training/start", data={"recipe": "digits", "verb": "hpo", "hpo.n_trials": "2"})
    client.post("/training/start", data={"recipe": "digits", "verb": "kfold"})
    assert began[0][0] == "hpo"
    assert began[0][-1].startswith("hpo.folder=")
    assert began[1][0] == "kfold"
    assert began[1][-1].startswith("run.folder=")


def test_the_preview_marks_what_has_changed_and_what_is_wrong(client):
    text = client.post("/training/preview", data={**USUAL, "training.batch_size": "8", "run.seed": "x"}).text
    assert "changed, default 64" in text
    assert re.search(r'id="note-run.seed"[^>]*><span class="wrong">run.seed=', text)


@pytest.mark.campaign
def test_a_programs_parameters_are_fields(client, tmp_path):
    (tmp_path / "train.py").write_text(PROGRAM)
    name = f"{tmp_path}/train.py:make"
    text = client.get(client.post("/training/read", data={"program": name}).headers["location"]).text
    assert 'name="program.lr" value="0.001"' in text
    assert '<option value="nan">nan</option>' in text
    wrong = client.post("/training/preview", data={"program": name, "program.lr": "3"}).text
    assert "program.lr=3: expected a number at least 0 and at most 1" in wrong
    good = client.post("/training/preview", data={"program": name, "program.kind": "nan", "program.width": "8"}).text
    assert "program.width=8" in good
    assert "program.kind=&#39;nan&#39;" in good.replace("&#39;&#34;&#39;&#34;&#39;", "&#39;")  # as text, in a shell


@pytest.mark.parametrize(
    ("program", "said"), [("train.py", "expected a file and its function"), ("none.py:make", "no such file")]
)
def test_a_program_that_cannot_be_named_is_said(client, program, said):
    answer = client.get("/training", params={"program": program})
    assert answer.status_code == 422
    assert said in answer.text
    assert f'value="{program}"' in answer.text


@pytest.mark.campaign
def test_a_program_that_raises_is_shown_and_does_not_harm_the_server(client, tmp_path):
    (tmp_path / "train.py").write_text("raise SystemExit('<b>no')")
    answer = client.post("/training/read", data={"program": f"{tmp_path}/train.py:make"})
    assert answer.status_code == 422
    assert "&lt;b&gt;no" in answer.text
    assert client.get("/runs").status_code == 200


def test_a_run_begins_with_the_settings_of_another(client, root):
    folder = a_run(root / "a")
    settings = configure.load(["recipe=diffusion", "training.batch_size=8", "compile.components.unet.training=aot_eager",
                               "training.optimization.use_torch_compile=true", "compile.preset=inductor"])  # fmt: skip
    (folder / "settings.yaml").write_text(configure.to_yaml(settings))
    text = client.get("/training?from=a").text
    assert 'name="training.batch_size" value="8"' in text
    assert re.search(r'id="mode-inductor"[^>]* checked', text)
    command = html.unescape(re.search(r'<pre class="log" id="command"[^>]*>(.*?)</pre>', text)[1])
    assert configure.load(command.split()[2:]) == settings


def test_a_choice_of_a_group_changes_the_defaults(client):
    text = client.get("/training", params={"recipe": "diffusion", "choice.pictures": "folder"}).text
    assert "<option selected>folder</option>" in text
    assert re.search(r'id="note-pictures.path"[^>]*><span class="wrong">pictures.path', text)
    assert client.get("/training", params={"recipe": "diffusion", "choice.pictures": "nonesuch"}).status_code == 422
