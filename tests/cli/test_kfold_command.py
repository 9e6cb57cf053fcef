"""``hotloop kfold``, and what ``train``, ``eval`` and ``report`` make of a cross-validation."""

import json
import signal
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hotloop.cli import app
from hotloop.errors import ConfigError
from hotloop.train import fit, kfold

sys.path.append(str(Path(__file__).parents[1] / "train"))
from training_fixtures import overrides


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setenv("HOTLOOP_CACHE_DIR", "")
    monkeypatch.setattr(kfold, "_forget", lambda: None)


def invoke(*arguments):
    result = CliRunner().invoke(app, [str(one) for one in arguments])
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def tiny(folder, **more):
    return overrides(folder, training__max_steps=2, **more)


def test_kfold_and_train_are_the_same_run_and_eval_and_report_know_it(tmp_path):
    first = invoke("kfold", *tiny(tmp_path, run__folder=tmp_path / "a"), "kfold.n_splits=2", "--json")
    assert first.exit_code == 0
    ended = json.loads(first.stdout)
    assert "Fold 1 of 2" in first.stderr
    second = invoke("train", *tiny(tmp_path, run__folder=tmp_path / "b"), "kfold.n_splits=2")
    assert "2 of 2 folds finished" in second.stdout
    again = json.loads((tmp_path / "b" / "kfold.json").read_text())
    assert [one["best"] for one in again["folds"]] == [one["best"] for one in ended["folds"]]
    every = json.loads(invoke("eval", f"run={tmp_path / 'a'}", "--json").stdout)
    one = json.loads(invoke("eval", f"run={tmp_path / 'a'}", "fold=1", "--json").stdout)
    assert every["folds"][1] == one["folds"][0]
    assert every["over_folds"]["loss"]["mean"] == pytest.approx(ended["metrics"]["best"]["loss"]["mean"], rel=1e-5)
    assert "± std" in invoke("eval", f"run={tmp_path / 'a'}").stdout
    shown = invoke("report", tmp_path / "a")
    assert "2 of 2 folds finished" in shown.stdout
    assert f"Report: {tmp_path / 'a' / 'report.html'}" in shown.stdout
    assert json.loads(invoke("report", tmp_path / "a" / "kfold.json", "--json").stdout)["names"][0] == "loss"
    with pytest.raises(ConfigError, match=r"fold=9: .* has the folds 0, 1"):
        invoke("eval", f"run={tmp_path / 'a'}", "fold=9")
    with pytest.raises(ConfigError, match="fold=two: expected the number of a fold"):
        invoke("eval", f"run={tmp_path / 'a'}", "fold=two")


def test_five_folds_where_nothing_says_how_many(tmp_path):
    assert "n_splits: 5" in invoke("kfold", "--show").stdout
    assert "n_splits: 3" in invoke("kfold", "kfold.n_splits=3", "--show").stdout
    (tmp_path / "mine.yaml").write_text("kfold:\n  n_splits: 4\n")
    assert "n_splits: 4" in invoke("kfold", "--config", tmp_path / "mine.yaml", "--show").stdout
    assert "n_splits: null" in invoke("train", "--show").stdout


def test_it_exits_as_it_ended(tmp_path, monkeypatch):
    whole = fit._Fitting.step

    def acting(self, batches):
        whole(self, batches)
        if self.settings.kfold.fold == 0 and self.position.step == 1:
            signal.raise_signal(signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(fit._Fitting, "step", acting)
        stopped = invoke("kfold", *tiny(tmp_path), "kfold.n_splits=2")
    assert stopped.exit_code == 130
    assert f"Resume with: hotloop kfold run.resume={tmp_path / 'run'}" in stopped.stdout

    def failing(self, batches):
        raise RuntimeError("planted")

    with monkeypatch.context() as patch:
        patch.setattr(fit._Fitting, "step", failing)
        failed = invoke("kfold", f"run.resume={tmp_path / 'run'}")
    assert failed.exit_code == 1
    assert "2 failed" in failed.stdout
    assert invoke("train", f"run.resume={tmp_path / 'run'}").exit_code == 0


def test_a_dry_run_checks_the_first_fold_and_writes_nothing(tmp_path):
    checked = invoke("kfold", *tiny(tmp_path), "kfold.n_splits=2", "--dry-run", "--json")
    assert checked.exit_code == 0
    document = json.loads(checked.stdout)
    assert (document["status"], len(document["folds"])) == ("checked", 2)
    assert invoke("kfold", *tiny(tmp_path), "kfold.n_splits=2", "--dry-run", "-q").stdout == (
        f"checked: {tmp_path / 'run'}\n"
    )
    assert not (tmp_path / "run").exists()
