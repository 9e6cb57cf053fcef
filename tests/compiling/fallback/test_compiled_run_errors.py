"""What fails while compiled code runs, and what torch's settings are after each call."""

import contextlib
import copy

import pytest
import torch
from compiling_models import Broken, Counter, Net, aot, dies_as_kernel, one, rows, total, train

import hotloop
from hotloop import events as ev
from hotloop._torch import backends
from hotloop.errors import CompiledRunError


@pytest.fixture
def plant(monkeypatch):
    def put(compiler):
        monkeypatch.setattr(backends, "aot_eager", lambda: compiler)
        return compiler

    return put


@pytest.mark.parametrize("phase", ["forward", "backward"])
@pytest.mark.parametrize("model", [Net, Broken])
def test_a_kernel_that_dies_is_raised_with_cause_and_remedy(plant, phase, model):
    plant(aot(**{phase: dies_as_kernel()}))
    model = hotloop.compile(model(), "aot_eager")
    with hotloop.watch() as events, pytest.raises(CompiledRunError) as caught:
        total(model(rows())).backward()
    text = str(caught.value)
    assert f"failed in its {phase}" in text
    assert "kernel died" in text
    assert "compiling_models.py:" in text
    assert "load the last checkpoint and use preset none, which is eager" in text, "there is no lower one"
    assert "HOTLOOP_DISABLE=1" in text
    assert type(caught.value.__cause__) is RuntimeError
    (failed,) = [event for event in events if isinstance(event, ev.RunFailed)]
    assert (failed.component, failed.phase, failed.preset) == ("model", phase, "aot_eager")
    causes = one(model).causes
    assert any("kernel died" in cause.reason and cause.hint == failed.remedy for cause in causes), causes


@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_out_of_memory_is_left_as_it_is(plant, phase):
    plant(aot(**{phase: dies_as_kernel("tried to allocate", "__import__('torch').OutOfMemoryError")}))
    model = hotloop.compile(Net(), "aot_eager")
    with pytest.raises(torch.OutOfMemoryError, match="tried to allocate") as caught:
        total(model(rows())).backward()
    assert type(caught.value) is torch.OutOfMemoryError
    assert caught.value.__cause__ is None


def test_backward_twice_is_the_users_error_and_says_what_eager_says():
    model = Net()
    eager = copy.deepcopy(model)
    hotloop.compile(model, "aot_eager")
    messages = []
    for candidate in (eager, model):
        loss = total(candidate(rows()))
        loss.backward()
        with pytest.raises(RuntimeError, match="backward through the graph a second time") as caught:
            loss.backward()
        messages.append(type(caught.value))
    assert messages == [RuntimeError, RuntimeError]


SETTINGS = ("suppress_errors", "skip_nnmodule_hook_guards", "skip_tensor_guards_with_matching_dict_tags")


def settings():
    dynamo = torch._dynamo.config
    return {
        **{name: getattr(dynamo, name) for name in SETTINGS},
        "lazy": torch._functorch.config.force_non_lazy_backward_lowering,
    }


@pytest.mark.parametrize(
    "ending", ["result", "backend fails", "kernel dies", "user error", "interrupt", "strict", "fullgraph break"]
)
def test_torchs_settings_are_as_before(plant, ending):
    def interrupted(graph, inputs):
        raise KeyboardInterrupt

    class Raises(Net):
        def forward(self, x):
            if ending == "user error":
                raise ValueError("mine")
            if ending == "fullgraph break":
                torch._dynamo.graph_break()
            return super().forward(x)

    compilers = {
        "backend fails": Counter(fail=lambda *a: True),
        "strict": Counter(fail=lambda *a: True),
        "kernel dies": aot(forward=dies_as_kernel()),
        "interrupt": interrupted,
    }
    if ending in compilers:
        plant(compilers[ending])
    before = settings()
    model = hotloop.compile(Raises(), "aot_eager", strict=ending == "strict", fullgraph=ending == "fullgraph break")
    raises = contextlib.nullcontext() if ending in ("result", "backend fails") else pytest.raises(BaseException)
    with raises:
        total(model(rows())).backward()
    assert settings() == before
    assert torch._dynamo.config.suppress_errors is False


def test_no_compiler_steps_the_whole_component_down_at_once(plant):
    class InvalidCxxCompiler(RuntimeError):
        pass

    counter = plant(Counter(fail=lambda *a: True, error=InvalidCxxCompiler("no g++")))
    model = hotloop.compile(Broken(), "aot_eager")
    train(model, [rows()])
    train(model, [rows(5)])
    assert counter.calls == 1
    cause = next(cause for cause in one(model).causes if "no g++" in cause.reason)
    assert cause.stage == "compile"
    assert "install a C++ compiler" in cause.hint
