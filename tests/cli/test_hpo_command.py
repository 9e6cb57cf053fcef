"""``hotloop hpo``: its commands, each with a help of its own, and its dry run; searches are made by hand."""

import json
import sys
from pathlib import Path

from typer.testing import CliRunner

from hotloop.cli import app
from hotloop.train.search import command

sys.path.extend(str(Path(__file__).parents[1] / room) for room in ("train", "report"))
from training_fixtures import overrides


def invoke(*arguments):
    result = CliRunner().invoke(app, ["hpo", *map(str, arguments)])
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def test_each_command_has_a_help_of_its_own_and_all_else_is_a_search(monkeypatch, tmp_path):
    listed = invoke("--help").stdout
    assert all(f" {name} " in listed for name in ("search", "best"))
    assert "--n-trials" not in invoke("best", "--help").stdout
    assert "--n-trials" in invoke("recipe=criteria", "--help").stdout
    monkeypatch.chdir(tmp_path)
    seen = []
    ended = command.Ended("finished", Path("study"), {"trials": [], "best": 3, "left": 0})
    monkeypatch.setattr(command, "search", lambda settings, say: seen.append(settings.hpo.n_trials) or ended)
    for arguments in ((), ("--n-trials", 7), ("search", "hpo.n_trials=8"), ("hpo.n_trials=9", "--quiet")):
        last = invoke(*arguments)
    assert seen == [100, 7, 8, 9]
    assert (last.stdout, last.stderr) == ("finished: best trial 3, study\n", "")


def test_a_dry_run_checks_a_trial_and_writes_nothing(tmp_path):
    ours = [one for one in overrides(tmp_path) if not one.startswith("run.folder")]
    search = [*ours, "hpo.metric=loss", f"hpo.folder={tmp_path / 'study'}"]
    checked = invoke(*search, "--dry-run", "--json")
    assert checked.exit_code == 0
    assert json.loads(checked.stdout)["status"] == "checked"
    for wrong, message in (("hpo.metric=beauty", "hpo.metric=beauty"), ("data.path=missing.csv", "No such file")):
        refused = invoke(*search, wrong, "--dry-run")
        assert refused.exit_code == 2
        assert message in refused.stderr
    assert not (tmp_path / "study").exists()
