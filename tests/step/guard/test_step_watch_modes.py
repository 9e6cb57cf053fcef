"""Settings of torch that change what a step computes belong to the key of a call."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from hotloop.step.calls.call_key import ambient_modes


@contextlib.contextmanager
def mkldnn_precision(value):
    before = torch.backends.mkldnn.matmul.fp32_precision
    torch.backends.mkldnn.matmul.fp32_precision = value
    try:
        yield
    finally:
        torch.backends.mkldnn.matmul.fp32_precision = before


class Doubled(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {})) * 2


MODES = {
    "a function mode": Doubled,
    "a default device": lambda: torch.device("meta"),
    "hooks for saved tensors": torch.autograd.graph.save_on_cpu,
    "anomaly": lambda: torch.autograd.set_detect_anomaly(mode=True),
    "anomaly without a check": lambda: torch.autograd.set_detect_anomaly(mode=True, check_nan=False),
    "attention kernels": lambda: sdpa_kernel(SDPBackend.MATH),
    "cudnn": lambda: torch.backends.cudnn.flags(enabled=False),
    "precision of one library": lambda: mkldnn_precision("bf16"),
}


@pytest.mark.parametrize("name", MODES)
def test_a_setting_makes_another_kind_of_call(name):
    if name == "precision of one library" and torch.cuda.is_available():
        pytest.skip("the host's precision is none of a GPU's step")
    before = ambient_modes()
    with MODES[name]():
        assert ambient_modes() != before
    assert ambient_modes() == before
