"""The proof: a recording that is wrong in one small way is found, named and not used, and has done no harm."""

from __future__ import annotations

import math
from unittest import mock

import pytest
import torch
from step_programs import GRAPH, Classifier, Pictures, batches, images
from torch.nn import functional as F

from hotloop._torch.dispatch import name_of, tensors_in
from hotloop.measure import Limits, differences
from hotloop.step.capture import engines
from hotloop.step.prove.reference_runs import StepOutputs
from hotloop.testing import captured as stand_in
from hotloop.testing.captured import Tape, TapeEngine, TapeRecording


class WrongTape(Tape):
    """A tape whose replay is wrong; the operations that it recorded have run rightly."""

    def replay(self):
        with torch.no_grad():
            for operation, args, kwargs, made in self.kept():
                results = self.run(operation, args, kwargs)
                for old, new in zip(made, tensors_in(results), strict=True):
                    if old.data_ptr() != new.data_ptr():
                        old.copy_(new)
                self.after(operation, made)

    def kept(self):
        return self._operations

    def run(self, operation, args, kwargs):
        return operation(*args, **kwargs)

    def after(self, operation, made):
        """Do what is wrong, after an operation."""


class SkipsTheClipping(WrongTape):
    """Leaves one operation out: the multiplication of all gradients by the clip coefficient."""

    def kept(self):
        left_out = [one for one in self._operations if name_of(one[0]) == "aten._foreach_mul_"]
        assert len(left_out) == 1
        return [one for one in self._operations if one is not left_out[0]]


class AddsToAGradient(WrongTape):
    """1e-3 too much in the gradient of one bias."""

    def after(self, operation, made):
        if name_of(operation) == "aten.native_layer_norm_backward":
            made[2].add_(1e-3)


class ForgetsABuffer(WrongTape):
    """Does not move the statistics of BatchNorm."""

    def run(self, operation, args, kwargs):
        if name_of(operation) == "aten.native_batch_norm":
            args = (*args[:3], args[3].clone(), *args[4:])
        return operation(*args, **kwargs)


class ReusesTheMask(WrongTape):
    """Draws nothing: the masks of the recorded step stay."""

    def kept(self):
        found = [one for one in self._operations if torch.Tag.nondeterministic_seeded not in one[0].tags]
        assert len(found) < len(self._operations)
        return found


class DrawsTwice(WrongTape):
    """Draws its masks from another place of the stream than eager."""

    def run(self, operation, args, kwargs):
        if torch.Tag.nondeterministic_seeded in operation.tags:
            torch.rand(())
        return operation(*args, **kwargs)


class ForgetsAMoment(WrongTape):
    """The optimizer's second moment of one parameter goes wrong, which its parameter hardly shows in one step."""

    def after(self, operation, made):
        if name_of(operation) == "aten._fused_adamw_":
            moments = next(args[3] for op, args, _, _ in self._operations if op is operation)
            moments[0].mul_(1.0001)


def training(dropout=0.0, model=None, data=batches):
    def program(run):
        live = (model() if model else Classifier(dropout)).to(run.device)
        optimizer = torch.optim.AdamW(live.parameters(), lr=2**-6, fused=True)

        @run.loop(live, optimizer).step
        def train_step(x, y):
            loss = F.cross_entropy(live(x), y)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(live.parameters(), 0.125, foreach=True)
            optimizer.step()
            optimizer.zero_grad()
            return loss

        for number, (x, y) in enumerate(data(run.device)):
            optimizer.param_groups[0]["lr"] = 2.0 ** -(5 + number % 3)
            run.note(train_step(x, y))
        return live, optimizer

    return program


@pytest.fixture
def cpu(both):
    if both.device.type != "cpu":
        pytest.skip("the broken engines are made for the CPU")
    return both


def declined_with(both, program, *reasons, tape=Tape, engine=TapeEngine):
    with mock.patch.object(stand_in, "Tape", tape), engines.using("cpu", engine):
        run = both.alike(program, exact=True)
    (told,) = run.declined
    assert told.tier == GRAPH
    for reason in reasons:
        assert reason in told.reason, told.reason
    assert run.status().tier == "eager"
    assert run.replays() == 0
    return told


WRONG = {
    SkipsTheClipping: (training(), ("does not agree", "gradient of ")),
    AddsToAGradient: (training(), ("does not agree", "gradient of norm.bias")),
    ForgetsAMoment: (training(), ("does not agree", "optimizer state of inner.weight: exp_avg_sq")),
    ForgetsABuffer: (training(model=Pictures, data=images), ("does not agree", "buffer norm.running_mean")),
    ReusesTheMask: (training(0.5), ("another position of torch's CPU generator",)),
    DrawsTwice: (training(0.5), ("another position of torch's CPU generator",)),
}


@pytest.mark.parametrize("tape", WRONG, ids=lambda one: one.__name__)
def test_a_replay_that_is_wrong_in_one_place_is_declined_by_its_name(cpu, tape):
    program, reasons = WRONG[tape]
    declined_with(cpu, program, *reasons, tape=tape)


def test_the_right_tape_made_the_same_way_is_accepted(cpu):
    """So that the tests above show what is wrong with their tapes, and not with how they are put in."""
    with mock.patch.object(stand_in, "Tape", WrongTape):
        cpu.equal(training(0.5), exact=True)


def test_an_input_that_is_not_copied_is_found(cpu, monkeypatch):
    from hotloop.step.capture import in_and_out

    filled = in_and_out.Inputs.fill
    calls = []

    def only_first(self, leaves):
        calls.append(leaves)
        if len(calls) == 1:
            filled(self, leaves)

    monkeypatch.setattr(in_and_out.Inputs, "fill", only_first)
    declined_with(cpu, training(), "does not agree", "result")


def test_a_learning_rate_that_stays_is_found(cpu, monkeypatch):
    from hotloop.step.capture import optimizers

    monkeypatch.setattr(optimizers.Recorded, "refresh", lambda self: None)
    declined_with(cpu, training(), "does not agree", "parameter ")


def test_gradients_that_are_left_wrong_are_found(cpu, monkeypatch):
    """The optimizer has had the right ones: only whoever reads them after the step is misled."""
    from hotloop.step.capture import recording

    result = recording.CapturedStep.result

    def off(self, *args):
        for parameter in self._parameters:
            if parameter.grad is not None:
                parameter.grad.mul_(1.001)
        return result(self, *args)

    def program(run):
        model = Classifier()
        optimizer = torch.optim.AdamW(model.parameters(), lr=2**-6, fused=True)

        @run.loop(model, optimizer).step
        def train_step(x, y):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            return loss

        for x, y in batches(run.device):
            run.note(train_step(x, y))
        return model, optimizer

    monkeypatch.setattr(recording.CapturedStep, "result", off)
    declined_with(cpu, program, "does not agree", "gradient of ")


@pytest.mark.parametrize("at", [0, 20, 30])
def test_an_engine_that_fails_while_it_records_is_declined_with_what_it_said(cpu, at):
    class Failing(Tape):
        def record(self, operation, args, kwargs):
            if len(self._operations) == at:
                raise RuntimeError("no room for a recording")
            return super().record(operation, args, kwargs)

    told = declined_with(cpu, training(0.5), "no room for a recording", tape=Failing)
    assert told.file == __file__


def test_an_engine_that_fails_as_it_ends_a_recording_is_declined(cpu):
    class Failing(TapeRecording):
        def cut(self, ready):
            super().cut(ready)
            raise RuntimeError("cannot be ended")

    class Engine(TapeEngine):
        def begin(self, device, streams, *, reports_capturing):
            return Failing(device, streams, reports_capturing=reports_capturing)

    declined_with(cpu, training(0.5), "cannot be ended", engine=Engine)


def test_an_engine_that_fails_in_the_second_replay_is_declined(cpu):
    class Failing(WrongTape):
        replays = 0

        def kept(self):
            self.replays += 1
            if self.replays == 2:
                raise RuntimeError("cannot be launched")
            return super().kept()

    declined_with(cpu, training(0.5), "cannot be launched", tape=Failing)


def test_a_proof_is_reported_with_its_steps_and_its_memory(cpu):
    from hotloop import events as ev

    run = cpu.equal(training(0.5), exact=True)
    (proven,) = run.told(ev.TierProven)
    assert (proven.tier, proven.steps, proven.step) == (GRAPH, 3, 5)
    assert proven.worst == "all equal"
    parameters = sum(one.numel() for one in Classifier().parameters())
    assert proven.copied_bytes >= 3 * 4 * parameters
    assert not proven.on_host
    assert proven.seconds > 0


def of_one_step(gradient, parameter):
    """What a step makes of a weight, and of a bias that the loss does not depend on but for rounding."""
    return {
        "gradient of weight at the optimizer step": torch.ones(64),
        "gradient of bias at the optimizer step": torch.full((4,), 1e-9 * gradient),
        "parameter weight": torch.ones(64),
        "parameter bias": torch.full((4,), parameter),
        "optimizer state of bias: exp_avg": torch.full((4,), parameter),
        "optimizer state of weight: exp_avg": torch.ones(64),
    }


@pytest.mark.parametrize(
    ("gradient", "parameter", "wrong"),
    [
        (1.0, 1.0, []),
        (1.5, 1.2, []),  # Adam made a full step of rounding, in either run another
        (1.5, math.nan, ["optimizer exp_avg", "parameter"]),
        (1.5, 20.0, ["optimizer exp_avg", "parameter"]),  # no optimizer does
        (1e7, 1.2, ["gradient"]),
    ],
)
def test_a_parameter_whose_gradient_is_rounding_is_not_held_to_another_runs(gradient, parameter, wrong):
    start = {"parameter weight": torch.full((64,), 0.9), "parameter bias": torch.full((4,), 0.9)}
    ours, again = of_one_step(1.0, 1.0), of_one_step(2.0, 1.1)
    found = StepOutputs(start, ours, spread=differences(ours, again)[0]).compare(
        of_one_step(gradient, parameter), Limits.rounding()
    )
    assert sorted(kind for kind, one in found.items() if not one.agrees) == wrong


def test_an_optimizer_is_judged_by_some_parameters_in_any_case():
    made = StepOutputs(
        {"parameter weight": torch.zeros(64), "parameter bias": torch.zeros(4)}, of_one_step(1.0, 1.0), spread={}
    )
    theirs = of_one_step(1.5, 1.2)
    theirs["gradient of weight at the optimizer step"] *= 1.01
    found = made.compare(theirs, Limits.rounding())
    assert not found["parameter"].agrees
