"""Functions of torch's that are replaced for a time: for the thread that asked, and put back whoever ends first."""

import contextvars
import threading
import types

import pytest
import torch
from torch import nn

from hotloop._torch import thread_patch as room
from hotloop._torch.thread_patch import replaced
from hotloop.step.audit.op_trace import trace_step
from hotloop.step.capture import engines
from hotloop.step.state.holdings import Holdings


@pytest.fixture(autouse=True)
def not_capturing(monkeypatch):
    """A build for CPUs cannot even be asked."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)


def test_two_threads_that_overlap_leave_the_real_function():
    real = torch.cuda.is_current_stream_capturing
    inside, first_left, heard = threading.Barrier(3, timeout=900), threading.Event(), {}

    def ask(name, waits):
        with engines.reporting_capture(True):
            inside.wait()
            if waits:
                first_left.wait(300)
            heard[name] = torch.cuda.is_current_stream_capturing()
        if not waits:
            first_left.set()

    threads = [threading.Thread(target=ask, args=("first", False)), threading.Thread(target=ask, args=("second", True))]
    for one in threads:
        one.start()
    inside.wait()
    heard["nobody's"] = torch.cuda.is_current_stream_capturing()  # this thread did not ask
    for one in threads:
        one.join()
    assert heard == {"first": True, "second": True, "nobody's": False}
    assert torch.cuda.is_current_stream_capturing is real


def test_surveys_in_two_threads_leave_torch_as_it_was():
    before = torch.random.fork_rng, torch.jit.ScriptFunction.__call__
    inside, found = threading.Barrier(2, timeout=900), {}

    def look(name, reads):
        model = nn.Linear(2, 2)

        def step():
            inside.wait()
            if reads:
                model.weight.sum().item()
            inside.wait()

        _, found[name] = trace_step(Holdings({"model": model}, {}, ()), torch.device("cpu"), [], step)

    threads = [threading.Thread(target=look, args=(name, name == "reads")) for name in ("reads", "quiet")]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert [str(one.reason) for one in found["reads"].obstacles] == [
        "a value is read on the host: .item(), float(), print, or a branch on a tensor"
    ]
    assert found["quiet"].obstacles == []
    assert (torch.random.fork_rng, torch.jit.ScriptFunction.__call__) == before


def test_a_backward_in_another_thread_finds_what_its_caller_asked_for(monkeypatch):
    """On a GPU a backward runs in a thread of torch's, which has the context of its caller, or is known to be in one."""
    home = types.SimpleNamespace(answer=lambda: "real")
    heard, context = [], []

    def of_torch(path):
        if path.endswith("_current_graph_task_id"):
            return lambda: 7
        if not context:
            raise room.CapabilityMissingError(path)
        return lambda _key: context[0]

    with replaced(home, "answer", lambda real: lambda: f"not {real()}"):
        for found in ([], [contextvars.copy_context()], [contextvars.Context()]):
            context[:] = found
            with monkeypatch.context() as patch:
                patch.setattr(room, "private", of_torch)
                thread = threading.Thread(target=lambda: heard.append(home.answer()))
                thread.start()
                thread.join()
        assert home.answer() == "not real"
    assert heard == ["not real", "not real", "real"]
    assert home.answer() == "real"


def test_a_wrapper_that_somebody_put_over_it_stays_and_works():
    home = types.SimpleNamespace(answer=lambda: "real")
    with replaced(home, "answer", lambda _real: lambda: "ours"):
        ours = home.answer
        home.answer = lambda: f"theirs around {ours()}"
    assert home.answer() == "theirs around real"
    with replaced(home, "answer", lambda real: lambda: f"ours around {real()}"):
        assert home.answer() == "ours around theirs around real"
    assert home.answer() == "theirs around real"


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW, torch.optim.RMSprop, torch.optim.NAdam])
def test_an_optimizer_in_the_ambience_steps_as_ever(monkeypatch, kind):
    """torch 2.11 asks before each step, and refuses one that is not capturable in a capture; newer ask the device."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: None)  # a CUDA build looks for a driver
    model = nn.Linear(2, 2)
    optimizer = kind(model.parameters(), lr=0.25)
    model(torch.ones(1, 2)).sum().backward()
    before = model.weight.detach().clone()
    asked = []
    optimizer.register_step_pre_hook(lambda *_: asked.append(torch.cuda.is_current_stream_capturing()))
    with engines.reporting_capture(True):
        assert torch.cuda.is_current_stream_capturing()
        optimizer.step()
        assert torch.cuda.is_current_stream_capturing()
    assert asked == [False]
    assert not torch.equal(model.weight, before)


def test_after_an_optimizer_that_raised_the_answer_is_yes_again():
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.25)

    def fails(*_):
        raise ValueError("theirs")

    optimizer.register_step_pre_hook(fails)
    with engines.reporting_capture(True):
        with pytest.raises(ValueError, match="theirs"):
            optimizer.step()
        assert torch.cuda.is_current_stream_capturing()


def test_compiled_code_asks_without_a_graph_break():
    @torch.compile(backend="eager", fullgraph=True)
    def asks(x):
        return x + 1 if torch.cuda.is_current_stream_capturing() else x - 1

    for _ in range(2):
        with engines.reporting_capture(True):
            assert asks(torch.zeros(1)).item() == 1
    torch.compiler.reset()
