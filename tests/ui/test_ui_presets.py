"""Presets: settings kept by name as YAML of what differs, loaded into the form, compared; names stay in their folder."""

import html
import re

import pytest
from run_folders import a_run

from hotloop.errors import ConfigError
from hotloop.train import conf_files, configure
from hotloop.ui import drafts, presets
from hotloop.ui.presets import Presets

SCRIPT = "<script>alert(1)</script>"
TYPED = {"recipe": "digits", "training.batch_size": "8", "mode": "auto"}


def save(client, preset, /, **typed):
    return client.post("/presets/save", data={**TYPED, **typed, "preset-name": preset}).text


def file(root, name):
    return root / presets.FOLDER / f"{name}.yaml"


def test_a_preset_holds_what_differs_and_is_a_config_of_the_command_line(client, root):
    assert "Saved as small." in save(client, "small")
    found = conf_files.read(file(root, "small"))
    assert found == {
        "recipe": {"name": "digits"},
        "training": {"batch_size": 8, "optimization": {"use_torch_compile": "auto"}},
    }
    meant = ["recipe=digits", "training.batch_size=8", "training.optimization.use_torch_compile=auto"]
    assert configure.load((), file(root, "small")) == configure.load(meant)


@pytest.mark.parametrize("recipe", drafts.RECIPES)
def test_the_defaults_of_a_recipe_are_kept_as_its_name(root, recipe):
    Presets(root).save("usual", drafts.of({"recipe": recipe}, {}, root).base)
    assert conf_files.read(file(root, "usual")) == {"recipe": {"name": recipe}}
    assert Presets(root).values("usual") == drafts.of({"recipe": recipe}, {}, root).base


def test_the_choice_of_a_group_is_kept_by_what_it_sets(client, root, tmp_path):
    (tmp_path / "pictures").mkdir()
    typed = {"recipe": "diffusion", "choice.pictures": "folder", "pictures.path": str(tmp_path / "pictures")}
    draft = drafts.of(typed, {}, root)
    draft.read()
    Presets(root).save("own", presets.whole(draft.values()))
    assert configure.load((), file(root, "own")) == configure.build(draft.values())


def test_a_range_that_was_taken_out_stays_out(client, root):
    space = "{training: {learning_rate: {float: [0.1, 0.2]}}}"
    save(client, "search", **{"hpo.space": space})
    loaded = Presets(root).values("search")["hpo"]["space"]["training"]
    assert {name for name, one in loaded.items() if one is not None} == {"learning_rate"}


def test_a_preset_fills_the_form(client):
    save(client, "small")
    text = client.get("/training?preset=small").text
    assert 'name="training.batch_size" value="8"' in text
    assert re.search(r'id="mode-auto"[^>]* checked', text)
    assert 'data-sent="loaded"' in text
    command = html.unescape(re.search(r'<pre class="log" id="command"[^>]*>(.*?)</pre>', text)[1])
    assert "training.batch_size=8" in command


def test_a_preset_is_replaced_only_once_a_person_said_so(client, root):
    save(client, "small")
    asked = save(client, "small", **{"training.batch_size": "16"})
    assert "is there already" in asked
    assert 'value="small"' in asked  # the name that was typed stays
    assert conf_files.read(file(root, "small"))["training"]["batch_size"] == 8
    save(client, "small", **{"training.batch_size": "16", "sure": "yes"})
    assert conf_files.read(file(root, "small"))["training"]["batch_size"] == 16


def test_a_preset_is_deleted_only_once_a_person_said_so(client, root):
    save(client, "small")
    assert "for good?" in client.post("/presets/delete", data={**TYPED, "preset": "small"}).text
    assert file(root, "small").exists()
    client.post("/presets/delete", data={**TYPED, "preset": "small", "sure": "yes"})
    assert not file(root, "small").exists()


def test_a_form_with_a_mistake_is_not_saved_and_a_taken_name_of_a_run_is_no_mistake(client, root):
    assert "has mistakes" in save(client, "small", **{"training.batch_size": "zero"})
    assert not file(root, "small").exists()
    a_run(root / "digits" / "first")
    assert "Saved as" in save(client, "small", name="first")


@pytest.mark.parametrize(
    "name", ["", "../x", "a/b", "/etc/x", ".hidden", "a\0b", "x\ny", "a" * 70, SCRIPT, "a\\b", "CON:", "\u0430", "x."]
)
def test_a_name_leads_nowhere_else(client, root, name):
    text = save(client, name)
    assert "expected up to 64 letters" in text
    assert SCRIPT not in text
    assert not list(root.rglob("*.yaml"))
    assert client.get("/training", params={"preset": name or "x"}).status_code == 422
    assert client.post("/presets/delete", data={"preset": name, "sure": "yes"}).status_code == 200


def test_a_link_is_no_preset(client, root, tmp_path):
    (tmp_path / "elsewhere.yaml").write_text("training: {batch_size: 3}\n")
    file(root, "link").parent.mkdir(parents=True)
    file(root, "link").symlink_to(tmp_path / "elsewhere.yaml")
    assert Presets(root).names() == []
    for act in (Presets(root).values, Presets(root).delete, lambda name: Presets(root).save(name, {})):
        with pytest.raises(ConfigError, match="is a link"):
            act("link")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("training: [1", "cannot be read"),
        ("# The settings", "torn"),
        ("training: {nonesuch: 1}", "nonesuch"),
        (f"recipe: {{name: '{SCRIPT}'}}", "expected"),
        ("x: &a [1]\n" * 60_000, "no file of settings"),
    ],
    ids=["torn", "cut", "unknown", "script", "large"],
)
def test_a_hostile_preset_is_said_and_harms_nothing(client, root, content, said):
    file(root, "odd").parent.mkdir(parents=True)
    file(root, "odd").write_text(content)
    answer = client.get("/training?preset=odd")
    assert answer.status_code == 422
    assert said in answer.text
    assert SCRIPT not in answer.text
    assert client.get("/training").status_code == 200


def test_two_presets_or_one_and_the_form_show_only_what_differs(client):
    save(client, "small")
    save(client, "large", **{"training.batch_size": "512"})
    text = client.post("/presets/diff", data={**TYPED, "preset": "small", "against": "large"}).text
    assert "training.batch_size" in text
    assert re.findall(r'<div class="cell">([^<]*)</div>', text) == ["small", "large", "8", "512"]
    assert "learning_rate" not in text
    form = {**TYPED, "training.learning_rate": "0.5", "preset": "small", "against": "(form)"}
    text = client.post("/presets/diff", data=form).text
    assert "training.learning_rate" in text
    assert "batch_size" not in text
    assert "No setting differs" in client.post("/presets/diff", data={**TYPED, "preset": "small"}).text
    usual = client.post("/presets/diff", data={**TYPED, "preset": "small", "against": "(defaults)"}).text
    assert "training.optimization.use_torch_compile" in usual
    assert "there is none" in client.post("/presets/diff", data={**TYPED, "preset": "gone"}).text


def test_to_compare_a_preset_runs_no_program(client, root, tmp_path):
    marker = tmp_path / "ran"
    (tmp_path / "evil.py").write_text(f"open({str(marker)!r}, 'w')\ndef make(): pass\n")
    file(root, "evil").parent.mkdir(parents=True)
    file(root, "evil").write_text(f"recipe: {{name: '{tmp_path}/evil.py:make'}}\nprogram: {{lr: 3}}\n")
    text = client.post("/presets/diff", data={**TYPED, "preset": "evil"}).text
    assert "program.lr" in text
    assert not marker.exists()
