"""Cross-validation: folds as ordinary runs, resumed where they stopped, never lost, and compiled once."""

import gc
import json
import signal
import subprocess
import sys
import types
import weakref

import pytest
import torch
from test_train_fit import assert_same, load, losses
from training_fixtures import held_elsewhere, overrides, write_pairs

from hotloop import recipes, record
from hotloop.errors import ConfigError, DataError, RecordError, StepLostError
from hotloop.recipes import criteria
from hotloop.report import folds as report
from hotloop.train import checkpoint, configure, fit, folds, kfold, start, supervised


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


def test_two_cross_validations_with_a_seed_give_the_same_metrics(run, whole, study):
    again = run()
    assert metrics(again) == metrics(whole)
    assert again.document["contents"] == whole.document["contents"]
    other = folds.examine(study(folder="other", run__seed=1).settings, criteria.sides)
    assert kfold._contents(other) != whole.document["contents"]


@pytest.mark.parametrize(
    "preset", ["aot_eager", pytest.param("inductor", marks=[pytest.mark.inductor, pytest.mark.campaign])]
)
def test_the_second_fold_compiles_nothing_and_runs_compiled(tmp_path, run, whole, preset):
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
    if preset == "aot_eager":  # the others draw other random numbers for dropout
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


@pytest.mark.parametrize("place", [(0, 3), (2, 8)])
def test_an_interrupted_cross_validation_resumed_is_the_one_that_was_not(run, whole, monkeypatch, capsys, place):
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


@pytest.mark.parametrize("fails", [False, True])
def test_a_wish_to_stop_in_a_folds_last_validation_stops_the_whole(run, monkeypatch, fails):
    act = supervised.evaluate

    def acting(*given):
        signal.raise_signal(signal.SIGTERM)
        if fails:
            raise RuntimeError("planted")
        return act(*given)

    monkeypatch.setattr(supervised, "evaluate", acting)
    stopped = run(training__max_steps=1)
    assert stopped.status == "interrupted"
    ended = "failed" if fails else "finished"
    assert [one["status"] for one in stopped.document["folds"]] == [ended, "pending", "pending"]
    monkeypatch.setattr(supervised, "evaluate", act)
    assert resume(stopped.folder).status == "finished"


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


def test_a_kill_between_a_folds_end_and_its_note_trains_nothing_twice(tmp_path, run, whole, monkeypatch):

    def die(*_):
        raise SystemExit

    with monkeypatch.context() as patch:
        patch.setattr(kfold, "ended", die)
        with pytest.raises(SystemExit):
            run()
    assert report.load(tmp_path / "study")["folds"][0]["status"] == "running"
    ended = resume(tmp_path / "study")
    assert metrics(ended) == metrics(whole)
    assert len(record.load(tmp_path / "study" / "fold-0")["steps"]) == 8


def test_a_kill_before_a_folds_first_checkpoint_begins_it_again(tmp_path, run, whole, monkeypatch):
    with monkeypatch.context() as patch:
        fail_in(patch, 0, 2, KeyboardInterrupt())
        assert run().status == "interrupted"
    (tmp_path / "study" / "fold-0" / "settings.yaml").write_text("training:\n  num_ep")  # torn, as a kill may leave it
    assert metrics(resume(tmp_path / "study")) == metrics(whole)


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
    assert f"Failed: fold 1. Finished folds are kept; to try again: hotloop kfold run.resume={tmp_path / 'study'}" in (
        capsys.readouterr().out
    )
    mean = (first["best"]["loss"] + third["best"]["loss"]) / 2
    assert ended.document["metrics"]["best"]["loss"]["mean"] == pytest.approx(mean)
    view = report.build(ended.document)
    assert view.sentence == "2 of 3 folds finished, 1 failed. Mean and standard deviation are of the 2 that finished."
    assert "the loss is nan" in (tmp_path / "study" / "report.html").read_text()
    again = resume(tmp_path / "study")
    assert again.status == "finished"
    assert [record.load(tmp_path / "study" / f"fold-{fold}")["starts"] for fold in range(3)] == [1, 2, 1]


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB."), "out of memory"),
        (RuntimeError("planted"), "RuntimeError: planted"),
        (OSError(28, "No space left on device"), "No space left on device"),
    ],
)
def test_whatever_ends_a_fold_costs_no_other(run, monkeypatch, capsys, error, said):
    fail_in(monkeypatch, 0, 1, error)
    ended = run(training__max_steps=1, kfold__n_splits=2)
    assert [one["status"] for one in ended.document["folds"]] == ["failed", "finished"]
    assert said in ended.document["folds"][0]["error"]
    assert ("Traceback" in capsys.readouterr().err) == (type(error) is not torch.OutOfMemoryError)


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
    with pytest.raises(DataError, match=r"kfold\.n_splits=3: the 4 rows are in 2 groups"):
        run(data__path=tmp_path / "few.csv")
    with pytest.raises(DataError, match="no such file"):
        run(data__path=tmp_path / "nowhere.csv")
    with pytest.raises(ConfigError, match="did you mean"):
        run(compile__preset="inducter", training__optimization__use_torch_compile="true")
    with pytest.raises(ConfigError, match=r"run\.folder=.* cannot be written: .*name another run\.folder"):
        run(run__folder="/proc/study")
    assert not (tmp_path / "study").exists()


def test_folds_are_checked_for_the_kind_of_device_that_they_run_on(study, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    kinds = []
    monkeypatch.setattr(kfold.compiling, "check", lambda chosen, settings, kind: kinds.append(kind))
    kfold.run(study(run__device="auto", run__accelerator="cpu"), Recipe())
    assert kinds == ["cpu"]


def test_a_disk_that_is_full_is_told_once_and_stops_nothing(run, monkeypatch, capsys):
    def full(path, **more):
        if path.name == report.DOCUMENT:
            raise OSError(28, "No space left on device")
        return whole(path, **more)

    whole = record.whole
    monkeypatch.setattr("hotloop.record.schema.whole", full)
    assert run(training__max_steps=1).status == "finished"
    assert capsys.readouterr().out.count("study cannot be written: [Errno 28] No space left on device") == 1


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
        with pytest.raises(ConfigError, match=r"cannot change while a cross-validation is resumed.*Start a new one"):
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


@pytest.mark.parametrize("content", ["", "[]", '{"schema": 1}', '{"schema": 1, "folds": [{}], "contents": []}'])
def test_a_document_that_cannot_be_read_is_refused(tmp_path, content):
    (tmp_path / "kfold.json").write_text(content)
    with pytest.raises(RecordError, match=r"kfold\.json is no"):
        kfold.prepare([f"run.resume={tmp_path}"])


@pytest.mark.campaign
def test_a_fold_leaves_no_model_behind(run, monkeypatch):
    alive, counts = [], []
    whole = criteria.load_model

    def loading(begun, display):
        gc.collect()
        counts.append(sum(one() is not None for one in alive))
        loaded = whole(begun, display)
        alive.append(weakref.ref(loaded.model))
        return loaded

    monkeypatch.setattr(criteria, "load_model", loading)
    fail_in(monkeypatch, 1, 2, RuntimeError("planted"))
    compiled = {"training__optimization__use_torch_compile": "true", "compile__preset": "aot_eager"}
    run(**compiled, compile__measure_eager_steps=0, training__max_steps=3)
    assert counts == [0, 0, 0]


@pytest.fixture
def search(monkeypatch):
    """Stand in for the search: notes what each was told, and gives a learning rate."""
    told = []

    def nested(settings, folder, trials, say, later):
        told.append((settings, folder, trials, later))
        return (f"training.learning_rate={0.001 * (1 + settings.kfold.fold)}",)

    monkeypatch.setattr(kfold.command, "nested", nested)
    return told


def test_an_inner_search_chooses_the_settings_of_each_fold(tmp_path, run, search):
    ended = run(kfold__inner_trials=7, kfold__inner_splits=2)
    folder = tmp_path / "study"
    assert [(one[0].kfold.fold, one[1], one[2]) for one in search] == [
        (fold, folder / f"fold-{fold}" / "search", 7) for fold in range(3)
    ]
    assert [one[3] for one in search] == [14, 7, 0], "trials of the searches to come share what is compiled"
    for fold, (settings, *_) in enumerate(search):
        assert (settings.kfold.n_splits, settings.kfold.inner_splits, settings.kfold.inner_trials) == (3, 2, 7)
        with pytest.raises(
            ConfigError, match=r"kfold\.inner_trials=7 is of a fold with its search, and of no single run"
        ):
            criteria.load_pairs(settings)  # a trial that forgot its inner fold
        own = record.load(folder / f"fold-{fold}")["settings"]["training"]
        assert own["learning_rate"] == pytest.approx(0.001 * (fold + 1))
        assert ended.document["folds"][fold]["chosen"] == [f"training.learning_rate={0.001 * (fold + 1)}"]
        inner = folds.of_inner_fold(settings, 1)  # what the search judges a trial by is an ordinary run
        configure.from_dict(configure.to_dict(inner))
        held = {pair.text for pair in criteria.load_pairs(folds.of_fold(settings, fold)).validation}
        split = criteria.load_pairs(inner)
        assert not held & {pair.text for pair in (*split.train, *split.validation)}
    assert "training.learning_rate=0.002" in (folder / "report.html").read_text()


def test_an_inner_search_that_is_done_is_not_run_again(tmp_path, study, search):
    class Stopped(Recipe):
        def train(self, begun, console=None):
            if begun.settings.kfold.fold == 1:
                raise KeyboardInterrupt
            return super().train(begun, console)

    assert kfold.run(study(kfold__inner_trials=2, kfold__inner_splits=2), Stopped()).status == "interrupted"
    assert len(search) == 2
    ended = kfold.run(kfold.prepare([f"run.resume={tmp_path / 'study'}"]), Recipe())
    assert ended.status == "finished"
    assert [one[0].kfold.fold for one in search] == [0, 1, 2]


def test_one_fold_alone_may_have_its_search_too(study, search):
    ended = kfold.run(study(kfold__inner_trials=2, kfold__inner_splits=2, kfold__fold=2), Recipe())
    assert [(one["fold"], one["status"]) for one in ended.document["folds"]] == [(2, "finished")]
    assert len(search) == 1


def test_a_search_has_no_say_in_the_data_or_the_folds(study, monkeypatch):
    monkeypatch.setattr(kfold.command, "nested", lambda *_, **__: ("kfold.fold=0",))
    with pytest.raises(ConfigError, match=r"the inner search chose kfold\.fold=0"):
        kfold.run(study(kfold__inner_trials=2, kfold__inner_splits=2), Recipe())


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ("hpo.space.data.negatives.choices=[chapter,sibling]", r"hpo\.space\.data: .* set hpo\.space\.data=null"),
        ("hpo.trial.data.sample_size=20", r"hpo\.trial\.data\.sample_size: .* set hpo\.trial\.data\.sample_size=null"),
        ("hpo=fast", r"set hpo\.trial\.data\.sample_size=null$"),
        ("hpo.workers=2", r"hpo\.workers has no effect on a search within a fold.*set hpo\.workers=1"),
        ("hpo.timeout_seconds=60", r"hpo\.timeout_seconds has no.* set hpo\.timeout_seconds=null"),
        ("hpo.storage='postgresql://me:secret@host/db'", r"hpo\.storage has no.* set hpo\.storage=null"),
        ("hpo.space.training.batch_size=3", r"hpo\.space\.training\.batch_size=3: expected"),
    ],
)
def test_what_an_inner_search_has_no_say_in_is_told_before_it_begins(study, search, more, said):
    with pytest.raises(ConfigError, match=said):
        kfold.run(study(more, kfold__inner_trials=2, kfold__inner_splits=2), Recipe())
    assert search == []


def test_a_recipe_without_folds_is_told(study):
    with pytest.raises(ConfigError, match="recipe=criteria cannot be split into folds"):
        kfold.run(study(), types.SimpleNamespace(COMPONENTS=criteria.COMPONENTS))


def test_a_fold_is_judged_on_its_own_held_out_rows(whole):
    for fold in range(3):
        (judged,) = kfold.judge(whole.folder, fold, criteria, [])
        assert judged["metrics"] == pytest.approx(whole.document["folds"][fold]["best"], rel=1e-5)
    assert [one["fold"] for one in kfold.judge(whole.folder, None, criteria, [])] == [0, 1, 2]
    with pytest.raises(ConfigError, match=r"fold=3: .* has the folds 0, 1, 2"):
        kfold.judge(whole.folder, 3, criteria, [])
    with pytest.raises(ConfigError, match=r"kfold.n_splits=3 to 2: cannot change"):
        kfold.judge(whole.folder, 1, criteria, ["kfold.n_splits=2"])


def test_a_run_of_another_fold_is_not_resumed_as_this_one(tmp_path, train):
    train(kfold__n_splits=3, kfold__fold=1, training__max_steps=2)
    with pytest.raises(ConfigError, match=r"kfold\.\w+ cannot change while a run is resumed"):
        start.prepare([f"run.resume={tmp_path / 'run'}", "kfold.n_splits=4", "kfold.fold=2"])
    assert recipes.load("criteria").train(start.prepare([f"run.resume={tmp_path / 'run'}"])).status == "finished"
