"""A survey that ends before its step does: the rest of the step runs unobserved, and is eager's."""

import types
from unittest import mock

import torch
from torch import nn

import hotloop
from hotloop.step.audit import op_trace
from hotloop.step.audit.findings import Look
from hotloop.step.audit.op_trace import trace_step
from hotloop.step.state.holdings import Holdings


def observed(run, *, operations):
    """Observe a run up to its so-manieth operation."""
    look = Look(lambda seen: seen.operations == operations)
    return trace_step(Holdings({}, {}), torch.device("cpu"), [], run, look)[1]


def test_nothing_is_observed_after_the_end():
    def run():
        one = torch.ones(2)
        one.sum().item()
        return torch.ones(2).sum().item()

    seen = observed(run, operations=3)
    assert seen.stopped
    assert seen.operations == 3
    assert [one.line for one in seen.obstacles] == [run.__code__.co_firstlineno + 2]


def test_a_step_that_runs_to_its_end_is_observed_to_its_end():
    assert not observed(lambda: torch.ones(2) + 1, operations=100).stopped


def test_a_failure_while_the_step_is_looked_at_leaves_the_step_alone():
    look = Look(lambda _: 1 // 0)
    result, seen = trace_step(Holdings({}, {}), torch.device("cpu"), [], lambda: torch.ones(2) + 1, look)
    assert result.tolist() == [2, 2]
    assert seen.stopped
    assert "hotloop failed as it looked at the step: ZeroDivisionError" in seen.failed.reason
    assert seen.failed.not_repeatable


def test_code_with_a_path_of_its_own_for_a_capture_is_surveyed_up_to_what_that_path_avoids(monkeypatch):
    """transformers reads a padding mask on the host unless it is captured: all of the step was observed twice."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    looked = mock.create_autospec(op_trace.OpTrace._after, side_effect=op_trace.OpTrace._after)
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
    traces = [one.args[0] for one in looked.call_args_list]
    counted = [sum(one is trace for one in traces) for trace in dict.fromkeys(traces)]
    assert counted[0] == 2  # the sum, and the read of its value
    assert counted[1] > 5
