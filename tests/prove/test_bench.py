"""A bench of a user's own step: timed ways ran as asked, the others are listed with their reason; its arithmetic."""

from __future__ import annotations

import json
import math
import random
import re
from pathlib import Path

import bench_programs as programs
import pytest
import torch

import hotloop
from hotloop._torch import backends
from hotloop.errors import ConfigError
from hotloop.prove.bench import child, way
from hotloop.prove.bench.bench import ways_for
from hotloop.prove.bench.measured import block_steps
from hotloop.prove.bench.verdict import Course, Speed, noise_of, sentence, why_eager
from hotloop.prove.workloads import source_of
from hotloop.record import load
from hotloop.report import build
from hotloop.testing import captured_step_emulation

FILE = Path(__file__).with_name("bench_programs.py")
TIMES = "\N{MULTIPLICATION SIGN}"


def bench(workload, *runs, **settings):
    return hotloop.bench(workload, runs or None, **{"steps": 12, **settings})


def test_ways_are_timed_side_by_side_and_the_verdict_names_one(tmp_path):
    found = bench(programs.make, "aot_eager", "full+graph", total_steps=500, record=tmp_path / "run")
    eager, compiled, _ = found.ways
    for one in (eager, compiled):
        assert one.timed
        assert one.as_asked == 1
        assert one.step_ms_low <= one.step_ms <= one.step_ms_high
        assert one.total_seconds > one.cold_seconds
    assert eager.speed is None
    assert compiled.speed_low <= compiled.speed <= compiled.speed_high
    assert compiled.compile_seconds > 0
    assert found.verdict.startswith("At 500 steps: ")
    assert found.document["verdicts"][0]["verdict"] in found.verdict
    assert found.noise >= 0
    data = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert [one["name"] for one in data["ways"]] == ["eager", "aot_eager", "full+graph"]
    assert data["longest"] in ("eager", "aot_eager")
    assert data["environment"]["torch"] == str(torch.__version__)
    document = load(tmp_path / "run")
    ways = document["measurements"]["ways"]
    assert ways["eager"]["step_ms"] == pytest.approx(eager.step_ms, rel=1e-4)
    assert "captured on a GPU only" in ways["full+graph"]["failed"]
    assert build(document).diagnosis == found.verdict
    assert found.verdict in found.report(tmp_path / "page.html").read_text(encoding="utf-8").replace("&#39;", "'")
    assert found.verdict in str(found)


@pytest.mark.parametrize(("make", "ways"), [(programs.make, ("eager", "full")), (programs.blocks, ("eager", "regional", "full"))])  # fmt: skip
def test_the_ways_that_make_sense_are_chosen(make, ways):
    assert ways_for(source_of(make)) == ways


@pytest.mark.parametrize(
    ("make", "name", "reason"),
    [
        (programs.make, "eager+graph", "captured on a GPU only"),
        (programs.make, "triton", "cannot run it: (no GPU|the model is on the CPU)"),
        (programs.make, "regional", "has no repeated blocks"),
        (programs.counting, "aot_eager", "it went back to eager: the step changes Python state"),
    ],
)
def test_a_way_that_does_not_run_as_asked_is_listed_and_not_timed(make, name, reason):
    found = bench(make, name)
    one = found.way(name)
    assert not one.timed
    assert re.search(reason, one.reason)
    assert found.way("eager").timed
    assert found.verdict == "At any length of the run: eager, since no other way ran here."
    assert f"{name} was not timed" in str(found)


def test_code_that_stepped_down_is_not_timed(monkeypatch):
    """A compile that fails on the first graph runs the next rung, which is another way than the one asked for."""

    def broken(*_):
        raise RuntimeError("planted failure")

    monkeypatch.setattr(backends, "aot_eager", lambda: broken)
    assert "planted failure" in bench(programs.make, "aot_eager").way("aot_eager").reason


def test_a_way_that_fails_after_it_got_ready_leaves_the_bench(monkeypatch):
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


def test_captured_steps_are_replays_and_tiers_of_the_same_code_all_count_its_compile():
    with captured_step_emulation():
        found = bench(programs.make, "aot_eager", "aot_eager+graph", "eager+graph")
    first, second, captured = (found.way(name) for name in ("aot_eager", "aot_eager+graph", "eager+graph"))
    assert second.cold_seconds > 0.5 * first.compile_seconds
    assert captured.as_asked == 1
    assert captured.caches == "none"


def test_steps_of_a_shape_without_code_are_told():
    found = bench(programs.ragged, "aot_eager", steps=32)
    assert 0.5 < found.way("aot_eager").as_asked < 1, "one batch in four is short, and compiles nothing the first times"
    assert "ran as asked, the others as written" in str(found)


def test_a_workload_is_copied_where_its_step_goes_with_its_model_and_random_numbers_are_left_alone():
    trainer = programs.Trainer()
    before = [one.clone() for one in trainer.model.parameters()]
    torch.manual_seed(3)
    wanted = torch.rand(3)
    torch.manual_seed(3)
    assert bench(trainer.workload(), "aot_eager").way("aot_eager").timed
    assert torch.equal(torch.rand(3), wanted)
    assert all(torch.equal(a, b) for a, b in zip(before, trainer.model.parameters(), strict=True))


def test_what_the_program_raises_is_the_users():
    with pytest.raises(KeyError, match="the user's own"):
        bench(programs.failing, "aot_eager")


@pytest.mark.parametrize(
    ("arguments", "settings", "message"),
    [
        ((3,), {}, "workload 3: expected a hotloop.Workload"),
        ((lambda: 3,), {}, "gave a int"),
        (("nowhere.py:make",), {}, "there is no file"),
        ((programs.make(),), {}, "each way needs its own; give the function"),
        ((programs.compiled,), {}, "compiled already"),
        ((programs.make, ("eagre",)), {}, "run 'eagre'"),
        ((programs.make, ("auto",)), {}, "auto is a choice"),
        ((programs.make, "eager"), {}, "runs 'eager'"),
        ((programs.make, ()), {}, "runs \\(\\)"),
        (("no_such_file.py:make",), {"steps": 11}, "steps 11: expected a whole number of 12"),
        ((programs.make,), {"total_steps": 0}, "total_steps 0"),
        ((programs.make,), {"steps": True}, "steps True"),
        ((lambda: programs.make(),), {"cold": True}, "another process has to make the workload"),  # noqa: PLW0108
    ],
)
def test_wrong_input_is_refused_before_work_starts(arguments, settings, message):
    with pytest.raises(ConfigError, match=message):
        hotloop.bench(*arguments, **settings)


# -- cold, in processes of their own -----------------------------------------------------------------------------------


@pytest.mark.campaign
def test_each_way_gets_ready_in_a_process_of_its_own():
    one = bench(f"{FILE}:make", "aot_eager", cold=True).way("aot_eager")
    assert one.timed
    assert 0 < one.compile_seconds < one.cold_seconds


@pytest.mark.campaign
@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("import os; os.kill(os.getpid(), 9)", "crashed with signal SIGKILL"),
        ("import time; time.sleep(600)", "no answer after 20 s"),
        ("raise OSError('only once')", "OSError: only once"),
    ],
)
def test_a_process_that_dies_hangs_or_raises_is_a_reason(tmp_path, monkeypatch, body, reason):
    (tmp_path / "cold.py").write_text(f"def make():\n    {body}\n", encoding="utf-8")
    monkeypatch.setattr(child, "LIMIT_S", 20.0)
    with pytest.raises(way.NotRunError, match=reason):
        child.run_cold("eager", f"{tmp_path / 'cold.py'}:make")


def test_a_bench_inside_a_bench_is_refused(monkeypatch):
    monkeypatch.setenv(child.INSIDE, "1")
    with pytest.raises(ConfigError, match="if __name__ == '__main__'"):
        bench(f"{FILE}:make")


# -- the arithmetic ----------------------------------------------------------------------------------------------------

TINY = [Course("eager", 2.1, 0.01675), Course("eager+graph", 2.2, 0.00185), Course("full+graph", 23.0, 0.0017)]
"""Cold seconds and seconds of a step, about as an H200 gave them for a small transformer."""


def pairs(ours, eager, jitter=0.002, rounds=12):
    """Return blocks whose times jitter, on a machine that is half as fast in some rounds."""
    draw = random.Random(1)
    slow = [2.0 if turn % 5 == 4 else 1.0 for turn in range(rounds)]
    return [tuple(s * one * (1 + draw.uniform(-jitter, jitter)) for one in (ours, eager)) for s in slow]


@pytest.mark.parametrize(
    ("blocks", "noise", "difference"),
    [
        (pairs(1.85, 16.75), 0.01, "faster"),  # it holds where the machine slows down for both
        (pairs(16.75, 1.85), 0.01, "slower"),
        (pairs(9.9, 10, 0.0005), 0.005, "faster"),
        (pairs(9.9, 10, 0.0005), 0.02, "none"),
        (pairs(9.9, 10, 0.0005), math.inf, "none"),
        (pairs(1.85, 16.75, rounds=5), 0.0, "none"),  # too few
    ],
)
def test_a_difference_that_noise_explains_is_none(blocks, noise, difference):
    found = Speed.of(blocks)
    assert found.low <= found.median <= found.high
    assert found.difference(noise) == difference


def test_noise_is_how_far_eager_is_from_itself():
    assert noise_of(pairs(10, 10, jitter=0)) == 0
    assert 0.001 < noise_of(pairs(10, 10, jitter=0.05)) < 0.1
    assert noise_of(pairs(9, 10, jitter=0)) == pytest.approx(1 / 0.9 - 1), "the farther end, either way"
    assert math.isinf(noise_of(pairs(10, 10, rounds=5)))


@pytest.mark.parametrize(
    ("best", "longest", "steps", "said"),
    [
        (1, 2, 100_000, f"At 100,000 steps: eager+graph, 8.96{TIMES} in all; from 138,667 steps on: full+graph (9.85{TIMES} a step)"),
        (2, 2, None, f"From 1,389 steps on: full+graph (9.85{TIMES} a step)"),
        (0, 0, None, "At any length of the run: eager"),
        (0, 0, 50, "At 50 steps: eager"),
        (0, 1, 5, f"At 5 steps: eager; from 7 steps on: eager+graph (9.05{TIMES} a step)"),
        (3, 3, None, f"At any length of the run: default (2{TIMES} a step)"),
    ],
)  # fmt: skip
def test_the_sentence(best, longest, steps, said):
    courses = [*TINY, Course("default", 1.0, 0.008375)]
    assert sentence(courses[best], courses[longest], courses[0], steps) == said


def test_stay_eager_is_said_with_its_figures():
    assert why_eager({}, 0.01) == ", since no other way ran here"
    slower = why_eager({"full": Speed.of(pairs(15, 10, 0))}, 0.01)
    assert slower == "; full comes nearest, and its step takes 1.50 times eager's"
    equal = why_eager({"full": Speed.of(pairs(10, 10, 0))}, 0.01)
    assert equal == f"; full comes nearest, and 1.00{TIMES} a step is no difference (noise: 1%)"


@pytest.mark.parametrize("number", [1, 2, 3, 6])
def test_each_way_comes_in_each_place(number):
    orders = list(way.in_turns(number, 2 * number))
    assert all(sorted(order) == list(range(number)) for order in orders)
    assert {order[0] for order in orders} == {order[-1] for order in orders} == set(range(number))


@pytest.mark.parametrize(
    ("seconds", "steps"), [((0.015, 0.015), 10), ((0.00185, 0.01675), 28), ((3.0, 4.0), 1), ((1e-7, 1e-6), 400)]
)
def test_blocks_are_long_enough_for_the_fastest_and_short_enough_for_the_slowest(seconds, steps):
    assert block_steps(seconds) == steps
