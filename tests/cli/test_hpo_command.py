"""``hotloop hpo``: its commands, each with a help of its own, and its dry run; searches are made by hand."""

import json
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hotloop.cli import app
from hotloop.errors import ConfigError, RecordError
from hotloop.train.search import command

sys.path.extend(str(Path(__file__).parents[1] / room) for room in ("train", "report"))
from run_folders import a_run, a_study
from training_fixtures import overrides


def invoke(*arguments):
    result = CliRunner().invoke(app, ["hpo", *map(str, arguments)])
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def test_each_command_has_a_help_of_its_own_and_all_else_is_a_search(monkeypatch, tmp_path):
    listed = invoke("--help").stdout
    assert all(f" {name} " in listed for name in ("search", "best", "list", "show"))
    assert "--trial" in invoke("best", "--help").stdout
    assert "--trial" not in invoke("list", "--help").stdout
    assert "--n-trials" in invoke("recipe=digits", "--help").stdout
    monkeypatch.chdir(tmp_path)
    seen = []
    ended = command.Ended("finished", Path("study"), {"trials": [], "best": 3, "left": 0})
    monkeypatch.setattr(command, "search", lambda settings, say: seen.append(settings.hpo.n_trials) or ended)
    for arguments in ((), ("--n-trials", 7), ("search", "hpo.n_trials=8"), ("hpo.n_trials=9", "--quiet")):
        last = invoke(*arguments)
    assert seen == [100, 7, 8, 9]
    assert (last.stdout, last.stderr) == ("finished: best trial 3, study\n", "")


def test_searches_are_listed_and_a_study_is_shown(tmp_path):
    a_study(tmp_path / "search")
    a_run(tmp_path / "run")
    assert [one["kind"] for one in json.loads(invoke("list", tmp_path, "--json").stdout)] == ["search"]
    assert "No search below" in invoke("list", tmp_path / "run").stdout
    named = json.loads((a_study(tmp_path / "s2") / "study.json").read_text()) | {"name": "/home/me/own.py:make/s2"}
    (tmp_path / "s2" / "study.json").write_text(json.dumps(named))
    assert " own.py:make " in invoke("list", tmp_path).stdout
    with pytest.raises(RecordError, match="no readable document of a search"):
        invoke("show", tmp_path / "run")
    with pytest.raises(ConfigError, match="expected the folder of one study"):
        invoke("best", tmp_path / "run", tmp_path / "search")


def test_searches_of_any_program_and_recipe_are_found(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"no search below runs/: `hotloop hpo` begins one"):
        invoke("show")
    a_study(tmp_path / "runs" / "digits" / "search")
    assert invoke("show", "--json").stderr.startswith("Of runs/digits/search\n")
    own = a_study(tmp_path / "runs" / "mine.py-make" / "search")
    document = json.loads((own / "study.json").read_text())
    document["trials"][0] |= {"began": 9.0, "value": 0.7}
    (own / "study.json").write_text(json.dumps(document))
    shown = invoke("show", "--json")
    assert shown.stderr.startswith("Of runs/mine.py-make/search, the last to begin of 2 searches below runs/\n")
    for named, value in ((["mine.py:make"], 0.7), (["recipe=mine.py:make"], 0.7), (["recipe=digits"], 0.9)):
        assert f" {value}" in " ".join(invoke("show", *named).stdout.split()), named
        (row,) = json.loads(invoke("list", *named, "--json").stdout)
        assert row["best"] == value
    with pytest.raises(ConfigError, match=r"runs/mine\.py-make/other holds no study"):
        invoke("best", "mine.py:make", "hpo.name=other")


def test_a_dry_run_checks_a_trial_and_writes_nothing(tmp_path):
    ours = [one for one in overrides(tmp_path) if not one.startswith("run.folder")]
    search = [*ours, "hpo.metric=loss", f"hpo.folder={tmp_path / 'study'}"]
    checked = invoke(*search, "--dry-run", "--json")
    assert checked.exit_code == 0
    assert json.loads(checked.stdout)["status"] == "checked"
    assert "Batch: input_ids int64" in checked.stderr
    for wrong, message in (("hpo.metric=beauty", "hpo.metric=beauty"), ("data.path=missing.csv", "no such file")):
        refused = invoke(*search, wrong, "--dry-run")
        assert refused.exit_code == 2
        assert message in refused.stderr
    assert not (tmp_path / "study").exists()
