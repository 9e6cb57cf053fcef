"""``hotloop runs``: what is listed, compared and deleted, and what is refused."""

import json
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hotloop.cli import app
from hotloop.errors import ConfigError
from hotloop.remote import runs as remote_runs

sys.path.extend(str(Path(__file__).parents[1] / room) for room in ("train", "report"))
from run_folders import a_cross_validation, a_run, a_study
from training_fixtures import held_elsewhere


def invoke(*arguments, answer=None):
    result = CliRunner().invoke(app, ["runs", *map(str, arguments)], input=answer)
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def test_runs_are_listed_where_train_puts_them(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="runs: no such folder"):
        invoke("list")
    (tmp_path / "runs").mkdir()
    assert "No run below runs" in invoke("list").stdout
    a_run(Path("runs/focus/one"))
    a_cross_validation(Path("runs/focus/kf"))
    Path("runs/notes").mkdir()
    shown = invoke("list").stdout
    assert "focus/one" in shown
    assert "2 folds" in shown
    assert "notes" not in shown, "a folder without a run in it"
    listed = json.loads(invoke("list", "--json").stdout)
    assert {one["folder"]: one["kind"] for one in listed} == {
        "runs/focus/one": "run", "runs/focus/kf": "cross-validation",
    }  # fmt: skip


def test_one_is_shown_with_its_members(tmp_path):
    folder = a_cross_validation(tmp_path / "kf")
    shown = invoke("show", folder).stdout
    for text in ("mean accuracy 0.8", "training.learning_rate  0.001", "Folds", "fold-1"):
        assert text in shown
    found = json.loads(invoke("show", folder, "--json").stdout)
    assert [Path(one["folder"]).name for one in found["members"]] == ["fold-0", "fold-1"]
    with pytest.raises(ConfigError, match=r"is no run, cross-validation or search"):
        invoke("show", tmp_path)


def test_compared_runs_show_the_settings_that_differ(tmp_path):
    folders = [a_run(tmp_path / "a"), a_run(tmp_path / "b", goal="min:loss", accuracies=(0.1,))]
    found = json.loads(invoke("compare", *folders, "--json").stdout)
    assert found["settings"] == {"recipe.goal": ["max:accuracy", "min:loss"]}
    assert found["figures"]["accuracy"] == [0.9, 0.1]
    shown = invoke("compare", *folders).stdout
    assert "recipe.goal" in shown
    assert "learning_rate" not in shown
    assert "No setting differs" in invoke("compare", folders[0], folders[0]).stdout
    with pytest.raises(ConfigError, match="expected two or more runs"):
        invoke("compare", folders[0])


def test_a_run_is_deleted_once_it_is_confirmed(tmp_path):
    folder, other = a_run(tmp_path / "a"), a_study(tmp_path / "search")
    assert invoke("rm", folder, answer="n\n").exit_code == 1
    assert folder.is_dir()
    assert invoke("rm", folder, answer="y\n").exit_code == 0
    assert json.loads(invoke("rm", "--yes", "--json", other).stdout) == {"removed": [str(other)]}
    assert not folder.exists()
    assert not other.exists()


def test_what_is_no_run_or_trains_now_is_not_deleted(tmp_path, monkeypatch):
    run, kf = a_run(tmp_path / "a"), a_cross_validation(tmp_path / "kf")
    (tmp_path / "mine").mkdir()
    (tmp_path / "link").symlink_to(run)
    refused = {
        tmp_path / "mine": "no run, cross-validation or search", tmp_path / "gone": "no such folder",
        tmp_path / "link": "it is a link", kf / "fold-0": "part of",
    }  # fmt: skip
    for folder, why in refused.items():
        with pytest.raises(ConfigError, match=why):
            invoke("rm", "--yes", run, folder)
    for place in (run, kf / "fold-1"):
        with held_elsewhere(place), pytest.raises(ConfigError, match="another process trains there"):
            invoke("rm", "--yes", run, kf)
    monkeypatch.chdir(run)
    with pytest.raises(ConfigError, match="the current folder"):
        invoke("rm", "--yes", run)
    assert (run / "record.json").is_file(), "nothing of several is deleted where one is refused"
    assert (kf / "kfold.json").is_file()


def test_what_is_on_a_cluster_is_not_deleted_unless_it_is_to_be_forgotten(tmp_path, monkeypatch):
    run, search = a_run(tmp_path / "a", status="running", submitted="20260101-120000-abcd"), tmp_path / "search"
    a_run(a_study(search, "running") / "trials" / "0000", status="running", submitted="20260101-120000-abcd")
    for folder in (run, search):
        with pytest.raises(ConfigError, match=r"it is on a cluster.*runs rm --forget /"):
            invoke("rm", "--yes", folder)
        assert folder.is_dir()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    remote_runs.keep(remote_runs.RemoteRun("20260101-120000-abcd", "http://gone:1", (), str(run), ""))
    invoke("rm", "--yes", "--forget", run, search)
    assert not run.exists()
    assert not search.exists()
    assert remote_runs.known() == []


def test_a_link_in_a_run_is_deleted_and_not_followed(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "file").write_text("kept")
    folder = a_run(tmp_path / "a")
    (folder / "data").symlink_to(tmp_path / "mine")
    (folder / "run.lock").symlink_to(tmp_path / "mine" / "file")
    assert invoke("rm", "--yes", folder).exit_code == 0
    assert (tmp_path / "mine" / "file").read_text() == "kept"
