"""What proofs keep alive between steps: nothing but the recording. Bytes are counted, of a model that dwarfs its batch."""

import gc
import weakref

import pytest
import torch
from step_memory import live_bytes
from torch import nn
from torch.nn import functional as F

import hotloop
from hotloop.step.audit.op_trace import OpTrace
from hotloop.testing import captured_step_emulation

WIDTH = 256


def is_captured():
    try:
        return torch.cuda.is_current_stream_capturing()
    except RuntimeError:  # a build without CUDA, outside of the loop's own runs
        return False


class Net(nn.Sequential):
    def __init__(self, *, asks=False):
        super().__init__(*(nn.Linear(WIDTH, WIDTH) for _ in range(6)))
        self.asks = asks

    def forward(self, x):
        if self.asks and not is_captured():  # as transformers' masks do: the step is audited on both paths
            x.sum().item()
        return super().forward(x)


def lived(run, *, asks=False, steps=12):
    """Train; gives the bytes alive after each step beyond those after the first, in models, and what the step did."""
    gc.collect()
    torch.manual_seed(0)
    model = Net(asks=asks)
    size = sum(one.nbytes for one in model.parameters())
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    loop = hotloop.Loop(model, optimizer, run=run, sentinel=None)

    @loop.step
    def step(x):
        loss = F.mse_loss(model(x), x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    found = []
    for _ in range(steps):
        step(torch.randn(2, WIDTH))
        found.append((loop.last_ran(), live_bytes() / size))
    loop.close()
    first = found[0][1]
    return [(ran, alive - first) for ran, alive in found]


@pytest.mark.parametrize(("run", "asks"), [("eager+graph", False), ("eager+graph", True), ("aot_eager+graph", False)])
def test_nothing_of_an_audit_or_a_proof_is_alive_after_its_step(run, asks):
    """Each audit's trace was kept, by the loop's own hook of the optimizer, with the gradients of its step."""
    with captured_step_emulation():
        found = lived(run, asks=asks)
    before = [alive for (_, doing), alive in found if doing in ("survey", "proof")]
    captured = [doing for (_, doing), _ in found].index("capture")
    assert found[-1][0] == (run, "run")
    assert [doing for (_, doing), _ in found].count("survey") == 1 + asks
    assert max(alive for _, alive in found[:captured]) < 0.1, before
    assert found[-1][1] - found[captured][1] < 0.1


def test_the_trace_of_an_audit_is_gone_with_its_step(monkeypatch):
    traces = []
    made = OpTrace.__init__

    def noted(self, *args, **more):
        made(self, *args, **more)
        traces.append(weakref.ref(self))

    monkeypatch.setattr(OpTrace, "__init__", noted)
    with captured_step_emulation():
        lived("eager+graph", steps=4)
    gc.collect()
    assert traces
    assert not any(one() for one in traces)
