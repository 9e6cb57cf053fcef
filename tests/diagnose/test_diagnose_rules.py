"""Each rule on saved documents: what it must find, what it says, and that it finds nothing else; the catalogue too."""

from __future__ import annotations

import copy
import json

import pytest
from diagnose_catalogue import render
from diagnose_documents import PROGRAMS, SAVED, WRITTEN, line_of

from hotloop.diagnose import CATALOGUE, RULES, Case, diagnose
from hotloop.diagnose.host_sync import IN_A_SCALER

FILES = {path.stem: path for folder in (SAVED, WRITTEN) for path in sorted(folder.glob("*.json"))}
NAMES = {f"{one.rule}-{one.kind}".removesuffix(f"-{one.rule}"): one for one in CATALOGUE}
ALSO = {"recompile_limit": {"recompile-attribute"}}
"""What a program shows beside its own problem, since one follows from the other."""


def loaded(name):
    return json.loads(FILES[name].read_text(encoding="utf-8"))


def problem_names(found):
    return {f"{one.rule}-{one.kind}".removesuffix(f"-{one.rule}") for one in found}


def the(name):
    (advice,) = [one for one in diagnose(loaded(name)) if problem_names([one]) == {name}]
    return advice


def test_every_entry_has_a_saved_document_and_every_rule_entries():
    assert set(FILES) == set(NAMES) | {"clean-train", "clean-loop", "clean-ways"}
    assert {one.rule for one in CATALOGUE} == set(RULES)
    assert len(NAMES) == len(CATALOGUE)
    page = render()
    assert all(problem.symptom in page and problem.change in page for problem in CATALOGUE)


@pytest.mark.parametrize("name", sorted(NAMES))
def test_a_saved_document_gives_its_own_entry_and_no_other(name):
    found = diagnose(loaded(name))
    assert problem_names(found) == {name} | ALSO.get(name, set())
    advice, problem = the(name), NAMES[name]
    assert advice.what
    assert advice.change
    assert advice.remedy == (problem.remedy if name != "recompile_limit" else None)
    program = PROGRAMS / f"{name}.py"
    if program.exists() and (line := line_of(program)) is not None:
        assert (advice.file, advice.line) == (program.name, line)
        assert advice.source.endswith("# here")


@pytest.mark.parametrize("name", sorted(name for name in FILES if name.startswith("clean-")))
def test_a_clean_run_gives_no_advice(name):
    document = loaded(name)
    assert document["events"]
    assert diagnose(document) == []


def test_an_empty_document_and_unknown_events_give_no_advice():
    assert diagnose({}) == []
    assert diagnose({"events": [{"kind": "of_a_later_version", "what": 1}], "measurements": {"ways": None}}) == []


# -- the figures -------------------------------------------------------------------------------------------------------


def test_recompiles_for_one_attribute_are_one_advice_with_all_their_compiles():
    document = loaded("recompile_limit")
    advice = next(one for one in diagnose(document) if one.rule == "recompile")
    frames = {one["frame"] for one in document["events"] if one["kind"] == "recompiled"}
    seconds = sum(one["seconds"] for one in document["events"] if one["kind"] == "compiled" and one["frame"] in frames)
    assert advice.compiles == advice.times == len(frames) == 9
    assert advice.seconds == pytest.approx(seconds)
    assert f"{advice.compiles} compiles" in advice.cost


def test_the_ways_in_figures():
    slower = the("slower_preset")
    assert slower.milliseconds == pytest.approx(0.32)
    assert slower.lost_seconds(20_000) == pytest.approx(0.4 + 6.4)
    never = the("never_pays")
    assert "5,508 steps" in never.what  # 38 s at 6.9 ms a step
    assert never.seconds == pytest.approx(38.0 - 13.8)
    assert the("data_wait").milliseconds == pytest.approx(12.0)
    assert the("data_wait").what.endswith("its batch from 2 workers, then takes 28 ms: 30% of the time")
    assert the("memory-more").nbytes == 3 * 2**30
    assert the("host_sync").milliseconds == pytest.approx(3.1)
    assert "rules out eager+graph" in the("host_sync").what


def test_a_break_that_torch_asks_for_in_its_own_code_is_nobodys_to_mend():
    document = loaded("graph_break-disabled")
    asked = {"reason": "Call to `torch._dynamo.graph_break()`", "file": "site-packages/torch/optim/optimizer.py"}
    document["events"] = [one | asked for one in document["events"] if one["kind"] == "graph_break"]
    assert diagnose(document) == []


@pytest.mark.parametrize("name", ["slower_preset", "never_pays"])
def test_ways_whose_intervals_meet_are_not_told_apart(name):
    document = loaded(name)
    ways = document["measurements"]["ways"]
    for way in ways.values():
        way["step_ms_low"], way["step_ms_high"] = way["step_ms"] * 0.999, way["step_ms"] * 1.001
    assert name in {one.rule for one in diagnose(document)}
    slowest = max(way["step_ms"] for way in ways.values())
    for way in ways.values():
        way["step_ms_high"] = slowest
    assert diagnose(document) == []


def test_on_a_cpu_there_is_no_device_to_wait_for():
    assert the("host_sync").what.startswith("the step waits for the device")
    document = loaded("host_sync")
    document["environment"] = {"device": "cuda:0"}
    assert diagnose(document)[0].what.startswith("the step waits for the device")
    document["environment"] = {"device": "cpu"}
    (advice,) = diagnose(document)
    assert advice.what.startswith("on a GPU the step would wait for the device")


def test_a_value_read_in_a_package_is_not_the_users_to_return():
    document = loaded("host_sync")
    for event in document["events"]:
        if event["kind"] == "host_sync":
            event["reason"] += " (in masking_utils.py:369, an installed package)"
    (advice,) = diagnose(document)
    assert "return the tensor" not in advice.change
    assert "the library's line" in advice.change


def test_a_grad_scalers_read_is_spared_by_a_fused_optimizer():
    document = loaded("host_sync")
    for event in document["events"]:
        if event["kind"] == "host_sync":
            event["reason"] += f" ({IN_A_SCALER})"
    (advice,) = diagnose(document)
    assert "fused=True" in advice.change
    assert "return the tensor" not in advice.change


def test_only_the_way_that_was_asked_for_is_weighed():
    ways = {"eager": {"step_ms": 1.0}, "aot_eager": {"step_ms": 2.0}, "default": {"step_ms": 3.0}}
    both = diagnose({"measurements": {"ways": ways}})
    assert [one.what.split()[0] for one in both] == ["default", "aot_eager"]
    (asked,) = diagnose({"measurements": {"ways": ways}, "settings": {"run": "aot_eager"}})
    assert asked.what.startswith("aot_eager")


def test_the_worst_comes_first():
    documents = [loaded(name) for name in ("recompile-attribute", "graph_break-print", "host_sync", "memory-more")]
    merged = {
        "events": [event for one in documents for event in one["events"]],
        "measurements": documents[-1]["measurements"],
    }
    found = diagnose(merged)
    lost = [one.lost_seconds(1_000) for one in found]
    assert lost == sorted(lost, reverse=True)
    assert found[0].rule == "host_sync"
    assert (
        next(one.rule for one in found if not one.lost_seconds(1_000)) == "memory"
    )  # bytes, before what has no figure


def test_a_read_that_breaks_a_graph_is_one_advice_with_its_wait():
    document = loaded("graph_break-item")
    place = next(one for one in document["events"] if one["kind"] == "graph_break")
    sync = {
        "kind": "host_sync", "component": None, "time": 0.0, "file": place["file"], "line": place["line"],
        "source": place["source"], "reason": "Tensor.item()", "times": 1.0, "seconds": 0.004,
    }  # fmt: skip
    document["events"].append(sync)
    (advice,) = diagnose(document)
    assert (advice.rule, advice.kind) == ("graph_break", "item")
    assert advice.milliseconds == pytest.approx(4.0)


def test_a_break_inside_a_package_is_told_once_for_each_line_that_leads_there():
    document = loaded("graph_break-print")
    inner = next(one for one in document["events"] if one["kind"] == "graph_break")
    inner |= {"file": "site-packages/theirs.py", "line": 5}
    led = [{**inner, "by_file": "train.py", "by_line": line, "by_source": "theirs.f(x)"} for line in (7, 9, 9)]
    echoes = [inner, {**inner, "file": "train.py", "line": 9, "reason": "step_unsupported"}]
    found = diagnose({"events": [*led, *echoes]})
    assert [("train.py:7" in one.what, "train.py:9" in one.what, one.times) for one in found] == [
        (False, True, 2),
        (True, False, 1),
    ]


# -- ragged or dynamic -------------------------------------------------------------------------------------------------


def recompiled(*reasons):
    return [
        {"kind": "recompiled", "component": "model", "time": 0.0, "function": "Net", "file": None, "line": None,
         "reason": reason, "nth": number + 1, "frame": f"0/{number + 1}", "source": ""}
        for number, reason in enumerate(reasons)
    ]  # fmt: skip


def size(before, after, dim=0, name="x"):
    return f"tensor '{name}' size mismatch at index {dim}. expected {before}, actual {after}"


@pytest.mark.parametrize(
    ("reasons", "kind"),
    [
        ([size(32, 7)], "ragged_batch"),
        ([size(32, 1)], "ragged_batch"),
        ([size(32, 7), size(32, 7, name="y")], "ragged_batch"),
        ([size(7, 32)], "dynamic_lengths"),
        ([size(32, 24), size(24, 16)], "dynamic_lengths"),
        ([size(64, 48, dim=1)], "dynamic_lengths"),
        (["2 <= x.size()[0]"], "ragged_batch"),
    ],
)
def test_an_odd_batch_is_told_from_lengths_that_vary(reasons, kind):
    (advice,) = diagnose({"events": recompiled(*reasons)})
    assert (advice.rule, advice.kind) == ("recompile", kind)
    assert advice.remedy == {"ragged_batch": "odd_batch_eager", "dynamic_lengths": "mark_dynamic"}[kind]


def test_a_case_reads_a_record_whole():
    case = Case.from_document({"events": [{"kind": "checkpoint_outside", "function": "Block", "line": 3, "step": 7}]})
    assert case.events[0].line == 3
    assert (case.starts, case.steps) == (1, 1_000)


def test_what_is_printed_cannot_harm_a_terminal():
    document = loaded("graph_break-item")
    for event in document["events"]:
        event["source"] = "\x1b[2Jx.item()\u202e"
    assert "\x1b" not in str(*diagnose(document))
    assert "\u202e" not in str(*diagnose(document))


@pytest.mark.parametrize("name", sorted(FILES))
def test_whatever_a_file_holds_raises_nothing(name):
    """A record is a file: each value is replaced by what it must not be, one kind at a time."""
    document = loaded(name)
    for wrong in (None, "nan", -1, 1e400, [], [None], True):
        for event in range(min(2, len(document["events"]))):
            for key in document["events"][event]:
                if key != "kind":
                    broken = copy.deepcopy(document)
                    broken["events"][event][key] = wrong
                    diagnose(broken)
        for section in ("measurements", "settings", "environment", "components"):
            diagnose({**document, section: dict.fromkeys(document.get(section) or ["ways", "shapes"], wrong)})
            diagnose({**document, section: wrong if isinstance(wrong, dict) else None})
        ways = document.get("measurements", {}).get("ways") or {"eager": {}, "default": {}, "default by blocks": {}}
        figures = dict.fromkeys(("step_ms", "cold_seconds", "peak_bytes"), wrong)
        diagnose({**document, "measurements": {"ways": {**ways, "default": figures}}, "starts": wrong})
        diagnose(
            {
                **document,
                "measurements": {"ways": dict.fromkeys(ways, wrong), "shapes": {"step": {"varying_dims": wrong}}},
            }
        )
        diagnose({**document, "components": {"model": {"causes": wrong}, "other": {"causes": [wrong]}}})
