"""A program's own settings are searched, and what is written on the command line wins over what trials would have."""

import json
import re
import textwrap
from pathlib import Path

import pytest

from hotloop.errors import ConfigError
from hotloop.report import study as report
from hotloop.train import configure
from hotloop.train.search import command, preparing, space, trial
from hotloop.train.search.preparing import prepared

PROGRAM = """
    from typing import Annotated, Literal

    import torch

    import hotloop


    def made(lr, width=8):
        model = torch.nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=lr)

        def step(x):
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        def metrics():
            return {"score": -abs(lr - 0.1) - abs(width - 32) / 100, "size": width}

        return hotloop.Workload(model, optimizer, step, [torch.ones(3, 2)], metrics=metrics)


    def make(
        lr: Annotated[float, hotloop.Range(1e-6, 1), hotloop.Search(log=(1e-3, 1))] = 0.01,
        width: Annotated[int, hotloop.Search(choices=(8, 16, 32))] = 8,
        kind: Literal["plain", "deep"] = "plain",
    ):
        return made(lr, width)


    def plain(lr: float = 0.01, width: int = 8):
        return made(lr, width)


    def needed(lr: float):
        return made(lr)

"""


@pytest.fixture
def own(tmp_path):
    """Settings of a search of a function of the program."""
    file = tmp_path / "own.py"
    file.write_text(textwrap.dedent(PROGRAM))

    def settings(function, *overrides, sampler="random"):
        given = [f"hpo.folder={tmp_path / 'study'}", f"hpo.sampler={sampler}", "hpo.pruner=none"]
        given += [] if any(one.startswith("recipe.goal=") for one in overrides) else ["hpo.metric=score"]
        return configure.load_search([f"{file}:{function}", *given, *overrides])

    return settings


def nested(settings, folder, trials):
    return command.nested(settings, folder, trials, print)


def kinds(settings):
    return {one.name: one.kind for one in space.parse(prepared(settings)).searched}


def trials(folder):
    return {one["number"]: one for one in json.loads((Path(folder) / "study.json").read_text())["trials"]}


def test_a_search_is_declared_where_the_parameter_is(own):
    assert kinds(own("make")) == {"program.lr": "log", "program.width": "choices"}
    other = own("make", "hpo.space.program.lr.choices=[0.1,0.2]", "hpo.space.program.width=null")
    assert kinds(other) == {"program.lr": "choices"}
    assert set(kinds(own("make", "hpo.space.program.width=null"))) == {"program.lr"}
    out = own("make", "hpo.space.program=null", "hpo.space.training.num_epochs.int=[1,3]")
    assert set(kinds(out)) == {"training.num_epochs"}
    more = own("make", "hpo.space.program.kind.choices=[plain,deep]", "hpo.space.training.num_epochs.int=[1,3]")
    assert set(kinds(more)) == {"program.lr", "program.width", "program.kind", "training.num_epochs"}
    once = prepared(own("make"))
    assert prepared(once) == once


@pytest.mark.parametrize(
    ("overrides", "objective"),
    [
        (["recipe.goal=max:score"], ("score", "maximize")),
        (["recipe.goal=min:size"], ("size", "minimize")),
        (["recipe.goal=min:size", "hpo.metric=size"], ("size", "minimize")),
        (["recipe.goal=min:size", "hpo.metric=score"], ("score", "maximize")),
    ],
)
def test_a_search_is_for_the_goal_unless_it_names_another_metric(own, overrides, objective):
    settings = prepared(own("make", *overrides))
    preparing.check(settings)
    assert (settings.hpo.metric, settings.hpo.towards) == objective
    assert prepared(settings) == settings


@pytest.mark.parametrize(
    ("overrides", "goal"),
    [
        ([], "max:score"),
        (["hpo.direction=minimize"], "min:score"),
        (["recipe.goal=min:size", "hpo.metric=score"], "min:size"),
    ],
)
def test_the_final_run_keeps_its_best_by_what_the_search_was_for(own, overrides, goal):
    settings = prepared(own("make", *overrides))
    assert trial.best_settings(settings, {"program.lr": 0.1}).recipe.goal == goal


@pytest.mark.parametrize(
    ("function", "override", "said"),
    [
        ("plain", "hpo.space.program.lrr.log=[1,2]", "program.lrr: did you mean program.lr?"),
        ("plain", "hpo.space.program.width.log=[1.5,2]", "program.width: program.width=1.5"),
        ("make", "hpo.space.program.lr.log=[1,20]", "program.lr: program.lr=20"),
        ("make", "hpo.space.width.choices=[1,2]", "did you mean program.width?"),
        ("make", "hpo.trial.program.width=x", "hpo.trial: program.width='x'"),
        ("make", "hpo.enqueue=[{program.lrr: 1}]", "program.lrr is not searched; did you mean program.lr"),
        ("plain", "hpo.n_trials=3", "hpo.space is empty"),
        ("needed", "hpo.space.training.num_epochs.int=[1,2]", "program.lr"),
        ("make", "hpo.sampler=grid", "hpo.sampler=grid: program.lr has no end of values"),
    ],
)
def test_what_cannot_be_searched_is_told_before_a_trial(own, function, override, said):
    with pytest.raises(ConfigError, match=re.escape(said)):
        preparing.check(prepared(own(function, override)))


def test_a_grid_has_every_combination_once_follows_conditions_and_is_over_then(own, tmp_path):
    settings = own(
        "make", "hpo.space.program.lr.choices=[0.1,0.2]", "hpo.space.program.kind.choices=[plain,deep]",
        "hpo.space.program.width={choices: [8, 16], when: {program.kind: deep}}", sampler="grid",
    )  # fmt: skip
    for _ in range(2):
        nested(settings, tmp_path / "study", 100)
        values = [tuple(sorted(one["values"].items())) for one in trials(tmp_path / "study").values()]
        assert len(values) == len(set(values)) == 6
    assert report.SCHEMA.load(tmp_path / "study")["left"] == 0


def test_trials_train_the_program_with_the_values_chosen(own, tmp_path):
    settings = prepared(own("make", "hpo.trial.program.kind=deep"))
    preparing.check(settings)
    best = dict(one.split("=") for one in nested(settings, tmp_path / "study", 4))
    assert set(best) == {"program.lr", "program.width"}
    for number, one in trials(tmp_path / "study").items():
        run = configure.load(config=tmp_path / "study" / "trials" / f"{number:04d}" / "settings.yaml").program
        assert {name.partition(".")[2]: value for name, value in one["values"].items()}.items() <= run.items()
        assert run["kind"] == "deep"
        assert one["value"] == pytest.approx(-abs(run["lr"] - 0.1) - abs(run["width"] - 32) / 100)
    written = configure.load(config=tmp_path / "study" / "best.yaml")
    assert str(written.program["lr"]) == best["program.lr"]
    assert written.program["kind"] == "plain"


def test_integers_are_searched_by_their_logarithm(own, tmp_path):
    settings = own("plain", "hpo.space.program.width.log=[1,64]", "hpo.space.program.lr.log=[1.0,2]", "hpo.n_trials=9")
    lr, width = sorted(space.parse(prepared(settings)).searched, key=lambda one: one.name)
    assert (width.changes_code, lr.changes_code) == (True, False)
    nested(settings, tmp_path / "study", 6)
    found = [one["values"] for one in trials(tmp_path / "study").values()]
    assert all(isinstance(one["program.width"], int) and 1 <= one["program.width"] <= 64 for one in found)
    assert all(isinstance(one["program.lr"], float) for one in found)
    assert sum(one["program.width"] <= 8 for one in found) >= 2


@pytest.mark.parametrize("sampler", ["random", "tpe", "gp", "cmaes", "qmc"])
def test_known_values_are_tried_first_by_every_sampler(own, tmp_path, sampler):
    settings = own("make", "hpo.enqueue=[{program.lr: 0.1, program.width: 32}, {program: {lr: 0.5}}]", sampler=sampler)
    nested(settings, tmp_path / "study", 4)
    found = trials(tmp_path / "study")
    assert found[0]["values"] == {"program.lr": 0.1, "program.width": 32}
    assert found[1]["values"]["program.lr"] == 0.5
    assert found[1]["values"]["program.width"] in (8, 16, 32)
    assert len({one["values"]["program.lr"] for one in found.values()}) == 4


def test_a_setting_without_a_default_may_be_searched(own, tmp_path):
    best = nested(own("needed", "hpo.space.program.lr.choices=[0.1,0.2]"), tmp_path / "study", 3)
    assert best == ("program.lr=0.1",)


def test_what_is_written_on_the_command_line_wins_over_what_a_choice_sets_for_trials():
    written = configure.load_search(["hpo=fast", "data.sample_size=512"])
    assert trial.settings_of(written, {}, Path("x")).data.sample_size == 512
    assert trial.settings_of(written, {}, Path("x")).training.num_epochs == 3
    of_trials = configure.load_search(["hpo=fast", "data.sample_size=512", "hpo.trial.data.sample_size=64"])
    assert trial.settings_of(of_trials, {}, Path("x")).data.sample_size == 64
    assert (
        trial.settings_of(
            configure.load_search(["hpo=fast", "data=csv", "data.path=x"]), {}, Path("x")
        ).data.sample_size
        == 2000
    )


def test_what_is_written_in_a_file_wins_as_well(own, tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text("data:\n  sample_size: 512\ntraining:\n  learning_rate: 1.0e-4\nhpo:\n  n_trials: 7\n")
    written = configure.load_search(["hpo=fast"], file)
    assert trial.settings_of(written, {}, Path("x")).data.sample_size == 512
    assert trial.settings_of(written, {}, Path("x")).training.num_epochs == 3
    names = [one.name for one in space.parse(written).searched]
    assert "training.learning_rate" not in names
    assert "training.batch_size" in names
    file.write_text("program:\n  lr: 0.5\n")
    overrides = [f"{tmp_path / 'own.py'}:make", "hpo.metric=score"]
    assert kinds(configure.load_search(overrides, file)) == {"program.width": "choices"}
    # One that hotloop wrote has every setting, and none of them is the user's word.
    file.write_text(configure.to_yaml(configure.load_search()))
    assert trial.settings_of(configure.load_search(["hpo=fast"], file), {}, Path("x")).data.sample_size == 2000
    assert "training.learning_rate" in [one.name for one in space.parse(configure.load_search([], file)).searched]


def test_what_is_written_on_the_command_line_is_not_searched():
    names = [one.name for one in space.parse(configure.load_search(["training.learning_rate=1e-4"])).searched]
    assert "training.learning_rate" not in names
    assert "training.batch_size" in names
    both = configure.load_search(["training.learning_rate=1e-4", "hpo.space.training.learning_rate.log=[1e-5,1e-3]"])
    assert "training.learning_rate" in [one.name for one in space.parse(both).searched]
