"""The layout of convolutions where it counts: cuDNN's kernels, fused optimizers, bf16, and CUDA graphs."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import hotloop

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning"),
]


def small(kind=nn.Conv2d, pool=nn.AdaptiveAvgPool2d):
    return nn.Sequential(
        *(kind(3, 32, 3, bias=False), nn.ReLU(), kind(32, 64, 3, bias=False, stride=2), nn.ReLU()),
        *(kind(64, 64, 3, bias=False, groups=4), nn.ReLU(), pool(1), nn.Flatten(), nn.Linear(64, 10)),
    )


def resnet50():
    return pytest.importorskip("torchvision").models.resnet50(num_classes=10)


def inception():
    models = pytest.importorskip("torchvision").models
    return models.inception_v3(num_classes=10, weights=None, init_weights=False, dropout=0.0)


PROGRAMS = {
    "small": (small, (16, 3, 32, 32)),
    "volumes": (lambda: small(nn.Conv3d, nn.AdaptiveAvgPool3d), (4, 3, 16, 16, 16)),
    "resnet50": (resnet50, (8, 3, 96, 96)),
    "inception": (inception, (2, 3, 299, 299)),
    "as in benchmarks/layout.py": (resnet50, (64, 3, 224, 224)),
}


class Run:
    def __init__(self, run, program, *, fused=True, bf16=True, **settings):
        make, self.shape = PROGRAMS[program]
        torch.manual_seed(0)
        self.model = make().cuda()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3, momentum=0.9, fused=fused)
        self.loop, self.losses = hotloop.Loop(self.model, self.optimizer, run=run, **settings), []
        self.weight = next(one for one in self.model.parameters() if one.dim() > 3 and one[0, 0].numel() > 1)
        self.draws = torch.Generator("cuda").manual_seed(1)

        @self.loop.step
        def step(x, y):
            with torch.autocast("cuda", torch.bfloat16, enabled=bf16):
                scores = self.model(x)
                scores = getattr(scores, "logits", scores)
            loss = F.cross_entropy(scores.float(), y)
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            return loss

        self._step = step

    def train(self, steps):
        for _ in range(steps):
            x = torch.randn(self.shape, generator=self.draws, device="cuda")
            y = torch.randint(0, 10, self.shape[:1], generator=self.draws, device="cuda")
            self.losses.append(self._step(x, y))
        return self

    def untouched(self):
        tensors = [self.weight, self.optimizer.state[self.weight]["momentum_buffer"]]
        return all(one.is_contiguous() for one in tensors)


@pytest.mark.parametrize("run", ["channels_last", "channels_last+graph"])
@pytest.mark.parametrize("program", ["small", "volumes", "resnet50", "inception"])
def test_it_is_proven_and_leaves_the_model_as_it_is(program, run):
    ours = Run(run, program).train(24)
    assert ours.loop.tier.name == run, ours.loop.status()
    assert ours.loop.last_ran() == (run, "run"), ours.loop.status()
    assert ours.untouched()
    ours.loop.close()
    assert all(torch.isfinite(loss) for loss in ours.losses)


@pytest.mark.parametrize("fused", [False, True])
def test_float32_trains_as_eager(fused, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    eager = Run("eager", "small", fused=fused, bf16=False).train(24)
    ours = Run("channels_last+graph", "small", fused=fused, bf16=False).train(24)
    torch.testing.assert_close(torch.stack(ours.losses), torch.stack(eager.losses), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(ours.model.state_dict(), eager.model.state_dict(), rtol=1e-3, atol=1e-5)


def test_auto_times_it_by_turns_and_keeps_both_recordings():
    ours = Run("auto", "as in benchmarks/layout.py", total_steps=100_000).train(160)
    document = ours.loop.record.document
    reasons = [one["reason"] for one in document["decisions"]]
    assert any("channels_last+graph" in reason and " against " in reason for reason in reasons), reasons
    assert not [one for one in document["events"] if one["kind"] == "capture_dropped"]
