"""Each test of the hot loop runs on the CPU, on the stand-in for a capture, and on a GPU where there is one."""

from __future__ import annotations

import pytest
import torch
from step_programs import Both, engines

from hotloop.step.ranks import threads

_GPU = (pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"))


@pytest.fixture(autouse=True)
def _nobody_trained_before(monkeypatch):
    """The main thread's last test is no training beside one in a thread."""
    monkeypatch.setattr(threads, "_last", {})


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=_GPU)])
def both(request):
    """Run programs both ways on a device."""
    with engines(request.param):
        yield Both(request.param)


@pytest.fixture
def device(both):
    return both.device
