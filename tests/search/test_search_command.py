"""The commands, with a tiny recipe and real processes: what people type, kill and read."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from shared import is_gone, once
from training_fixtures import overrides
from typer.testing import CliRunner

from hotloop import recipes, record
from hotloop.cli import app
from hotloop.errors import ConfigError, DataError, RunPrunedError, SearchStoppedError
from hotloop.report import study as study_report
from hotloop.train import configure, start, supervised
from hotloop.train.search import before, document, supervise
from hotloop.train.search.study import Study
from hotloop.train.search.told import Said, SearchBegan, TrialBegan, TrialEnded
from hotloop.train.search.work import Worker

pytestmark = pytest.mark.campaign  # real processes, some of which are killed


@pytest.fixture
def run():
    def invoke(*arguments):
        result = CliRunner().invoke(app, [str(one) for one in arguments])
        if result.exception and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result

    return invoke


def tiny(folder, **more):
    """A search of runs that take a second."""
    chosen = [one for one in overrides(folder) if not one.startswith("run.folder")]
    ours = {
        "hpo.folder": folder / "study", "hpo.sampler": "random", "hpo.metric": "loss",
        "hpo.space.training.batch_size.choices": "[3,4]", "hpo.space.training.learning_rate.log": "[2.0e-5,3.0e-4]",
        **{name.replace("__", "."): value for name, value in more.items()},
    }  # fmt: skip
    return [*chosen, *(f"{name}={value}" for name, value in ours.items())]


@pytest.mark.parametrize("pruned", [False, True])
def test_a_wish_to_stop_in_a_trials_last_validation_keeps_its_result_and_ends_the_worker(tmp_path, monkeypatch, pruned):
    act, report = supervised.evaluate, Worker.report

    def acting(*given):
        signal.raise_signal(signal.SIGINT)
        return act(*given)

    def pruning(self, taken, step, value):
        report(self, taken, step, value)
        if pruned:
            raise RunPrunedError("planted")

    monkeypatch.setattr(supervised, "evaluate", acting)
    monkeypatch.setattr(Worker, "report", pruning)
    settings = configure.load(tiny(tmp_path, hpo__n_trials=3, hpo__pruner="none", training__max_steps=1))
    study, heard = Study(settings, tmp_path / "study", print), []
    with pytest.raises(KeyboardInterrupt):
        Worker(study, heard.append).run()
    ended = [one.state for one in heard if isinstance(one, TrialEnded)]
    assert ended == ["pruned" if pruned else "complete"]
    study.storage.close()


def test_a_worker_that_swallowed_its_interrupt_is_asked_again(tmp_path, search):
    def wish():
        while not (tmp_path / "study" / "trials" / "0000" / "waits").exists():
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=wish, daemon=True).start()
    ended, _ = search("swallows_the_first_interrupt")
    assert ended.status == "interrupted"
    assert [one["state"] for one in ended.document["trials"]] == ["complete", "interrupted"]


def test_a_search_of_real_runs_from_its_command_to_the_final_run(tmp_path, run):
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        done = run("hpo", "--n-trials", 3, *tiny(tmp_path, hpo__pruner="median", hpo__startup_trials=1))
    assert done.exit_code == 0, done.output
    assert "trial 2" in done.stderr
    assert "hotloop train --config" in done.stdout
    study = tmp_path / "study"
    found = study_report.SCHEMA.load(study)
    assert [one["number"] for one in found["trials"]] == [0, 1, 2]
    by_state = {record.load(study / "trials" / f"{n:04d}")["status"] for n in range(3)}
    assert by_state <= {"finished", "pruned"}
    for one in found["trials"]:
        folder = study / "trials" / f"{one['number']:04d}"
        assert (record.load(folder)["status"] == "pruned") == (one["state"] == "pruned")
        assert (folder / "checkpoints" / "best.pt").exists() == (one["number"] == found["best"])
        assert (
            configure.load(config=folder / "settings.yaml").training.learning_rate
            == one["values"]["training.learning_rate"]
        )
    best = run("hpo", "best", study)
    assert best.stdout == (study / "best.yaml").read_text()
    values = json.loads(run("hpo", "best", study, "--json").stdout)["values"]
    final = start.prepare([f"run.folder={tmp_path / 'final'}"], study / "best.yaml")
    assert final.settings.training.learning_rate == values["training.learning_rate"]
    assert final.settings.training.checkpoint_every_steps == 100, "what was for trials alone is not the final run's"
    assert recipes.load("criteria").train(final).status == "finished"
    trained = min(one["loss"] for one in record.load(tmp_path / "final")["metrics"])
    value = next(one["value"] for one in found["trials"] if one["number"] == found["best"])
    assert trained == pytest.approx(value, rel=1e-6), "the final run is the best trial's"
    shown = run("report", study)
    assert "Best loss" in shown.stdout
    assert (study / "report.html").stat().st_size > 1000
    again = run("hpo", "--n-trials", 3, *tiny(tmp_path, hpo__pruner="median", hpo__startup_trials=1))
    assert "began" not in again.stderr, "everything is done"


def test_a_record_of_a_pruned_run_says_so(tmp_path):
    from hotloop.errors import RunPrunedError
    from hotloop.train.within import Within

    def enough(step, epoch, metrics):
        raise RunPrunedError("not worth going on with")

    begun = start.prepare(overrides(tmp_path))
    with pytest.raises(RunPrunedError):
        recipes.load("criteria").train(start.Start(begun.settings, begun.folder, within=Within(validated=enough)))
    found = record.load(tmp_path / "run")
    assert (found["status"], found["error"]) == ("pruned", "not worth going on with")
    assert found["metrics"]


OWN = ["recipe=program.py:make", "hpo.metric=score", "hpo.space.training.num_epochs.int=[1,3]"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["hpo.space.training.lr={log: [1, 2]}"], r"hpo\.space\.training\.lr: unknown setting"),
        (["hpo.sampler=annealing"], "tpe or gp or cmaes"),
        (["hpo.storage=mysql://u@h/d"], "expected postgresql://"),
        (["hpo.storage=nonsense"], r"hpo\.storage"),
        (["hpo.n_trials=0"], "at least 1"),
        (["run.folder=x"], r"hpo\.folder"),
        (["recipe=program.py:make", "hpo.metric=score"], r"hpo\.space is empty: .*training\.num_epochs"),
        (
            [OWN[0], "hpo.metric=score", "hpo.space.training.learning_rate.log=[1e-5,1e-3]"],
            r"hpo\.space\.training\.learning_rate: a program of your own has no training\.learning_rate: it has training",
        ),
        (
            [*OWN, "hpo.metric=mishits", "hpo.direction=maximize", "recipe.goal=min:mishits"],
            r"would maximize mishits: set hpo\.direction=minimize, or leave it out",
        ),
        (
            [OWN[0], OWN[2]],
            r"hpo\.metric is not set, and recipe=.*program\.py:make has no goal: .* recipe\.goal=max:accuracy",
        ),
        ([OWN[0], OWN[2], "recipe.goal=accuracy"], r"recipe\.goal='accuracy': expected max:<metric>"),
        ([OWN[0], OWN[2], "recipe.goal=max:a", "hpo.also=[min:a]"], r"hpo\.also='min:a': .* not hpo\.metric again"),
        ([*OWN, "hpo.trial.data.sample_size=9"], r"hpo\.trial\.data\.sample_size: a program of your own has no data"),
        (["best"], r"there is no search below runs/"),
        (["best", "recipe=criteria"], r"runs/criteria/search holds no study"),
        (["best", "recipe=digits", "hpo.name=mine"], r"runs/digits/mine holds no study"),
        (["best", "--fast"], r"runs/criteria/fast holds no study"),
        (["best", "here", "there"], "the folder of one study"),
        (["best", "nowhere"], "holds no study"),
    ],
)
def test_bad_input_is_refused_before_anything_is_written(tmp_path, run, monkeypatch, arguments, said):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "program.py").write_text("def make(): pass\n")
    with pytest.raises(ConfigError, match=said):
        run("hpo", *arguments)
    assert {one.name for one in tmp_path.iterdir()} <= {"program.py", "__pycache__"}


def test_a_file_that_is_not_there_burns_no_trial(tmp_path, run, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match=r"data\.path=missing\.csv: no such file"):
        run("hpo", "data=csv", "data.path=missing.csv", "--n-trials", 5)
    assert list(tmp_path.iterdir()) == []


def test_a_search_without_a_complete_trial_is_a_failed_one(run, monkeypatch):
    ended = supervise.Ended("finished", Path("study"), {"trials": [], "best": None, "left": 0})
    monkeypatch.setattr(supervise, "search", lambda settings, tell: ended)
    assert run("hpo").exit_code == 1


def test_in_a_submitted_job_a_search_names_the_commands_of_the_users_machine(run, monkeypatch):
    monkeypatch.setenv("HOTLOOP_SUBMITTED", "20261126-120000-abcd")
    ended = supervise.Ended("out of time", Path("study"), {"trials": [], "best": 0, "left": 2})
    monkeypatch.setattr(supervise, "search", lambda settings, tell: ended)
    assert run("hpo").stdout == (
        "Search out of time: no trial\nBest: trial 0. Its settings are fetched as best.yaml\n"
        "2 trials are left: hotloop submit resume 20261126-120000-abcd\n"
    )


def test_fast_says_what_it_changes(tmp_path, run, monkeypatch):
    seen = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(supervise, "search", lambda settings, tell: seen.append(settings) or _ended(settings))
    for command in (["hpo", "--fast"], ["hpo_fast"]):
        result = run(*command)
        assert "In trials alone: training.checkpoint_every_steps=null training.num_epochs=3" in result.stderr
        assert "data.sample_size=2000" in result.stderr
    assert [one.hpo.name for one in seen] == ["fast", "fast"]


@pytest.mark.parametrize("choice", [["focus"], ["program.py:make", *OWN[1:]]])
def test_fast_goes_with_recipes_that_read_no_sample(run, monkeypatch, tmp_path, choice):
    seen = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(supervise, "search", lambda settings, tell: seen.append(settings) or _ended(settings))
    (tmp_path / "program.py").write_text("def make(): pass\n")
    assert "sample_size" not in run("hpo_fast", f"recipe={choice[0]}", *choice[1:]).stderr
    before.check(seen[0])


def _ended(settings):
    return supervise.Ended("finished", Path(settings.hpo.folder), {"trials": [], "best": 0, "left": 0})


def test_no_such_metric_of_a_recipe_is_known_before_anything_is_written(tmp_path, run):
    with pytest.raises(ConfigError, match=r"hpo\.metric=beauty: a validation of recipe criteria gives .*f1"):
        run("hpo", *tiny(tmp_path, hpo__metric="beauty"))
    assert list(tmp_path.rglob("study*")) == []


def test_no_such_metric_of_a_program_ends_the_search_at_once(tmp_path, run, monkeypatch):
    monkeypatch.setattr(before, "METRICS", {})  # as little is known of a recipe then as of a program
    with pytest.raises(SearchStoppedError, match=r"hpo\.metric=beauty: a validation of recipe criteria gives .*f1"):
        run("hpo", *tiny(tmp_path, hpo__metric="beauty"))
    assert states(tmp_path) == [(0, "interrupted")], "no trial is burnt"


def test_a_worker_that_dies_is_replaced_and_its_trial_run_again(search):
    ended, heard = search("kills_its_worker_once", hpo__n_trials=3)
    assert [one["state"] for one in ended.document["trials"]] == ["complete", "died", "complete", "complete"]
    assert [(one.number, one.attempt) for one in heard if isinstance(one, TrialBegan)] == [
        (0, 1),
        (1, 1),
        (1, 2),
        (2, 1),
    ]
    assert any("SIGKILL" in one.text for one in heard if isinstance(one, Said))


def test_a_worker_hears_its_settings_in_private(search, monkeypatch):
    started, popen = [], subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", lambda command, **how: started.append(command) or popen(command, **how))
    ended, _ = search("quadratic", hpo__n_trials=1)
    assert ended.document["best"] == 0
    assert [one[-1] for one in started] == ["hotloop.train.search.worker"]


def test_a_study_can_be_read_from_its_first_moment(compose):
    seen = []

    def tell(what):
        if isinstance(what, SearchBegan):
            folder = Path(compose().hpo.folder)
            seen.append(
                (study_report.SCHEMA.load(folder)["left"], configure.load(config=folder / "study.yaml").hpo.n_trials)
            )

    supervise.search(compose(hpo__n_trials=1), tell, "search_objectives:quadratic")
    assert seen == [(1, 1)]


def test_settings_with_a_password_are_for_their_owner_alone(compose, tmp_path):
    for storage, mode in (("null", 0o644), ("'postgresql://me:s3cret@host/db'", 0o600)):
        document.write_settings(compose(hpo__storage=storage), tmp_path)
        assert (tmp_path / "study.yaml").stat().st_mode & 0o777 & ~0o022 == mode & ~0o022
        assert list(tmp_path.iterdir()) == [tmp_path / "study.yaml"]


def test_workers_share_a_study(search):
    ended, heard = search("meets_another", hpo__n_trials=8, hpo__workers=2)
    assert sorted(one.number for one in heard if isinstance(one, TrialEnded)) == list(range(8))
    assert {one.worker for one in heard if isinstance(one, TrialEnded)} == {1, 2}
    assert ended.status == "finished"


def begun(tmp_path, trial=1, **named):
    """Start a search as a process of its own, and wait for a trial; from the third on they wait for the test."""
    program = (
        "import sys; from hotloop.train import configure; from hotloop.train.search import supervise, told\n"
        "e = supervise.search(configure.load(sys.argv[2:]), lambda w: print(told.line(w), flush=True), sys.argv[1])\n"
        "print('ended', e.status, flush=True); sys.exit(130 * (e.status == 'interrupted'))"
    )
    chosen = {
        "hpo.folder": tmp_path / "study",
        "hpo.sampler": "random",
        "hpo.pruner": "none",
        "hpo.n_trials": 6,
        **named,
    }
    process = subprocess.Popen(
        [sys.executable, "-c", program, "search_objectives:waits_for_a_kill", *(f"{k}={v}" for k, v in chosen.items())],
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    lines = []
    while not any(f"trial {trial} began" in one for one in lines):
        lines.append(process.stdout.readline())
        assert lines[-1], "it ended"
    return process, lines


def states(tmp_path):
    return [(one["number"], one["state"]) for one in document.refresh(tmp_path / "study")[0]["trials"]]


def test_ctrl_c_stops_and_the_same_command_goes_on(tmp_path, search):
    process, _ = begun(tmp_path, trial=2)
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=900)[0].endswith("ended interrupted\n")
    assert process.returncode == 130
    before = states(tmp_path)
    assert "interrupted" in [state for _, state in before]
    assert "running" not in [state for _, state in before]
    search("quadratic", hpo__n_trials=6)
    after = [number for number, state in states(tmp_path) if state == "complete"]
    assert sorted(after) == list(range(6))


def test_kill_9_of_the_first_process_ends_its_workers_and_loses_nothing_else(tmp_path, search):
    process, _ = begun(tmp_path, **{"hpo.workers": 2})
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    process.kill()
    process.communicate()
    once(lambda: all(is_gone(int(one)) for one in children))
    done = [one for one in states(tmp_path) if one[1] == "complete"]
    search("quadratic", hpo__n_trials=6)
    after = states(tmp_path)
    assert [one for one in after if one in done] == done
    assert sorted(number for number, state in after if state == "complete") == list(range(6))
    assert len(after) <= 8


def test_a_server_that_goes_away_is_said_and_the_command_goes_on(tmp_path, postgresql, search, monkeypatch):
    url = f"'{postgresql.url}'"
    process, lines = begun(tmp_path, **{"hpo.storage": url, "hpo.name": "away"})
    postgresql.stop()
    (tmp_path / "study" / "go").touch()  # which has a trial to end, where none was at its end already
    try:
        while not any("does not answer" in one for one in lines):
            lines.append(process.stdout.readline())
            assert lines[-1], "it ended"
    finally:
        postgresql.start()
    rest = process.communicate(timeout=900)[0]
    assert rest.endswith("ended finished\n")
    found = states(tmp_path)
    assert [number for number, state in found if state == "complete"] == list(range(6)), "nothing is lost"


def test_optuna_dashboard_reads_the_storage(search, tmp_path):
    import optuna_dashboard
    from search_wsgi import get

    search("quadratic", hpo__n_trials=2)
    import optuna

    storage = optuna.storages.RDBStorage(f"sqlite:///{tmp_path / 'study' / 'study.db'}")
    try:
        status, body = get(optuna_dashboard.wsgi(storage), "/api/studies")
    finally:
        storage.remove_session()
        storage.engine.dispose()
    assert status.startswith("200")
    assert [one["study_name"] for one in json.loads(body)["study_summaries"]] == ["criteria/search"]


def test_a_full_disk_is_said_and_nothing_is_lost(tmp_path, search):
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = os.geteuid() == 0 and shutil.which("mount")
    made = mounted and subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", disk], check=False, capture_output=True
    )
    if not made or made.returncode:
        pytest.skip("no small disk can be mounted here")
    try:
        search("quadratic", hpo__folder=disk / "study", hpo__n_trials=2)
        (disk / "ballast").write_bytes(bytes(shutil.disk_usage(disk).free))
        with pytest.raises(SearchStoppedError, match=r"full|disk I/O|No space"):
            search("quadratic", hpo__folder=disk / "study", hpo__n_trials=400)
        (disk / "ballast").unlink()
        ended, _ = search("quadratic", hpo__folder=disk / "study", hpo__n_trials=4)
        assert sorted(one["number"] for one in ended.document["trials"] if one["state"] == "complete")[:4] == [
            0,
            1,
            2,
            3,
        ]
    finally:
        subprocess.run(["umount", "-l", disk], check=True)
