"""A workload examined from its import to its ways side by side; wrong settings are refused before any work."""

import logging

import pytest
import torch

from hotloop.diagnose import RULES
from hotloop.errors import ConfigError
from hotloop.prove.doctor import step_operations
from hotloop.prove.doctor.examining import examine
from hotloop.report import build


def test_ways_are_timed_apart_and_what_ran_is_on_record(program):
    document = examine(program("breaks"), preset="aot_eager", steps=6, total_steps=500)
    ways = document["measurements"]["ways"]
    assert list(ways) == ["eager", "aot_eager"]
    for figures in ways.values():
        assert figures["step_ms"] > 0
        assert figures["step_ms_low"] <= figures["step_ms"] <= figures["step_ms_high"]
        assert figures["cold_seconds"] >= 0
        assert "peak_bytes" not in figures  # nobody can tell it honestly on a CPU
    settings = document["settings"]
    assert (settings["total_steps"], settings["run"], settings["preset"]) == (500, "aot_eager", "aot_eager")
    assert document["components"]["model"]["graph_breaks"] == 1
    assert document["components"]["model"]["state"] == "compiled"
    assert document["environment"]["torch"] == torch.__version__
    assert document["status"] == "finished"
    assert {step["running"] for step in document["steps"]} == {"eager", "aot_eager"}


@pytest.mark.campaign
def test_a_condition_that_is_trained_is_timed_both_ways(program):
    """Run with every compile off, ``torch.cond`` raised in the first eager step: it compiles itself, in eager, too."""
    ways = examine(program("branched"), preset="aot_eager", steps=4)["measurements"]["ways"]
    assert list(ways) == ["eager", "aot_eager"]
    assert all(figures["step_ms"] > 0 for figures in ways.values())


def test_the_advice_is_worst_first_and_names_the_line(program, line_of):
    document = examine(program("breaks"), preset="aot_eager", steps=4)
    rules = [advice["rule"] for advice in document["advice"]]
    assert "graph_break" in rules
    assert set(rules) <= set(RULES)
    broken = document["advice"][rules.index("graph_break")]
    assert broken["line"] == line_of("BREAK")
    assert ".item()" in broken["source"]
    assert build(document).diagnosis.startswith("aot_eager: ")


def test_blocks_are_a_way_where_a_model_has_them(program):
    ways = examine(program("blocks"), preset="aot_eager", steps=4)["measurements"]["ways"]
    assert list(ways) == ["eager", "aot_eager", "aot_eager by blocks"]
    assert all(figures["step_ms"] > 0 for figures in ways.values())


def test_blocks_leave_the_compiles_on_record_alone(program):
    document = examine(program("blocks"), preset="aot_eager", steps=4)
    compiled = [one for one in document["events"] if one["kind"] == "compiled" and one["phase"] == "forward"]
    assert len(compiled) == document["components"]["model"]["compiles"]


@pytest.mark.parametrize(("name", "components"), [("head_left", {}), ("wrapped", {})])
def test_a_program_that_compiles_itself_is_looked_at_as_it_is(program, name, components):
    document = examine(program(name), steps=4)
    assert list(document["measurements"]["ways"]) == ["eager", "as given"]
    assert document["settings"]["run"] == "as given"
    assert document["components"] == components
    assert [one for one in document["events"] if one["kind"] == "compiled"]


def test_a_dictionary_of_modules_is_compiled_child_by_child(program):
    document = examine(program("parts"), preset="aot_eager", steps=4)
    assert set(document["components"]) == {"body", "head"}
    assert all(part["state"] == "compiled" for part in document["components"].values())


def test_a_step_that_trains_nothing_is_told_first(program):
    document = examine(program("idle"), preset="none", steps=4)
    assert document["measurements"]["trained"] == {
        "parameters": 4,
        "unchanged": 4,
        "steps": document["measurements"]["steps_done"],
    }
    first = document["advice"][0]
    assert (first["rule"], first["milliseconds"]) == (
        "not_trained",
        document["measurements"]["ways"]["eager"]["step_ms"],
    )
    assert "optimizer.step()" in first["change"]


def test_a_step_that_trains_is_not_told_that_it_does_not(program):
    document = examine(program("clean"), preset="none", steps=4)
    assert document["measurements"]["trained"]["unchanged"] == 0
    assert "not_trained" not in {advice["rule"] for advice in document["advice"]}


def test_preset_none_is_eager_alone(program):
    document = examine(program("clean"), preset="none", steps=4)
    assert list(document["measurements"]["ways"]) == ["eager"]
    assert document["components"] == {}


@pytest.mark.skipif(torch.cuda.is_available(), reason="the preset can run on this machine")
def test_a_preset_that_cannot_run_here_is_on_record(program, monkeypatch, tmp_path):
    monkeypatch.setenv("CXX", str(tmp_path / "gone"))
    document = examine(program("clean"), preset="default", steps=4)
    (first, *_) = [one for one in document["events"] if one["kind"] == "unavailable"]
    assert "no C++ compiler" in first["missing"]
    assert document["components"]["model"]["state"] == "eager"
    assert "fallback" in [advice["rule"] for advice in document["advice"]]


def test_compiled_code_that_fails_while_it_runs_leaves_the_other_ways(program, monkeypatch):
    from hotloop.errors import CompiledRunError
    from hotloop.prove.doctor import examining

    real = examining._Examination._run

    def run(self, way, batch):
        if way.name == "aot_eager" and len(way.first) == 2:
            raise CompiledRunError("compiled code of component 'model' failed")
        real(self, way, batch)

    monkeypatch.setattr(examining._Examination, "_run", run)
    document = examine(program("blocks"), preset="aot_eager", steps=4)
    ways = document["measurements"]["ways"]
    assert "CompiledRunError" in ways["aot_eager"]["failed"]
    assert "step_ms" not in ways["aot_eager"]
    assert ways["eager"]["step_ms"] > 0
    assert "aot_eager failed: CompiledRunError" in build(document).diagnosis


def test_the_users_own_exception_reaches_them_with_its_step(program):
    with pytest.raises(KeyError, match="their own") as caught:
        examine(program("fails_in_the_third"), preset="aot_eager", steps=4)
    assert caught.value.__notes__ == ["hotloop doctor: raised in step 3, which ran eager"]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("no_model", "expected a torch Module or a sequence, got str"),
        ("no_batch", "expected at least one batch"),
        ("no_workload", "gave a Net, expected a hotloop.Workload"),
        ("used_up", "found none a second time: give a list"),
        ("in_another_order", r"^Workload step of type list: expected a function of one batch; the order is Workload"),
        ("of_a_size", r"of_a_size\(\) needs size: expected a function that is called without arguments"),
        ("nonesuch", "has no function 'nonesuch'"),
    ],
)
def test_a_workload_that_is_wrong_is_a_config_error(program, name, said):
    with pytest.raises(ConfigError, match=said):
        examine(program(name), steps=4)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"steps": 3}, "--steps 3: expected a whole number of 4 or more"),
        ({"total_steps": 0}, "--total-steps 0"),
        ({"preset": "tritn"}, "did you mean 'triton'"),
    ],
)
def test_a_setting_that_is_wrong_is_refused_before_the_program_is_imported(tmp_path, settings, said):
    program = tmp_path / "never.py"
    program.write_text("raise SystemExit('imported')")
    with pytest.raises(ConfigError, match=said):
        examine(f"{program}:make", **settings)


def test_a_preset_over_a_wrapped_model_is_refused(program):
    with pytest.raises(ConfigError, match="compiled already by torch"):
        examine(program("wrapped"), preset="aot_eager", steps=4)


def test_nothing_of_the_process_stays_changed(program):
    import sys

    before = (
        torch.get_float32_matmul_precision(),
        torch.is_grad_enabled(),
        sys.getprofile(),
        logging.getLogger("hotloop").level,
    )
    examine(program("clean"), preset="aot_eager", steps=4)
    assert before == (torch.get_float32_matmul_precision(), torch.is_grad_enabled(), sys.getprofile(), logging.getLogger("hotloop").level)  # fmt: skip


def test_the_same_seed_makes_the_same_program(program):
    seen = []
    for _ in range(2):
        torch.manual_seed(77)
        examine(program("clean"), preset="none", steps=4)
        seen.append(torch.get_rng_state())
    assert torch.equal(*seen)


@pytest.mark.campaign
@pytest.mark.inductor
def test_with_inductor_the_loss_is_what_is_left(program, line_of, monkeypatch):
    monkeypatch.setattr(step_operations, "_LEAST_SHARE", 0.0)  # of a step that waits for a busy core, it is small
    document = examine(program("clean"), preset="default", steps=4)
    parts = [one for one in document["events"] if one["kind"] == "eager_part"]
    assert [(one["part"], one["line"]) for one in parts] == [("loss", line_of("LOSS"))]
    assert document["components"]["model"]["running"] == "default"
