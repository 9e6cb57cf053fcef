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
from hotloop.ui import compilation, drafts, fields, processes

PARTS = ["unet", "text_encoder", "text_encoder_2", "vae", "loss"]
PROGRAM = '''
from typing import Annotated, Literal
import hotloop

def make(lr: Annotated[float, hotloop.Range(0, 1)] = 1e-3, kind: Literal["plain", "nan"] = "plain", width: int = 4):
    """Make it.

    Args:
        lr: the rate of it.
    """
'''


def draft(**typed):
    found = drafts.of({"recipe": "diffusion", **typed}, {"diffusion": PARTS}, Path("runs"))
    found.read()
    return found


def component(name, on=True, mode="as above", inference="none"):
    return {f"part.{name}.mode": mode, f"part.{name}.inference": inference, **({f"part.{name}.on": "on"} if on else {})}


def command_in(text):
    return html.unescape(re.search(r'<pre class="log" id="command"[^>]*>(.*?)</pre>', text, re.DOTALL)[1])


@pytest.mark.parametrize("recipe", drafts.RECIPES)
def test_the_form_of_a_recipe_shows_its_settings_and_stands_for_the_defaults(recipe):
    found = drafts.of({"recipe": recipe}, {}, Path("runs"))
    assert {"training.learning_rate", "run.seed", "hpo.n_trials"} <= {one.name for one in found.fields}
    sent = {one.name: found.typed(one) for one in found.fields}
    again = drafts.of({"recipe": recipe, "verb": "hpo", **sent}, {}, Path("runs"))
    again.read()
    assert again.changes == {}
    assert again.overrides == [f"recipe={recipe}"]


def test_what_is_changed_becomes_the_command_and_the_file():
    found = draft(**{"training.batch_size": "8", "training.learning_rate": "1e-4", "data.sample_size": "64"})
    assert not found.errors
    assert found.shown == (
        "hotloop train recipe=diffusion training.batch_size=8 training.learning_rate=0.0001 data.sample_size=64"
    )
    assert configure.load(found.overrides) == configure.build(found.values())
    assert "batch_size: 8" in found.yaml()


def test_all_that_is_wrong_is_said_at_once_beside_its_field(client):
    typed = {
        "training.batch_size": "0", "training.learning_rate": "0,001", "training.optimizer": "Adom", "run.seed": "-1",
        "name": "../a",
    }  # fmt: skip
    found = draft(**typed)
    assert set(found.errors) == {*typed}
    assert "equal to 1" in found.errors["training.batch_size"]
    for path in ("/training/preview", "/training/start"):
        text = html.unescape(client.post(path, data={"recipe": "diffusion", **typed}).text)
        assert text.count(found.errors["training.batch_size"]) == 1, path
        assert '<a href="#note-training.batch_size" data-mend>' in text, path
    assert "Nothing was checked" in client.post("/training/check", data={"recipe": "diffusion", **typed}).text


def test_settings_that_do_not_fit_together_are_said_beside_the_first_that_is_named():
    both = draft(**{"training.optimization.use_bf16": "true", "training.optimization.use_fp16": "true"})
    assert "leave one out" in str(both.errors)


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
    assert [one for one in said if one not in found.shown] == []
    assert compilation.mode_of(found.values()) == mode


def test_each_component_has_a_switch_and_a_mode_of_its_own():
    on = {one for one in PARTS if f"part.{one}.on" in compilation.form_of(draft().base, PARTS)}
    assert on == {"unet"}
    found = draft(
        mode="default",
        **component("unet", mode="aot_eager", inference="as above"),
        **component("vae", inference="inductor"),
    )
    parts = found.values()["compile"]["components"]
    assert parts["unet"] == {"training": "aot_eager"}
    assert parts["vae"] == {"training": None, "inference": "inductor"}
    assert parts["text_encoder"]["training"] == "none"
    off = draft(mode="default", **component("unet", on=False))
    assert off.values()["compile"]["components"]["unet"]["training"] == "none"


def test_what_is_to_be_done_is_given_only_the_groups_that_it_uses():
    typed = {"kfold.n_splits": "2", "hpo.n_trials": "7"}
    assert draft(**typed).shown == "hotloop train recipe=diffusion"
    assert draft(verb="kfold", **typed).shown == "hotloop kfold recipe=diffusion kfold.n_splits=2"
    assert "hpo.n_trials=7" in draft(verb="hpo", **typed).shown


def test_a_setting_that_is_taken_out_of_the_space_of_a_search_is_out():
    found = draft(verb="hpo", **{"hpo.space": "{training: {learning_rate: {float: [0.1, 0.2]}}}"})
    assert not found.errors
    searched = configure.load_search(found.overrides).hpo.space["training"]
    assert {name for name, one in searched.items() if one is not None} == {"learning_rate"}
    assert searched["learning_rate"]["float"] == [0.1, 0.2]


def test_a_cluster_is_given_the_same_settings(client, monkeypatch):
    asked = []
    monkeypatch.setattr(processes, "ask", lambda *told: asked.append(told[0]) or (0, "Submitted: <b>", ""))
    typed = {"recipe": "diffusion", "where": "http://head:8265", "mode": "inductor", "name": "x"}
    client.post("/training/check", data=typed)
    answer = client.post("/training/start", data=typed)
    own = ["train", "recipe=diffusion", "training.optimization.use_torch_compile=true", "compile.preset=inductor"]
    assert asked[1] == ["submit", "--address", "http://head:8265", "--", *own]
    assert asked[0] == ["submit", "--dry-run", *asked[1][1:]]
    assert "Submitted: &lt;b&gt;" in answer.text


def test_what_this_machine_cannot_run_is_greyed_with_its_reason(client):
    text = client.get("/training").text
    row = re.search(r'<tr class="off">(.*?)</tr>', text, re.DOTALL)[1]
    assert 'value="triton"' in row
    assert "disabled" in row
    assert "Not here: no GPU that torch can use" in row
    assert re.search(r'id="mode-default"[^>]*>', text)[0].count("disabled") == 0


texts = st.text("ab1.:,'\"\\ -[]{}\xe9")
values = st.recursive(
    st.none() | st.booleans() | st.integers() | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)


@given(values)
def test_a_value_is_written_so_that_it_is_read_back(value):
    assert grammar.parse(fields.override("a.b", value).removeprefix("a.b=")) == value


def test_a_form_that_is_wrong_comes_back_with_all_that_was_typed(client, monkeypatch):
    monkeypatch.setattr(processes, "start", lambda *_: pytest.fail("it was started"))
    typed = {
        "recipe": "diffusion", "training.batch_size": "<b>", "diffusion.samples": "24", "mode": "auto", "name": "mine",
    }  # fmt: skip
    answer = client.post("/training/start", data=typed | component("unet", on=False))
    assert answer.status_code == 422
    assert "<b>" not in answer.text
    text = html.unescape(answer.text)
    for value in ('value="<b>"', 'value="24"', 'value="mine"', 'aria-invalid="true"'):
        assert value in text
    assert re.search(r'id="mode-auto"[^>]* checked', text)
    assert " checked" not in re.search(r'id="part-unet"[^>]*>', text)[0]


def test_start_begins_a_process_in_a_folder_below_the_runs_and_shows_it(client, root, monkeypatch):
    began, asked = [], []
    monkeypatch.setattr(processes, "start", lambda folder, arguments: began.append((folder, arguments)))
    monkeypatch.setattr(processes, "ask", lambda arguments: asked.append(arguments) or (0, "", ""))
    typed = {"recipe": "diffusion", "name": "first", "training.num_epochs": "1"}
    shown = shlex.split(command_in(client.post("/training/preview", data=typed).text))
    client.post("/training/check", data=typed)
    answer = client.post("/training/start", data=typed)
    assert answer.headers["location"] == "/run?run=diffusion%2Ffirst"
    folder, arguments = began[0]
    assert folder == root / "diffusion" / "first"
    assert arguments == ["train", "recipe=diffusion", "training.num_epochs=1", f"run.folder={folder}"]
    assert (shown, asked) == (["hotloop", *arguments], [[*arguments, "--dry-run"]])
    a_run(folder)
    assert "is there; choose another name" in client.post("/training/start", data=typed).text


@pytest.mark.parametrize(("verb", "key"), [("hpo", "hpo.folder="), ("kfold", "run.folder=")])
def test_a_search_and_a_cross_validation_are_started_as_such(client, monkeypatch, verb, key):
    began = []
    monkeypatch.setattr(processes, "start", lambda folder, arguments: began.append(arguments))
    client.post("/training/start", data={"recipe": "diffusion", "verb": verb})
    assert began[0][0] == verb
    assert began[0][-1].startswith(key)


def test_the_page_opens_on_the_recipe_that_the_command_line_opens_on(client):
    assert 'data-draft="criteria"' in client.get("/training").text
    for path in ("/training/start", "/training/read"):  # a refused form has this address
        assert client.get(path).headers["location"] == "/training"


@pytest.mark.campaign
def test_a_programs_parameters_are_fields(client, tmp_path):
    (tmp_path / "train.py").write_text(PROGRAM)
    name = f"{tmp_path}/train.py:make"
    text = client.get(client.post("/training/read", data={"program": name}).headers["location"]).text
    assert 'name="program.lr" value="0.001"' in text
    assert '<option value="nan">nan</option>' in text
    good = client.post("/training/preview", data={"program": name, "program.kind": "nan", "program.width": "8"}).text
    assert "program.width=8" in command_in(good)
    (tmp_path / "train.py").write_text("raise SystemExit('<b>no')")
    answer = client.post("/training/read", data={"program": name})
    assert answer.status_code == 422
    assert "&lt;b&gt;no" in answer.text


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"program": "train.py"}, "expected a file and its function"),
        ({"program": "none.py:make"}, "no such file"),
        ({"program": f"{'a' * 5000}:make"}, "cannot be read"),
        ({"program": f"{'a' * 300}:make"}, "File name too long"),
        ({"program": "a\0b:make"}, "cannot be read"),
        ({"recipe": "diffusion", "choice.data": "nonesuch"}, "no such choice"),
    ],
)
def test_what_cannot_be_shown_is_said(client, asked, said):
    answer = client.get("/training", params=asked)
    assert answer.status_code == 422
    assert said in answer.text


def test_a_choice_of_a_group_changes_the_defaults(client):
    text = client.get("/training", params={"recipe": "criteria", "choice.data": "csv"}).text
    assert "<option selected>csv</option>" in text
    assert re.search(r'id="note-data.path"[^>]*><span class="wrong">data.path', text)


# -- the settings of a run ---------------------------------------------------------------------------------------------


def test_a_run_begins_with_the_settings_of_another(client, root):
    folder = a_run(root / "a")
    settings = configure.load(["recipe=diffusion", "training.batch_size=8", "compile.components.unet.training=aot_eager",
                               "training.optimization.use_torch_compile=true", "compile.preset=inductor"])  # fmt: skip
    (folder / "settings.yaml").write_text(configure.to_yaml(settings))
    text = client.get("/training?from=a").text
    assert 'name="training.batch_size" value="8"' in text
    assert re.search(r'id="mode-inductor"[^>]* checked', text)
    assert configure.load(shlex.split(command_in(text))[2:]) == settings


def test_the_settings_of_a_fold_and_of_a_searchs_best_trial_fill_the_form(client, root):
    fold, search = a_run(root / "fold-1"), a_study(root / "search")
    folds = configure.load(["recipe=diffusion", "kfold.n_splits=2", "kfold.fold=1"])
    (fold / "settings.yaml").write_text(configure.to_yaml(folds))
    text = client.get("/training?from=fold-1").text
    assert command_in(text) == "hotloop kfold recipe=diffusion kfold.n_splits=2 kfold.fold=1"
    button = "Train with its best settings"
    assert button not in client.get("/run?run=search").text
    (search / "best.yaml").write_text(configure.to_yaml(configure.load(["recipe=diffusion", "training.batch_size=8"])))
    assert f'href="/training?from=search">{button}' in client.get("/run?run=search").text
    assert command_in(client.get("/training?from=search").text).endswith("training.batch_size=8")


def test_a_start_that_failed_leads_back_to_its_settings(client, root):
    folder = root / "diffusion" / "a"
    folder.mkdir(parents=True)
    arguments = ["kfold", "recipe=diffusion", "training.batch_size=8", "kfold.n_splits=2", f"run.folder={folder}"]
    (folder / processes.START).write_text(json.dumps({"pid": 0, "arguments": arguments}))
    assert 'href="/training?from=diffusion/a">Back to its settings' in client.get("/run?run=diffusion/a").text
    text = client.get("/training?from=diffusion/a").text
    assert command_in(text) == "hotloop kfold recipe=diffusion training.batch_size=8 kfold.n_splits=2"
    (folder / processes.START).write_text(json.dumps({"pid": 0, "arguments": ["train", "nonesuch=<b>", "a.b=["]}))
    refused = client.get("/training?from=diffusion/a")
    assert refused.status_code == 422
    assert "<b>" not in refused.text
