import json

import pytest
from report_documents import HOSTILE, fresh

from hotloop.report import build
from hotloop.report.page import render

WAYS = {
    "eager": {"step_ms": 10.0, "cold_seconds": 1.0},
    "full": {"step_ms": 5.0, "cold_seconds": 21.0},
    "eager+graph": {"failed": "captured on a GPU only"},
}
BENCH = {
    "verdict": "At 8,000 steps: full, 1.3x in all.",
    "stretches": [{"first": 0, "way": "eager"}, {"first": 4001, "way": "full"}],
}


def document(ways=WAYS, bench=BENCH, **settings):
    return fresh(measurements={"ways": ways, "bench": bench}, settings=settings)


def test_each_way_is_a_line_of_total_time_and_the_overtaking_is_marked():
    (chart,) = build(document(total_steps=8000)).charts
    assert (chart.key, chart.names, chart.apart) == ("ways", ["eager", "full"], True)
    assert chart.steps[0] == 0
    assert chart.steps[-1] == 8000
    at = chart.steps.index(4001)
    eager, full = chart.columns
    assert (eager[0], full[0]) == (1.0, 21.0)
    assert eager[at] == pytest.approx(41.01)
    assert full[at] == pytest.approx(41.005)
    assert [(mark.step, mark.kind, mark.reasons) for mark in chart.marks] == [
        (4001, "overtakes", ("full takes the least time",))
    ]


def test_speeds_that_were_measured_in_pairs_are_taken_for_the_lines_and_the_table():
    paired = {"step_ms": 5.0, "cold_seconds": 21.0, "paired_ms": 8.0, "speed": 1.25, "difference": "none"}
    view = build(document({"eager": WAYS["eager"], "full": paired}, total_steps=8000))
    assert view.charts[0].columns[1][-1] == pytest.approx(21 + 64)
    assert [row.against for row in view.ways] == ["1x", "1.25x (within noise)"]


def test_without_planned_steps_the_chart_reaches_past_the_overtaking():
    assert build(document()).charts[0].steps[-1] == 6002
    assert build(document(total_steps=100)).charts[0].marks == [], "it lies beyond the run"
    assert build(document(bench=None)).charts[0].steps[-1] == 1000


def test_the_verdict_stands_on_the_page_and_the_figures_in_no_other_table():
    view = build(document(total_steps=8000))
    assert view.diagnosis == BENCH["verdict"]
    assert not [key for key, _ in view.measurements if "ways" in key.lower() or "bench" in key.lower()]
    page = render(view)
    assert "<h2>Ways to run it</h2>" in page
    assert BENCH["verdict"] in page


@pytest.mark.parametrize(
    "ways",
    [
        None,
        3,
        {},
        {"eager": {"step_ms": 1.0}},
        {"eager": 3, "full": [1]},
        {"eager": {"step_ms": "nan"}, "full": {"step_ms": 2.0}},
    ],
)
def test_fewer_than_two_lines_are_no_chart(ways):
    assert build(document(ways)).charts == []


def test_hostile_records_do_no_harm():
    bench = {"verdict": HOSTILE, "stretches": [HOSTILE, {"first": HOSTILE, "way": 3}, {"first": 1e300, "way": HOSTILE}]}
    found = document({HOSTILE: {"step_ms": 1.0, "cold_seconds": HOSTILE}, "b": {"step_ms": 2.0}}, bench, total_steps=10)
    view = build(found)
    assert json.dumps(view.to_dict())
    assert HOSTILE not in render(view)
    bench["stretches"] = HOSTILE
    assert len(build(found).charts) == 1
