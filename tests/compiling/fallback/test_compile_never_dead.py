"""A failing compiler costs speed, never the run: each compile-time failure on aot_eager, against a run eager from the start."""

import copy

import pytest
from compiling_models import Broken, Counter, Net, against_eager, aot, one, real_aot_eager, rows, train
from torch import nn

import hotloop
from hotloop import events as ev
from hotloop._torch import backends

STEPS = [rows(seed=s) for s in range(3)]
SECOND_SHAPE = [rows(4), rows(6, seed=1), rows(4, seed=2), rows(7, seed=3)]


def refuse(*args, **kwargs):
    raise RuntimeError("planted")


@pytest.fixture
def plant(monkeypatch):
    """Put a compiler in aot_eager's place."""

    def put(compiler):
        monkeypatch.setattr(backends, "aot_eager", lambda: compiler)
        return compiler

    return put


@pytest.fixture(params=["backend", "aot forward", "aot backward", "broken aot"])
def failing(request, plant, monkeypatch):
    """Each place where a backend can fail while it compiles; gives how often it was asked."""
    if request.param == "broken aot":
        import torch._functorch.aot_autograd as module

        counter = Counter(fail=lambda nth, graph: False, inner=real_aot_eager())
        monkeypatch.setattr(module, "aot_stage1_graph_capture", refuse)
        return plant(counter)
    inner = {"aot forward": aot(forward=refuse), "aot backward": aot(backward=refuse)}.get(request.param)
    return plant(Counter(fail=lambda nth, graph: request.param == "backend", inner=inner))


@pytest.mark.parametrize("model", [Net, Broken])
def test_first_compile(failing, model):
    with hotloop.watch() as events:
        status = against_eager(model(), STEPS)
    assert (status.state, status.running) == ("eager", "none")
    graphs = 2 if model is Broken else 1
    assert status.fallbacks == graphs
    assert failing.calls == graphs, "a failed graph is not tried again"
    assert status.frames_eager == 3 * graphs
    fell = [event for event in events if isinstance(event, ev.Fallback)]
    assert {(e.from_preset, e.to_preset, e.scope, e.component) for e in fell} == {
        ("aot_eager", "none", "graph", "model")
    }
    assert all(e.file.endswith("compiling_models.py") and e.line for e in fell)
    cause = next(cause for cause in status.causes if "planted" in cause.reason)
    assert cause.stage == "lower"
    assert cause.file.endswith("compiling_models.py")
    assert cause.source
    assert cause.hint


@pytest.mark.parametrize("where", ["backend", "forward", "backward"])
def test_recompile_for_a_second_shape(plant, where):
    seen = []

    def second(graph, inputs):
        seen.append(graph)
        if where == "backend" and len(seen) > 1:
            refuse()
        bad = refuse if len(seen) > 1 else None
        compiler = aot(**{where: bad}) if where != "backend" else real_aot_eager()
        return compiler(graph, inputs)

    plant(second)
    status = against_eager(Net(), SECOND_SHAPE)
    assert (status.state, status.running, status.fallbacks) == ("partial", "aot_eager", 2)
    assert status.recompiles == 2
    assert len(seen) == 3
    # Batches of the first size keep their code, whatever comes of the others.
    assert (status.frames_compiled, status.frames_eager) == (2, 2)


@pytest.mark.parametrize("model", [Net, Broken])
def test_a_bug_in_dynamo(monkeypatch, model):
    from torch._dynamo.variables.tensor import TensorVariable

    def bug(self, *args, **kwargs):
        assert False, "dynamo bug"  # noqa: B011, PT015

    real = TensorVariable.call_method
    monkeypatch.setattr(
        TensorVariable,
        "call_method",
        lambda self, tx, name, *a, **k: bug(self) if name == "sigmoid" else real(self, tx, name, *a, **k),
    )
    with hotloop.watch() as events:
        status = against_eager(model(), STEPS)
    assert (status.state, status.running) == ("eager", "none")
    failed = [e for e in events if isinstance(e, ev.FrameEager)]
    assert failed
    assert len(failed) <= 6
    assert all(e.stage == "trace" and "dynamo bug" in e.reason for e in failed)
    assert any(c.file and c.file.endswith("compiling_models.py") and "sigmoid" in c.source for c in status.causes)


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.net, self.k = Net(), 0

    def forward(self, x):
        self.k += 1
        return self.net(x) * (self.k + 1)


@pytest.mark.campaign
@pytest.mark.parametrize("settings", [{}, {"fullgraph": True}, {"strict": True}])
def test_recompile_limit(settings):
    class Growing(nn.Module):
        def __init__(self):
            super().__init__()
            self.net, self.k = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.1)), 2

        def forward(self, x):
            return self.net(x) * self.k

    model = Growing()
    reference = copy.deepcopy(model)
    hotloop.compile(model, "aot_eager", **settings)
    for step in range(20):  # torch's limit is 8, and the component gets code of its own once
        model.k = reference.k = step + 2
        run = {"batches": [rows(seed=step)], "lr": 1e-4, "seed": step}
        train(model, **run).assert_equal(train(reference, **run))
    status = one(model)
    assert status.state == "partial"
    assert status.frames_eager > 0
    # Of one graph alone torch calls nobody when the limit is reached: what is seen is that no operation reaches a graph.
    reason = "no tensor operation" if settings.get("fullgraph") else "recompile limit"
    assert any(reason in cause.reason for cause in status.causes)


@pytest.mark.campaign
def test_the_state_a_module_counts_in_python_moves_once_a_call():
    model = Counting()
    hotloop.compile(model, "aot_eager")
    for _ in range(4):
        model(rows())
    assert model.k == 4


def test_disabled_by_the_environment(monkeypatch):
    monkeypatch.setenv("HOTLOOP_DISABLE", "1")
    loss = hotloop.compile(nn.functional.mse_loss, "aot_eager", strict=True)
    loss(rows().requires_grad_(), rows())
    status = one(loss)
    assert (status.state, status.running, status.compiles, status.frames_compiled) == ("eager", "none", 0, 0)
    status = against_eager(Net(), STEPS, strict=True)
    assert (status.state, status.running, status.requested, status.compiles) == ("eager", "none", "aot_eager", 0)
    assert status.causes[0].reason == "HOTLOOP_DISABLE=1 is set"
    monkeypatch.setenv("HOTLOOP_DISABLE", "0")
    assert one(hotloop.compile(Net(), "aot_eager")).state == "pending"
