import json
import os

import pytest
from report_documents import FILE, fresh

from hotloop.events import Captured, CaptureDropped, StepUndone, TierChanged, TierDeclined, TierProven
from hotloop.report import build
from hotloop.report.occurrences import MARKS, ROWS


def chart(view, key):
    return next(each for each in view.charts if each.key == key)


def test_the_headline_says_what_ran_and_why(document):
    head = build(document).headline
    assert head.title == "criteria"
    assert (head.status, head.tone) == ("finished", "good")
    assert head.sentence == "Finished: 200 steps in 1 min 30 s."
    assert "model was asked for triton and ran partly compiled, the rest on inductor: capture failed" in head.verdict
    assert "encoder.py:71" in head.verdict
    assert "loss ran eager, as asked" in head.verdict


@pytest.mark.parametrize(
    ("component", "reasons", "sentence", "tone"),
    [
        ("inductor inductor compiled", [], "m ran compiled with inductor, as asked.", "good"),
        ("Inductor inductor compiled", [], "m ran compiled with inductor, as asked.", "good"),
        ("none none eager", [], "m ran eager, as asked.", "note"),
        ("triton none eager", ["no Triton"], "m was asked for triton and ran eager: no Triton.", "bad"),
        ("triton triton pending", [], "m was asked for triton and was not called.", "note"),
        ("triton triton partial", ["r"], "m was asked for triton and ran partly compiled, the rest eager: r.", "warn"),
        ("triton inductor compiled", [], "m was asked for triton and ran inductor (compiled).", "warn"),
        ("auto eager eager", [], "m ran eager, as auto decided.", "note"),
        ("auto eager+graph captured", [], "m ran eager+graph, as auto decided.", "good"),
        ("auto full partial", ["r"], "m was asked for auto and ran partly compiled, the rest on full: r.", "warn"),
        ("auto eager eager", ["disabled"], "m was asked for auto and ran eager: disabled.", "bad"),
    ],
)
def test_a_component_is_one_sentence(component, reasons, sentence, tone):
    entry = dict(zip(("requested", "running", "state"), component.split(), strict=True))
    view = build(fresh(components={"m": {**entry, "causes": [{"reason": reason} for reason in reasons]}}))
    assert view.headline.verdict == sentence
    assert view.components[0].tone == tone


def test_many_components_that_all_ran_as_asked_need_one_sentence():
    compiled = {"requested": "default", "running": "default", "state": "compiled"}
    eager = {"requested": "none", "running": "none", "state": "eager"}
    late = {"requested": "triton", "running": "none", "state": "eager"}

    def verdict(*parts):
        return build(fresh(components={f"c{n}": part for n, part in enumerate(parts)})).headline.verdict

    assert verdict(compiled, eager) == "c0 ran compiled with default, as asked; c1 ran eager, as asked."
    assert verdict(*[compiled] * 4) == "All 4 components ran as asked."
    assert verdict(*[compiled] * 4, late).startswith("c4 was asked for triton and ran eager; c0 ran compiled")
    assert verdict(*[compiled] * 4, late).endswith("; 2 more below.")


def test_a_killed_run_is_interrupted(document):
    document.update(status="running", finished=None, pid=2**22 + 99, process_started=1)
    head = build(document).headline
    assert head.status == ("interrupted (killed)" if os.name != "nt" else "running")
    if os.name != "nt":
        assert head.sentence.startswith("Interrupted (killed): 200 steps")
        assert head.tone == "warn"


def test_what_a_reader_must_not_miss_is_a_note(document):
    document.update(status="failed", error="RuntimeError: out of memory\n  and more", unread_lines=1)
    document["steps"][7]["loss"] = "nan"
    head = build(document).headline
    assert head.tone == "bad"
    assert [(note.tone, note.text) for note in head.notes] == [
        ("bad", "RuntimeError: out of memory and more"),
        ("warn", "The loss was not finite in 1 step, first in step 7."),
        ("warn", "1 line of the record could not be read (a kill tears the last one)."),
    ]
    assert [(mark.kind, mark.step) for mark in chart(build(document), "loss").marks] == [("not_finite", 7)]


def test_cards_take_what_was_measured_and_else_estimate(document):
    cards = {card.label: card for card in build(document).cards}
    assert cards["Cold time"].value == "22.5 s"
    assert (cards["Steady step"].value, cards["Steady step"].note) == ("30 ms", "median of the later half")
    assert cards["Peak memory"].value == "3 GiB"
    assert (cards["Best F1"].value, cards["Best F1"].note) == ("0.85", "validation step 100")
    document["measurements"] = {"steady_step_ms": 31}
    cards = {card.label: card for card in build(document).cards}
    assert (cards["Steady step"].value, cards["Steady step"].note) == ("31 ms", "measured")
    assert cards["First step"].value == "20 s"


def test_the_step_time_is_marked_with_what_happened(document):
    found = chart(build(document), "step-time")
    assert found.unit == "s"
    assert found.log_first
    assert [(mark.step, mark.kind, mark.count) for mark in found.marks] == [
        (0, "compiled", 2), (0, "graph_break", 1), (12, "recompiled", 1), (120, "fallback", 1),
    ]  # fmt: skip
    assert found.marks[0].reasons[0] == f"forward(), forward graph · {FILE}:40"
    assert [(band.start, band.end, band.label) for band in found.bands] == [(0, 120, "triton"), (121, 199, "inductor")]
    assert "from 20 s to 30 ms, between" in found.summary


def test_loss_metrics_and_rate_have_charts(document):
    view = build(document)
    assert chart(view, "loss").names == ["training loss", "training loss, smoothed", "validation loss"]
    assert chart(view, "loss").styles == ["faint", "line", "dots"]
    assert chart(view, "metrics").names == ["validation f1"]
    assert chart(view, "metric-0").title == "Validation support"
    assert chart(view, "learning-rate").columns[0][0] == 3e-4


def test_a_component_tells_its_modes_and_regions_apart():
    modes = {"training": {"calls": 27}, "inference": {"calls": 9}}
    entry = {
        "name": "m",
        "requested": "default",
        "inference": "none",
        "running": "default",
        "state": "compiled",
        "modes": modes,
    }
    part = build(fresh(components={"m": {**entry, "regions": ["layer.0", "layer.1", "rest"]}})).components[0]
    assert (part.requested, part.inference) == ("default", "none")
    assert part.facts == ("27 calls in training", "9 calls in inference", "in 3 regions")
    assert build(fresh(components={"m": {**entry, "inference": "default"}})).components[0].inference == ""


def test_the_speed_up_and_the_recipe_of_a_training_run():
    settings, measured = {"recipe": {"name": "criteria"}}, {"speed_up": 1.784, "cold_seconds": 63, "steady_step_ms": 1}
    steps = [{"step": step, "seconds": 1.0, "running": "none"} for step in range(8)]
    view = build(fresh(settings=settings, measurements=measured, steps=steps))
    assert view.headline.title == "criteria"
    assert [(card.label, card.value) for card in view.cards] == [
        ("Steady step", "1 ms"),
        ("Cold time", "1 min 03 s"),
        ("Speed-up", "1.78\N{MULTIPLICATION SIGN}"),
    ]


def test_a_speed_up_from_three_eager_steps_is_not_told():
    steps = [{"step": step, "seconds": 1.0, "running": "none" if step < 3 else "default"} for step in range(30)]
    view = build(fresh(measurements={"speed_up": 1.18}, steps=steps))
    card = next(card for card in view.cards if card.label == "Speed-up")
    assert (card.value, card.note) == ("\N{EN DASH}", "too few eager steps to tell")
    assert dict(view.measurements)["Speed up"] == "too few eager steps to tell"
    by_auto = build(fresh(measurements={"speed_up": 1.18, "eager_step_ms": 1000.0}, steps=steps))
    assert "1.18\N{MULTIPLICATION SIGN}" in [card.value for card in by_auto.cards]


def test_the_most_serious_events_come_first(document):
    rows = build(document).events
    labels = ["Fallback", "Graph break", "Recompiled", "Compiled", "Compiled"]
    assert [row.label for row in rows] == labels
    assert rows[0].reason == "triton → inductor (run): capture failed"
    assert (rows[1].source, rows[1].hint) == ("if mask.sum().item() > 0:", "use torch.where")
    assert (rows[3].cost, rows[3].step) == ("12 s", "0")


def test_rows_and_marks_are_bounded_and_keep_the_most_serious():
    events = [{"kind": "odd_kind", "reason": f"r{step}", "step": step} for step in range(3000)]
    events.append({"kind": "fallback", "reason": "late", "step": 2999})
    view = build(fresh(events=events, steps=[{"step": 1, "seconds": 1}]))
    assert (len(view.events), view.events_left, view.events_total) == (ROWS, 3001 - ROWS, 3001)
    assert view.events[0].label == "Fallback"
    marks = chart(view, "step-time").marks
    assert len(marks) == MARKS
    assert any(mark.kind == "fallback" for mark in marks)


def test_the_best_of_a_loss_is_its_smallest(document):
    rows = {row.name: row for row in build(document).metrics}
    assert (rows["loss"].best, rows["loss"].best_step) == (0.4, 100)
    assert (rows["f1"].first, rows["f1"].best, rows["f1"].last) == (0.85, 0.85, 0.81)


def test_unknown_measurements_are_shown_too(document):
    rows = dict(build(document).measurements)
    assert rows["Invented per second"] == "5/s"
    assert rows["Odd"] == "nan"
    assert rows["All steps together"] == "35.9 s in 200 steps"


def test_settings_decisions_and_verdicts(document):
    view = build(document)
    assert ("training.batch_size", "32") in view.settings
    assert ("torch", "2.13.0") in view.environment
    decision, verdict = view.decisions[0], view.verdicts[0]
    assert (decision.label, decision.reason, decision.step) == ("inductor", "pays from step 40 on", "3")
    assert decision.source == "saved 12.5 ms"
    assert (verdict.label, verdict.where) == ("equal", f"{FILE}:9")


DECLINED = TierDeclined(
    step=9,
    function="train_step",
    tier="eager+graph",
    reason="the step reads <b>count</b>",
    hint="return it",
    file=FILE,
    line=4,
)
PROVEN = TierProven(
    step=13, function="train_step", tier="full", steps=3, worst="loss, at 2% of its limit", seconds=0.5, copied_bytes=8, on_host=False,
)  # fmt: skip
DECIDED = {
    "step": 8, "action": "stay", "tier": "eager", "reason": "eager stays (7.07 ms a step): too short", "steps_left": 28,
    "eager_seconds": 0.00707, "saving_seconds_a_step": 0.0003, "background_seconds": None,
}  # fmt: skip


def test_what_a_hot_loop_decided_and_proved_is_said_with_its_numbers():
    events = [{**one.to_dict(), "verdict": verdict} for one, verdict in ((DECLINED, "declined"), (PROVEN, "proven"))]
    view = build(fresh(decisions=[DECIDED], verdicts=events, events=events))
    (decision,) = view.decisions
    assert (decision.label, decision.reason, decision.step) == ("stay", DECIDED["reason"], "8")
    assert decision.source == "tier eager, steps left 28, eager 7.07 ms, saving a step 300 µs"
    declined, proven = view.verdicts
    assert (declined.label, declined.reason) == ("declined", "eager+graph: the step reads <b>count</b>")
    assert (declined.where, declined.hint) == (f"{FILE}:4", "return it")
    assert proven.reason == "full agrees with its reference on 3 steps"
    assert {(row.label, row.tone) for row in view.events} == {("Tier declined", "warn"), ("Tier proven", "good")}


@pytest.mark.parametrize(
    ("event", "said"),
    [
        (Captured(step=1, function="f", seconds=0.1, operations=7), "f(), 7 operations"),
        (TierChanged(step=1, from_tier="eager", to_tier="full", reason="pays"), "eager → full: pays"),
        (StepUndone(step=1, function="f", tier="full", reason="no memory"), "full: no memory"),
        (CaptureDropped(step=1, function="f", reason="a shape"), "a shape"),
    ],
)
def test_events_of_a_hot_loop_are_said(event, said):
    (row,) = build(fresh(events=[event.to_dict()])).events
    assert row.reason == said
    assert row.label in {"Captured", "Tier changed", "Step undone", "Capture dropped"}


def test_an_empty_run_says_so(empty):
    view = build(empty)
    assert view.headline.sentence == "Finished: no step."
    assert view.headline.verdict == "The record names no component, so it cannot say what ran compiled."
    assert not view.charts
    assert not view.cards


def test_the_view_is_json(document, hostile, empty):
    for each in (document, hostile, empty):
        json.dumps(build(each).to_dict(), allow_nan=False)


def test_what_a_run_said_of_its_data_is_shown_by_subject_and_a_long_list_is_cut():
    said = {"data": ["12 pictures", "  <b>.png: has no caption"], "compile": "3 sizes", "left": list(range(900))}
    told = dict(build(fresh(told=said)).told)
    assert told["Data"] == "12 pictures\n<b>.png: has no caption"
    assert told["Compile"] == "3 sizes"
    assert told["Left"].splitlines()[-2:] == ["199", "and 700 more lines in the record"]
    assert build({name: value for name, value in fresh().items() if name != "told"}).told == []
