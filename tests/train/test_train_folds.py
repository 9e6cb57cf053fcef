"""Folds: groups that are never split, two levels of which the inner one sees no held-out row, and what is refused."""

from collections import Counter

import pytest
from training_fixtures import overrides, write_pairs

from hotloop import recipes
from hotloop.errors import ConfigError, DataError
from hotloop.recipes import criteria
from hotloop.train import configure, folds
from hotloop.train.folds import Side, Sides, split_rows

HEADER = "text,criterion,label,group\n"


@pytest.fixture
def settings(tmp_path):
    return lambda **more: configure.load(overrides(tmp_path, **more))


def texts(side):
    return {(pair.text, pair.criterion) for pair in side}


def groups(side):
    return {pair.group for pair in side}


@pytest.mark.parametrize("source", ["csv", "icd10cm"])
def test_each_group_is_held_out_by_one_fold_and_no_fold_trains_on_what_it_holds_out(settings, source):
    more = {} if source == "csv" else {"data": "icd10cm", "data__path": "null", "data__sample_size": 1200}
    held = Counter()
    for fold in range(4):
        split = criteria.load_pairs(settings(**more, kfold__n_splits=4, kfold__fold=fold))
        assert not groups(split.train) & groups(split.validation)
        assert not texts(split.train) & texts(split.validation)
        assert {pair.label for pair in split.validation} == {0, 1}
        held.update(groups(split.validation))
    assert set(held.values()) == {1}
    if source == "csv":
        assert len(held) == 24


@pytest.mark.parametrize("source", ["csv", "icd10cm"])
def test_an_inner_fold_sees_nothing_of_what_its_outer_fold_holds_out(settings, source):
    more = {} if source == "csv" else {"data": "icd10cm", "data__path": "null", "data__sample_size": 1200}
    for fold in range(3):
        outer = settings(**more, kfold__n_splits=3, kfold__fold=fold, kfold__inner_splits=3)
        whole = criteria.load_pairs(outer)
        judged = Counter()
        for inner in range(3):
            split = criteria.load_pairs(folds.of_inner_fold(outer, inner))
            seen = (*split.train, *split.validation)
            assert not groups(seen) & groups(whole.validation)
            assert (
                not {pair.criterion for pair in seen} & {pair.criterion for pair in whole.validation} or source == "csv"
            )
            assert not {pair.text for pair in seen} & {pair.text for pair in whole.validation}
            assert groups(seen) <= groups(whole.train)
            assert not groups(split.train) & groups(split.validation)
            judged.update(groups(split.validation))
        assert set(judged.values()) == {1}


@pytest.mark.parametrize(
    ("groups", "more", "said"),
    [
        (4, {"n_splits": 5}, r"8 rows in 4 groups are too few to hold out one of 5 folds.*set kfold\.n_splits lower"),
        (
            6,
            {"n_splits": 2, "inner_trials": 3, "inner_splits": 4},
            r"6 rows in 3 groups.*one of 4 folds.*kfold\.inner_splits",
        ),
    ],
)
def test_fewer_groups_than_folds_is_told_before_any_work(settings, tmp_path, groups, more, said):
    write_pairs(tmp_path / "few.csv", groups=groups)
    chosen = settings(data__path=tmp_path / "few.csv", **{f"kfold__{name}": value for name, value in more.items()})
    with pytest.raises(DataError, match=said):
        folds.examine(chosen, criteria.sides)


def test_a_single_split_holds_out_about_the_fraction():
    groups = [f"g{index // 2}" for index in range(200)]
    train, held_out = split_rows(groups, [index % 2 for index in range(200)], fraction=0.25, seed=0)
    assert len(held_out) == pytest.approx(50, abs=6)
    assert sorted(train + held_out) == list(range(200))
    assert not {groups[row] for row in train} & {groups[row] for row in held_out}


def test_a_fold_with_one_label_only_is_told_before_any_work(settings, tmp_path):
    path = tmp_path / "lopsided.csv"  # both positives in one group: of three folds, two hold out negatives alone
    rows = ["a,b,1,g0", "c,d,1,g0", *(f"e{i},f,0,g{i}" for i in range(1, 12))]
    path.write_text(HEADER + "\n".join(rows))
    with pytest.raises(
        DataError,
        match=r"side of fold \d of kfold\.n_splits=3 has only pairs with label [01].*lower kfold\.n_splits \(it is 3\)",
    ):
        folds.examine(settings(data__path=path, kfold__n_splits=3), criteria.sides)


def sides(train=((0, 1), "ab"), held=((0, 1), "cd")):
    return Sides(*(Side(tuple(labels), tuple(groups)) for labels, groups in (train, held)), "x")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (sides(held=((), "")), r"held-out side of fold 0 of kfold\.n_splits=2 has no rows.*Set kfold\.n_splits or"),
        (sides(train=((1, 1), "ab")), "training side of fold 0 .* has only rows with label 1"),
        (sides(held=((0, 1), "bc")), "fold 0 .* has the group 'b' on both sides"),
        (sides(), "the group 'c' is held out by 2 folds"),
    ],
)
def test_a_recipe_that_splits_wrongly_is_found_out(settings, given, message):
    with pytest.raises(DataError, match=message):
        folds.examine(settings(kfold__n_splits=2), lambda _: given)


def test_data_without_labels_is_split_by_its_groups_alone(settings):
    text = sides(train=((None, None), "ab"), held=((None,), "c"))
    text.check("fold 0", "")
    assert text.train.to_dict() == {"rows": 2, "groups": 2, "shares": {}}
    with pytest.raises(DataError, match="held-out side of fold 0 has no rows"):
        sides(train=((None, None), "ab"), held=((), "")).check("fold 0", "")


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({}, r"kfold\.n_splits=3 without kfold\.fold.*hotloop kfold"),
        ({"kfold__fold": 1, "kfold__inner_trials": 7}, r"kfold\.inner_trials=7 is of a fold with its search"),
    ],
)
def test_what_is_part_of_a_cross_validation_is_no_single_run(settings, more, said):
    with pytest.raises(ConfigError, match=said):  # else a trial would be judged by what its outer fold holds out
        recipes.load("criteria").sides(settings(kfold__n_splits=3, **more))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"kfold__n_splits": 1}, r"kfold\.n_splits=1: Input should be greater than or equal to 2"),
        ({"kfold__n_splits": 3, "kfold__fold": 3}, r"kfold\.fold=3: expected 0 to 2, .* kfold\.n_splits=3"),
        ({"kfold__n_splits": 3, "kfold__fold": -1}, r"kfold\.fold=-1: Input should be greater than or equal to 0"),
        ({"kfold__fold": 1}, r"kfold\.fold has no effect while kfold\.n_splits is null"),
        ({"kfold__inner_trials": 5}, r"kfold\.inner_trials has no effect while kfold\.n_splits is null"),
        ({"kfold__n_splits": 3, "kfold__inner_fold": 0}, r"kfold\.inner_fold has no effect while kfold\.fold is null"),
        ({"kfold__n_splits": 3, "kfold__fold": 0, "kfold__inner_fold": 3}, r"kfold\.inner_fold=3: expected 0 to 2"),
        ({"kfold__n_splits": 3, "kfold__fold": 0, "kfold__inner_fold": 1, "kfold__inner_trials": 2}, "leave the other out"),
        ({"kfold__n_split": 3}, r"did you mean kfold\.n_splits"),
    ],
)  # fmt: skip
def test_settings_of_folds_that_do_not_fit_are_told(settings, given, message):
    with pytest.raises(ConfigError, match=message):
        settings(**given)
