"""Cross-validation: folds as ordinary runs, resumed where they stopped, never lost, and compiled once."""

import json
import signal
import subprocess
import sys

import pytest
import torch
from test_train_fit import assert_same, load, losses
from training_fixtures import held_elsewhere, overrides, write_pairs

from hotloop import record
from hotloop.errors import ConfigError, DataError, StepLostError
from hotloop.recipes import criteria
from hotloop.report import folds as report
from hotloop.train import checkpoint, fit, kfold


@pytest.fixture
def study(tmp_path):
    """Prepare a cross-validation of three folds of 8 steps; ``a__b=value`` changes a setting."""

    def make(*more, folder="study", **settings):
        chosen = {"kfold__n_splits": 3, "training__num_epochs": 1, "run__folder": tmp_path / folder, **settings}
        return kfold.prepare([*overrides(tmp_path, **chosen), *more])

    return make


@pytest.fixture
def run(study):
    return lambda *more, **settings: kfold.run(study(*more, **settings), criteria)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """What nothing disturbs: the same three folds, run to their end once."""
    folder = tmp_path_factory.mktemp("whole")
    settings = {"kfold__n_splits": 3, "training__num_epochs": 1, "run__folder": folder / "study"}
    return kfold.run(kfold.prepare(overrides(folder, **settings)), criteria)


@pytest.fixture(autouse=True)
def _no_collection(request, monkeypatch):
    """Collecting the garbage of transformers and torch takes longer than a tiny fold."""
    if "leaves_no_model" not in request.node.name:
        monkeypatch.setattr(kfold, "_forget", lambda: None)


class Recipe:
    """A recipe that trains nothing, and notes what it was given."""

    COMPONENTS, sides = criteria.COMPONENTS, staticmethod(criteria.sides)

    def __init__(self):
        self.begun = []

    def train(self, begun, console=None):
        self.begun.append(begun)
        return fit.Outcome("finished", begun.folder, 1, 1, {"f1": 0.5}, {}, {}, 0.0)


def resume(folder, *more):
    return kfold.run(kfold.prepare([f"run.resume={folder}", *more]), criteria)


def metrics(ended):
    return [(one["best"], one["last"], one["best_step"]) for one in ended.document["folds"]]


def fail_in(monkeypatch, fold, step, error):
    """Raise at the end of a step of one fold."""
    whole = fit._Fitting.step

    def failing(self, batches):
        whole(self, batches)
        if self.settings.kfold.fold == fold and self.position.step == step:
            raise type(error)(*error.args)

    monkeypatch.setattr(fit._Fitting, "step", failing)


def test_each_fold_is_an_ordinary_run_and_the_whole_is_summed_up(whole):
    ended, folder = whole, whole.folder
    assert ended.status == "finished"
    document = json.loads((folder / "kfold.json").read_text())
    assert document == json.loads(record.to_json(ended.document))
    for fold, one in enumerate(document["folds"]):
        own = folder / f"fold-{fold}"
        assert (own / "checkpoints" / "best.pt").is_file()
        assert (own / "report.html").is_file()
        assert record.load(own)["status"] == one["status"] == "finished"
        assert checkpoint.load(own / "checkpoints" / "last.pt")["settings"]["kfold"]["fold"] == fold
        assert one["step"] == 8
        assert one["last"]["loss"] == record.load(own)["metrics"][-1]["loss"]
    values = torch.tensor([one["best"]["loss"] for one in document["folds"]], dtype=torch.float64)
    assert document["metrics"]["best"]["loss"]["mean"] == pytest.approx(values.mean().item())
    assert document["metrics"]["best"]["loss"]["std"] == pytest.approx(values.std().item())
    assert "3 of 3 folds finished" in (folder / "report.html").read_text()
    assert "n_splits: 3" in (folder / "settings.yaml").read_text()


def test_a_fold_alone_is_the_same_run_as_in_the_whole(tmp_path, whole, train):
    alone = {"kfold__n_splits": 3, "kfold__fold": 1, "training__num_epochs": 1, "run__folder": tmp_path / "alone"}
    assert kfold.prepare(overrides(tmp_path, **alone)) is None  # an ordinary run
    train(**alone)
    assert losses(tmp_path / "alone") == losses(whole.folder / "fold-1")
    assert_same(load(tmp_path / "alone"), load(whole.folder / "fold-1"))


def test_the_second_fold_compiles_nothing_and_runs_compiled(tmp_path, run, whole):
    preset = "aot_eager"
    on = {"training__optimization__use_torch_compile": "true", "compile__preset": preset}
    ended = run(**on, compile__measure_eager_steps=1)
    first, *others = [one["compiled"] for one in ended.document["folds"]]
    assert first["compiles"] >= 1
    assert first["seconds"] > 0
    assert [(one["compiles"], one["captured"], one["seconds"]) for one in others] == [(0, 0, 0), (0, 0, 0)]
    for fold in range(3):
        own = record.load(tmp_path / "study" / f"fold-{fold}")
        model = own["components"]["model"]
        assert (model["running"], model["state"], model["recompiles"]) == (preset, "compiled", 0)
        assert model["frames_compiled"] == 7
        assert [step["running"] for step in own["steps"]] == ["none"] + [preset] * 7
        assert [event for event in own["events"] if event["kind"] == "compiled"] == [] or fold == 0
    assert f"Compiled or captured in fold 0: {first['compiles']} compile" in report.build(ended.document).compiled
    assert "Nothing in folds 1, 2" in report.build(ended.document).compiled
    for ours, theirs in zip(metrics(ended), metrics(whole), strict=True):
        assert ours[0] == pytest.approx(theirs[0], rel=1e-3)


def test_each_fold_is_told_how_many_runs_will_use_what_it_compiles(study):
    one, recipe = study(), Recipe()
    kfold.run(one, recipe)
    told = [(begun.settings.kfold.fold, begun.within.runs) for begun in recipe.begun]
    assert told == [(0, 3), (1, 2), (2, 1)]
    within = recipe.begun[2].within
    assert (within.study, within.fold, within.folder, within.resume) == ("study", 2, one.folder, one.again)
    document = json.loads((one.folder / "kfold.json").read_text())
    document["folds"][1]["status"] = "failed"
    (one.folder / "kfold.json").write_text(json.dumps(document))
    recipe = Recipe()
    kfold.run(kfold.prepare([f"run.resume={one.folder}"]), recipe)
    assert [(begun.settings.kfold.fold, begun.within.runs) for begun in recipe.begun] == [(1, 1)]


def test_an_interrupted_cross_validation_resumed_is_the_one_that_was_not(run, whole, monkeypatch, capsys):
    place = (1, 3)
    with monkeypatch.context() as patch:
        act = fit._Fitting.step

        def acting(self, batches):
            act(self, batches)
            if (self.settings.kfold.fold, self.position.step) == place:
                signal.raise_signal(signal.SIGINT)

        patch.setattr(fit._Fitting, "step", acting)
        stopped = run()
    assert stopped.status == "interrupted"
    fold, folder = place[0], stopped.folder
    said = capsys.readouterr().out
    assert said.count(f"Resume with: hotloop kfold run.resume={folder}") == 2  # the fold and the whole say the same
    assert "hotloop train run.resume" not in said
    states = [one["status"] for one in report.load(folder)["folds"]]
    assert states == ["finished"] * fold + ["interrupted"] + ["pending"] * (2 - fold)
    resumed = resume(folder)
    assert resumed.status == "finished"
    assert metrics(resumed) == metrics(whole)
    for one in range(3):
        assert losses(folder / f"fold-{one}") == losses(whole.folder / f"fold-{one}")
        assert_same(load(folder / f"fold-{one}"), load(whole.folder / f"fold-{one}"))
        assert record.load(folder / f"fold-{one}")["starts"] == (2 if one == fold else 1)


@pytest.mark.campaign
def test_a_kill_loses_what_is_behind_the_last_checkpoint_and_nothing_else(tmp_path, whole):
    program = (
        "import os, sys\n"
        "from hotloop.recipes import criteria\nfrom hotloop.train import fit, kfold\n"
        "step = fit._Fitting.step\n"
        "def dying(self, batches):\n"
        "    step(self, batches)\n"
        "    if (self.settings.kfold.fold, self.position.step) == (1, 5): os.kill(os.getpid(), 9)\n"
        "fit._Fitting.step = dying\n"
        "kfold.run(kfold.prepare(sys.argv[1:]), criteria)\n"
    )
    more = {"kfold__n_splits": 3, "training__num_epochs": 1, "training__checkpoint_every_steps": 3}
    arguments = overrides(tmp_path, **more, run__folder=tmp_path / "study")
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments], capture_output=True, text=True, timeout=900, check=False
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    folder = tmp_path / "study"
    left = report.load(folder)
    assert report.build(left).status == "interrupted (killed)"
    assert [one["status"] for one in left["folds"]] == ["finished", "running", "pending"]
    assert load(folder / "fold-1")["position"]["step"] == 3
    ended = resume(folder)
    assert metrics(ended) == metrics(whole)
    assert [record.load(folder / f"fold-{fold}")["starts"] for fold in range(3)] == [1, 2, 1]
    assert_same(load(folder / "fold-1"), load(whole.folder / "fold-1"))


def test_a_fold_that_fails_is_recorded_with_its_cause_and_the_others_still_run(tmp_path, run, monkeypatch, capsys):
    with monkeypatch.context() as patch:
        step = fit._Fitting.step

        def poisoned(self, batches):
            if self.settings.kfold.fold == 1 and self.position.step == 2:
                for batch in batches:
                    batch.labels.fill_(float("nan"))
            return step(self, batches)

        patch.setattr(fit._Fitting, "step", poisoned)
        ended = run()
    assert ended.status == "failed"
    first, second, third = ended.document["folds"]
    assert (first["status"], second["status"], third["status"]) == ("finished", "failed", "finished")
    assert "step 3: the loss is nan" in second["error"]
    said = f"Failed. Finished folds are kept. Resume with: hotloop kfold run.resume={tmp_path / 'study'}"
    assert said in capsys.readouterr().out
    mean = (first["best"]["loss"] + third["best"]["loss"]) / 2
    assert ended.document["metrics"]["best"]["loss"]["mean"] == pytest.approx(mean)
    view = report.build(ended.document)
    assert view.sentence == "2 of 3 folds finished, 1 failed. Mean and standard deviation are of the 2 that finished."
    assert "the loss is nan" in (tmp_path / "study" / "report.html").read_text()
    again = resume(tmp_path / "study")
    assert again.status == "finished"
    assert [record.load(tmp_path / "study" / f"fold-{fold}")["starts"] for fold in range(3)] == [1, 2, 1]


def test_wrong_settings_and_a_lost_gpu_end_the_whole_at_once(tmp_path, run, monkeypatch):
    with pytest.raises(ConfigError, match=r"model\.max_length=999"):
        run(model__max_length=999)
    assert [one["status"] for one in report.load(tmp_path / "study")["folds"]] == ["failed", "pending", "pending"]
    fail_in(monkeypatch, 1, 1, StepLostError("the GPU is lost"))
    with pytest.raises(StepLostError):
        run(folder="lost")
    left = report.load(tmp_path / "lost")
    assert [one["status"] for one in left["folds"]] == ["finished", "failed", "pending"]
    assert (left["status"], left["error"]) == ("failed", "the GPU is lost")


def test_what_cannot_be_used_is_told_before_anything_is_written(tmp_path, run):
    write_pairs(tmp_path / "few.csv", groups=2)
    with pytest.raises(
        DataError, match=r"4 rows in 2 groups are too few to hold out one of 3 folds.*set kfold\.n_splits lower"
    ):
        run(data__path=tmp_path / "few.csv")
    with pytest.raises(DataError, match="No such file"):
        run(data__path=tmp_path / "nowhere.csv")
    with pytest.raises(ConfigError, match=r"run\.folder=.* cannot be written: .*name another run\.folder"):
        run(run__folder="/proc/study")
    assert not (tmp_path / "study").exists()


def test_a_resumed_cross_validation_keeps_what_its_folds_are_compared_by(tmp_path, study):
    kfold.run(study(training__max_steps=2), Recipe())
    folder = tmp_path / "study"
    for changed in (
        "training.learning_rate=0.5",
        "kfold.n_splits=4",
        "kfold.fold=1",
        "run.seed=3",
        "run.devices=2",
        "model.dropout=0.3",
    ):
        with pytest.raises(
            ConfigError,
            match=rf"{changed.split('=')[0]} cannot change while a cross-validation is resumed: start a new one",
        ):
            kfold.prepare([f"run.resume={folder}", changed])
    with pytest.raises(ConfigError, match=r"--config .* does not go with run\.resume"):
        kfold.prepare([f"run.resume={folder}"], folder / "settings.yaml")
    same = [one for one in overrides(tmp_path) if not one.startswith(("run.folder", "training.num_epochs"))]
    again = kfold.prepare([*same, "training.optimization.use_torch_compile=true", f"run.resume={folder}"])
    assert again.settings.training.optimization.use_torch_compile is True
    assert again.settings.training.max_steps == 2
    recipe = Recipe()
    assert kfold.run(again, recipe).status == "finished"
    assert recipe.begun == []


def test_a_resumed_cross_validation_keeps_its_data(tmp_path, study):
    kfold.run(study(), Recipe())
    (tmp_path / "pairs.csv").write_text((tmp_path / "pairs.csv").read_text().replace("x1,", "y1,"))
    with pytest.raises(DataError, match="begun on other data"):
        resume(tmp_path / "study")


def test_a_folder_that_holds_one_is_neither_written_over_nor_run_twice_at_a_time(tmp_path, study, prepare):
    kfold.run(study(), Recipe())
    folder = tmp_path / "study"
    for again in (study, lambda: prepare(run__folder=folder)):
        with pytest.raises(ConfigError, match=r"holds a run already: go on with it by run\.resume="):
            again()
    with (
        held_elsewhere(folder),
        pytest.raises(ConfigError, match=r"another process trains there\. Wait for it, or stop it"),
    ):
        kfold.prepare([f"run.resume={folder}"])
    assert kfold.prepare([f"run.resume={folder}"]).before["status"] == "finished"


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (
            "hpo.space.data.negatives.choices=[chapter,sibling]",
            r"data\.negatives: a search within a fold has no say in",
        ),
        ("hpo.trial.data.sample_size=20", r"data\.sample_size: a search within a fold has no say in"),
        ("hpo=fast", r"data\.sample_size: a search within a fold has no say in"),
        ("hpo.space.training.batch_size=3", r"hpo\.space\.training\.batch_size=3: expected"),
    ],
)
def test_what_an_inner_search_has_no_say_in_is_told_before_it_begins(study, more, said):
    with pytest.raises(ConfigError, match=said):
        kfold.run(study(more, kfold__inner_trials=2, kfold__inner_splits=2), Recipe())
