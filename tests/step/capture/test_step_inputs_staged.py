"""Batches that are pinned already are staged like all others; learning rates on the host reach the device."""

import pytest
import torch
from torch import nn

from hotloop.step.capture import in_and_out
from hotloop.step.capture.optimizers import Recorded


def test_a_pinned_batch_may_be_filled_again_as_soon_as_the_step_has_returned(monkeypatch):
    """The copy to the device is late on a GPU: here it is done by hand, after the buffer was filled again."""
    late = []

    class Event:
        def synchronize(self):
            """Nothing is under way."""

        def record(self, stream):
            """Nothing is asked of it."""

    class Late:
        def copy_(self, source, non_blocking):
            late.append((source, non_blocking))

    real = torch.empty_like
    monkeypatch.setattr(torch, "empty_like", lambda one, **_: real(one))
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    leaf = torch.zeros(3)
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda self: True)
    staged = in_and_out._Staged(leaf, torch.device("cuda"))
    staged.copy(leaf, Late())
    leaf.fill_(7)
    ((source, non_blocking),) = late
    assert non_blocking
    assert torch.equal(source, torch.zeros(3))


@pytest.mark.parametrize("as_tensor", [False, True])
def test_a_rate_on_the_host_is_refreshed_on_the_device_when_it_changes(monkeypatch, as_tensor):
    """The meta device stands for the GPU, so what is written is noted instead of read."""
    rate = torch.tensor(0.5) if as_tensor else 0.5
    optimizer = torch.optim.SGD(nn.Linear(2, 2, device="meta").parameters(), lr=rate)
    recorded, written, real = Recorded(optimizer, torch.device("meta")), [], torch.Tensor.fill_
    with recorded.on_device():
        assert optimizer.param_groups[0]["lr"].device.type == "meta"
    assert optimizer.param_groups[0]["lr"] is rate
    monkeypatch.setattr(torch.Tensor, "fill_", lambda self, value: written.append(value))
    recorded.refresh()
    assert written == []
    if as_tensor:
        real(rate, 0.25)  # as a scheduler changes it
    else:
        optimizer.param_groups[0]["lr"] = 0.25
    recorded.refresh()
    recorded.refresh()
    assert written == [0.25]
    assert recorded.changed() == ""


def test_a_rate_on_the_device_is_the_recordings_own():
    rate = torch.tensor(0.5)
    optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=rate)
    recorded = Recorded(optimizer, torch.device("cpu"))
    with recorded.on_device():
        assert optimizer.param_groups[0]["lr"] is rate
