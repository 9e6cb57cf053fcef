from pathlib import Path

import pytest

from hotloop.errors import ConfigError
from hotloop.train import configure, documentation, schema, start
from hotloop.train.settings import Settings


def test_defaults_are_those_that_the_documentation_promises():
    settings = configure.load()
    assert settings.recipe.name == "criteria"
    assert settings.training.optimization.use_torch_compile is False
    assert settings.compile.preset == "default"
    assert settings.compile.inference == "none"
    assert settings.data.sample_size is not None


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
    "lines",
    [
        ["recipe=digits", "run.folder='it\\'s, a run'", "training.num_epochs=7"],
        ["training.num_epochs=7", "recipe=digits", "training.learning_rate=1e-3", "training.num_epochs=8"],
        ["hpo=fast", "hpo.space.training.learning_rate.log=[1e-5,1e-3]", "hpo.space.training.batch_size=null"],
        ["run.folder=${recipe.name}/here", "+training.max_steps=4", "training.num_epochs=${training.max_steps}"],
        ["training.num_epochs=9", "~training.weight_decay=0.01", "training.weight_decay=0.5", "run.tracking=there"],
    ],
)
def test_values_on_top_of_choices_are_as_hydra_composes_all_of_it(lines):
    """Twice, the second time on what was kept of the choices, which neither has changed."""
    import hydra
    from omegaconf import OmegaConf

    known = configure.groups()
    whole = [line if line[0] in "+~" or line.split("=")[0] in known else f"++{line}" for line in lines]
    choices = [line for line in lines if line.split("=")[0] in known]
    before = configure.compose(choices)
    with hydra.initialize_config_module(configure.CONF, version_base="1.3"):
        expected = OmegaConf.to_container(hydra.compose("config", overrides=whole), resolve=True)
    for _ in range(2):
        assert configure.compose(lines) == expected
    assert configure.compose(choices) == before


def test_what_only_hydra_can_judge_is_judged_behind_the_values_before_it():
    with pytest.raises(ConfigError, match=r"An item is already at 'training\.max_steps'"):
        configure.load(["training.max_steps=4", "+training.max_steps=5"])
    assert configure.load(["+training.max_steps=5", "training.max_steps=4"]).training.max_steps == 4


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("training.num_epoch=3", "unknown setting training.num_epoch: did you mean training.num_epochs"),
        ("num_epochs=3", "did you mean training.num_epochs"),
        ("use_torch_compile=true", "did you mean training.optimization.use_torch_compile"),
        ("compile.components.model.trainin=none", "did you mean compile.components.model.training"),
        ("data=cvs", "data=cvs: no such choice; did you mean csv"),
        ("recipe=digit", "recipe=digit: no such choice; did you mean digits? (a program of your own: recipe=FILE.py:f"),
        ("recipe=x", "expected one of criteria, diffusion, digits, focus, language (a program of your own"),
        ("run=x", "run=x: no such choice; expected one of default"),
        ("training.num_epochs=abc", "training.num_epochs='abc': expected an integer of at least 1"),
        ("training.num_epochs=1.5", "training.num_epochs=1.5: expected an integer"),
        ("training.num_epochs=true", "training.num_epochs=true: expected an integer"),
        ("training.batch_size=0", "expected an integer of at least 1"),
        ("training.learning_rate=0", "expected a number above 0"),
        ("training.learning_rate=nan", "expected a number above 0"),
        ("training.optimization.use_torch_compile=maybe", "expected true or false, or auto"),
        ("training.optimization.use_bf16=1", "use_bf16=1: expected true or false"),
        ("data.sample_size=many", "expected an integer of at least 4, or null"),
        ("compile.components.model=inductor", "expected settings below it, such as compile.components.model.training"),
        ("compile.regions=block", "expected auto or whole or blocks"),
        ("run.folder=5", "run.folder=5: expected text, or null"),
        ("data.delimiter=ab", "expected one character"),
        ("data=csv", "data.path is not set"),
        ("data.path=a.csv", "set data=csv"),
        ("compile.fullgraph=true", "has no effect while training.optimization.use_torch_compile=false"),
        ("training.num_epochs", "expected <setting>=<value>"),
        ("training.batch_size=1,2", "names several values"),
        ("data.path=[a", "cannot be read"),
    ],
)
def test_what_cannot_be_used_is_named_with_what_was_expected(override, message):
    with pytest.raises(ConfigError) as caught:
        configure.load([override])
    assert message in str(caught.value)


def test_full_graphs_are_asked_for_with_compiling_alone():
    with pytest.raises(ConfigError, match=r"no effect while training\.optimization\.use_torch_compile=auto"):
        configure.load(["compile.fullgraph=true", "training.optimization.use_torch_compile=auto"])


def test_all_wrong_values_are_named_at_once():
    with pytest.raises(ConfigError, match=r"batch_size=0(.|\n)*weight_decay=-1"):
        configure.load(["training.batch_size=0", "training.weight_decay=-1"])


def test_a_file_of_settings_lies_between_defaults_and_overrides(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text("data: csv\ntraining: {num_epochs: 7, batch_size: 5}\n")
    settings = configure.load(["data.path=a.csv", "training.batch_size=6"], file)
    assert (settings.data.source, settings.training.num_epochs, settings.training.batch_size) == ("csv", 7, 6)
    assert configure.load().training.num_epochs == 1, "a file must not stay behind"


@pytest.mark.parametrize(
    ("text", "message"),
    [("trainin: {num_epochs: 7}", "did you mean training"), ("training: {num_epoch: 7}", "did you mean training.num_epochs"),
     ("- a", "expected a mapping"), ("a: [", "cannot be read as YAML"), ("data: cvs", "did you mean csv")],
)  # fmt: skip
def test_a_file_that_does_not_fit_is_refused(tmp_path, text, message):
    file = tmp_path / "mine.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=message):
        configure.load(config=file)
    with pytest.raises(ConfigError, match="no such file"):
        configure.load(config=tmp_path / "other.yaml")


def test_a_folder_of_groups_adds_choices(tmp_path):
    (tmp_path / "training").mkdir()
    (tmp_path / "training" / "long.yaml").write_text("defaults: [default, _self_]\nnum_epochs: 9\n")
    assert configure.load(["training=long"], tmp_path).training.num_epochs == 9


def test_a_callers_own_hydra_is_left_as_it_was(tmp_path):
    import hydra
    from hydra.core.global_hydra import GlobalHydra

    with hydra.initialize_config_dir(str(tmp_path), version_base="1.3"):
        before = GlobalHydra.instance().hydra
        configure.load()
        assert GlobalHydra.instance().hydra is before
    configure.load()
    assert not GlobalHydra.instance().is_initialized()


def test_settings_survive_being_plain():
    settings = configure.load(["compile.components.model.training=inductor", "model.buckets=[8]"])
    plain = configure.to_dict(settings)
    assert configure.from_dict(plain) == settings
    assert configure.from_dict(plain, ["training.num_epochs=4"]).training.num_epochs == 4


def test_every_setting_has_a_range_or_type_that_can_be_told():
    for name in schema.names(Settings):
        setting = schema.at(Settings, name)
        assert setting.is_group or setting.takes
    assert schema.at(Settings, "model.buckets").takes == "a list of items that are each an integer of at least 4"
    assert schema.at(Settings, "training.learning_rate").takes == "a number above 0"
    assert schema.at(Settings, "model.max_length").takes == "an integer of at least 4, or auto"


def test_the_documentation_is_made_of_the_settings():
    page = Path(__file__).parents[2] / "docs" / "settings.md"
    assert page.read_text(encoding="utf-8") == documentation.render(), "run python -m hotloop.train.documentation"


def test_the_documentation_says_which_settings_may_change_when_a_run_is_resumed():
    _, resumed = documentation.render().split("## When a run is resumed")
    for names in (*start.FIXED.values(), start.COMPARED, start.FREE):
        assert all(f"`{one}`" in resumed for one in names)
        assert all(one == "recipe" or schema.at(Settings, one) is not None for one in names)


def test_every_setting_is_in_the_documentation_with_what_it_is_for():
    described, _ = documentation.render().split("## When a run is resumed")
    rows = {row.split("`")[1]: row for row in described.splitlines() if row.startswith("| `")}
    for name in schema.names(Settings):
        if not schema.at(Settings, name).is_group:
            row = rows.get(name) or rows[f"{name}.<name>"]
            assert len(row.split(" | ")[-1]) > 15, f"{name} has no comment in its YAML file"
