"""A bench on a GPU: captured ways beside eager, the device's own times, memory of a process of its own."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import hotloop

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    # Inductor suggests TF32 on such a card, and uses deprecated parts of torch: an error there would break a lowering.
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning"),
]

PROGRAM = """
import torch
from torch import nn
from torch.nn import functional as F
import hotloop

def make():
    layers = [nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(12)]
    model = nn.Sequential(*layers, nn.Linear(64, 4)).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    data = [(torch.randn(16, 64), torch.randint(0, 4, (16,))) for _ in range(4)]

    def step(x, y):
        loss = F.cross_entropy(model(x.cuda(non_blocking=True)), y.cuda(non_blocking=True))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return hotloop.Workload(model, optimizer, step, data)
"""


@pytest.fixture
def name(tmp_path):
    path = tmp_path / "gpu_program.py"
    path.write_text(PROGRAM, encoding="utf-8")
    return f"{path}:make"


def test_captured_steps_are_timed_as_replays_and_their_memory_is_known(name):
    found = hotloop.bench(name, ("eager", "eager+graph"), total_steps=10_000)
    eager, captured = found.ways
    assert captured.timed, captured.reason
    assert captured.as_asked == 1
    assert captured.caches == "none"
    assert eager.peak_bytes > 0
    assert captured.peak_bytes > 0


def test_after_a_bench_nothing_is_left_on_the_gpu(name):
    ways = ("eager", "eager+graph", "aot_eager+graph")
    hotloop.bench(name, ways, steps=12)  # cuBLAS keeps 64 MiB for the stream of recordings, once
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    hotloop.bench(name, ways, steps=12)
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() - before < 2**20


def test_the_ways_that_make_sense_are_those_with_graphs():
    def make():
        model = nn.Linear(4, 4).cuda()
        optimizer = torch.optim.SGD(model.parameters())

        def step(x):
            F.mse_loss(model(x), x).backward()
            optimizer.step()
            optimizer.zero_grad()

        return hotloop.Workload(model, optimizer, step, [torch.randn(4, 4, device="cuda")])

    found = hotloop.bench(make, steps=12)
    assert [one.name for one in found.ways] == ["eager", "eager+graph", "full", "full+graph"]
