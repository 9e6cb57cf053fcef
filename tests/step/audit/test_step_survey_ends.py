"""A survey that ends before its step does: the rest of the step runs unobserved, and is eager's."""

import sys
import types

import torch
from torch import nn

import hotloop
from hotloop._torch import hooks
from hotloop._torch.dispatch import observing
from hotloop.step.audit import op_trace
from hotloop.step.audit.call_monitor import CallMonitor
from hotloop.step.audit.op_trace import trace_step
from hotloop.step.audit.side_effects import SideEffects
from hotloop.step.state.holdings import Holdings

DEVICE = torch.device("cpu")


def observed(run, *, operations):
    """Observe a run up to its so-manieth operation; gives what was seen, and the listener."""
    heard = SideEffects()
    heard.ends = lambda seen: seen.operations == operations
    return trace_step(Holdings({}, {}), DEVICE, [], run, heard)[1], heard


def test_nothing_is_observed_after_the_end():
    said = []

    def run():
        one = torch.ones(2)
        print("before")
        one.sum().item()
        print("after", torch.ones(2).tolist())
        said.append(sys.getprofile())
        return torch.ones(2) + 1

    seen, heard = observed(run, operations=3)
    assert seen.stopped
    assert seen.operations == 3
    assert [one.line for one in seen.obstacles] == [run.__code__.co_firstlineno + 3]
    assert not heard.complete
    assert "after" not in str(heard)
    assert "before" in str(heard)
    assert said == [None]  # up to Python 3.11 the place is free again


def test_a_step_that_runs_to_its_end_is_observed_to_its_end():
    seen, heard = observed(lambda: torch.ones(2) + 1, operations=100)
    assert not seen.stopped
    assert heard.complete


def test_code_with_a_path_of_its_own_for_a_capture_is_surveyed_up_to_what_that_path_avoids(monkeypatch):
    """transformers reads a padding mask on the host unless it is captured: all of the step was observed twice."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    surveys = []
    real = op_trace.OpTrace._after
    looked = lambda look, *given: (surveys.append(look), real(look, *given))[1]  # noqa: E731
    monkeypatch.setattr(op_trace.OpTrace, "_after", looked)
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=2**-4)
    reads = types.SimpleNamespace(mask=torch.ones(1, 2))
    with hotloop.testing.captured_step_emulation():
        loop = hotloop.Loop(model, optimizer, run="eager+graph", sentinel=0)

        @loop.step
        def step(x):
            if not torch.cuda.is_current_stream_capturing() and reads.mask.sum().item() == 0:
                x = x + 1
            loss = model(x * reads.mask).square().sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        ran = []
        for _ in range(10):
            step(torch.ones(1, 2))
            ran.append(loop.last_ran())
        status = loop.status()
    assert status.tier == "eager+graph"
    assert [kind for _, kind in ran].count("survey") == 2
    counted = [sum(look is one for look in surveys) for one in dict.fromkeys(surveys)]
    assert counted[0] == 2  # the sum, and the read of its value
    assert counted[1] > 5


def test_an_observed_operation_runs_no_function_of_the_compilers():
    """torch wraps a mode's method in four functions, which are heard: they took two thirds of a survey's time."""
    began = []
    calls = CallMonitor(frozenset(), lambda *_: None, lambda code, _: began.append(code.co_filename) is None)
    one = torch.ones(2)
    with observing(lambda operation, args, kwargs: operation(*args, **kwargs)), calls.heard():
        for _ in range(3):
            one.add(1)
    assert calls.complete
    assert not [file for file in began if "_dynamo" in file or file.endswith(("_compile.py", "compiler/__init__.py"))]


def test_what_observes_a_step_is_none_of_what_the_step_reads():
    """It was looked for after the step, was gone by then, and made everything be looked at again."""
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with hotloop.testing.captured_step_emulation():
        loop = hotloop.Loop(model, optimizer, run="eager+graph", sentinel=0)

        @loop.step
        def step(x):
            loss = model(x).sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        for _ in range(2):
            step(torch.ones(1, 2))
        assert loop.last_ran()[1] == "survey"
        watch = loop._runners[0]._auditor._changes.heard
    assert watch.reads.holders
    assert not [
        one.kind for one in watch.reads.holders.values() if one.kind.__module__.startswith("hotloop.step.audit")
    ]


def test_a_survey_looks_at_the_hooks_of_each_parameter_once(monkeypatch):
    """Its own hooks on the optimizers made it look a second time, at hundreds of parameters."""
    looked, real = [], hooks._tables
    monkeypatch.setattr(hooks, "_tables", lambda tensor: (looked.append(tensor), real(tensor))[1])
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with hotloop.testing.captured_step_emulation():
        loop = hotloop.Loop(model, optimizer, run="eager+graph", sentinel=0)

        @loop.step
        def step(x):
            loss = model(x).sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        step(torch.ones(1, 2))
        before = len(looked)
        step(torch.ones(1, 2))
        assert loop.last_ran()[1] == "survey"
    assert len(looked) - before == 2
