"""A bench of a user's own step: timed ways ran as asked, and the others are listed with their reason."""

from __future__ import annotations

import json
import re

import bench_programs as programs
import pytest
import torch

import hotloop
from hotloop._torch import backends
from hotloop.errors import ConfigError
from hotloop.prove.bench.bench import ways_for
from hotloop.prove.bench.rounds import Rounds
from hotloop.prove.workloads import source_of
from hotloop.record import load
from hotloop.report import build
from hotloop.testing import captured_step_emulation

STEPS = 12


def bench(workload, *runs, **settings):
    return hotloop.bench(workload, runs or None, **{"steps": STEPS, "cold": False, **settings})


def test_ways_are_timed_side_by_side_and_the_verdict_names_one():
    found = bench(programs.make, "eager", "aot_eager", total_steps=500)
    eager, compiled = found.ways
    assert (eager.name, compiled.name) == ("eager", "aot_eager")
    for one in found.ways:
        assert one.timed
        assert one.as_asked == 1
        assert len(one.block_ms) == 6
        assert one.step_ms_low <= one.step_ms <= one.step_ms_high
        assert one.step_ms == pytest.approx(sorted(one.block_ms)[2] / 2 + sorted(one.block_ms)[3] / 2, rel=1e-3)
        assert one.total_seconds == pytest.approx(one.cold_seconds + 500 * one.paired_ms / 1e3)
    assert eager.speed is None
    assert eager.paired_ms == eager.step_ms
    assert compiled.paired_ms == pytest.approx(eager.step_ms / compiled.speed)
    assert compiled.speed_low <= compiled.speed <= compiled.speed_high
    assert compiled.compile_seconds > 0
    assert compiled.prepared_steps == 4, "a survey and three proofs"
    assert found.verdict.startswith("At 500 steps: ")
    assert found.best(500) in found.verdict
    assert found.noise >= 0


def test_what_it_gives_is_json_a_record_and_a_page(tmp_path):
    found = bench(programs.make, "aot_eager", "full+graph", record=tmp_path / "run")
    data = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert [one["name"] for one in data["ways"]] == ["eager", "aot_eager", "full+graph"]
    assert data["stretches"][0]["first"] == 0
    assert data["environment"]["torch"] == str(torch.__version__)
    document = load(tmp_path / "run")
    ways = document["measurements"]["ways"]
    assert ways["eager"]["step_ms"] == pytest.approx(found.way("eager").step_ms, rel=1e-4)
    assert "cold_seconds" in ways["aot_eager"]
    assert "captured on a GPU only" in ways["full+graph"]["failed"]
    view = build(document)
    assert view.diagnosis == found.verdict
    assert [chart.key for chart in view.charts] == ["ways"]
    assert found.verdict in found.report(tmp_path / "page.html").read_text(encoding="utf-8").replace("&#39;", "'")
    assert found.verdict in str(found)


def test_the_ways_that_make_sense_are_chosen():
    assert ways_for(source_of(programs.make)) == ("eager", "full"), "no GPU, and no repeated blocks"
    assert ways_for(source_of(programs.blocks)) == ("eager", "regional", "full")


NOT_RUN = {
    "a graph without a GPU": (programs.make, "eager+graph", "captured on a GPU only"),
    "a preset that this machine lacks a part for": (
        programs.make,
        "triton",
        "cannot run it: (no GPU|the model is on the CPU)",
    ),
    "blocks that there are not": (programs.make, "regional", "has no repeated blocks"),
    "a step that no proof can run twice": (
        programs.counting,
        "aot_eager",
        "it went back to eager: the step changes Python state",
    ),
}


@pytest.mark.parametrize("what", NOT_RUN)
def test_a_way_that_does_not_run_as_asked_is_listed_and_not_timed(what):
    make, way, reason = NOT_RUN[what]
    found = bench(make, way)
    one = found.way(way)
    assert not one.timed
    assert one.block_ms == ()
    assert re.search(reason, one.reason)
    assert found.way("eager").timed
    assert found.verdict == "At any length of the run: eager, since no other way ran here."
    assert f"{way} was not timed" in str(found)


def test_code_that_stepped_down_is_not_timed(monkeypatch):
    """A compile that fails on the first graph runs the next rung, which is another way than the one asked for."""

    def broken(*_):
        raise RuntimeError("planted failure")

    monkeypatch.setattr(backends, "aot_eager", lambda: broken)
    found = bench(programs.make, "aot_eager")
    one = found.way("aot_eager")
    assert not one.timed
    assert "planted failure" in one.reason


def test_a_way_that_fails_after_it_got_ready_leaves_the_bench(monkeypatch):
    from hotloop.prove.bench import way

    done = []

    def check(self):
        done.append(self.name)
        if self.name == "aot_eager" and done.count("aot_eager") > 4:
            raise way.NotRunError("planted")

    monkeypatch.setattr(way.Running, "check", check)
    found = bench(programs.make, "aot_eager")
    assert found.way("aot_eager").reason == "planted"
    assert found.way("eager").timed


def test_with_hotloop_disabled_nothing_is_timed_as_compiled(monkeypatch):
    monkeypatch.setenv("HOTLOOP_DISABLE", "1")
    assert bench(programs.make, "aot_eager").way("aot_eager").reason == "it would run eager: HOTLOOP_DISABLE=1 is set"


def test_captured_steps_are_replays():
    with captured_step_emulation():
        found = bench(programs.make, "eager+graph")
    one = found.way("eager+graph")
    assert one.timed
    assert one.as_asked == 1
    assert one.prepared_steps > 4
    assert one.caches == "none"


def test_steps_of_a_shape_without_code_are_told():
    found = bench(programs.ragged, "aot_eager", steps=32)
    one = found.way("aot_eager")
    assert 0.8 < one.as_asked < 1, "one batch in eight is short, and compiles nothing the first times"
    assert "ran as asked, the others as written" in one.notes[0]


def test_two_tiers_of_the_same_code_both_count_its_compile():
    with captured_step_emulation():
        found = bench(programs.make, "aot_eager", "aot_eager+graph")
    first, second = found.way("aot_eager"), found.way("aot_eager+graph")
    assert second.cold_seconds > 0.5 * first.compile_seconds
    assert "the compile that it found made for aot_eager" in second.notes[0]


@pytest.mark.campaign
def test_ways_that_do_not_fit_into_memory_together_run_one_after_another(monkeypatch):
    monkeypatch.setattr(Rounds, "_groups", lambda self: None)
    found = bench(programs.make, "aot_eager", "full+graph", steps=24)
    assert found.notes == (
        "two ways do not fit into memory together: they ran one after another, 3 times, which is noisier",
    )
    for name in ("eager", "aot_eager"):
        assert len(found.way(name).block_ms) == 12
        assert found.way(name).as_asked == 1
    assert "captured on a GPU only" in found.way("full+graph").reason


def test_a_workload_is_copied_where_its_step_goes_with_its_model():
    trainer = programs.Trainer()
    before = [one.clone() for one in trainer.model.parameters()]
    found = bench(trainer.workload(), "aot_eager")
    assert found.way("aot_eager").timed
    assert all(torch.equal(a, b) for a, b in zip(before, trainer.model.parameters(), strict=True))


def test_random_numbers_of_the_caller_are_left_alone():
    torch.manual_seed(3)
    wanted = torch.rand(3)
    torch.manual_seed(3)
    bench(programs.make, "eager")
    assert torch.equal(torch.rand(3), wanted)


def test_what_the_program_raises_is_the_users():
    with pytest.raises(KeyError, match="the user's own"):
        bench(programs.failing, "aot_eager")


WRONG = {
    "no workload": (lambda: hotloop.bench(3), "workload 3: expected a hotloop.Workload"),
    "a function that gives something else": (lambda: hotloop.bench(lambda: 3), "gave a int"),
    "no such file": (lambda: hotloop.bench("nowhere.py:make"), "there is no file"),
    "a step over this one model": (lambda: hotloop.bench(programs.make()), "each way needs its own; give the function"),
    "a model that is compiled": (lambda: hotloop.bench(programs.compiled, cold=False), "compiled already"),
    "an unknown way": (lambda: hotloop.bench(programs.make, ("eagre",)), "run 'eagre'"),
    "auto": (lambda: hotloop.bench(programs.make, ("auto",)), "auto is a choice"),
    "one name": (lambda: hotloop.bench(programs.make, "eager"), "runs 'eager'"),
    "no way": (lambda: hotloop.bench(programs.make, ()), "runs \\(\\)"),
    "few steps": (lambda: hotloop.bench("no_such_file.py:make", steps=11), "steps 11: expected a whole number of 12"),
    "total_steps": (lambda: hotloop.bench(programs.make, total_steps=0), "total_steps 0"),
    "a bool": (lambda: hotloop.bench(programs.make, steps=True), "steps True"),
}


@pytest.mark.parametrize("what", WRONG)
def test_wrong_input_is_refused_before_work_starts(what):
    call, message = WRONG[what]
    with pytest.raises(ConfigError, match=message):
        call()
