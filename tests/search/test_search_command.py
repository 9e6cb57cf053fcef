"""The command: its workers, what kills and interrupts leave, and a search of real runs."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from shared import is_gone, once
from training_fixtures import overrides
from typer.testing import CliRunner

from hotloop import recipes, record
from hotloop.cli import app
from hotloop.report import study as study_report
from hotloop.train import configure, start
from hotloop.train.search import document


@pytest.fixture
def run():
    def invoke(*arguments):
        return CliRunner().invoke(app, [str(one) for one in arguments])

    return invoke


def tiny(folder, **more):
    given = {"hpo__folder": folder / "study", "hpo__metric": "loss", "hpo__sampler": "random", **more}
    chosen = [one for one in overrides(folder, **given) if not one.startswith("run.folder=")]
    ranges = ["hpo.space.training.batch_size.choices=[3,4]", "hpo.space.training.learning_rate.log=[2.0e-5,3.0e-4]"]
    return [*chosen, *ranges, "hpo.space.model=null"]


def states(tmp_path):
    return [(one["number"], one["state"]) for one in document.refresh(tmp_path / "study")[0]["trials"]]


def test_a_search_of_real_runs_from_its_command_to_the_final_run(tmp_path, run, monkeypatch):
    monkeypatch.chdir(tmp_path)
    command = ["hpo", "--n-trials", 3, *tiny(tmp_path, hpo__pruner="median", hpo__startup_trials=1)]
    done = run(*command)
    assert done.exit_code == 0, done.output
    assert "trial 2" in done.stderr
    assert "hotloop train --config" in done.stdout
    study = tmp_path / "study"
    found = study_report.SCHEMA.load(study)
    assert [one["number"] for one in found["trials"]] == [0, 1, 2]
    for one in found["trials"]:
        folder = study / "trials" / f"{one['number']:04d}"
        assert (record.load(folder)["status"] == "pruned") == (one["state"] == "pruned")
        assert (folder / "checkpoints" / "best.pt").exists() == (one["number"] == found["best"])
        rate = configure.load(config=folder / "settings.yaml").training.learning_rate
        assert rate == one["values"]["training.learning_rate"]
    best = run("hpo", "best", study)
    assert best.stdout == (study / "best.yaml").read_text()
    values = json.loads(run("hpo", "best", study, "--json").stdout)["values"]
    final = start.prepare([f"run.folder={tmp_path / 'final'}"], study / "best.yaml")
    assert final.settings.training.learning_rate == values["training.learning_rate"]
    assert final.settings.training.checkpoint_every_steps == 100, "trials' own settings are not the final run's"
    assert recipes.load("criteria").train(final).status == "finished"
    trained = min(one["loss"] for one in record.load(tmp_path / "final")["metrics"])
    value = next(one["value"] for one in found["trials"] if one["number"] == found["best"])
    assert trained == pytest.approx(value, rel=1e-6), "the final run is the best trial's"
    assert "Best loss" in run("report", study).stdout
    assert "began" not in run(*command).stderr, "everything is done"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["hpo.metric=los"], "hpo.metric=los"),
        (["hpo.space.training.learning_rat={log: [1e-5, 1e-3]}"], "learning_rat"),
        (["run.folder=x"], "run.folder and run.resume belong to a run"),
        (["hpo.sampler=grid"], "has no end of values"),
        (["data.path=nowhere.csv"], "nowhere.csv"),
    ],
)
def test_bad_input_is_refused_before_anything_is_written(tmp_path, run, monkeypatch, arguments, said):
    monkeypatch.chdir(tmp_path)
    given = {name: value for name, _, value in (one.partition("=") for one in arguments)}
    base = [one for one in tiny(tmp_path) if one.partition("=")[0] not in given]
    refused = run("hpo", *base, *arguments)
    assert said in str(refused.exception)
    assert not (tmp_path / "study").exists()


def test_a_worker_that_dies_is_replaced_and_its_trial_run_again_with_its_values(search):
    ended, lines = search("kills_its_worker_once", hpo__n_trials=4)
    assert ended.status == "finished"
    trials = ended.document["trials"]
    assert [one["state"] for one in trials].count("complete") == 4
    dead = next(one for one in trials if one["state"] == "interrupted")
    again = next(one for one in trials if one["attempt"] == 2)
    assert dead["values"] == again["values"]
    assert any("worker 1 died (SIGKILL)" in line for line in lines)


def test_a_trial_that_kills_every_worker_has_failed(search):
    ended, _ = search("always_kills", hpo__n_trials=4)
    failed = [one for one in ended.document["trials"] if one["state"] == "failed"]
    assert [(one["cause"], one["attempt"]) for one in failed] == [("its worker died", 3)]
    assert sum(one["state"] == "complete" for one in ended.document["trials"]) == 3


def test_workers_share_a_study_and_draw_no_value_twice(search):
    ended, _ = search("meets_another", hpo__n_trials=8, hpo__workers=2)
    complete = [one for one in ended.document["trials"] if one["state"] == "complete"]
    assert 8 <= len(complete) <= 9
    assert len({one["values"]["training.learning_rate"] for one in complete}) == len(complete)
    assert len({one["worker"] for one in complete}) == 2


def begun(tmp_path, trial=1, **named):
    """Start a search as a process of its own, and wait for a trial; from the third on they wait for the test."""
    program = (
        "import sys; from hotloop.train import configure; from hotloop.train.search import command\n"
        "e = command.search(configure.load(sys.argv[2:]), lambda line: print(line, flush=True), sys.argv[1])\n"
        "print('ended', e.status, flush=True); sys.exit(130 * (e.status == 'interrupted'))"
    )
    chosen = {"hpo.folder": tmp_path / "study", "hpo.sampler": "random", "hpo.pruner": "none", "hpo.n_trials": 6}
    process = subprocess.Popen(
        [
            sys.executable, "-c", program, "search_objectives:waits_for_a_kill",
            *(f"{key}={value}" for key, value in {**chosen, **named}.items()),
        ],
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    once((tmp_path / "study" / "trials" / f"{trial:04d}" / "began").exists)
    return process


def test_ctrl_c_stops_and_the_same_command_goes_on(tmp_path, search):
    process = begun(tmp_path, trial=2)
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=900)[0].endswith("ended interrupted\n")
    assert process.returncode == 130
    assert {state for _, state in states(tmp_path)} == {"complete", "interrupted"}
    ended, _ = search("quadratic", hpo__n_trials=6)
    assert sum(one["state"] == "complete" for one in ended.document["trials"]) == 6


def test_kill_9_of_the_first_process_ends_its_workers_and_loses_nothing_else(tmp_path, search):
    process = begun(tmp_path, trial=2, **{"hpo.workers": 2})
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    process.kill()
    process.communicate()
    once(lambda: all(is_gone(int(one)) for one in children))
    done = [one for one in states(tmp_path) if one[1] == "complete"]
    ended, _ = search("quadratic", hpo__n_trials=6)
    after = [(one["number"], one["state"]) for one in ended.document["trials"]]
    assert [one for one in after if one in done] == done
    assert sum(state == "complete" for _, state in after) == 6
    assert "running" not in [state for _, state in after]
