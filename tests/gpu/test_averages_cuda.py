"""torch's averages of weights in a captured step on a GPU, with their count on the host or on the device."""

import copy
import functools
import io

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import swa_utils

import hotloop

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning"),
]

EMA = functools.partial(swa_utils.AveragedModel, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.75))
KINDS = {
    "ema": EMA,
    "ema with buffers": functools.partial(EMA, use_buffers=True),
    "ema one by one": functools.partial(swa_utils.AveragedModel, avg_fn=swa_utils.get_ema_avg_fn(0.75)),
    "equal weights": swa_utils.AveragedModel,
    "equal weights, one by one": functools.partial(swa_utils.AveragedModel, avg_fn=swa_utils.get_swa_avg_fn()),
}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 32, bias=False), nn.BatchNorm1d(32), nn.GELU(), nn.Linear(32, 4))

    def forward(self, x):
        return self.layers(x)


def training(make, run, between=None, steps=32):
    """Train; give the model, the average and the loop's status. ``between`` runs after each step."""
    torch.manual_seed(0)
    model = Net().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2**-8, fused=True)
    average = make(model)
    with hotloop.Loop(model, optimizer, run=run, state=average) as loop:

        @loop.step
        def step(x, y):
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            average.update_parameters(model)
            return loss

        draws = torch.Generator().manual_seed(1)
        for number in range(steps):
            x, y = torch.randn(8, 16, generator=draws).cuda(), torch.randint(4, (8,), generator=draws).cuda()
            step(x, y)
            if between is not None:
                between(average, number)
        status = loop.status()
    return model, average, status


def assert_same(ours, theirs):
    mine, others = ours.state_dict(), theirs.state_dict()
    assert list(mine) == list(others)
    for name, one in mine.items():
        assert (type(one), one.device, one.dtype) == (type(others[name]), others[name].device, others[name].dtype), name
        torch.testing.assert_close(one, others[name], rtol=0.0, atol=0.0, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("named", [False, True], ids=["count on the host", "count on the device"])
@pytest.mark.parametrize("kind", KINDS)
def test_an_average_is_captured_and_equal_to_eagers(kind, named):
    make = functools.partial(KINDS[kind], device=torch.device("cuda")) if named else KINDS[kind]
    _, eager, _ = training(make, "eager")
    _, ours, status = training(make, "eager+graph")
    assert status.tier == "eager+graph", status
    assert_same(ours, eager)
    assert ours.n_averaged.is_cuda == named


def test_a_checkpoint_in_the_middle_of_a_run_is_eagers_and_a_run_goes_on_from_it():
    def saving(kept):
        def between(average, number):
            if number == 20:
                file = io.BytesIO()
                torch.save(average.state_dict(), file)
                file.seek(0)
                kept.update(torch.load(file, weights_only=True))

        return between

    eager, ours = {}, {}
    training(EMA, "eager", saving(eager))
    *_, status = training(EMA, "eager+graph", saving(ours))
    assert status.tier == "eager+graph", status
    for name, one in ours.items():
        assert one.device == eager[name].device, name
        torch.testing.assert_close(one, eager[name], rtol=0.0, atol=0.0)
    assert not ours["n_averaged"].is_cuda

    def resumed(model):
        average = EMA(model)
        average.load_state_dict(ours)
        return average

    (_, theirs, _), (_, mine, status) = training(resumed, "eager"), training(resumed, "eager+graph")
    assert status.tier == "eager+graph", status
    assert_same(mine, theirs)
    assert int(mine.n_averaged) == 21 + 32


def test_an_update_beside_a_recording_waits_for_nothing():
    """Eager's update of an average that counts on the host waits for no device; nor does ours while it lies there."""
    waits = []

    def between(average, number):
        if number == 25:
            other = copy.deepcopy(average.module)
            torch.cuda.synchronize()
            torch.cuda.set_sync_debug_mode("error")
            try:
                average.update_parameters(other)
            finally:
                torch.cuda.set_sync_debug_mode("default")
            waits.append(type(average.n_averaged))

    *_, status = training(EMA, "eager+graph", between)
    assert status.tier == "eager+graph", status
    assert issubclass(waits[0], torch.Tensor)
    assert waits[0] is not torch.Tensor
