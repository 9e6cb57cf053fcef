"""The page and the summary of a search, from its document alone."""

import io
import json

import pytest
from rich.console import Console

from hotloop.errors import RecordError
from hotloop.report import page as pages
from hotloop.report import study, terminal

HOSTILE = "</script><img src=x onerror=alert(1)>{{ 7*7 }}[bold]"


def attempt(number, **more):
    return {
        "number": number, "attempt": 1, "state": "complete", "value": 0.5 + number / 100, "cause": "",
        "values": {"training.learning_rate": 1e-5 * (number + 1), "model.dropout": [0.0, 0.1][number % 2]},
        "reports": [[1, 0.4]], "began": 1.7e9, "seconds": 3.0, "worker": "here 12", **more,
    }  # fmt: skip


def made(attempts, **more):
    return {
        "schema": 1, "kind": "study", "name": "criteria/search", "storage": "sqlite:///x", "written": 1.7e9, "metric": "f1",
        "direction": "maximize", "sampler": "tpe", "pruner": "median", "n_trials": 10, "left": 2,
        "space": {
            "training.learning_rate": {"kind": "log", "values": [1e-5, 1e-3], "step": None, "when": {}},
            "model.dropout": {"kind": "choices", "values": [0.0, 0.1], "step": None, "when": {}},
        },
        "trial_settings": {"training.num_epochs": 1}, "best": 7, "importances": {"training.learning_rate": 0.8},
        "trials": attempts, **more,
    }  # fmt: skip


def drawn(view):
    console = Console(file=io.StringIO(), width=160)
    console.print(terminal.draw(view))
    return console.file.getvalue()


def test_what_is_shown():
    failed = attempt(3, state="failed", value=None, cause="out of memory: no room")
    view = study.build(made([*(attempt(number) for number in range(8) if number != 3), failed]))
    page = pages.render(view)
    for text in ("out of memory: no room", "training.num_epochs=1", "80%", "2 trials left", "Best f1"):
        assert text in page
    assert "out of memory" in drawn(view)
    json.dumps(view.to_dict())


def test_a_trial_of_several_attempts_counts_once_by_the_last_one():
    interrupted = [attempt(number, state="interrupted", value=None) for number in (0, 1)]
    view = study.build(made([*interrupted, attempt(0, attempt=2), attempt(2)], left=1))
    assert view.sentence == "10 trials: 2 complete, 1 interrupted; 1 trial left."


def test_a_search_whose_first_trial_runs_does_not_say_that_none_was_begun():
    assert study.build(made([], left=10)).sentence == "10 trials: none is over yet; 10 trials left."


def test_nothing_in_a_document_acts_as_code():
    values = {"training.learning_rate": 1e-4, HOSTILE: HOSTILE}
    hostile = attempt(7, cause=HOSTILE, worker=HOSTILE, values=values, state=HOSTILE)
    document = made([attempt(0), attempt(7, values=values), hostile], name=HOSTILE, metric=HOSTILE, storage=HOSTILE)
    document["space"] = {HOSTILE: {"kind": "float"}, **document["space"]}
    document["importances"] = {HOSTILE: 0.5}
    view = study.build(document)
    page = pages.render(view)
    assert "<img" not in page
    assert page.count("</script>") == 2
    assert "49" not in page.split("</style>")[1].split('<script type="application/json"')[0].replace("1,749", "")
    assert "[bold]" in drawn(view)


@pytest.mark.parametrize(
    "document", [made([]), made([{}, 3, {"state": None, "value": "nan", "values": []}], space=None, importances=None)]
)
def test_a_study_with_little_or_wrong_in_it_is_shown(document):
    view = study.build(document)
    assert 'id="trials"' in pages.render(view)
    drawn(view)


def test_many_trials_do_not_fill_the_page():
    view = study.build(made([attempt(number) for number in range(5000)], best=4999))
    assert len(view.trials) == study.ROWS
    assert view.trials_left_out == 5000 - study.ROWS
    assert view.trials[-1].best


@pytest.mark.parametrize("text", ["", "[]", '{"schema": 2, "trials": []}', '{"schema": 1}'])
def test_what_is_no_study_is_said(tmp_path, text):
    (tmp_path / "study.json").write_text(text)
    assert study.SCHEMA.is_at(tmp_path)
    with pytest.raises(RecordError, match=r"study\.json"):
        study.SCHEMA.load(tmp_path)
