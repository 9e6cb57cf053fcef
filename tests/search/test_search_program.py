"""A program's own settings are searched, and what is written on the command line wins over what trials would have."""

import json
import textwrap
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hotloop.cli import app
from hotloop.errors import ConfigError
from hotloop.report import study as report
from hotloop.train import checkpoint, configure, start
from hotloop.train.search import command, document, preparing, space, trial
from hotloop.train.search.preparing import prepared
from hotloop.train.search.study import Study

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


    def hidden(lr: float = 0.01):
        made_ = made(lr)
        figures = made_.metrics
        return hotloop.Workload(made_.model, made_.optimizer, made_.step, made_.batches, metrics=lambda: dict(figures()))


    def needed(lr: float):
        return made(lr)


    def silent(lr: float = 0.01):
        made_ = made(lr)
        return hotloop.Workload(made_.model, made_.optimizer, made_.step, made_.batches)


    def fails_when_wide(width: int = 8):
        if width > 8:
            raise ValueError("planted: too wide")
        return made(0.1, width)
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
    for out in ("hpo.space.program.width=null", "~hpo.space.program.width"):
        assert set(kinds(own("make", out))) == {"program.lr"}
    for out in ("hpo.space.program=null", "~hpo.space.program"):
        assert set(kinds(own("make", out, "hpo.space.training.num_epochs.int=[1,3]"))) == {"training.num_epochs"}
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


def test_a_program_without_metrics_ends_the_search_before_a_step(own, tmp_path):
    with pytest.raises(
        ConfigError, match=r"recipe\.goal=max:score: recipe=.*own\.py:silent has no metrics: give its Workload"
    ):
        nested(prepared(own("silent", "hpo.space.program.lr.log=[0.001,1]")), tmp_path / "study", 2)
    assert [one["state"] for one in trials(tmp_path / "study").values()] == ["interrupted"]
    assert not list((tmp_path / "study").rglob("record.json*"))


def test_a_width_is_compiled_anew_and_a_rate_is_not(own):
    found = space.parse(prepared(own("make"))).searched
    assert [one.name for one in found if one.changes_code] == ["program.width"]


@pytest.mark.parametrize(
    ("function", "override", "said"),
    [
        ("plain", "hpo.space.program.lrr.log=[1,2]", "hpo.space.program.lrr: unknown setting; did you mean program.lr?"),
        ("plain", "hpo.space.program.width.log=[1.5,2]", "hpo.space.program.width.log: program.width takes an integer: expected two integers"),
        ("make", "hpo.space.program.lr.log=[1,20]", "hpo.space.program.lr.log: program.lr=20.0: expected a number from 1e-06 to 1"),
        ("make", "hpo.space.program.kind.choices=[flat]", "hpo.space.program.kind.choices: program.kind='flat': expected plain or deep"),
        ("plain", "hpo.space.program.lr.logg=[1,2]", "hpo.space.program.lr.logg=[1, 2]: expected a setting with {log: [low, high]} or the like"),
        ("make", "hpo.space.program.width.choises=[1,2]", "expected a setting with {log: [low, high]} or the like"),
        ("make", "hpo.trial.width=1", "hpo.trial.width: unknown setting width: did you mean program.width?"),
        (
            "make",
            "hpo.space.program.lr={log: [0.1, 1], when: {program.kidn: deep}}",
            "hpo.space.program.lr.when: unknown setting program.kidn: did you mean program.kind?",
        ),
        (
            "make",
            "hpo.space.program.lr={log: [0.1, 1], when: {program.kind: flat}}",
            "hpo.space.program.lr.when: program.kind='flat': expected plain or deep",
        ),
        ("make", "hpo.space.width.choices=[1,2]", "hpo.space.width: unknown setting width: did you mean program.width?"),
        ("make", "hpo.trial.program.widht=3", "hpo.trial: unknown setting program.widht: did you mean program.width?"),
        ("make", "hpo.trial.program.width=x", "hpo.trial: program.width='x': expected an integer"),
        ("make", "hpo.enqueue=[{program.lrr: 1}]", "hpo.enqueue[0].program.lrr: it is not searched; did you mean program.lr or"),
        ("make", "hpo.enqueue=[{program.lr: 5}]", "hpo.enqueue[0].program.lr=5: expected a value of its space, log [0.001, 1]"),
        ("plain", "hpo.space.program.lr.log=5", "hpo.space.program.lr: expected a list under one of log, float, int, choices, found log=5"),
        ("make", "hpo.enqueue=5", "hpo.enqueue=5: expected a list of items that are each a mapping"),
        ("plain", "hpo.n_trials=3", "hpo.space is empty: expected a setting to vary, such as program.NAME, or training.num_epochs"),
        ("needed", "hpo.space.training.num_epochs.int=[1,2]", "program.lr is not set: expected a number"),
    ],
)  # fmt: skip
def test_what_cannot_be_searched_is_told_before_a_trial(own, function, override, said):
    with pytest.raises(ConfigError) as caught:
        preparing.check(prepared(own(function, override)))
    assert said in str(caught.value)


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


@pytest.mark.parametrize(("kept", "written"), [("best", ["best.pt"]), ("none", [])])
def test_checkpoints_that_would_be_deleted_are_not_written(own, tmp_path, monkeypatch, kept, written):
    saved, save = [], checkpoint.save
    monkeypatch.setattr(checkpoint, "save", lambda path, document: saved.append(path.name) or save(path, document))
    grid = ["hpo.space.program.lr.choices=[0.1]", "hpo.space.program.width.choices=[16,8]"]
    grid.append("hpo.trial.training.checkpoint_every_steps=1")  # nor one to resume a trial by
    settings = prepared(own("plain", *grid, f"hpo.keep_checkpoints={kept}", "training.num_epochs=1", sampler="grid"))
    study = Study(settings, tmp_path / "study")
    study.begin()
    study.run()
    assert saved == written
    names = [str(path.relative_to(tmp_path / "study" / "trials")) for path in (tmp_path / "study").rglob("best.pt")]
    assert names == {"best": ["0000/checkpoints/best.pt"], "none": []}[kept]


def test_a_corrected_metric_goes_on_with_the_same_study(own, tmp_path):
    hidden = ["hpo.space.program.lr.log=[0.01,1]"]  # whose names the program's text does not state
    with pytest.raises(ConfigError, match="did you mean score"):
        nested(own("hidden", *hidden, "hpo.metric=scoer"), tmp_path / "study", 2)
    nested(own("hidden", *hidden), tmp_path / "study", 2)
    assert [one["state"] for one in trials(tmp_path / "study").values()] == ["complete", "complete"]


def test_integers_are_searched_by_their_logarithm(own, tmp_path):
    settings = own("plain", "hpo.space.program.width.log=[1,64]", "hpo.space.program.lr.log=[1,2]", "hpo.n_trials=9")
    lr, width = sorted(space.parse(prepared(settings)).searched, key=lambda one: one.name)
    assert (width.changes_code, lr.changes_code) == (True, False)
    nested(settings, tmp_path / "study", 6)
    found = [one["values"] for one in trials(tmp_path / "study").values()]
    assert all(isinstance(one["program.width"], int) and 1 <= one["program.width"] <= 64 for one in found)
    assert all(isinstance(one["program.lr"], float) for one in found)
    assert sum(one["program.width"] <= 8 for one in found) >= 2


def test_a_range_under_its_dotted_name_is_searched_once(own):
    settings = own("plain", "hpo.space={program.lr: {log: [1, 2]}}")
    (lr,) = space.parse(prepared(settings)).searched
    assert (lr.name, lr.whole) == ("program.lr", False)


def test_a_grid_has_every_combination_once(own, tmp_path):
    settings = own(
        "plain",
        "hpo.space.program.lr.choices=[0.1,0.2]",
        "hpo.space.program.width={int: [8, 32], step: 8}",
        sampler="grid",
    )
    assert prepared(settings).hpo.n_trials == 8
    nested(settings, tmp_path / "study", 100)
    values = [tuple(one["values"].values()) for one in trials(tmp_path / "study").values()]
    assert values == [(lr, width) for lr in (0.1, 0.2) for width in (8, 16, 24, 32)]


def test_a_grid_follows_conditions_and_needs_an_end(own):
    settings = own(
        "make", "hpo.space.program.lr.choices=[0.1,0.2]", "hpo.space.program.kind.choices=[plain,deep]",
        "hpo.space.program.width={choices: [8, 16], when: {program.kind: deep}}", sampler="grid",
    )  # fmt: skip
    assert prepared(settings).hpo.n_trials == 6
    with pytest.raises(ConfigError, match=r"hpo\.sampler=grid: hpo\.space\.program\.lr has no end of values: give it"):
        prepared(own("make", sampler="grid"))


@pytest.mark.parametrize("sampler", ["random", "tpe", "gp", "cmaes", "qmc"])
def test_known_values_are_tried_first_by_every_sampler(own, tmp_path, sampler):
    settings = own("make", "hpo.enqueue=[{program.lr: 0.1, program.width: 32}, {program: {lr: 0.5}}]", sampler=sampler)
    nested(settings, tmp_path / "study", 4)
    found = trials(tmp_path / "study")
    assert found[0]["values"] == {"program.lr": 0.1, "program.width": 32}
    assert found[1]["values"]["program.lr"] == 0.5
    assert found[1]["values"]["program.width"] in (8, 16, 32)
    assert len({one["values"]["program.lr"] for one in found.values()}) == 4


def test_a_grid_comes_behind_known_values(own, tmp_path):
    settings = own(
        "make", "hpo.space.program.lr.choices=[0.1,0.2]", "hpo.space.program.width=null", "hpo.enqueue=[{program.lr: 0.2}]",
        sampler="grid",
    )  # fmt: skip
    nested(settings, tmp_path / "study", 10)
    assert [one["values"]["program.lr"] for one in trials(tmp_path / "study").values()] == [0.2, 0.1, 0.2]


def test_a_setting_without_a_default_may_be_searched(own, tmp_path):
    best = nested(own("needed", "hpo.space.program.lr.choices=[0.1,0.2]"), tmp_path / "study", 3)
    assert best == ("program.lr=0.1",)


def test_what_a_program_raises_for_some_values_fails_those_trials_alone(own, tmp_path):
    settings = own("fails_when_wide", "hpo.space.program.width.choices=[8,16]", sampler="grid")
    assert nested(settings, tmp_path / "study", 2) == ("program.width=8",)
    assert "planted: too wide" in trials(tmp_path / "study")[1]["cause"]


def test_a_study_is_read_where_its_program_is_gone(own, tmp_path):
    nested(own("make"), tmp_path / "study", 2)
    (tmp_path / "own.py").unlink()
    assert report.build(report.SCHEMA.load(tmp_path / "study")).names == ("program.lr", "program.width")


@pytest.mark.parametrize("override", ["training.checkpoint_every_steps=5", "~hpo.trial.training"])
def test_a_study_is_read_as_it_was_begun_where_the_command_took_a_default_out(own, tmp_path, override):
    settings = prepared(own("make", override))
    document.write_settings(settings, tmp_path / "study")
    nested(settings, tmp_path / "study", 1)
    found, note = document.refresh(tmp_path / "study")
    assert (found["best"], note) == (0, "")
    run = configure.load(config=tmp_path / "study" / "trials" / "0000" / "settings.yaml")
    best, _ = document.write_best(tmp_path / "study", found)
    assert run.training.checkpoint_every_steps == best.training.checkpoint_every_steps


@pytest.mark.campaign
def test_the_command_searches_announces_and_names_the_best(own, tmp_path):
    own("make")
    arguments = [
        "hpo",
        f"{tmp_path / 'own.py'}:make",
        "hpo.metric=score",
        "hpo.n_trials=2",
        f"hpo.folder={tmp_path / 'study'}",
    ]
    ended = CliRunner().invoke(app, [*arguments, "program.lr=0.5"])
    assert ended.exit_code == 0, ended.output
    assert "Searched: program.width\n" in ended.output
    assert "Best: trial" in ended.output
    assert configure.load(config=tmp_path / "study" / "best.yaml").program["lr"] == 0.5
    best = CliRunner().invoke(app, ["hpo", "best", str(tmp_path / "study"), "--json"])
    assert json.loads(best.stdout)["settings"]["program"]["kind"] == "plain"
    assert start.prepare([], tmp_path / "study" / "best.yaml").settings.program["lr"] == 0.5
    assert report.SCHEMA.load(tmp_path / "study")["space"]["program.width"]["values"] == [8, 16, 32]


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
    file.write_text("hpo:\n  trial: {data: {sample_size: 64}}\ndata:\n  sample_size: 512\n")
    assert trial.settings_of(configure.load_search(["hpo=fast"], file), {}, Path("x")).data.sample_size == 64
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


def test_a_misspelt_metric_is_told_with_those_of_the_program_and_kept_as_the_cause(own, tmp_path):
    said = r"hpo\.metric or recipe\.goal names 'scoer'; the metrics of .* are score, size: did you mean score\? Set: "
    with pytest.raises(ConfigError, match=said + "recipe.goal=max:score, in place of either"):
        nested(own("make", "hpo.metric=scoer"), tmp_path / "study", 2)
    assert "are score, size: did you mean score?" in trials(tmp_path / "study")[0]["cause"]
    (row,) = report.build(report.SCHEMA.load(tmp_path / "study")).trials
    assert "did you mean score?" in row.cause
