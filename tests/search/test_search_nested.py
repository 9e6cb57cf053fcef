"""A search within the folds of a cross-validation: what it may see, what it says, what it refuses."""

import pytest

from hotloop import recipes
from hotloop.errors import ConfigError
from hotloop.train import configure, folds
from hotloop.train.search import trial
from hotloop.train.search.nested import inner

NESTED = ("recipe=digits", "kfold.n_splits=3", "kfold.inner_trials=2", "kfold.inner_splits=2", "hpo.metric=accuracy")


@pytest.mark.parametrize(
    ("more", "accepted"),
    [
        ((), True),
        (("hpo.trial.training.num_epochs=1",), True),
        (("hpo.trial.data.sample_size=900",), False),
        (("data.sample_size=900", "hpo.trial.data.sample_size=null"), False),
        (("data.sample_size=900", "hpo.trial.data.sample_size=900"), True),
        (("hpo.trial.run.seed=1",), False),
        (("hpo.trial.kfold.inner_trials=null",), False),
        (("hpo.trial.kfold.n_splits=4",), False),
        (("hpo.trial.kfold.fold=1",), False),
        (("hpo.trial.kfold.fold=null",), True),
        (("hpo=fast",), False),
        (("hpo=fast", "hpo.trial.data.sample_size=null", "hpo.trial.kfold.n_splits=3"), True),
    ],
)
def test_no_accepted_trial_sees_a_row_that_is_held_out(tmp_path, more, accepted):
    settings = configure.load([*NESTED, *more])
    sides = recipes.load("digits").sides
    held_out = set(sides(folds.of_fold(settings, 0)).validation.groups)
    searched = folds.with_search(settings, 0)
    if not accepted:
        for level in (settings, searched):
            with pytest.raises(ConfigError, match=r"hpo\.trial\..* set hpo\.trial\."):
                inner(level)
        return
    inner(settings)
    one = trial.settings_of(inner(searched), {}, tmp_path)
    for fold in trial.folds_of(one):
        seen = sides(trial.changed(one, fold))
        assert not held_out & {*seen.train.groups, *seen.validation.groups}
    assert len(trial.folds_of(one)) == 2
