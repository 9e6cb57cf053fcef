from pathlib import Path

import pytest

from hotloop.errors import ConfigError
from hotloop.train import conf_files, configure, documentation, grammar, schema
from hotloop.train.settings import Settings

PROGRAM = """
import hotloop

def make(lr: float = 0.1, training: hotloop.Training = hotloop.Training()): ...
"""


def test_overrides_and_group_choices_are_applied():
    settings = configure.load(
        ["data=csv", "data.path=a.csv", "training.num_epochs=3", "model=bge-reranker", "data.columns.text=note",
         "training.optimization.use_torch_compile=auto", "compile.components.model.training=inductor",
         "compile.presets.mine={base: triton, options: {shape_padding: true}}", "model.buckets=[16,32]"]
    )  # fmt: skip
    assert (settings.data.source, settings.data.path, settings.data.columns.text) == ("csv", "a.csv", "note")
    assert settings.model.name == "BAAI/bge-reranker-base"
    assert settings.training.optimization.use_torch_compile == "auto"
    assert settings.compile.components["model"].training == "inductor"
    assert settings.compile.components["model"].inference is None
    assert settings.compile.presets["mine"].options == {"shape_padding": True}
    assert settings.model.buckets == (16, 32)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3", 3), ("-1_000", -1000), ("007", "007"), ("1e-3", 0.001), ("2.", 2.0), (".5", 0.5),
        ("true", True), ("False", False), ("NULL", None), ("", ""), (" a b ", "a b"), ("http://h:5/x?y=z", "http://h:5/x?y=z"),
        ("'3'", "3"), ("'it''s'", "it's"), ('"a,b"', "a,b"), (r"C:\data", r"C:\data"),
        ("[16, 32]", [16, 32]), ("[]", []), ("[a b,'c,d',[1]]", ["a b", "c,d", [1]]), ("{}", {}),
        ("{base: triton, options: {shape_padding: true}}", {"base": "triton", "options": {"shape_padding": True}}),
        ("{'a b': [1,null]}", {"a b": [1, None]}), ("${run.seed}/x", "${run.seed}/x"),
    ],
)  # fmt: skip
def test_values_are_read_as_yaml_has_them(text, value):
    assert grammar.parse(text) == value
    assert type(grammar.parse(text)) is type(value)


def test_later_lines_win_and_choices_lie_below_values():
    lines = [
        "training.num_epochs=7",
        "recipe=focus",
        "+training.max_steps=4",
        "training.num_epochs=${training.max_steps}",
    ]
    found = configure.load([*lines, "run.folder=${recipe.name}/here"])
    assert (found.training.num_epochs, found.training.max_steps, found.run.folder) == (4, 4, "focus/here")
    assert found.training.eval_batch_size == 32, "the recipe chooses training=focus"
    assert configure.load(["hpo=fast", "recipe=focus"]).hpo.trial["training"]["num_epochs"] == 3
    assert configure.load(["recipe=focus", "training=diffusion"]).training.num_epochs == 10
    assert configure.load().training.num_epochs == 1, "nothing may stay behind"


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (["recipe=focus", "data.path=x"], "recipe=focus has no data.path: "),
        (["recipe=focus", "data=csv"], "recipe=focus has not all settings of data=csv"),
        (["recipe=focus", "pictures.path=x"], "recipe=focus has no pictures.path: "),
        (["focus.layers=2"], "recipe=criteria has no focus.layers: "),
        (["recipe=focus", "recipe.goal=max:f1"], "recipe=focus has no recipe.goal: "),
        (["recipe=focus", "training.optimization.use_fp16=true"], "recipe=focus has no training.optimization.use_fp16: "),
        (["recipe=a.py:make", "training.batch_size=3"], "a program of your own has no training.batch_size: "),
        (["recipe=a.py:make", "run.device=cpu"], "a program of your own has no run.device: "),
        (["recipe=a.py:make", "lr=3"], "unknown setting lr: did you mean program.lr?"),
        (["recipe=a.py:make", "learning_rate=3"], "unknown setting learning_rate: did you mean program.training.learning_rate?"),
        (["recipe=a.py:make", "training.optimizer=SGD"], "has no training.optimizer: did you mean program.training.optimizer or "),
        (["recipe=a.py:make", "epochs=3"], "unknown setting epochs: did you mean training.num_epochs?"),
        (["program.lr=3"], "recipe=criteria has no program.lr: "),
    ],
)  # fmt: skip
def test_a_recipe_has_no_settings_but_those_that_it_reads(lines, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("a.py").write_text(PROGRAM)
    with pytest.raises(ConfigError) as caught:
        configure.load(lines)
    assert said in str(caught.value)


def test_what_a_recipe_does_not_read_is_neither_written_nor_missed():
    settings = configure.load(["recipe=focus"])
    plain = configure.to_dict(settings)
    assert not {"pictures", "model", "program"} & set(plain)
    assert set(plain["data"]) == {"validation_fraction"}
    assert settings.training.gradient_accumulation == 1, "code that all recipes share finds the default"


def test_written_settings_are_read_back_as_they_were(tmp_path):
    lines = ["run.folder='1e-3'", "run.tracking='2024-01-02'", "run.project='null'", "training.learning_rate=1e-5"]
    settings = configure.load(lines)
    (tmp_path / "settings.yaml").write_text(configure.to_yaml(settings))
    assert configure.load(config=tmp_path / "settings.yaml") == settings


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("training.num_epoch=3", "unknown setting training.num_epoch: did you mean training.num_epochs"),
        ("training.num_epoch=3", "did you mean training.num_epochs or training.max_s"),
        ("num_epochs=3", "did you mean training.num_epochs"),
        (
            "hpo.spce.training.learning_rate.log=[1,2]",
            "unknown setting hpo.spce.training.learning_rate.log: did you mean ",
        ),
        ("use_torch_compile=true", "did you mean training.optimization.use_torch_compile"),
        ("compile.components.model.trainin=none", "unknown setting compile.components.model.trainin: did you mean "),
        ("data=cvs", "data=cvs: no such choice; did you mean csv"),
        ("recipe=focu", "recipe=focu: no such choice; did you mean focus? (a program of your own: recipe=FILE.py:f"),
        ("recipe=x", "expected one of criteria, diffusion, focus (a program of your own"),
        ("run=x", "run=x: no such choice; expected one of default"),
        ("training.num_epochs=abc", "training.num_epochs='abc': Input should be a valid integer"),
        ("training.num_epochs=1.5", "training.num_epochs=1.5: Input should be a valid integer"),
        ("training.learning_rate=nan", "training.learning_rate="),
        ("training.optimization.use_torch_compile=maybe", "a valid boolean or Input should be 'auto'"),
        ("compile.components.model=inductor", "compile.components.model='inductor': Input should be an object"),
        ("run.folder=5", "run.folder=5: Input should be a valid string"),
        ("data.delimiter=ab", "at most 1 character"),
        ("data=csv", "set data=csv data.path=FILE"),
        ("data.path=a.csv", "set data=csv"),
        ("training.num_epochs", "expected <setting>=<value>"),
        ("training.batch_size=1,2", "training.batch_size='1,2': "),
    ],
)
def test_what_cannot_be_used_is_named_with_what_was_expected(override, message):
    with pytest.raises(ConfigError) as caught:
        configure.load([override])
    assert message in str(caught.value)


def test_all_wrong_values_are_named_at_once():
    with pytest.raises(ConfigError, match=r"delimiter='ab'(.|\n)*batch_size=0(.|\n)*weight_decay=-1"):
        configure.load(["training.batch_size=0", "training.weight_decay=-1", "data.delimiter=ab"])


def test_a_file_of_settings_lies_between_defaults_and_overrides(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text("data: csv\ntraining: {num_epochs: 7, batch_size: 5}\n")
    settings = configure.load(["data.path=a.csv", "training.batch_size=6"], file)
    assert (settings.data.source, settings.training.num_epochs, settings.training.batch_size) == ("csv", 7, 6)
    assert configure.load().training.num_epochs == 1, "a file must not stay behind"


@pytest.mark.parametrize(
    ("text", "message"),
    [("trainin: {num_epochs: 7}", "did you mean training"), ("training: {num_epoch: 7}", "did you mean training.num_epochs"),
     ("- a", "expected a mapping"), ("a: [", "cannot be read: while parsing"), ("data: cvs", "did you mean csv")],
)  # fmt: skip
def test_a_file_that_does_not_fit_is_refused(tmp_path, text, message):
    file = tmp_path / "mine.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=message):
        configure.load(config=file)
    with pytest.raises(ConfigError, match="no such file"):
        configure.load(config=tmp_path / "other.yaml")


def test_the_page_of_the_settings_has_each_with_what_it_is_for():
    rows = {row.split("`")[1]: row.split(" | ") for row in documentation.render().splitlines() if row.startswith("| `")}
    for name in schema.names(Settings):
        if name != "program" and not schema.at(Settings, name).is_group:
            assert len(rows[name][-1]) > 15, f"{name} has no comment in its YAML file"
    assert rows["focus.layers"][3] == "focus"


def test_aliases_that_make_endless_settings_are_refused(tmp_path):
    levels = [f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]" for n in range(1, 40)]
    for lines in (["a0: &a0 [1, 2]", *levels], ["a: &a [*a]"]):
        (tmp_path / "settings.yaml").write_text("\n".join(lines))
        with pytest.raises(ConfigError, match="its aliases"):
            conf_files.read(tmp_path / "settings.yaml")
    (tmp_path / "settings.yaml").write_text("a: &a [1, 2]\nb: [*a, *a]\n")
    assert conf_files.read(tmp_path / "settings.yaml")["b"] == [[1, 2], [1, 2]]
