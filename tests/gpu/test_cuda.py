"""What only a GPU can show: every kind of preset trains, falls back and frees there as it does on the CPU."""

import copy

import pytest
import torch
from torch import nn

import hotloop
from hotloop import errors, presets

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    # Inductor suggests TF32 on such a card, and uses deprecated parts of torch: an error there would break a lowering.
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning"),
]


class Net(nn.Module):
    """Blocks, or one product where there are none, normalisation with buffers, and a head; the width makes each test's code its own."""

    def __init__(self, width=64, layers=3):
        super().__init__()
        layer = [nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0, batch_first=True) for _ in range(layers)]
        layer = layer or [nn.Linear(width, width), nn.GELU()]
        self.layers = nn.ModuleList(layer)
        self.norm = nn.BatchNorm1d(width)
        self.head = nn.Linear(width, 2)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x.mean(1)))


def train(model, steps=3, seed=0, autocast=False):
    torch.manual_seed(seed)
    # Not Adam: a bias before the BatchNorm has a gradient that is all rounding, of which Adam makes whole steps.
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
    losses = []
    for _ in range(steps):
        x = torch.randn(8, 16, model.head.in_features, device="cuda")
        with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
            loss = model(x).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def pair(width, layers=3):
    torch.manual_seed(1)
    model = Net(width, layers).cuda()
    return model, copy.deepcopy(model)


@pytest.mark.parametrize(
    ("preset", "width"),
    [
        ("default", 64),
        ("aot_eager", 72),
        pytest.param("inductor", 80, marks=[pytest.mark.campaign, pytest.mark.long]),
        pytest.param("triton", 88, marks=[pytest.mark.campaign, pytest.mark.long]),
        ("reduce-overhead", 96),
    ],
)
def test_a_preset_trains_as_eager_does(preset, width):
    autotuned = preset in ("inductor", "triton")  # each product of matrices takes it half a minute
    model, eager = pair(width, 0 if autotuned else 3)
    hotloop.compile(model, preset)
    assert train(model) == pytest.approx(train(eager), rel=1e-3)
    for ours, theirs in zip(model.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-2, atol=1e-3)
    torch.testing.assert_close(model.norm.running_var, eager.norm.running_var, rtol=1e-4, atol=1e-5)
    status = hotloop.status(model).components["model"]
    assert (status.state, status.running, status.causes) == ("compiled", preset, ())


def test_blocks_under_autocast_are_compiled_once():
    model, eager = pair(104)
    hotloop.compile(model, "default", regions="blocks")
    assert train(model, autocast=True) == pytest.approx(train(eager, autocast=True), rel=2e-2)
    status = hotloop.status(model).components["model"]
    assert status.state == "compiled"
    assert status.regions == ("TransformerEncoderLayer", "rest")


def test_a_model_on_the_cpu_is_not_given_a_gpu_preset():
    model = Net(112)
    hotloop.compile(model, "triton")
    model(torch.randn(2, 16, 112)).sum().backward()
    status = hotloop.status(model).components["model"]
    assert status.running == "inductor"
    assert "CPU" in status.causes[0].reason


def test_a_model_may_move_to_the_gpu_after_compile():
    model = Net(120)
    hotloop.compile(model, "default")
    model.cuda()
    train(model)
    assert hotloop.status(model).components["model"].state == "compiled"


def test_out_of_memory_in_compiled_code_keeps_its_class():
    class Hungry(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(1))

        def forward(self, x):
            return x[:, None] * x[None, :] * self.scale

    model = Hungry().cuda()
    hotloop.compile(model, "default")
    model(torch.ones(64, device="cuda"))
    with pytest.raises(torch.OutOfMemoryError):
        model(torch.ones(400_000, device="cuda"))
    assert model(torch.ones(64, device="cuda")).shape == (64, 64)


def test_an_embedding_is_looked_up_compiled():
    model = nn.Embedding(8, 4).cuda()
    hotloop.compile(model, "default")
    assert model(torch.arange(8, device="cuda")).shape == (8, 4)
    assert hotloop.status(model).components["model"].state == "compiled"


def test_a_deleted_model_gives_its_memory_back_at_once():
    nn.Linear(64, 64).cuda()(torch.randn(4, 64, device="cuda")).sum().backward()  # what libraries keep is there then
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    model = nn.Sequential(nn.Linear(4096, 4096), nn.ReLU()).cuda()
    hotloop.compile(model, "default")
    model(torch.randn(4, 4096, device="cuda")).sum().backward()
    del model
    assert torch.cuda.memory_allocated() - before < 4096 * 4096 * 4


@pytest.mark.parametrize("name", ["triton", "reduce-overhead", "max-autotune"])
def test_this_machine_can_run_the_gpu_presets(name):
    from hotloop.compiling.fallback import missing

    assert missing(presets.get(name), "cuda") == ""


def test_strict_says_what_a_failing_graph_is(monkeypatch):
    from hotloop._torch import backends

    def fail(_graph, _inputs):
        raise RuntimeError("planted")

    monkeypatch.setattr(backends, "inductor", lambda *_: fail)
    model = Net(128).cuda()
    hotloop.compile(model, "default", strict=True)
    with pytest.raises(errors.CompileFailedError, match="planted"):
        train(model)
