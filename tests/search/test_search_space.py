import re

import pytest

from hotloop.errors import ConfigError
from hotloop.train import configure
from hotloop.train.search import space, trial


def parse(*overrides):
    return space.parse(configure.load(overrides))


class Fixed:
    """Suggests the first of everything."""

    def suggest_categorical(self, name, choices):
        return choices[0]

    def suggest_int(self, name, low, high, step):
        return low

    def suggest_float(self, name, low, high, step, log):
        return low


@pytest.mark.parametrize("choice", ["default", "fast"])
@pytest.mark.parametrize("recipe", ["criteria", "focus"])
def test_what_a_recipe_trains_with_is_in_its_space(recipe, choice):
    settings = configure.load([f"recipe={recipe}", f"hpo={choice}"])
    for one in space.parse(settings).searched:
        own = space.value_of(one.name, {}, settings)
        within = own in one.values if one.kind == "choices" else one.values[0] <= own <= one.values[1]
        assert within or own is None, f"{one.name}={own} is not in {one.values}"
    epochs = {"default": None, "fast": 3}
    assert settings.hpo.trial["training"].get("num_epochs") == epochs[choice]


def test_every_kind_is_read():
    found = parse(
        "hpo.space.training.max_steps={int: [10, 30], step: 10}",
        "hpo.space.training.warmup_fraction={float: [0, 0.5], step: 0.25}",
        "hpo.space.training.max_grad_norm={log: [0.1, 10]}",
        "hpo.space.model.name={choices: [minilm-l6, other]}",
        "hpo.space.model.dropout=null",
    )
    by_name = {one.name: one for one in found.searched}
    assert "model.dropout" not in by_name
    assert by_name["training.max_steps"].distinct() == by_name["training.warmup_fraction"].distinct() == 3
    assert by_name["training.max_grad_norm"].distinct() is None
    assert by_name["training.max_grad_norm"].values == (0.1, 10.0)
    (epochs,) = (one for one in parse("hpo.space.training.num_epochs.log=[1, 30]").searched if one.whole)
    assert epochs.name == "training.num_epochs"


def test_a_condition_decides_in_either_order():
    settings = configure.load(
        [
            "hpo.space.model.dropout={choices: [0.1, 0.2], when: {model.name: other}}",
            "hpo.space.training.weight_decay={float: [0.1, 0.2], when: {model.name: [minilm-l6, third]}}",
            "hpo.space.model.name={choices: [minilm-l6, other]}",
            "hpo.space.training.warmup_fraction={float: [0, 1], when: {data.source: icd10cm}}",
            "hpo.space.training.weight_decay.log=null",
            "hpo.space.training.max_steps={int: [1, 2], when: {data.source: csv}}",
        ]
    )
    chosen = space.parse(settings).suggest(Fixed(), settings)
    assert chosen["model.name"] == "minilm-l6"
    assert "model.dropout" not in chosen
    assert "training.max_steps" not in chosen
    assert chosen["training.weight_decay"] == 0.1
    assert chosen["training.warmup_fraction"] == 0


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("training.learning_rte={log: [1, 2]}", "did you mean training.learning_rate"),
        ("training.learning_rate={choices: [1e-4]}", "expected a list under one of log, float, int, choices"),
        ("training.learning_rate.log=[2, 1]", "low"),
        ("training.learning_rate.log=[1e-4]", "expected 2, got 1"),
        ("training.learning_rate.lgo=[1, 2]", "expected a list under one of log"),
        ("training.warmup_fraction.float=[0, 2]", "training.warmup_fraction=2"),
        ("training.warmup_fraction.step=0", "step"),
        ("training.batch_size.choices=[0, 4]", "training.batch_size=0"),
        ("training.num_epochs={float: [1, 2]}", "takes an integer: use int, log or choices"),
        ("training.num_epochs={int: [1.5, 2]}", "out of the range of the distribution"),
        ("model.buckets={choices: [[16], [32]]}", "persistent storage"),
        ("model.dropout.when={model.nam: x}", "model.dropout.when.model.nam: unknown setting"),
        ("model.dropout.when={training.batch_size: x}", "training.batch_size='x'"),
        ("model.dropout.when=3", "expected a list under one of log"),
        ("run.seed={int: [0, 9]}", "cannot vary"),
        ("model={choices: [a, b]}", "expected a setting with"),
        ("model.dropout.when={training.batch_size: 16} hpo.space.training.batch_size.when={model.dropout: 0.1}", "depend"),
        ("={training: null, model: null}", "empty"),
    ],
)  # fmt: skip
def test_a_space_that_cannot_be_used_says_what_was_expected(given, said):
    overrides = f"hpo.space.{given}".replace(".=", "=").split(" hpo.")
    with pytest.raises(ConfigError, match=re.escape(said)):
        parse(overrides[0], *(f"hpo.{one}" for one in overrides[1:]))


def test_null_takes_a_group_out_of_the_settings_of_trials():
    settings = configure.load(["hpo.trial={training: null, run: {seed: 1}}"])
    assert space.trial_changes(settings) == {"run.seed": 1}


def test_only_what_changes_code_counts_as_compiled():
    def compiled(*given):
        return {one.name: one.distinct() for one in parse(*given).searched if one.changes_code}

    assert compiled() == {"training.batch_size": 2, "model.dropout": 4}
    assert compiled("hpo.space.model.dropout={choices: null, float: [0, 0.5]}")["model.dropout"] is None


@pytest.mark.parametrize("value", ["it's a \\ path, {x}: [1]", 1.2e-05, 0.1 + 0.2, -3, True, None, [1, 2], {"a": "b"}])
def test_an_override_gives_its_value_back(value):
    settings = configure.load([])
    found = configure.from_dict(configure.to_dict(settings), [space.override("compile.options.some", value)])
    assert found.compile.options["some"] == value


def test_trials_have_their_own_settings_and_the_final_run_does_not(tmp_path):
    settings = configure.load(["hpo=fast", "training.num_epochs=9"])
    values = {"training.learning_rate": 1.5e-4, "model.dropout": 0.05}
    one = trial.settings_of(settings, values, tmp_path / "a b")
    assert (one.training.num_epochs, one.training.learning_rate) == (3, 1.5e-4)
    assert one.run.folder == str(tmp_path / "a b")
    best = trial.best_settings(settings, values)
    assert (best.training.num_epochs, best.training.learning_rate, best.run.folder) == (9, 1.5e-4, None)
    for wrong in ({"training.batch_size": 0}, {"training.epochs": 1}):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            trial.settings_of(settings, wrong, tmp_path)
