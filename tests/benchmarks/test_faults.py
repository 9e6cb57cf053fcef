"""The table of faults: a cell that is wrong is judged so, and the page is what the committed results say."""

import dataclasses
import json
import pathlib
import sys

import pytest

from benchmarks.faults import judging, page
from benchmarks.faults.__main__ import FAULTS, cell
from benchmarks.faults.running import Bench

ROOT = pathlib.Path(__file__).parents[2]
RESULTS = [ROOT / "benchmarks" / "results" / f"2026-11-26-cpu-faults-torch-{torch}.json" for torch in ("2.11", "2.15")]
STATE = {"weight": [[1.0, 2.0], [-0.5, 0.0]], "step": 3}
EAGER = judging.Outcome([1.0, 0.5, 0.25], 0.125, STATE)
SAID = "model: preset default failed (lower): planted\nand goes on"


def judged(losses=(1.0, 0.5, 0.25), final=0.125, output=SAID, codes=(0,), state=STATE, **more):
    ours = judging.Outcome(list(losses), final, state, "aot_eager")
    return judging.judge(ours, EAGER, said="planted", output=output, codes=codes, expected=(0,), **more)


def test_a_run_that_lived_said_and_is_equal():
    found = judged()
    assert found.right
    assert (found.equal, found.said, found.trouble) == ("bits", "printed", "")
    assert found.line == "model: preset default failed (lower): planted"
    assert judged(losses=(1.0, None, 0.25), unseen=1).equal == "bits", "interrupted once it was done: it has no loss"
    assert judged(final=0.125001).equal == "rounding"
    assert judged(state={**STATE, "weight": [[1.0, 2.0], [-0.5, 1e-4]]}).equal == "rounding"


def test_a_traceback_is_right_only_where_the_fault_says_why():
    output = f"{SAID}\nTraceback (most recent call last):\n  ...\nRuntimeError: planted"
    assert not judged(output=output).right
    assert judged(output=output, raises="it is the user's own").right
    assert judged(output=output, raises="it is the user's own").raised == "it is the user's own"
    assert judged(raises="it is the user's own").raised == "", "none was printed"


@pytest.mark.parametrize(
    ("wrong", "as_documented", "said", "equal"),
    [
        ({"codes": (1,)}, False, "printed", "bits"),
        ({"codes": (0, 0)}, False, "printed", "bits"),
        ({"losses": (1.0, 0.5)}, False, "printed", ""),
        ({"losses": (1.0, 0.5, 0.26)}, True, "printed", ""),
        ({"losses": (1.0, 0.5, float("nan"))}, True, "printed", ""),
        ({"final": 0.5}, True, "printed", ""),
        ({"losses": (1.0, None, 0.25)}, True, "printed", ""),
        ({"state": {**STATE, "weight": [[1.0, 2.0], [-0.5, 0.001]]}}, True, "printed", ""),
        ({"state": {**STATE, "step": 4}}, True, "printed", ""),
        ({"state": {"step": 3}}, True, "printed", ""),
        ({"output": "12 steps"}, True, "", "bits"),
        ({"runs": "default"}, False, "printed", "bits"),
    ],
    ids=str,
)
def test_what_is_wrong_is_judged_so(wrong, as_documented, said, equal):
    found = judged(**wrong)
    assert (found.as_documented, found.said, found.equal) == (as_documented, said, equal)
    assert not found.right
    assert found.trouble
    shown = page.outcome(dataclasses.asdict(found))
    assert shown.startswith("**")
    assert ("died" in shown, "silent" in shown, "differs" in shown) == (not as_documented, not said, not equal)


def test_a_run_that_left_nothing_died():
    found = judging.judge(None, EAGER, said="", output="", codes=(-9,), expected=(-9,))
    assert not found.as_documented
    assert page.outcome(dataclasses.asdict(found)).startswith("**died")


@pytest.mark.campaign
def test_one_fault_in_one_way(tmp_path):
    """By real processes, with this torch; then the same with an eager run that trained otherwise."""
    fault, bench = FAULTS["dynamo"], Bench(sys.executable, tmp_path)
    row = cell(fault, "compile", bench)
    assert (row["right"], row["equal"], row["said"], row["codes"]) == (True, "bits", "printed", (0,)), row
    assert "planted: a bug in dynamo" in row["line"]
    eager = bench.eager(fault, "compile")
    assert len(eager.losses) == 12
    assert {"into.weight", "norm.running_var", "optimizer 0 exp_avg"} <= set(eager.state)
    ours = judging.left_by(tmp_path / "compile-0", "compile")
    other = dataclasses.replace(eager, losses=[*eager.losses[:-1], eager.losses[-1] * 1.01])
    found = judging.judge(ours, other, said=fault.said, output="", codes=(0,), expected=(0,))
    assert (found.as_documented, found.said, found.equal) == (True, "status", "")
    other = dataclasses.replace(eager, state={**eager.state, "norm.running_var": [2.0] * 16})
    assert judging.equality(ours, other) == ""


def test_a_way_that_a_fault_does_not_concern_has_its_reason(tmp_path):
    row = cell(FAULTS["kill"], "loop", Bench(sys.executable, tmp_path))
    assert "no folder of its own" in row["not_here"]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("result", RESULTS, ids=lambda path: path.stem)
def test_every_fault_was_run_in_every_way(result):
    rows = json.loads(result.read_text(encoding="utf-8"))["rows"]
    assert {(row["fault"], row["way"]) for row in rows} == {(name, way) for name in FAULTS for way in page.WAYS}
    assert [row["fault"] for row in rows if not row.get("right", row.get("not_here"))] == []
    assert {row["fault"] for row in rows if row.get("not_here", "").startswith("needs")} == set()


def test_the_page_is_made_of_the_results(tmp_path):
    text = (ROOT / "docs" / "evidence" / "faults.md").read_text(encoding="utf-8")
    before, rest = text.split(page.BEGIN)
    (tmp_path / "faults.md").write_text(f"{before}{page.BEGIN}{page.END}{rest.split(page.END)[1]}", encoding="utf-8")
    page.write(tmp_path / "faults.md", RESULTS)
    assert (tmp_path / "faults.md").read_text(encoding="utf-8") == text
    made = text.split(page.END)[0].split(page.BEGIN)[1]
    assert not [word for word in ("**died", "silent**", "differs**") if word in made]


@pytest.mark.parametrize(
    ("codes", "shown"),
    [
        ((0,), "equal"),
        ((1, 0), "equal, ended (exit code 1), then 0"),
        ((2, 0), "equal, refused (exit code 2), then 0"),
        ((-9, 2, 0), "equal, killed, refused (exit code 2), then 0"),
    ],
    ids=str,
)
def test_a_run_that_ended_and_was_resumed_is_not_shown_as_one_that_lived(codes, shown):
    row = dataclasses.asdict(judging.Cell(True, "nothing to say", "bits", codes))
    assert page.outcome(row) == shown
