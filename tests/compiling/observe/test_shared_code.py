"""The ledger is right where components, instances and trials share compiled code."""

import pytest
from compiling_models import Counter, Net, one, real_aot_eager, rows, total
from torch import nn

import hotloop
from hotloop import events as ev
from hotloop._torch import backends


@pytest.fixture
def counter(monkeypatch):
    compiler = Counter(inner=real_aot_eager())
    monkeypatch.setattr(backends, "aot_eager", lambda: compiler)
    return compiler


class Drops(nn.Module):
    def __init__(self, p):
        super().__init__()
        self.linear, self.drop = nn.Linear(8, 8), nn.Dropout(p)

    def forward(self, x):
        return self.drop(self.linear(x))


def compiles(events):
    return [event for event in events if isinstance(event, ev.Compiled)]


def test_twenty_trials_of_one_setting_compile_once(counter):
    with hotloop.watch() as events:
        for trial in range(20):
            model = hotloop.compile(Drops(0.1), "aot_eager")
            for seed in range(3):
                total(model(rows(seed=seed))).backward()
            status = one(model)
            assert status.state == "compiled"
            assert status.frames_compiled == 3
            assert status.compiles == (1 if trial == 0 else 0)
    assert len(compiles(events)) == 1
    assert counter.calls == 1


@pytest.mark.campaign
def test_twenty_dropout_values_all_compile(counter):
    for value in range(20):
        model = hotloop.compile(Drops(value / 40), "aot_eager")
        for _ in range(2):
            total(model(rows())).backward()
        status = one(model)
        assert (status.state, status.frames_compiled, status.frames_eager) == ("compiled", 2, 0), value
    assert counter.calls == 20


def test_two_components_that_share_code_are_counted_apart(counter):
    parts = hotloop.compile({"teacher": Net(), "student": Net()}, "aot_eager")
    for _ in range(3):
        parts["teacher"](rows())
    for _ in range(5):
        total(parts["student"](rows())).backward()
    status = hotloop.status(parts).components
    assert (status["teacher"].frames_compiled, status["student"].frames_compiled) == (3, 5)
    assert (status["teacher"].compiles, status["student"].compiles) == (1, 0)
    assert counter.calls == 1
