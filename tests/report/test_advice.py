import io

import pytest
from report_documents import FILE, HOSTILE, fresh
from rich.console import Console

from hotloop.diagnose import Advice
from hotloop.remedies import REMEDIES
from hotloop.report import build, write_html
from hotloop.report.advice import ROWS
from hotloop.report.terminal import draw, draw_diagnosis

WAYS = {
    "eager": {"step_ms": 12.0, "peak_bytes": 2**30},
    "default": {"step_ms": 10.0, "step_ms_low": 9.5, "step_ms_high": 10.75, "cold_seconds": 31.0, "peak_bytes": 2**30},
    "as given": {"step_ms": 9.0, "cold_seconds": 3.0, "cache_hits": 4},
    "default by blocks": {"failed": "CUDA out of memory"},
}
BREAK = Advice(
    rule="graph_break",
    what="The step breaks in two.",
    change="keep the value a tensor",
    cause="a tensor is read in Python",
    component="model",
    file=FILE,
    line=41,
    source="if loss.item() > 3:",
    milliseconds=0.8,
    compiles=2,
    nbytes=2**20,
    times=3,
)
COLD = Advice(
    rule="cold_cache", what="Nothing was cached.", change="keep the cache folder", seconds=20.0, remedy="tier"
)


def diagnosed(**fields):
    found = [BREAK.to_dict(), COLD.to_dict()]
    return fresh(**{"settings": {"preset": "default"}, "measurements": {"ways": WAYS}, "advice": found, **fields})


def shown(renderable, width=120):
    out = io.StringIO()
    Console(file=out, width=width, force_terminal=False, highlight=False).print(renderable)
    return out.getvalue()


def test_the_sentence_says_how_fast_what_it_costs_and_where_to_begin():
    said = build(diagnosed()).diagnosis
    assert said == (
        "default: 1.2x eager. 2 findings, the worst graph break (800 µs a step, 2 compiles, 1 MiB, seen 3x); "
        "fix …/encoder.py:41 first."
    )


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"advice": []}, "default: 1.2x eager. Nothing to fix was found."),
        (
            {"settings": {"preset": "default by blocks"}, "advice": []},
            "default by blocks failed: CUDA out of memory. Nothing",
        ),
        ({"advice": [COLD.to_dict()]}, "default: 1.2x eager. Cold cache (20 s once); first: keep the cache folder."),
        ({"measurements": {}, "advice": []}, ""),
        (
            {"measurements": {"ways": {"default": {}}}, "advice": []},
            "default was not timed. Nothing to fix was found.",
        ),
    ],
)
def test_the_sentence_of_other_cases(fields, said):
    assert build(diagnosed(**fields)).diagnosis.startswith(said)
    assert bool(build(diagnosed(**fields)).diagnosis) == bool(said)


def test_ways_whose_intervals_meet_have_no_difference():
    eager = {**WAYS["eager"], "step_ms_low": 10.5, "step_ms_high": 12.5}
    measured = {
        "ways": {"eager": eager, "default": WAYS["default"], "as given": {**WAYS["default"], "step_ms_high": 10.4}}
    }
    rows = build(diagnosed(measurements=measured)).ways
    assert build(diagnosed(measurements=measured)).diagnosis.startswith("default: 1.2x eager (within noise). ")
    assert [row.against for row in rows] == ["1x", "1.2x (within noise)", "1.2x"]
    measured["ways"]["default"] = {**WAYS["default"], "difference": "faster"}  # measured in pairs, which is sharper
    assert build(diagnosed(measurements=measured)).ways[1].against == "1.2x"


def test_a_place_in_an_installed_package_is_told_from_the_package_on():
    entry = {**BREAK.to_dict(), "file": "/home/me/.venv/lib/python3.11/site-packages/transformers/modeling_bert.py"}
    view = build(diagnosed(advice=[entry]))
    assert view.advice[0].where == "transformers/modeling_bert.py:41"
    assert "fix" not in view.diagnosis
    assert f"first: {BREAK.change}" in view.diagnosis


def test_a_row_says_where_and_each_cost():
    row = build(diagnosed()).advice[0]
    assert (row.label, row.where, row.source) == ("Graph break", f"{FILE}:41", "if loss.item() > 3:")
    assert row.costs == ("800 µs a step", "2 compiles", "1 MiB", "seen 3x")
    assert not row.remedy
    assert build(diagnosed()).advice[1].remedy == f"hotloop.Loop {REMEDIES['tier']}"


@pytest.mark.parametrize("drawn", [draw_diagnosis, draw])
def test_the_terminal_shows_ways_and_advice_in_order(drawn):
    text = shown(drawn(build(diagnosed())))
    for said in ("default by blocks", "CUDA out of memory", "10 ms (9.5 ms to 10.8 ms)", "3 s (cached)", "1.2x", "31 s", "1. Graph break", "2. Cold cache",
                 "if loss.item() > 3:", "change: keep the value a tensor", "why: a tensor is read in Python"):  # fmt: skip
        assert said in text
    assert text.index("Graph break") < text.index("Cold cache")


def test_the_page_shows_it_escaped(tmp_path):
    hostile = dict.fromkeys(("rule", "what", "change", "cause", "component", "file", "line", "source"), HOSTILE)
    ways = {HOSTILE: {"step_ms": HOSTILE, "failed": HOSTILE}, "eager": HOSTILE}
    document = diagnosed(advice=[{**hostile, "milliseconds": HOSTILE}, {}], measurements={"ways": ways})
    text = write_html(document, tmp_path / "a.html").read_text(encoding="utf-8")
    assert 'id="advice"' in text
    assert "<script>alert" not in text
    assert text.count("&lt;script&gt;alert(1)") > 6
    assert "\x1b" not in text
    assert "\x1b" not in shown(draw(build(document)))


def test_more_advice_than_anybody_reads_is_counted():
    view = build(diagnosed(advice=[COLD.to_dict()] * (ROWS + 5)))
    assert (len(view.advice), view.advice_left) == (ROWS, 5)
    assert "and 5 more in the record" in shown(draw_diagnosis(view))


def test_the_verdict_of_a_bench_is_the_sentence_and_its_figures_stand_in_no_other_table():
    bench = {"verdict": "At 8,000 steps: full, 1.3x in all."}
    paired = {"step_ms": 5.0, "speed": 1.25, "difference": "none"}
    view = build(diagnosed(measurements={"ways": {"eager": WAYS["eager"], "full": paired}, "bench": bench}))
    assert view.diagnosis == bench["verdict"]
    assert view.ways[1].against == "1.25x (within noise)"
    assert not [key for key, _ in view.measurements if "ways" in key.lower() or "bench" in key.lower()]


@pytest.mark.parametrize("ways", [None, 3, [], {"eager": 3}, {"eager": {"step_ms": "fast"}, HOSTILE: {}}])
def test_ways_of_other_types_are_no_traceback(ways):
    shown(draw(build(diagnosed(measurements={"ways": ways, "bench": ways}))))
