"""The report of a cross-validation: what it says, and that nothing in its document acts as code or markup."""

import io
import json
import re

import pytest
from rich.console import Console

from hotloop.errors import RecordError
from hotloop.report import folds, terminal
from hotloop.report.page import render, write_view

EVIL = "<script>alert(1)</script>\"'&\x1b[31m[bold]"


def document(**more):
    side = {"rows": 40, "groups": 20, "shares": {"0": 0.5, "1": 0.5}}

    def fold(number, **values):
        compiled = {"running": "inductor", "compiles": 0, "captured": 0, "seconds": 0.0}
        best = {"f1": 0.8 + number / 100, "loss": 0.3}
        known = {"status": "finished", "folder": f"fold-{number}", "best": best, "best_step": 8, "seconds": 2.0}
        return {"fold": number, **known, "compiled": {**compiled, **values.pop("compiled", {})}, **values}

    return {
        "schema": 1, "recipe": "criteria", "status": "finished", "error": None, "created": 1.7e9,
        "settings": {"kfold": {"n_splits": 3}}, "contents": [{"train": side, "validation": side}] * 3,
        "folds": [fold(0, compiled={"compiles": 2, "seconds": 31.0}), fold(1), fold(2)],
        "metrics": {
            "best": {"f1": {"mean": 0.81, "std": 0.01}, "loss": {"mean": 0.3, "std": 0.0}},
            "last": {"f1": {"mean": 0.8, "std": None}},
        },
        **more,
    }  # fmt: skip


def text_of(view):
    console = Console(file=io.StringIO(), width=120)
    console.print(terminal.draw(view))
    return console.file.getvalue()


def test_a_reader_sees_that_the_second_fold_compiled_nothing():
    view = folds.build(document())
    assert view.compiled == "Compiled or captured in fold 0: 2 compiles. Nothing in folds 1, 2."
    assert [(row.compiles, row.captured) for row in view.folds] == [("2", "0"), ("0", "0"), ("0", "0")]
    for shown in (text_of(view), render(view)):
        for said in ("3 of 3 folds finished.", "0.8100", "0.0100", "inductor"):
            assert said in shown
    assert view.compiled in text_of(view)


@pytest.mark.parametrize(
    ("compiled", "said"),
    [
        ([{}, {}, {}], "Nothing was compiled or captured."),
        ([{"captured": 1}, {"captured": 1}, {"captured": 1}], "Compiled or captured in fold 0: 1 captured step; fold 1: 1 captured step; fold 2: 1 captured step."),
        ([{"compiles": 1, "captured": 2}, {}, {"compiles": 1}], "Compiled or captured in fold 0: 1 compile, 2 captured steps; fold 2: 1 compile. Nothing in fold 1."),
    ],
)  # fmt: skip
def test_what_was_compiled_where_is_said(compiled, said):
    known = document()
    for one, more in zip(known["folds"], compiled, strict=True):
        one["compiled"] = {"running": "eager", "compiles": 0, "captured": 0, "seconds": 0.0, **more}
    assert folds.build(known).compiled == said


def test_a_failed_fold_is_said_with_its_cause():
    known = document(status="failed")
    known["folds"][1] = {"fold": 1, "folder": "fold-1", "status": "failed", "error": "out of memory", "chosen": ["a=1"]}
    view = folds.build(known)
    assert view.sentence == "2 of 3 folds finished, 1 failed. Mean and standard deviation are of the 2 that finished."
    assert (view.tone, view.folds[1].tone) == ("bad", "bad")
    for shown in (text_of(view), render(view)):
        assert "out of memory" in shown
        assert "a=1" in shown


def test_nothing_in_a_document_acts_as_code_or_markup():
    known = document(recipe=EVIL, error=EVIL, settings={EVIL: EVIL}, status=EVIL)
    known["folds"][0].update(error=EVIL, chosen=[EVIL], folder=EVIL, best={EVIL: EVIL, "f1": float("nan")})
    known["metrics"]["best"] = {EVIL: {"mean": EVIL}}
    view = folds.build(json.loads(json.dumps(known)))
    page = render(view)
    assert "<script" not in page
    assert "&lt;script&gt;" in page
    assert "script-src" not in page  # what is not named falls to default-src 'none'
    assert "default-src 'none'" in page
    shown = text_of(view)
    assert "\x1b" not in shown
    assert "[bold]" in shown


def test_the_page_needs_nothing_else(tmp_path):
    page = write_view(folds.build(document()), tmp_path / "new" / "report.html").read_text()
    assert not re.search(r"(?:src|href)=\"(?!data:)", page)
    assert [one.name for one in (tmp_path / "new").iterdir()] == ["report.html"]


def test_a_killed_one_is_said_to_be_so():
    view = folds.build(document(status="running", pid=2**22 + 1, host=None))
    assert view.status == "interrupted (killed)"


def test_a_newer_schema_is_refused(tmp_path):
    (tmp_path / "kfold.json").write_text(json.dumps(document(schema=99)))
    with pytest.raises(RecordError, match="schema 99; this version of hotloop reads 1 to 1"):
        folds.load(tmp_path)
    with pytest.raises(RecordError, match="no readable document"):
        folds.load(tmp_path / "nowhere.json")
