"""Recording a step's calls: nothing changes for the step, and the child gets what it needs to run them again."""

import gc
import os
import subprocess
import sys
import threading
import weakref

import pytest
import torch
from cache_models import Net
from torch import nn

from hotloop.cache import BackgroundUnavailableError, Recorder, Request, request
from hotloop.cache.ambient import Modes, apply_process_settings, process_settings
from hotloop.cache.portable import build, unpack


@pytest.fixture
def ids():
    return torch.randint(40, (8, 4))


def test_the_step_and_the_module_are_as_before(ids):
    net, plain = Net(), Net()
    plain.load_state_dict(net.state_dict())
    before = set(net.__dict__), dict(net._forward_pre_hooks)
    torch.manual_seed(0)
    expected = plain(ids)["logits"]
    torch.manual_seed(0)
    with Recorder({"model": net}):
        got = net(ids)["logits"]
    assert torch.equal(got, expected)
    assert (set(net.__dict__), dict(net._forward_pre_hooks)) == before


def test_the_calls_can_be_run_again_from_the_request(ids):
    net = Net()
    with Recorder({"model": net}) as recorder:
        net(ids, scale=2.0)
    made = Request.loads(recorder.request({"preset": "default"}).dumps())
    tensors = build(made.tensors)
    module = unpack(made.modules["model"], tensors)
    (call,) = made.calls
    args, kwargs = unpack(call.arguments, tensors)
    assert torch.equal(args[0], ids)
    assert kwargs == {"scale": 2.0}
    assert module(*args, **kwargs)["hidden"].shape == (8, 16)
    assert not module._forward_pre_hooks
    assert made.settings == {"preset": "default"}


def test_equal_calls_count_once_and_others_keep_their_order(ids):
    net = Net()
    with Recorder({"model": net}) as recorder:
        for rows in (8, 4, 8, 4, 6):
            net(ids[:rows].clone())
    made = recorder.request({})
    tensors = build(made.tensors)
    assert [unpack(call.arguments, tensors)[0][0].shape[0] for call in made.calls] == [8, 4, 6]


def test_calls_are_bounded(ids, monkeypatch):
    monkeypatch.setattr(request, "MAX_CALLS", 2)
    net = Net()
    with Recorder({"model": net}) as recorder:
        for rows in range(2, 8):
            net(ids[:rows])
    assert len(recorder.request({}).calls) == 2


def test_the_arguments_are_those_of_the_call_though_the_step_writes_into_them_later(ids):
    net, given = Net(), ids.clone()
    with Recorder({"model": net}) as recorder:
        net(given)
        given.zero_()
    made = recorder.request({})
    args, _ = unpack(made.calls[0].arguments, build(made.tensors))
    assert torch.equal(args[0], ids)


def test_modes_are_noted_for_each_call_and_come_back(ids):
    net = Net()
    with Recorder({"model": net}) as recorder:
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
            net(ids)
        net.eval()
        with torch.no_grad():
            net(ids)
    first, second = (call.modes for call in recorder.request({}).calls)
    assert (first.grad, first.autocast, first.autocast_cache, all(first.training)) == (
        True,
        {"cpu": torch.bfloat16},
        False,
        True,
    )
    assert (second.grad, second.autocast, any(second.training)) == (False, {}, False)
    with first.on(net):
        assert Modes.of(net) == first
    with second.on(net):
        assert Modes.of(net) == second
    assert torch.is_grad_enabled()


def test_several_components_share_one_set_of_tensors(ids):
    first, second = Net(), nn.Linear(16, 16)
    second.weight = first.inner.weight
    with Recorder({"first": first, "second": second}) as recorder:
        second(first(ids)["hidden"])
    made = recorder.request({})
    tensors = build(made.tensors)
    modules = {name: unpack(pickled, tensors) for name, pickled in made.modules.items()}
    assert modules["second"].weight is modules["first"].inner.weight
    assert [call.component for call in made.calls] == ["first", "second"]
    args, _ = unpack(made.calls[1].arguments, tensors)
    assert (args[0].requires_grad, args[0].is_leaf) == (True, False)


def test_a_recorder_holds_no_batch(ids):
    net, given = Net(), ids.clone()
    watched = weakref.ref(given)
    with Recorder({"model": net}) as recorder:
        net(given)
    del given
    assert watched() is None
    assert len(recorder.request({}).calls) == 1


def test_a_recorder_that_is_kept_holds_no_model(ids):
    net = Net()
    watched = weakref.ref(net.inner.weight)
    with Recorder({"model": net}) as recorder:
        net(ids)
    del net
    gc.collect()
    assert watched() is None
    assert list(recorder.request({}).modules) == ["model"]


def test_what_cannot_be_noted_is_a_reason_and_the_step_goes_on(ids):
    net = Net()
    net.callback = threading.Lock()
    with Recorder({"model": net}) as recorder:
        assert net(ids)["logits"].shape == (8, 50)
    with pytest.raises(BackgroundUnavailableError, match="lock"):
        recorder.request({})


def test_an_argument_that_fails_in_its_own_way_is_a_reason_too(ids):
    class Odd:
        def __getattribute__(self, name):
            raise LookupError("odd")

    net = nn.Identity()
    with Recorder({"model": net}) as recorder:
        net(Odd())
    with pytest.raises(BackgroundUnavailableError, match="model"):
        recorder.request({})


def test_a_request_asks_for_the_memory_of_the_recorded_step_whatever_was_proven_since(ids, monkeypatch):
    """A UNet's proofs took three times what its step takes: a second child did not seem to fit beside it."""
    needed = [7]
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda *_: needed[0])
    net = Net()
    with Recorder({"model": net}) as recorder:
        net(ids)
        needed[0] = 20
    needed[0] = 60
    assert recorder.request({"preset": "default"}).peak_bytes == 20
    assert recorder.request({"preset": "default"}, peak_bytes=30).peak_bytes == 30


def test_a_component_that_was_not_called_is_a_reason(ids):
    net = Net()
    with Recorder({"model": net}) as recorder:
        net.forward(ids)
    with pytest.raises(BackgroundUnavailableError, match="model was not called"):
        recorder.request({})


def test_settings_that_cannot_be_pickled_are_a_reason(ids):
    net = Net()
    with Recorder({"model": net}) as recorder:
        net(ids)
    with pytest.raises(BackgroundUnavailableError, match="settings"):
        recorder.request({"options": lambda: None}).dumps()


@pytest.mark.parametrize("name", ["make", ":make", "file.py:", "__main__:make"])
def test_a_factory_must_have_a_place_of_its_own(name):
    with pytest.raises(BackgroundUnavailableError, match=r"module:function or file\.py:function"):
        Request.of_factory(name, {})


@pytest.mark.campaign
def test_another_process_gets_the_settings_of_this_one():
    changes = """
import torch, torch._inductor.config
torch.set_num_threads(3)
torch.set_default_dtype(torch.float64)
torch.set_default_device("meta")
torch.set_float32_matmul_precision("high")
torch.backends.cudnn.benchmark = True
torch.backends.cuda.enable_flash_sdp(False)
torch.use_deterministic_algorithms(True, warn_only=True)
torch._inductor.config.coordinate_descent_tuning = True
torch._inductor.config.triton.cudagraphs = True
"""
    program = """
import pickle, sys
from hotloop.cache.ambient import apply_process_settings, process_settings
if sys.argv[1] == "give":
    exec(sys.argv[2])
    sys.stdout.buffer.write(pickle.dumps(process_settings()))
else:
    given = pickle.loads(sys.stdin.buffer.read())
    apply_process_settings(given)
    import torch
    now = process_settings()
    assert now == given, [(k, v, given.get(k)) for k, v in now.items() if v != given.get(k)]
    assert torch.get_num_threads() == 3 and torch.get_float32_matmul_precision() == "high"
    assert torch._inductor.config.triton.cudagraphs is True and "torch._inductor:config" in given
"""
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    given = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program, "give", changes], capture_output=True, check=True, env=env
    ).stdout
    taken = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program, "take"], check=False, input=given, capture_output=True, env=env
    )
    assert taken.returncode == 0, taken.stderr.decode()


def test_settings_that_are_equal_already_are_not_touched():
    before = process_settings()
    apply_process_settings(before)
    assert process_settings() == before
