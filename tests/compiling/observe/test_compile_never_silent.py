"""What runs is what the status says, and the cause of any difference is named with file, line and remedy."""

import inspect
import json
import logging

import pytest
import torch
from compiling_models import Net, against_eager, one, rows
from torch import nn

import hotloop
from hotloop import events as ev
from hotloop.compiling.control import Status


def line_of(function, text):
    """The file's line of a function that holds a text."""
    lines, start = inspect.getsourcelines(function)
    return start + next(number for number, line in enumerate(lines) if text in line)


class CallsForward(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = Net()

    def forward(self, x):
        return self.net(x)

    def training_step(self, x):
        return self.forward(x)


class CallsAnother(CallsForward):
    def training_step(self, x):
        return self.encode(x)

    def encode(self, x):
        return self.net.last(x)


@pytest.mark.parametrize("kind", [CallsForward, CallsAnother])
@pytest.mark.parametrize("validated", [False, True], ids=["", "validated by its call before"])
def test_a_compile_that_nothing_calls(kind, validated, caplog):
    model = hotloop.compile(kind(), "aot_eager")
    if validated:
        with torch.no_grad():
            model(rows())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with hotloop.watch() as events:
        for _ in range(4):
            model.training_step(rows()).sum().backward()
            optimizer.step()
    (event,) = [e for e in events if isinstance(e, ev.NoEffect)]
    status = one(model)
    cause = next(c for c in status.causes if "never entered" in c.reason)
    assert status.state == ("partial" if validated else "eager")
    assert "model(x)" in cause.hint
    assert event.problem == "bypassed"
    assert caplog.text.count("compile has no effect") == 1


class Reaches(nn.Module):
    """A call that does no tensor work that dynamo sees."""

    def __init__(self):
        super().__init__()
        self.net = Net()

    @torch._dynamo.disable
    def hidden(self, x):
        return self.net(x)

    def forward(self, x):
        return self.hidden(x)


def test_a_call_that_reaches_no_graph(caplog):
    status = against_eager(Reaches(), [rows()] * 3)
    assert (status.state, status.running, status.compiles) == ("eager", "none", 0)
    assert status.frames_eager == 3
    cause = next(c for c in status.causes if c.file == __file__)
    assert cause.line == line_of(Reaches, "return self.hidden(x)")
    assert "take the decorator or call off" in cause.hint
    assert "model:" in caplog.text


class Items(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = Net()

    def forward(self, x):
        x = self.net(x)
        if x.sum().item() > 1e9:
            x = x + 1
        print(end="")
        return x * 2


def test_a_graph_break_names_line_source_and_remedy(caplog):
    caplog.set_level(logging.INFO, "hotloop")
    with hotloop.watch() as events:
        status = against_eager(Items(), [rows()] * 3)
    assert status.state == "compiled"
    assert status.graph_breaks == 2
    found = {event.line: event for event in events if isinstance(event, ev.GraphBreak)}
    item = found[line_of(Items, ".item() > 1e9")]
    assert item.file == __file__
    assert item.source == "if x.sum().item() > 1e9:"
    assert "keep the value a tensor" in item.hint
    printed = found[line_of(Items, 'print(end="")')]
    assert "print" in printed.hint
    assert {(c.file, c.line) for c in status.causes} == {(__file__, line) for line in found}
    assert caplog.text.count(f"graph break at {__file__}:{item.line}") == 1
    places = "; ".join(f"{__file__}:{line}" for line in sorted(found))
    assert Status({"model": status}).compile_lines()[0] == f"model: 2 graph breaks: {places}"


class Anew(Net):
    factor = 1

    def forward(self, x):
        return super().forward(x) * self.factor


@pytest.mark.campaign
def test_the_status_says_how_often_and_where_code_was_compiled_anew():
    model = hotloop.compile(Anew(), "aot_eager")
    for model.factor in (1, 2, 3):
        model(rows())
    for model.factor in (1, 2, 3):
        with torch.no_grad():
            model(rows())
    status = hotloop.status(model)
    line = line_of(Anew, "self.factor")
    told = status.compile_lines()
    assert told == [f"model: 4 recompiles: {__file__}:{line}: factor changed (it was 2)"]
    assert told[0] in " ".join(str(status).split())
    (cause,) = status.to_dict()["components"]["model"]["recompiled"]
    assert (cause["file"], cause["line"]) == (__file__, line)
    assert cause["source"] == "return super().forward(x) * self.factor"
    assert "keep it as a tensor" in cause["hint"]


def test_watch_sees_plain_torch_compile_and_events_are_typed():
    with hotloop.watch() as events:
        f = torch.compile(lambda x: x.sin() + 1, backend="aot_eager", dynamic=False)
        f(rows(2))
        f(rows(3))
        g = torch.compile(Items(), backend="aot_eager")
        g(rows())
    assert {e.component for e in events} == {None}
    kinds = {type(e) for e in events}
    assert {ev.Compiled, ev.Recompiled, ev.GraphBreak} <= kinds
    compiled = next(e for e in events if isinstance(e, ev.Compiled))
    assert compiled.file == __file__
    assert compiled.seconds > 0
    for event in events:
        again = ev.from_dict(json.loads(json.dumps(event.to_dict())))
        assert again == event
