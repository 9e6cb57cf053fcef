"""hotloop's own hooks, looks, decisions and accounts fail: the user's call returns what eager returns, and a line says so."""

from __future__ import annotations

import logging

import pytest
import torch
from step_failures import plant
from step_programs import Classifier, batches, plain_step
from torch.nn import functional as F

import hotloop
from hotloop.step.audit import auditor, effects, findings, op_trace, strangers
from hotloop.step.capture import outside
from hotloop.step.loop import account, capturing, deciding, reporter
from hotloop.step.loop.transitions import Transitions
from hotloop.step.policy import policy as fixed
from hotloop.step.prove import proof, unseen
from hotloop.step.state import program as program_state
from hotloop.step.watch import plain, stream

SAID = logging.getLogger("program")

HOOKS = {
    "an operation comes": (op_trace.OpTrace, "_look_before"),
    "an operation has run": (op_trace.OpTrace, "_look_after"),
    "a tensor is written": (op_trace.OpTrace, "_wrote"),
    "the optimizer finds gradients": (op_trace.OpTrace, "_finds"),
    "the optimizer has stepped": (op_trace.OpTrace, "_stepped"),
    "a draw": (op_trace, "draws_random"),
    "a function begins": (plain.PlainWatch, "_enter"),
    "a line is printed or logged": (effects.Effects, "_note"),
    "a stream is drawn from": (op_trace, "drawn_by"),
    "an operation is noted": (stream.OpStream, "before"),
    "a module is called": (strangers, "is_sharded"),
}
"""What runs amid the user's step while it is audited."""
AROUND = {
    "snapshot of the audit": (auditor, "before_a_run"),
    "what the audit makes of a result": (auditor.StepAuditor, "_of_result"),
    "the kind of a call": (capturing, "key_of"),
    "the recording is declared proven": (capturing.Capturing, "agree"),
    "a replay is due": (deciding.Deciding, "_check_due"),
    "an event": (account.Account, "event"),
    "a line": (reporter, "line_of"),
    "a step is counted": (account.Account, "step"),
    "gradients of a proof": (proof, "gradients_of"),
    "a comparison": (proof, "compare_kinds"),
    "the end of the record": (account.Account, "close"),
    "the end of the policy": (fixed.Fixed, "close"),
    "recordings are let go": (Transitions, "forget_recordings"),
    "the watch of writes ends": (program_state.WriteWatch, "close"),
}
"""What runs around it."""
COMPILED = {
    "a look at gradients amid the step": (unseen.Unseen, "look_before"),
    "gradients on their way to the host": (unseen.Unseen, "_look"),
    "gradients that were looked at": (unseen.Unseen, "appeared"),
    "a step is counted that may be looked at": (unseen.Unseen, "due"),
}
"""What runs amid and around a step of compiled code without a graph, where no proof has seen a gradient."""


BETWEEN = {
    "a segment ends before the optimizer": (outside.OutsideHooks, "enter"),
    "a segment begins after it": (outside.OutsideHooks, "leave"),
    "gradients are bound": (outside, "bind"),
    "the optimizer is called in a replay": (outside.OutsideCall, "run"),
}
"""What calls an optimizer between two segments of a recording."""


def program(run, **settings):
    model = Classifier(dropout=0.25).to(run.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2**-6, fused=True)

    @run.loop(model, optimizer, **settings).step
    def train_step(x, y):
        SAID.debug("a step")
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    for x, y in batches(run.device, 14):
        run.note(train_step(x, y))
    return model, optimizer


@pytest.mark.parametrize("hook", HOOKS)
def test_a_hook_of_ours_that_fails_amid_a_step_declines_it(both, monkeypatch, hook):
    owner, name = HOOKS[hook]
    SAID.setLevel(logging.DEBUG)
    failed = plant(monkeypatch, owner, name)
    run = both.alike(program, exact=True)
    assert failed
    assert run.declined, run.status()
    assert findings.FAILED in run.declined[0].reason
    assert "Planted" in run.declined[0].reason
    assert run.status().tier == "eager"


@pytest.mark.parametrize("place", AROUND)
@pytest.mark.parametrize("after", [0, 2])
def test_what_fails_around_a_step_leaves_it_as_eager_runs_it(both, monkeypatch, caplog, place, after):
    owner, name = AROUND[place]
    failed = plant(monkeypatch, owner, name, after=after)
    run = both.alike(program, exact=True)
    assert failed or after  # some are called once
    assert run.declined or "Planted" in caplog.text or not failed
    assert run.loops[0].steps == 14


def train_compiled(run):
    torch.manual_seed(0)
    model = Classifier()
    model.unused = torch.nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2**-6)
    with hotloop.Loop(model, optimizer, run=run, sentinel=0) as loop:

        @loop.step
        def step(x, y):
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        losses = [step(x, y).item() for x, y in batches(torch.device("cpu"), 8)]
        return losses, loop.status()


@pytest.mark.parametrize("hook", COMPILED)
def test_a_look_of_ours_that_fails_leaves_a_compiled_step_alone(monkeypatch, caplog, hook):
    eager, _ = train_compiled("eager")
    failed = plant(monkeypatch, *COMPILED[hook])
    losses, status = train_compiled("aot_eager")
    assert failed
    assert "Planted" in caplog.text
    assert status.tier == "eager"
    torch.testing.assert_close(losses, eager)


@pytest.mark.parametrize("place", BETWEEN)
@pytest.mark.parametrize("after", [0, 1, 4, 9])
def test_what_fails_between_two_segments_leaves_the_step_as_eager_runs_it(both, monkeypatch, caplog, place, after):
    failed = plant(monkeypatch, *BETWEEN[place], after=after)
    run = both.alike(steps_adagrad, exact=True)
    assert failed or after  # some are called once, as the step is recorded
    assert run.declined or "Planted" in caplog.text or not failed
    assert run.loops[0].steps == 14


def steps_adagrad(run):
    model = Classifier().to(run.device)
    optimizer = torch.optim.Adagrad(model.parameters(), lr=2**-6)
    step = run.loop(model, optimizer).step(plain_step(model, optimizer))
    for x, y in batches(run.device, 14):
        run.note(step(x, y))
    return model, optimizer
