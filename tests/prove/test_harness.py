"""The harness: what is safe passes, and each thing that CUDA graphs do to a program fails with its name."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import harness_programs as programs
import pytest
import torch

import hotloop
import hotloop.cli
from hotloop.compiling.fallback import emulation, step_marks
from hotloop.errors import ConfigError

NAME = f"{Path(__file__).with_name('harness_programs.py')}"


def failures(found):
    return [(one.kind, one.what) for one in found.findings if one.fails]


@pytest.mark.campaign
@pytest.mark.parametrize("make", [programs.allocator, programs.trained_only])
def test_two_networks_trained_in_batches_and_asked_by_an_allocator_are_safe(make):
    found = hotloop.harness(make)
    assert found.passed, str(found)
    assert found.findings == ()
    assert found.emulated
    assert found.nearest == "everything equals eager's"
    gist = found.components["model[0]"]["modes"]
    assert gist["training"]["calls"] == found.rounds
    assert gist["training"]["calls_per_step"] == {"1": found.rounds}
    between = found.calls * (4 if make is programs.allocator else 1)
    assert gist["inference"]["calls"] == found.rounds * between
    assert gist["training"]["calls_in_backward"] == 0
    assert found.components["model[0]"]["outputs_copied"] > 0
    assert "36 calls between them, under the emulation of CUDA graphs, since there is no GPU" in found.verdict


@pytest.mark.campaign
def test_what_an_allocator_holds_is_listed_with_the_remedy():
    found = hotloop.harness(programs.allocator)
    (held,) = [one for one in found.held if one.component == "model[0]"]
    assert held.file.endswith("two_networks.py")
    assert "hotloop.own" in held.remedy
    assert "Held when a later call may overwrite it" in str(found)
    assert "(its outputs that are held are copied)" in found.verdict


@pytest.mark.campaign
def test_training_and_inference_are_switched_apart():
    found = hotloop.harness(programs.allocator, "reduce-overhead", inference="none")
    assert found.passed
    modes = found.components["model[0]"]["modes"]
    assert (modes["training"]["compiles"], modes["inference"]["compiles"]) == (1, 0)
    assert found.held == (), "nothing that runs eager is overwritten"
    other = hotloop.harness(programs.allocator, "none", inference="reduce-overhead")
    assert other.components["model[0]"]["modes"]["training"]["compiles"] == 0
    assert other.passed


def test_a_capture_that_is_passed_over_fails():
    found = hotloop.harness(programs.writes)
    kinds = {kind for kind, _ in failures(found)}
    assert kinds == {"skipped"}
    assert any("no CUDA graph was captured: it writes into an input" in what for _, what in failures(found))
    assert found.verdict.startswith("reduce-overhead does not run as asked here")


def test_outputs_that_are_not_copied_are_found(monkeypatch):
    """The purpose of the harness: if the copies at the boundary were broken, held outputs would change."""
    monkeypatch.setattr(step_marks, "Outputs", lambda run: run)
    found = hotloop.harness(programs.keeps)
    assert {kind for kind, _ in failures(found)} == {"held"}


def test_wrong_numbers_are_found(monkeypatch):
    right = emulation._Graph.run

    def wrong(self, args):
        outputs = right(self, args)
        return [one * 1.001 if isinstance(one, torch.Tensor) and one.is_floating_point() else one for one in outputs]

    monkeypatch.setattr(emulation._Graph, "run", wrong)
    found = hotloop.harness(programs.plain, look=False)
    assert "numerics" in {kind for kind, _ in failures(found)}


def test_what_only_the_compiled_program_raises_is_found(monkeypatch):
    def broken(self, args):
        raise RuntimeError("planted")

    monkeypatch.setattr(emulation._Graph, "run", broken)
    found = hotloop.harness(programs.plain, look=False)
    assert not found.passed
    assert "planted" in str(found)


def test_a_model_that_is_called_past_its_compiled_entry_fails():
    found = hotloop.harness(programs.bypassed)
    assert {kind for kind, _ in failures(found)} == {"not called"}
    assert all("call the module itself" in one.remedy for one in found.findings if one.fails)


def test_random_numbers_and_modes_are_as_they_were():
    torch.manual_seed(3)
    wanted = torch.rand(2)
    torch.manual_seed(3)
    hotloop.harness(programs.plain, look=False)
    assert torch.equal(torch.rand(2), wanted)


def test_what_the_program_raises_is_the_users():
    with pytest.raises(KeyError, match="the user's own"):
        hotloop.harness(programs.failing)


def test_memory_that_is_too_small_for_both_programs_is_no_fault_of_the_compilers():
    [finding] = [one for one in hotloop.harness(programs.without_room).findings if one.kind == "error"]
    assert finding.fails
    assert "OutOfMemoryError: CUDA out of memory" in finding.what
    assert "holds the program twice" in finding.remedy
    assert "bug" not in finding.remedy


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"preset": "aot_eager"}, "it has no CUDA graphs; expected one that has: triton, reduce"),
        ({"preset": "reduce-overhed"}, "reduce-overhead"),
        ({"rounds": 2}, "rounds 2: expected a whole number of 3"),
        ({"calls": 0}, "calls 0"),
    ],
)
def test_wrong_settings_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        hotloop.harness(programs.plain, **settings)


def test_a_model_that_is_compiled_already_is_no_eager_to_be_held_against():
    def make():
        workload = programs.plain()
        workload.model.compile(backend="eager")
        return workload

    with pytest.raises(ConfigError, match="a model is compiled already: expected it as it was"):
        hotloop.harness(make, rounds=3, calls=2)


def loss_alone():
    """A step without a backward: trainers call the backward themselves."""
    workload = programs.plain()
    return dataclasses.replace(workload, step=lambda x: workload.model(x).sum())


def by_hand():
    """A step that updates without an optimizer, and leaves no gradient."""
    workload = programs.plain()

    def step(x):
        weights = list(workload.model.parameters())
        gradients = torch.autograd.grad(workload.model(x).square().sum(), weights)
        with torch.no_grad():
            for weight, gradient in zip(weights, gradients, strict=True):
                weight.sub_(0.01 * gradient)

    return dataclasses.replace(workload, step=step)


@pytest.mark.parametrize("judge", [hotloop.harness, lambda make: hotloop.verify(make, "aot_eager", steps=1)])
def test_a_step_that_trains_nothing_is_refused(judge):
    with pytest.raises(ConfigError, match="Workload step: it gave no parameter a gradient and changed nothing"):
        judge(loss_alone)


def test_a_step_that_updates_by_hand_is_judged():
    assert hotloop.verify(by_hand, "aot_eager", steps=1).passes


def command(*arguments):
    with pytest.raises(SystemExit) as stopped:
        hotloop.cli.main(["harness", *arguments])
    return stopped.value.code or 0


def test_the_command_prints_a_verdict_and_its_exit_code_is_the_verdicts(capsys):
    assert command(f"{NAME}:plain", "--preset", "reduce-overhead") == 0
    assert "reduce-overhead is safe here" in capsys.readouterr().out
    assert command(f"{NAME}:writes", "--json") == 1
    data = json.loads(capsys.readouterr().out)
    assert data["passed"] is False
    assert {one["kind"] for one in data["findings"]} == {"skipped"}
    assert command(f"{NAME}:plain", "--preset", "aot_eager") == 2
    assert command("nowhere.py:make") == 2
