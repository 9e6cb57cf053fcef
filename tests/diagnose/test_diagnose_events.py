"""What the events tell a rule: the line and the argument that a guard is about, and the program's own line of a break."""

from __future__ import annotations

import functools
import inspect
import sys

import pytest
import torch
from torch import nn

import hotloop
from hotloop import events as ev
from hotloop.compiling.observe import explain
from hotloop.diagnose.breaks import cause_of
from hotloop.diagnose.guards import guard_of


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.times = 1

    def forward(self, rows, factor=1):
        return self.linear(rows) * self.times * factor


def line_of(where, text):
    lines, start = inspect.getsourcelines(where)
    return next(start + number for number, line in enumerate(lines) if text in line)


def of(kind, events):
    return [event for event in events if isinstance(event, kind)]


def test_a_guard_on_an_attribute_names_its_line_and_frame():
    model = hotloop.compile(Scaled(), "aot_eager")
    with hotloop.watch() as events:
        for model.times in (1, 2, 3):
            model(torch.ones(2, 4))
    found = of(ev.Recompiled, events)
    assert [(one.file, one.line) for one in found] == [(__file__, line_of(Scaled, "self.times *"))] * 2
    assert found[0].source == "return self.linear(rows) * self.times * factor"
    frames = {one.frame for one in of(ev.Compiled, events)}
    assert {one.frame for one in found} < frames
    assert len(frames) == 3


class Wrapped(Scaled):
    @functools.wraps(Scaled.forward)
    def forward(self, *args, **kwargs):
        return super().forward(*args, **kwargs)


@pytest.mark.parametrize("kind", [Scaled, Wrapped])
def test_a_size_names_the_argument_and_where_the_function_begins(kind):
    model = hotloop.compile(kind(), "aot_eager")
    with hotloop.watch() as events:
        for size in (2, 3):
            model(torch.ones(size, 4))
    (found,) = of(ev.Recompiled, events)
    assert found.reason == "tensor 'rows' size mismatch at index 0. expected 2, actual 3"
    assert (found.file, found.line) == (__file__, line_of(Scaled, "def forward"))


def test_a_keyword_is_named_where_a_decorator_wraps_the_function():
    model = hotloop.compile(Wrapped(), "aot_eager")
    with hotloop.watch() as events:
        for size in (2, 3):
            model(rows=torch.ones(size, 4))
    (found,) = of(ev.Recompiled, events)
    assert guard_of(found).subject == "rows"


def test_a_function_names_its_arguments_from_the_first():
    def total(rows, factor):
        return (rows * factor).sum()

    compiled = hotloop.compile(total, "aot_eager")
    with hotloop.watch() as events:
        for factor in (True, False):
            compiled(torch.ones(2), factor)
    (found,) = of(ev.Recompiled, events)
    assert found.reason == "factor == True"


def test_a_break_inside_a_package_names_the_programs_own_line(tmp_path, monkeypatch):
    package = tmp_path / "site-packages" / "somebodys.py"
    package.parent.mkdir()
    package.write_text("def halve(x):\n    print(end='')\n    return x / 2\n", encoding="utf-8")
    monkeypatch.syspath_prepend(package.parent)
    import somebodys

    class Model(nn.Module):
        def forward(self, x):
            return somebodys.halve(x * 2)

    model = hotloop.compile(Model(), "aot_eager")
    with hotloop.watch() as events:
        model(torch.ones(2))
    found = of(ev.GraphBreak, events)
    assert {(one.file, one.line) for one in found} == {(str(package), 2)}
    named = next(one for one in found if one.by_file)
    assert (named.by_file, named.by_line) == (__file__, line_of(Model, "somebodys.halve"))
    assert named.by_source == "return somebodys.halve(x * 2)"
    sys.modules.pop("somebodys")


def test_a_hint_is_for_the_cause_and_not_for_what_torch_hints_at():
    text = (
        "Failed to trace builtin operator\n  Explanation: Dynamo does not know how to trace builtin operator `open`\n"
        "  Hint: Avoid calling builtin `print`; consider logging instead."
    )
    assert "print out of the model" not in explain.hint_of(text)
    assert "move the print" in explain.hint_of(text.replace("`open`", "`print`"))


def test_a_print_is_told_to_be_moved_whatever_it_prints():
    class Model(nn.Module):
        def forward(self, x):
            print("mean", x.mean().item(), end="")
            return x * 2

    class Formats(nn.Module):
        def forward(self, x):
            print(f"mean {float(x.mean()):.3f}", end="")
            return x * 2

    for model in (Model(), Formats()):
        hotloop.compile(model, "aot_eager")
        with hotloop.watch() as events:
            model(torch.ones(2))
            model(torch.zeros(2))
        found = [*of(ev.GraphBreak, events), *of(ev.FrameEager, events)]
        assert len({one.reason for one in found}) > 1, "what it prints stops tracing as well"
        assert {one.hint for one in found} == {cause_of("", "print(x)").change}
        assert {cause_of(one.reason, one.source).kind for one in found} == {"print"}
