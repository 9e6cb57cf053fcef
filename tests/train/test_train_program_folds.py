"""A program that takes a fold is cross-validated: it is made once a fold, and splits its rows as scikit-learn does."""

import json
import textwrap

import numpy as np
import pytest
import torch
from sklearn.model_selection import GroupKFold, KFold, StratifiedKFold
from typer.testing import CliRunner

import hotloop
from hotloop import record
from hotloop.cli import app
from hotloop.errors import ConfigError, DataError
from hotloop.report import folds as report
from hotloop.train import checkpoint

PROGRAM = """
    import torch
    from torch.nn import functional as F

    import hotloop

    LABELS = [row % 2 for row in range(24)]
    GROUPS = [f"patient {row // 3}" for row in range(24)]


    def make(lr: float = 0.1, by: str = "both", *, fold: hotloop.Fold | None = None):
        here = fold or hotloop.Fold()
        given = {"both": (LABELS, GROUPS), "labels": (LABELS, None), "groups": (None, GROUPS), "rows": (None, None)}
        if by == "number":
            train = [row for row in range(24) if row % here.splits != here.number]
            held_out = [row for row in range(24) if row % here.splits == here.number]
        else:
            train, held_out = here.split(24, *given[by])
        x, y = torch.arange(24.0)[:, None] % 2, torch.tensor(LABELS)
        model = torch.nn.Linear(1, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=lr)

        def step(a, b):
            loss = F.cross_entropy(model(a), b)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        def metrics():
            with torch.no_grad():
                right = (model(x[held_out]).argmax(1) == y[held_out]).float().mean()
            return {"accuracy": right, "first": float(held_out[0]), "rows": len(held_out), "rate": -abs(lr - 0.1)}

        return hotloop.Workload(model, optimizer, step, [(x[train], y[train])], metrics=metrics)


    def without(lr: float = 0.1):
        return make(lr)
"""


@pytest.fixture
def own(tmp_path):
    (tmp_path / "own.py").write_text(textwrap.dedent(PROGRAM))
    return f"{tmp_path / 'own.py'}:make"


def run(*arguments):
    result = CliRunner().invoke(app, [str(one) for one in arguments])
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


LABELS, GROUPS = [row % 2 for row in range(30)], [row // 3 for row in range(30)]


@pytest.mark.parametrize(
    ("labels", "groups", "splitter"),
    [(None, None, KFold), (LABELS, None, StratifiedKFold), (None, GROUPS, GroupKFold)],
)
def test_rows_are_split_as_scikit_learn_does(labels, groups, splitter):
    ours = [hotloop.Fold(number, 3, seed=5).split(30, labels, groups) for number in range(3)]
    theirs = splitter(3, shuffle=True, random_state=5).split(np.zeros(30), labels, groups)
    for (train, held_out), (their_train, their_held_out) in zip(ours, theirs, strict=True):
        assert train.tolist() == their_train.tolist()
        assert held_out.tolist() == their_held_out.tolist()


@pytest.mark.parametrize("kind", [list, np.array, torch.tensor])
def test_groups_are_never_on_both_sides_and_labels_are_even(kind):
    held = []
    for number in range(5):
        train, held_out = hotloop.Fold(number).split(30, kind(LABELS), kind(GROUPS))
        assert not {GROUPS[row] for row in train} & {GROUPS[row] for row in held_out}
        assert sum(LABELS[row] for row in held_out) == 3
        held += held_out.tolist()
    assert sorted(held) == list(range(30))


def test_an_inner_fold_never_sees_what_the_outer_one_holds_out():
    outer = hotloop.Fold(1, 5)
    train, held_out = outer.split(30, LABELS, GROUPS)
    judged = []
    for number in range(3):
        inner, validation = hotloop.Fold(number, 3, within=outer).split(30, LABELS, GROUPS)
        assert not {*inner, *validation} & {*held_out}
        assert not {GROUPS[row] for row in inner} & {GROUPS[row] for row in validation}
        judged += validation.tolist()
    assert sorted(judged) == sorted(train.tolist())


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((30, LABELS[:5]), r"labels of shape \(5,\): expected one for each of the 30 rows"),
        ((30, np.linspace(0, 1, 30)), "labels are measurements, and no classes: leave labels out"),
        ((30, None, [1] * 30), "30 rows in 1 groups are too few to hold out one of 5 folds"),
        ((3,), "3 rows in 3 groups are too few to hold out one of 5 folds"),
        ((8, [0, 0, 1, 1, 2, 2, 3, 3]), "8 rows in 8 groups are too few to hold out one of 5 folds"),
    ],
)
def test_rows_that_cannot_be_split_are_told(arguments, said):
    with pytest.raises(DataError, match=said):
        hotloop.Fold().split(*arguments)


@pytest.mark.parametrize("goal", [(), ("recipe.goal=max:accuracy",)])
def test_a_program_is_made_and_judged_once_a_fold(own, tmp_path, goal):
    folder = tmp_path / "cv"
    ended = run("kfold", own, "kfold.n_splits=4", "training.num_epochs=2", f"run.folder={folder}", *goal)
    assert ended.exit_code == 0
    assert "No group is on both sides of a fold" in ended.output
    document = report.load(folder)
    assert [one["status"] for one in document["folds"]] == ["finished"] * 4
    assert sum(one["validation"]["rows"] for one in document["contents"]) == 24
    assert document["contents"][0]["validation"]["shares"] == {"0": 0.5, "1": 0.5}
    kept = report.build(document)
    assert "accuracy" in kept.names
    assert kept.mean[kept.names.index("rows")] == "6.0000"
    steps = [
        one["best_step"] if goal else record.load(folder / one["folder"])["metrics"][-1]["step"]
        for one in document["folds"]
    ]
    assert [int(row.step) for row in kept.folds] == steps
    assert min(steps) > 0
    firsts = {record.load(folder / f"fold-{fold}")["metrics"][-1]["first"] for fold in range(4)}
    assert len(firsts) == 4
    judged = json.loads(run("eval", f"run={folder}", "--json").stdout)
    assert {one["metrics"]["first"] for one in judged["folds"]} == firsts


@pytest.mark.parametrize(("by", "known"), [("rows", True), ("number", False)])
def test_what_is_in_the_folds_is_shown_as_far_as_it_is_known(own, tmp_path, by, known):
    ended = run("kfold", own, "kfold.n_splits=3", f"program.by={by}", f"run.folder={tmp_path / 'cv'}")
    assert ("What is in the folds is not known" in ended.output) is not known
    document = report.load(tmp_path / "cv")
    assert [bool(one) for one in document["contents"]] == [known] * 3
    assert (tmp_path / "cv" / "report.html").is_file()
    run("report", tmp_path / "cv")


def test_a_fold_is_resumed_with_its_rows_alone(own, tmp_path):
    folder = tmp_path / "run"
    run("train", own, "kfold.n_splits=4", "kfold.fold=1", f"run.folder={folder}")
    assert checkpoint.load(folder / "checkpoints" / "last.pt")["data"]
    assert run("train", f"run.resume={folder}", "training.num_epochs=2").exit_code == 0
    file = tmp_path / "own.py"
    # Of another length: Python takes its bytecode for a text of the same second and length.
    file.write_text(file.read_text().replace("row // 3", "(row // 2)"))
    with pytest.raises(DataError, match="was trained on other data"):
        run("train", f"run.resume={folder}", "training.num_epochs=3")


@pytest.mark.campaign
def test_each_fold_has_a_search_of_its_own_over_its_training_side(own, tmp_path):
    folder = tmp_path / "cv"
    ended = run(
        "kfold", own, "kfold.n_splits=2", "kfold.inner_trials=2", "kfold.inner_splits=2", "hpo.metric=rate",
        "hpo.direction=maximize", "hpo.sampler=grid", "hpo.space.program.lr.choices=[0.1,0.5]", f"run.folder={folder}",
    )  # fmt: skip
    assert ended.exit_code == 0, ended.output
    assert [one["chosen"] for one in report.load(folder)["folds"]] == [["program.lr=0.1"]] * 2
    for fold in range(2):
        outer = hotloop.Fold(fold, 2).split(
            24, [row % 2 for row in range(24)], [f"patient {row // 3}" for row in range(24)]
        )
        for inner in range(2):
            one = record.load(folder / f"fold-{fold}" / "search" / "trials" / "0000" / f"fold-{inner}")
            assert int(one["metrics"][-1]["first"]) in outer[0]
    assert record.load(folder / "fold-0")["settings"]["program"]["lr"] == 0.1


def test_a_trial_of_a_search_over_folds_is_the_mean_of_them(own, tmp_path):
    from hotloop.train import configure
    from hotloop.train.search.command import nested

    settings = configure.load_search(
        [own, "kfold.n_splits=3", "hpo.metric=first", "hpo.space.program.lr.choices=[0.1,0.2]"]
    )
    nested(settings, tmp_path / "study", 1, print)
    found = json.loads((tmp_path / "study" / "study.json").read_text())["trials"][0]
    assert len(found["reports"]) == 3
    means = [
        record.load(tmp_path / "study" / "trials" / "0000" / f"fold-{fold}")["metrics"][-1]["first"]
        for fold in range(3)
    ]
    assert found["value"] == pytest.approx(sum(means) / 3)


def test_a_program_without_folds_is_not_cross_validated(own, tmp_path):
    with pytest.raises(ConfigError, match=r"its function takes no fold\. Give it the parameter "):
        run("kfold", own.replace(":make", ":without"), f"run.folder={tmp_path / 'cv'}")
    assert not (tmp_path / "cv").exists()
