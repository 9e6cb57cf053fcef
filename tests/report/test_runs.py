"""Rows of runs, cross-validations and searches: what a list says of whole, torn, killed and foreign folders."""

import json
import shutil

import pytest
from run_folders import a_cross_validation, a_run, a_study

from hotloop.record import RunRecord, load, this_process
from hotloop.report import build, runs

THERE = "20260101-120000-abcd"


def test_a_run_tells_how_it_ended_what_ran_and_its_best(tmp_path):
    row = runs.read(a_run(tmp_path / "run"))
    assert (row.kind, row.status, row.recipe, row.steps, row.tier) == ("run", "finished", "focus", 3, "eager")
    assert (row.metric, row.best) == ("accuracy", 0.9)
    assert (row.figures["accuracy"], row.figures["loss"]) == (0.9, pytest.approx(1.1)), "those of the best validation"
    assert row.settings["training.learning_rate"] == 1e-3
    least = runs.read(a_run(tmp_path / "least", goal="min:loss", accuracies=(0.9, 0.5)))
    assert (least.metric, least.best) == ("loss", pytest.approx(1.1))
    assert runs.read(a_run(tmp_path / "failed", status="failed")).problem == "why it ended"


def test_a_run_that_goes_on_and_one_whose_process_is_gone(tmp_path):
    folder = a_run(tmp_path / "run", status="running")
    assert runs.read(folder).status == "running"
    lines = (folder / "record.jsonl").read_text()
    assert str(this_process()["pid"]) in lines
    (folder / "record.jsonl").write_text(lines.replace(f'"pid": {this_process()["pid"]}', '"pid": 4194305'))
    assert runs.read(folder).status == "killed"


def fetched(folder, status):
    told = {"run": THERE, "address": "http://head:8265", "status": status, "fetched": 1.7e9}
    (folder / runs.FETCHED).write_text(json.dumps(told))


def test_a_run_of_a_cluster_is_not_looked_for_among_the_processes_of_this_machine(tmp_path, monkeypatch):
    folder = a_run(tmp_path / "run", status="running", submitted=THERE)
    lines = (folder / "record.jsonl").read_text()
    (folder / "record.jsonl").write_text(lines.replace(f'"pid": {this_process()["pid"]}', '"pid": 4194305'))
    row = runs.read(folder)
    assert row.status == "on cluster"
    assert f"where it was submitted, `hotloop submit status {THERE}`" in row.place
    fetched(folder, "running")
    row = runs.read(folder)
    assert (row.status, build(load(folder)).headline.status) == ("on cluster", "running on a cluster")
    assert row.place.startswith("on http://head:8265, running at 2023-11-1")
    assert f"`hotloop submit fetch {THERE}`" in row.place
    fetched(folder, "failed")
    row = runs.read(folder)
    assert (row.status, f"`hotloop submit resume {THERE}`" in row.place) == ("killed", True)
    monkeypatch.setenv("HOTLOOP_SUBMITTED", THERE)  # in the run's own job
    assert (runs.read(folder).status, runs.read(folder).place) == ("killed", "")
    monkeypatch.delenv("HOTLOOP_SUBMITTED")
    a_run(folder, status="running")  # it goes on here
    assert (runs.read(folder).status, runs.read(folder).place) == ("running", "")


def test_folds_and_trials_of_a_cluster_are_where_the_whole_is(tmp_path):
    a_run(a_study(tmp_path / "search", "running") / "trials" / "0000", status="running", submitted=THERE)
    fetched(tmp_path / "search", "running")
    for row in (runs.read(tmp_path / "search"), *runs.members(tmp_path / "search")):
        assert (row.status, row.place[:21]) == ("on cluster", "on http://head:8265, ")


def test_what_a_strangers_record_says_of_its_cluster_is_no_command(tmp_path):
    folder = a_run(tmp_path / "run", status="running", submitted="20260101; rm -rf")
    assert runs.read(folder).status == "running"


def test_a_cross_validation_is_judged_by_what_its_folds_are_judged_by(tmp_path):
    folder = a_cross_validation(tmp_path / "kf")
    found = json.loads((folder / "kfold.json").read_text())
    found["metrics"]["best"] = {"loss": {"mean": 0.3}, **found["metrics"]["best"]}
    (folder / "kfold.json").write_text(json.dumps(found))
    for number in (0, 1):  # the goal is the recipe's own, which only measurements name
        shutil.rmtree(folder / f"fold-{number}")
        written = RunRecord(folder / f"fold-{number}")
        written.update("measurements", goal="max:accuracy")
        written.append("metrics", {"step": 1, "split": "validation", "loss": 0.3, "accuracy": 0.8})
        written.finish()
    row = runs.read(folder)
    assert (row.metric, row.best) == ("accuracy", 0.8)


def test_cross_validations_and_searches_are_one_row_and_their_members_another_list(tmp_path):
    a_cross_validation(tmp_path / "kf")
    a_run(a_study(tmp_path / "search") / "trials" / "0000")
    a_run(tmp_path / "deep" / "er" / "run")
    found = {row.folder.name: row for row in runs.find(tmp_path)}
    assert {name: row.kind for name, row in found.items()} == {
        "kf": "cross-validation", "search": "search", "run": "run",
    }  # fmt: skip
    assert (found["kf"].members, found["kf"].metric, found["kf"].best, found["kf"].tier) == (
        2,
        "accuracy",
        0.8,
        "eager",
    )
    assert (found["search"].members, found["search"].best, found["search"].status) == (1, 0.9, "finished")
    assert found["kf"].settings["training.learning_rate"] == 1e-3, "those that a fold read"
    assert {row.folder.name for row in runs.find(tmp_path / "kf")} == {"fold-0", "fold-1"}
    assert [row.folder.name for row in runs.find(tmp_path / "search")] == ["0000"]


def test_a_trial_that_is_open_again_is_not_counted_and_one_of_two_attempts_is_counted_once(tmp_path):
    folder = a_study(tmp_path / "search")
    document = json.loads((folder / "study.json").read_text())
    states = {0: ["died", "complete"], 1: ["failed"], 2: ["interrupted"], 3: ["interrupted", "running"]}
    document["trials"] = [{"number": number, "state": one} for number, each in states.items() for one in each]
    (folder / "study.json").write_text(json.dumps(document))
    assert runs.read(folder).members == 3


def test_a_search_runs_where_one_of_its_trials_does(tmp_path):
    folder = a_study(tmp_path / "search", state="running")
    assert runs.read(folder).status == "finished"
    a_run(folder / "trials" / "0000", status="running")
    assert runs.read(folder).status == "running"


def test_torn_and_foreign_folders_are_listed_with_what_is_wrong(tmp_path):
    torn = {
        "torn": ("record.jsonl", '{"set": {"schema"'), "document": ("record.json", "[]"), "kf": ("kfold.json", "["),
        "study": ("study.json", "{}"), "early": ("settings.yaml", "a: 1"),
        "deep": ("record.json", "[" * 100_000), "binary": ("record.jsonl", "\0\ud800"),
    }  # fmt: skip
    for folder, (name, content) in torn.items():
        (tmp_path / folder).mkdir()
        (tmp_path / folder / name).write_bytes(content.encode("utf-8", "surrogatepass"))
    (tmp_path / "foreign" / "inside").mkdir(parents=True)
    (tmp_path / "foreign" / "notes.txt").write_text("x")
    a_run(tmp_path / "whole")
    with (tmp_path / "whole" / "record.jsonl").open("a") as lines:
        lines.write('{"append": "steps", "en')
    (tmp_path / "link").symlink_to(tmp_path.parent)
    found = {row.folder.name: row for row in runs.find(tmp_path)}
    assert set(found) == {*torn, "whole"}, "a link is not followed, and a folder without a run is left out"
    assert all(found[name].status == "unreadable" and found[name].problem for name in torn)
    assert found["early"].problem == "it was stopped before its first record was written"
    assert found["whole"].problem == "1 line of its record cannot be read"


def test_values_of_other_types_than_expected_are_no_traceback(tmp_path):
    folder = a_run(tmp_path / "run")
    document = json.loads((folder / "record.json").read_text())
    (folder / "record.jsonl").unlink()
    for wrong in (None, [], {}, "x", 1e400, -1, "\x1b[31m", {"a": {"b": [1]}}):
        changed = document | {"created": wrong, "status": wrong, "error": wrong, "pid": wrong, "unread_lines": wrong}
        changed |= {"steps": [{"step": wrong, "running": wrong}], "metrics": [{"split": wrong, "accuracy": wrong}]}
        changed |= {"measurements": {"goal": wrong, "steps_done": wrong, "steady_step_ms": wrong}}
        changed |= {"settings": {"recipe": {"name": wrong, "goal": wrong}}, "components": {"model": {"running": wrong}}}
        (folder / "record.json").write_text(json.dumps(changed))
        assert "\x1b" not in runs.read(folder).status
        (folder / "kfold.json").write_text(
            json.dumps(
                {"schema": 1, "folds": [{"fold": 0, "step": wrong, "compiled": wrong}], "contents": [], "settings": {},
                 "metrics": {"best": {"a": wrong}}, "recipe": wrong, "status": wrong, "created": wrong, "error": wrong}
            )
        )  # fmt: skip
        assert runs.read(folder).kind == "cross-validation"
        (folder / "kfold.json").unlink()
        trial = {"number": wrong, "state": wrong, "value": wrong, "values": wrong, "began": wrong}
        study = {"schema": 1, "trials": [trial, wrong], "best": wrong, "metric": wrong, "name": wrong, "left": wrong}
        (folder / "study.json").write_text(json.dumps(study))
        assert runs.read(folder).kind == "search"
        (folder / "study.json").unlink()
